"""The attention kernel: one packed query tile against one part of its keys."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from splitkv.kernels.formats import PLAIN, decode_pairs, decoded
from splitkv.kernels.jit import unspecialized
from splitkv.kernels.primitives import (
    BALANCED,
    CONTIGUOUS,
    CSR,
    FIXED_PARTS,
    FIXED_TOKENS,
    GRAIN,
    GROUPS,
    LN2,
    LOG2E,
    MAX_TOKENS,
    PAGED,
    choose_shares,
    clamp,
    even_edge,
    finite_or_zero,
    keys_before,
    listed_request,
    listed_shares,
    listed_weight,
    load_kv_range,
    load_q_range,
    locate,
    part_tokens,
    request_work,
    round_to,
    tanh,
    tile_at,
    tile_weight,
)


@triton.jit
def stretch(low, high, offset, taken, weight, by_work, TILE_COST: tl.constexpr):
    """The keys of low…high that a stretch of a tile's length on the axis stands for.

    By work, a step is a grain of keys, after those that stand for the tile's own cost, and the tile's last stretch
    takes all that is left, should it have weighed less than its keys; else the keys are cut into equal lengths, of
    which the last may be shorter. Either way neighbouring stretches meet and together they are low…high.
    """
    visible = tl.maximum(high - low, 0)
    if by_work:
        first = clamp(offset * GRAIN - TILE_COST, 0, visible)
        last = tl.where(offset + taken == weight, visible, clamp((offset + taken) * GRAIN - TILE_COST, 0, visible))
    else:
        length = tl.cdiv(visible, weight)
        first = tl.minimum(offset * length, visible)
        last = tl.minimum((offset + taken) * length, visible)
    return low + first, low + last


@triton.jit
def wide_product(x, y):
    """x · y in 64 bits, of two 32-bit factors: one instruction, where a product of 64-bit factors takes four."""
    return x.to(tl.int64) * y.to(tl.int64)


@triton.jit
def within(stride, block, TALL: tl.constexpr):
    """A stride as the loop over blocks of tall tiles, which begin at 0 or later, needs it for wide_product: unchanged.

    What depends on the block the compiler does not widen to 64 bits ahead of the loop, where the product would no
    longer be seen to be one of 32-bit factors.
    """
    if TALL:
        return stride + (block >> 31)
    else:
        return stride


@triton.jit
def load_page_ids(page_ids, key, high, PAGE_SIZE: tl.constexpr):
    """The page of each key before `high`. Keys are unsigned here: dividing those by a power of two is a shift."""
    return tl.load(page_ids + key.to(tl.uint32) // PAGE_SIZE, mask=key < high, other=0)


@triton.jit
def row_pointers(base, row_offset, offs, VECTOR: tl.constexpr):
    """Pointers [rows, columns] of which the host guarantees that every row starts at a multiple of VECTOR elements.

    The hint sits on the pointers themselves. On an offset or a base it would be lost wherever the compiler folds the
    operation that carries it (times a head that is always 0, plus a slot that is always 0), and with it the 16-byte
    copies.
    """
    pointers = base + row_offset[:, None] + offs[None, :]
    return tl.multiple_of(pointers, [1, VECTOR * base.dtype.element_ty.primitive_bitwidth // 8])


@triton.jit
def packed_rows(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Where each of ROWS rows of WIDTH begins that lie without gaps.

    Written as a sum over groups of four rows and rows of a group: a thread that copies every fourth row then computes
    one address, and the compiler adds a constant to it for each row.
    """
    groups, within_group = tl.arange(0, ROWS // 4) * (4 * WIDTH), tl.arange(0, 4) * WIDTH
    return tl.reshape(groups[:, None] + within_group[None, :], [ROWS])


@triton.jit
def in_bytes(pointers):
    """The same addresses, as pointers that count bytes."""
    return pointers.to(tl.pointer_type(tl.int8), bitcast=True)


@triton.jit
def rows_moved(rows, offset, base, VECTOR: tl.constexpr):
    """Rows of addresses in bytes, each moved by an offset [rows] in bytes, as pointers like `base` again.

    With the hint of row_pointers, and that columns follow each other, which counting in bytes hides.
    """
    pointers = (rows + offset[:, None]).to(base.dtype, bitcast=True)
    SIZE: tl.constexpr = base.dtype.element_ty.primitive_bitwidth // 8
    return tl.max_contiguous(tl.multiple_of(pointers, [1, VECTOR * SIZE]), [1, VECTOR])


@triton.jit
def load_pieces(
    base,
    row_offset,
    row_mask,
    COLUMN: tl.constexpr,
    WIDTH: tl.constexpr,
    MOST: tl.constexpr,
    PIECE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Columns COLUMN…COLUMN + WIDTH of rows, as a tuple of pieces of PIECE columns; none of those from MOST on."""
    pieces = ()
    for first in tl.static_range(COLUMN, min(COLUMN + WIDTH, MOST), PIECE):
        offs = first + tl.arange(0, PIECE)
        mask = row_mask[:, None] & (offs < MOST)[None, :]
        pieces = pieces + (tl.load(row_pointers(base, row_offset, offs, VECTOR), mask=mask, other=0.0),)  # noqa: RUF005
    return pieces


@triton.jit
def add_products(
    scores,
    q_pieces,
    base,
    row_offset,
    row_mask,
    COLUMN: tl.constexpr,
    WIDTH: tl.constexpr,
    MOST: tl.constexpr,
    PIECE: tl.constexpr,
    VECTOR: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Scores with the float32 products of columns COLUMN…COLUMN + WIDTH of queries, in pieces, and keys added.

    Ordinary instructions add one product after another, which over all of a key rounds more than the error budget
    allows: pieces have sums of their own, and so have groups of columns.
    """
    COLUMNS: tl.constexpr = 128 if KV_FORMAT == PLAIN else 64  # conversion takes registers too
    for group in tl.static_range(0, len(q_pieces), COLUMNS // PIECE):
        # A group is loaded before its products: where loads with a mask are branches, products between them would all
        # wait for the last, and what they are of fill the registers.
        k_pieces = load_pieces(
            base, row_offset, row_mask, COLUMN + group * PIECE, min(COLUMNS, WIDTH), MOST, PIECE, VECTOR
        )  # fmt: skip
        total = tl.zeros(scores.shape, tl.float32)
        for i in tl.static_range(len(k_pieces)):
            k = decoded(k_pieces[i], KV_FORMAT, tl.float32, NATIVE)
            # Triton would let products go on from the sum to which they are added. Where it is told how many of them a
            # sum may take without care, whatever the number, it does not.
            total += tl.dot(q_pieces[group + i], tl.trans(k), input_precision="ieee", max_num_imprecise_acc=PIECE)
        scores += total
    return scores


@triton.jit
def add_exactly(total, lost, x):
    """The pair (total, lost) with x added to its sum: what rounding takes from the first goes to the second."""
    new = total + x
    taken = new - total
    return new, lost + ((total - (new - taken)) + (x - taken))


@triton.jit
def settled(total, lost):
    """The sum of such a pair; where infinity or NaN took part the first is all there is."""
    return tl.where(lost == lost, total + lost, total)


@triton.jit
def finite_top(x):
    """The largest finite magnitude in each row."""
    size = tl.abs(x.to(tl.float32))
    return tl.max(tl.where(size < float("inf"), size, 0.0), 1)


@triton.jit
def power_towards(top, EXPONENT: tl.constexpr):
    """The power of two that brings numbers of this size to 2^EXPONENT … 2^(EXPONENT + 1), and its inverse."""
    biased = (top.to(tl.int32, bitcast=True) >> 23) & 0xFF
    power = tl.minimum(tl.maximum(254 + EXPONENT - biased, 1), 253)
    return (power << 23).to(tl.float32, bitcast=True), ((254 - power) << 23).to(tl.float32, bitcast=True)


@unspecialized
def split_decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    out_ptr,
    lse_ptr,
    lens_ptr,
    indptr_ptr,
    table_ptr,
    rows_ptr,
    kv_start_ptr,
    qo_indptr_ptr,
    sinks_ptr,
    alibi_ptr,
    tree_ptr,
    list_ptr,
    members_ptr,
    shard_lens_ptr,
    shard_starts_ptr,
    k_scale_ptr,
    v_scale_ptr,
    batch: tl.int32,
    q_len: tl.int32,
    total_q: tl.int32,
    capacity: tl.int32,
    window_left: tl.int32,
    shares: tl.int32,
    heaviest: tl.int32,
    has_lse: tl.int32,
    tree_len: tl.int32,
    shard_first: tl.int32,
    shard_step: tl.int32,
    sm_scale: tl.float32,
    softcap: tl.float32,
    v_scale: tl.float32,
    stride_q_batch: tl.int64,
    stride_q_token: tl.int64,
    stride_q_head: tl.int64,
    stride_out_batch: tl.int64,
    stride_out_token: tl.int64,
    stride_out_head: tl.int64,
    stride_lse_batch: tl.int64,
    stride_lse_token: tl.int64,
    stride_lse_head: tl.int64,
    stride_k_page: tl.int32,
    stride_k_token: tl.int32,
    stride_k_head: tl.int32,
    stride_v_page: tl.int32,
    stride_v_token: tl.int32,
    stride_v_head: tl.int32,
    stride_k_scale_page: tl.int32,
    stride_k_scale_token: tl.int32,
    stride_k_scale_head: tl.int32,
    stride_v_scale_page: tl.int32,
    stride_v_scale_token: tl.int32,
    stride_v_scale_head: tl.int32,
    stride_table_row: tl.int64,
    stride_tree_batch: tl.int64,
    stride_tree_row: tl.int64,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KV_KIND: tl.constexpr,
    SCHEDULE: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    SEGMENT_COST: tl.constexpr,
    TILE_COST: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
    WAITS_LAST: tl.constexpr,
    MULTI_TOKEN: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    FIRST_KEYS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    POSITIVE_SCALE: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    Q_VECTOR: tl.constexpr,
    KV_VECTOR: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    K_SCALE_PER_TOKEN: tl.constexpr,
    V_SCALE_PER_TOKEN: tl.constexpr,
    NATIVE: tl.constexpr,
    PACKED: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_D_TAIL: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_DV_TAIL: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Attend packed query tiles to their keys, one share of the work per program, and leave results or partials.

    Grid: (shares · NUM_KV_HEADS,); with fixed parts one program per part. Tile row r is query token r // GROUP_SIZE,
    head r % GROUP_SIZE of one KV head; rows past the last are padding.

    Reads:  q, K and V pages, page table, lengths
    Writes: partial_out [slots, BLOCK_M, HEAD_DIM_V] fp32, partial_lse [slots, BLOCK_M] fp32, natural log, of tiles in
            several parts; out and lse of tiles in one
    A part without keys writes (0, -inf), the merge identity. Every slot that the merge reads is written: the workspace
    needs no initialisation. No atomics.

    Widths that are no power of two are attended as a block and a tail (576 = 512 + 64), since a block must be one.
    Strides of K and V count steps of KV_VECTOR elements, in 32 bits. KV_VECTOR and Q_VECTOR are what the host
    guarantees of addresses, in elements; without it rows could not be copied 16 bytes at a time. WIDEN computes
    products in float32, for Triton's interpreter, whose bfloat16 products are wrong. lse is written if has_lse.

    With members_ptr [3, total_q] a "request" is a group of them and its keys are those that they have in common: its
    query tokens are gathered by their index in q (row 0), and each has its own position (row 1) and, with FIRST_KEYS,
    its own first visible key (row 2). With shard_lens_ptr the keys are a shard of longer sequences: key j stands at
    shard_first + j · shard_step (or shard_starts[b] + …), and the last query token of a sequence at its end.

    With WAITS_LAST the kernel needs nothing of the one before it, which itself waited for all that came earlier before
    it let this one be started: both may run at a time, and what comes after waits for both.

    Without v_ptr values are the first columns of the keys' block. A quantised cache (KV_FORMAT) is bytes; its numbers
    are float16 exactly, so that is what 16-bit queries are computed in, those of bfloat16 brought into its range by a
    power of two per row. Scales of K are in sm_scale and multiply scores, those of V (v_scale · *v_scale_ptr) multiply
    the output, or the weights where every token has its own.
    """
    if DEPENDENT_LAUNCH:
        # This kernel may be started while the one before it ends, and lets the merge be started while it runs itself:
        # only the cost of starting overlaps, since each waits for the memory of the one before.
        if not WAITS_LAST:
            gdc_wait()
        gdc_launch_dependents()
    share_id = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    RIGHT_BOUND: tl.constexpr = CAUSAL and tree_ptr is None
    SHARDED: tl.constexpr = shard_lens_ptr is not None
    RANGE_KIND: tl.constexpr = KV_KIND if members_ptr is None else GROUPS
    LATENT: tl.constexpr = v_ptr is None
    ONE_PAGE: tl.constexpr = LATENT and PAGE_SIZE % BLOCK_N == 0
    QUANTIZED: tl.constexpr = KV_FORMAT != PLAIN
    HAS_V_SCALE: tl.constexpr = k_scale_ptr is not None if LATENT else v_scale_ptr is not None
    Q_TYPE: tl.constexpr = q_ptr.dtype.element_ty
    # In which products are computed, but for WIDEN.
    TYPE: tl.constexpr = tl.float16 if QUANTIZED and Q_TYPE != tl.float32 else Q_TYPE
    FIT_Q: tl.constexpr = TYPE != Q_TYPE
    # A product whose result the compiler can follow to another is computed twice, by both halves of eight warps. The
    # branch before the weights hides them from it; and neither of the two products of keys goes on with the other's.
    APART: tl.constexpr = LATENT and BLOCK_M >= 64 and not QUANTIZED and TYPE != tl.float32
    TWO_SUMS: tl.constexpr = APART and BLOCK_D_TAIL > 0
    # Values, and latent rows, are loaded as pairs of numbers, and the even and the odd ones are products of their own.
    # A product needs 16 columns.
    K_PAIRS: tl.constexpr = (
        NATIVE and LATENT and TYPE == tl.float16 and HEAD_DIM % 2 == 0 and BLOCK_D >= 32 and BLOCK_D_TAIL != 16
    )
    PAIRS: tl.constexpr = K_PAIRS if LATENT else NATIVE and TYPE == tl.float16 and HEAD_DIM_V % 2 == 0
    PER_V: tl.constexpr = 2 if PAIRS else 1
    PER_K: tl.constexpr = 2 if K_PAIRS else 1
    WIDE_PRODUCTS: tl.constexpr = WIDEN and not QUANTIZED
    # Tiles of many rows: what is computed per key and row counts more than how early keys arrive. Blocks that every row
    # sees whole have a loop of their own without masks, and values are waited for together with their keys.
    TALL: tl.constexpr = BLOCK_M >= 64 and not LATENT and TYPE != tl.float32
    # A scale above 0 commutes with the maximum, and is then multiplied in where that is subtracted.
    FOLD: tl.constexpr = POSITIVE_SCALE and not (
        HAS_SOFTCAP or alibi_ptr is not None or k_scale_ptr is not None or FIT_Q or TWO_SUMS
    )
    # Keys lie at the same places of their pages in every block, so that each block's addresses are those of page 0 and
    # one product, in bytes: SAME_STRIDES holds only where a page's stride in bytes fits 31 bits. Smaller tiles lack the
    # registers to keep those of page 0.
    WHOLE_PAGES: tl.constexpr = (
        TALL and BLOCK_N % PAGE_SIZE == 0 and SAME_STRIDES and BLOCK_D_TAIL == 0 and BLOCK_DV_TAIL == 0
    )
    # Sums of float32 products in pieces, see add_products, and over blocks of keys without loss: of thousands of keys
    # they would round more than the error budget allows. Pieces of wide keys are longer, since each takes registers.
    EXACT: tl.constexpr = TYPE == tl.float32
    # None is wider than the block that it is of: a tail may be far wider than that.
    PIECE: tl.constexpr = min(16 if BLOCK_D + BLOCK_D_TAIL <= 256 else 32, BLOCK_D)
    TAIL_PIECE: tl.constexpr = min(PIECE, BLOCK_D_TAIL) if BLOCK_D_TAIL else PIECE
    # float16 weights are 2^WEIGHT_BITS times as large as they are, and so is their sum: those of far smaller ones that
    # bfloat16 would keep would vanish.
    WEIGHT_BITS: tl.constexpr = 14 if QUANTIZED and TYPE == tl.float16 else 0
    if list_ptr is not None:
        tiles_each = tl.cdiv(q_len * GROUP_SIZE, BLOCK_M)
        by_work, each, share, total = listed_shares(list_ptr, batch, tiles_each, shares)
    else:
        by_work, each, share, total = choose_shares(
            batch, lens_ptr, indptr_ptr, kv_start_ptr, qo_indptr_ptr, capacity, q_len, total_q, window_left, shares,
            heaviest, PAGE_SIZE, RANGE_KIND, GROUP_SIZE, BLOCK_M, HAS_WINDOW, RIGHT_BOUND, SCHEDULE, PARTS, MIN_CHUNK,
            SEGMENT_COST, TILE_COST, BLOCK_B,
        )  # fmt: skip
    place = share_id * share
    stop = tl.minimum(place + share, total)
    if SCHEDULE == FIXED_TOKENS:
        # One part; most of those that a sequence could have are past its end.
        if place >= total:
            return
        b, begin = locate(
            place, batch, by_work, each, lens_ptr, indptr_ptr, kv_start_ptr, qo_indptr_ptr, capacity, q_len, total_q,
            window_left, heaviest, PAGE_SIZE, RANGE_KIND, GROUP_SIZE, BLOCK_M, HAS_WINDOW, RIGHT_BOUND, TILE_COST,
            BLOCK_B,
        )  # fmt: skip
        _, seq_len, _ = load_kv_range(b, True, lens_ptr, indptr_ptr, kv_start_ptr, capacity, PAGE_SIZE, RANGE_KIND)
        parts = tl.maximum(tl.cdiv(seq_len, part_tokens(seq_len, SPLIT_TOKENS, PARTS)), 1)
        if (place - begin) % PARTS >= parts:
            return
    while place < stop:
        # Which request, tile and stretch of it lie at this place of the axis?
        if list_ptr is not None:
            b, begin = listed_request(list_ptr, place, batch, tiles_each, by_work, each, BLOCK_B)
            weight = listed_weight(list_ptr, b, by_work, each)
        else:
            b, begin = locate(
                place, batch, by_work, each, lens_ptr, indptr_ptr, kv_start_ptr, qo_indptr_ptr, capacity, q_len,
                total_q, window_left, heaviest, PAGE_SIZE, RANGE_KIND, GROUP_SIZE, BLOCK_M, HAS_WINDOW, RIGHT_BOUND,
                TILE_COST, BLOCK_B,
            )  # fmt: skip
            _, span = request_work(
                b, True, lens_ptr, indptr_ptr, kv_start_ptr, qo_indptr_ptr, capacity, q_len, total_q, window_left,
                PAGE_SIZE, RANGE_KIND, GROUP_SIZE, BLOCK_M, HAS_WINDOW, RIGHT_BOUND,
            )  # fmt: skip
            weight = tile_weight(span, by_work, each, heaviest, TILE_COST)
        start, seq_len, pool_first = load_kv_range(
            b, True, lens_ptr, indptr_ptr, kv_start_ptr, capacity, PAGE_SIZE, RANGE_KIND
        )
        q_first, q_tokens = load_q_range(b, True, qo_indptr_ptr, q_len, total_q)
        if MULTI_TOKEN or GROUP_SIZE > BLOCK_M:
            tile = (place - begin) // weight
            if RIGHT_BOUND:
                tile = tile_at(tile, tl.cdiv(q_tokens * GROUP_SIZE, BLOCK_M))
            offset = (place - begin) % weight
        else:  # its only one
            tile = 0
            offset = place - begin
        taken = tl.minimum(weight - offset, stop - place)

        # Which keys may its rows see? Row r stands at position p = seq_len - q_tokens + token, of the whole sequence.
        offs_r = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        row_live = offs_r < q_tokens * GROUP_SIZE
        token = offs_r // GROUP_SIZE
        head = kv_head * GROUP_SIZE + offs_r % GROUP_SIZE
        first_position = seq_len - q_tokens
        key_first = shard_first
        if SHARDED:
            first_position = clamp(tl.load(shard_lens_ptr + b), 0, MAX_TOKENS) - q_tokens
            if shard_starts_ptr is not None:
                key_first = clamp(tl.load(shard_starts_ptr + b), 0, MAX_TOKENS)
        if members_ptr is not None:
            member = members_ptr + q_first + token
            q_index = tl.load(member, mask=row_live, other=0)
            q_batch, q_token = q_index // q_len, q_index % q_len
            position = tl.load(member + total_q, mask=row_live, other=0)
        else:
            q_batch, q_token = b, q_first + token
            position = first_position + token
        low = start
        high = seq_len
        if HAS_WINDOW:
            leftmost = first_position + tile * BLOCK_M // GROUP_SIZE - window_left
            low = tl.maximum(low, keys_before(leftmost, key_first, shard_step, SHARDED))
        if MULTI_TOKEN and RIGHT_BOUND:
            last_token = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP_SIZE, q_tokens - 1)
            high = tl.minimum(high, keys_before(first_position + last_token + 1, key_first, shard_step, SHARDED))

        # Which of them are in this stretch?
        if SCHEDULE == FIXED_TOKENS:
            distance = part_tokens(seq_len, SPLIT_TOKENS, PARTS)
            parts = tl.maximum(tl.cdiv(seq_len, distance), 1)
            low = tl.maximum(low, offset * distance)
            high = tl.minimum(high, tl.minimum(offset + 1, parts) * distance)
        elif SCHEDULE == FIXED_PARTS:
            parts = PARTS
            low = tl.maximum(low, even_edge(offset, PARTS, seq_len))
            high = tl.minimum(high, even_edge(offset + 1, PARTS, seq_len))
        else:
            parts = tl.where(taken == weight, 1, 2)
            low, high = stretch(low, high, offset, taken, weight, by_work, TILE_COST)

        # Queries.
        offs_n = tl.arange(0, BLOCK_N)
        offs_d = tl.arange(0, BLOCK_D)
        q_offset = (
            q_batch.to(tl.int64) * stride_q_batch
            + q_token.to(tl.int64) * stride_q_token
            + head.to(tl.int64) * stride_q_head
        )
        if EXACT:
            q = load_pieces(q_ptr, q_offset, row_live, 0, BLOCK_D, HEAD_DIM, PIECE, Q_VECTOR)
            q_tail = load_pieces(q_ptr, q_offset, row_live, BLOCK_D, BLOCK_D_TAIL, HEAD_DIM, TAIL_PIECE, Q_VECTOR)
        else:
            q = tl.load(
                row_pointers(q_ptr, q_offset, offs_d, Q_VECTOR),
                mask=row_live[:, None] & (offs_d < HEAD_DIM)[None, :],
                other=0.0,
            )
        if BLOCK_D_TAIL and not EXACT:
            offs_d_tail = BLOCK_D + tl.arange(0, BLOCK_D_TAIL)
            q_tail = tl.load(
                row_pointers(q_ptr, q_offset, offs_d_tail, Q_VECTOR),
                mask=row_live[:, None] & (offs_d_tail < HEAD_DIM)[None, :],
                other=0.0,
            )
            if WIDE_PRODUCTS:
                q_tail = q_tail.to(tl.float32)
        if WIDE_PRODUCTS and not EXACT:
            q = q.to(tl.float32)
        if FIT_Q:
            q_top = finite_top(q)
            if BLOCK_D_TAIL:
                q_top = tl.maximum(q_top, finite_top(q_tail))
            q_power, q_inverse = power_towards(q_top, 14)
            q = (q.to(tl.float32) * q_power[:, None]).to(TYPE)
            if BLOCK_D_TAIL:
                q_tail = (q_tail.to(tl.float32) * q_power[:, None]).to(TYPE)
        if K_PAIRS:
            q, q_odd = tl.split(tl.reshape(q, [BLOCK_M, BLOCK_D // 2, 2]))
            if BLOCK_D_TAIL:
                q_tail, q_tail_odd = tl.split(tl.reshape(q_tail, [BLOCK_M, BLOCK_D_TAIL // 2, 2]))
        if alibi_ptr is not None:
            slope = tl.load(alibi_ptr + head, mask=row_live, other=0.0).to(tl.float32)

        # Keys and values: where the request's tokens lie.
        offs_dv = tl.arange(0, BLOCK_DV)
        offs_v = tl.arange(0, BLOCK_DV // PER_V)
        offs_k = tl.arange(0, BLOCK_D // PER_K)
        if BLOCK_D_TAIL:
            offs_k_tail = BLOCK_D // PER_K + tl.arange(0, BLOCK_D_TAIL // PER_K)
        k_base = k_ptr + wide_product(kv_head, stride_k_head) * KV_VECTOR
        if K_PAIRS:
            k_base = k_base.to(tl.pointer_type(tl.int16), bitcast=True)
        if not LATENT:
            v_base = v_ptr + wide_product(kv_head, stride_v_head) * KV_VECTOR
            if PAIRS:
                v_base = v_base.to(tl.pointer_type(tl.int16), bitcast=True)
        if k_scale_ptr is not None:
            k_scales = k_scale_ptr + wide_product(kv_head, stride_k_scale_head)
        if HAS_V_SCALE:
            v_scales = k_scales if LATENT else v_scale_ptr + wide_product(kv_head, stride_v_scale_head)
        if KV_KIND == PAGED or KV_KIND == CONTIGUOUS:
            row = b
            if rows_ptr is not None:
                row = tl.load(rows_ptr + b)
            if KV_KIND == CONTIGUOUS:
                k_base += wide_product(row, stride_k_page) * KV_VECTOR
                v_base += wide_product(row, stride_v_page) * (KV_VECTOR // PER_V)
                if K_SCALE_PER_TOKEN:
                    k_scales += wide_product(row, stride_k_scale_page)
                if V_SCALE_PER_TOKEN:
                    v_scales += wide_product(row, stride_v_scale_page)
            else:
                page_ids = table_ptr + row.to(tl.int64) * stride_table_row
        elif KV_KIND == CSR:
            if members_ptr is not None:
                pool_first = tl.load(rows_ptr + b)
            page_ids = table_ptr + pool_first
        else:
            k_base += wide_product(pool_first, stride_k_token) * KV_VECTOR
            v_base += wide_product(pool_first, stride_v_token) * (KV_VECTOR // PER_V)
            if K_SCALE_PER_TOKEN:
                k_scales += wide_product(pool_first, stride_k_scale_token)
            if V_SCALE_PER_TOKEN:
                v_scales += wide_product(pool_first, stride_v_scale_token)
        BY_PAGE: tl.constexpr = KV_KIND == PAGED or KV_KIND == CSR

        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        # In low tiles a row crosses warps: its sum is kept per column of a block and added up once at the end.
        ROW_SUMS: tl.constexpr = BLOCK_M >= 64
        if ROW_SUMS:
            row_sum = tl.zeros([BLOCK_M], tl.float32)
        else:
            column_sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV // PER_V], tl.float32)
        if PAIRS:
            acc_odd = tl.zeros([BLOCK_M, BLOCK_DV // PER_V], tl.float32)
        if BLOCK_DV_TAIL:
            offs_dv_tail = BLOCK_DV + tl.arange(0, BLOCK_DV_TAIL)
            offs_v_tail = BLOCK_DV // PER_V + tl.arange(0, BLOCK_DV_TAIL // PER_V)
            acc_tail = tl.zeros([BLOCK_M, BLOCK_DV_TAIL // PER_V], tl.float32)
            if PAIRS:
                acc_tail_odd = tl.zeros([BLOCK_M, BLOCK_DV_TAIL // PER_V], tl.float32)
        if EXACT:
            acc_lost = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
            if BLOCK_DV_TAIL:
                tail_lost = tl.zeros([BLOCK_M, BLOCK_DV_TAIL], tl.float32)
            if ROW_SUMS:
                row_lost = tl.zeros([BLOCK_M], tl.float32)
            else:
                columns_lost = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        # Without a per-row mask or an unbounded bias, every row of a block that has a key sees one.
        ROW_MASK: tl.constexpr = FIRST_KEYS or (MULTI_TOKEN and (RIGHT_BOUND or HAS_WINDOW or tree_ptr is not None))
        # Keys of seen_from…seen_to are seen by every row that is live: blocks within them need no mask.
        seen_from = low
        seen_to = high
        if ROW_MASK and RIGHT_BOUND:
            last_key = position
            if SHARDED:
                last_key = keys_before(position + 1, key_first, shard_step, SHARDED) - 1
            last_key = tl.where(row_live, tl.minimum(last_key, high - 1), high - 1)
            seen_to = tl.min(last_key, 0) + 1
        if ROW_MASK and (FIRST_KEYS or HAS_WINDOW):
            if FIRST_KEYS:
                first_key = tl.load(member + 2 * total_q, mask=row_live, other=0)
            else:
                first_key = keys_before(position - window_left, key_first, shard_step, SHARDED)
            first_key = tl.where(row_live, first_key, low)
            seen_from = tl.max(first_key, 0)
        inverse_cap = 1.0 / softcap
        score_scale = sm_scale if HAS_SOFTCAP or alibi_ptr is not None else sm_scale * LOG2E
        if k_scale_ptr is not None and not K_SCALE_PER_TOKEN:
            score_scale *= tl.load(k_scales)
        if FIT_Q:
            score_scale = (score_scale * q_inverse)[:, None]
        if FOLD:
            score_scale = tl.maximum(score_scale, 2.0**-126)  # -inf times 0 would be no number
        if V_SCALE_PER_TOKEN:
            # The largest scale of a value so far, as a power of two: weights are times a scale over it, and acc too, so
            # that whatever the scales, weights keep to the range of float16.
            v_top = 2.0**-100
        first = low
        if LATENT:
            # Blocks begin at multiples of their size, so that each lies in one page where pages are multiples of it.
            first = tl.where(low < high, low - low % BLOCK_N, high)
        if ONE_PAGE:
            page = tl.load(page_ids + first // PAGE_SIZE, mask=first < high, other=0)
        elif BY_PAGE:
            # Page ids travel one block ahead through the loop: loaded in the block that uses them, they would keep the
            # software pipeline from buffering more than one block of keys and values.
            page = load_page_ids(page_ids, first + offs_n, high, PAGE_SIZE)
            if WHOLE_PAGES:
                in_page = ((first + offs_n).to(tl.uint32) % PAGE_SIZE).to(tl.int32)
                in_page_offset = wide_product(in_page, stride_k_token) * KV_VECTOR
                # Of the first block; written so that what keys a page apart have in common is computed once.
                entries = page_ids + (first + offs_n % PAGE_SIZE).to(tl.uint32) // PAGE_SIZE + offs_n // PAGE_SIZE
                k_page_0 = in_bytes(row_pointers(k_base, in_page_offset, offs_k, KV_VECTOR))
                v_page_0 = in_bytes(row_pointers(v_base, in_page_offset, offs_v, KV_VECTOR))
                page_bytes = stride_k_page * (KV_VECTOR * k_ptr.dtype.element_ty.primitive_bitwidth // 8)
        # Draft tokens of a tree come last, in a loop of their own: the one before it is that of plain decode. Of tall
        # tiles so do blocks that some row does not see whole.
        PHASES: tl.constexpr = 2 if tree_ptr is not None or TALL else 1
        turn = high
        if TALL:
            turn = first + clamp(seen_to - first, 0, tl.maximum(high - first, 0)) // BLOCK_N * BLOCK_N
        if tree_ptr is not None:
            before = keys_before(first_position, key_first, shard_step, SHARDED)
            turn = first + clamp(before - first, 0, tl.maximum(high - first, 0)) // BLOCK_N * BLOCK_N
        for phase in tl.static_range(PHASES):
            first_block = first if phase == 0 else turn
            last_block = turn if phase + 1 < PHASES else high
            if TALL and BY_PAGE and phase > 0:
                # Were they carried over from the loop before, each of its blocks would load them a second time, in the
                # layout that this one needs.
                page = load_page_ids(page_ids, first_block + offs_n, high, PAGE_SIZE)
            for block in tl.range(first_block, last_block, BLOCK_N, num_stages=NUM_STAGES):
                key = block + offs_n
                in_part = key < high
                if LATENT:
                    in_part = in_part & (key >= low)
                k_rows = k_base
                if ONE_PAGE:
                    in_page = block % PAGE_SIZE
                    tile_offset = wide_product(page, stride_k_page) + wide_product(in_page, stride_k_token)
                    k_rows += tile_offset * (KV_VECTOR // PER_K)
                    if PACKED and APART:  # with few rows the code that this makes is slower
                        k_offset = packed_rows(BLOCK_N, HEAD_DIM // KV_VECTOR)
                    elif PACKED:
                        k_offset = offs_n * (HEAD_DIM // KV_VECTOR)
                    else:
                        k_offset = wide_product(offs_n, stride_k_token)
                    if K_SCALE_PER_TOKEN:
                        k_scale_offset = wide_product(page, stride_k_scale_page) + wide_product(
                            in_page + offs_n, stride_k_scale_token
                        )
                    page = tl.load(page_ids + (block + BLOCK_N) // PAGE_SIZE, mask=block + BLOCK_N < high, other=0)
                elif WHOLE_PAGES:
                    page_offset = wide_product(page, within(page_bytes, block, TALL))
                    next_entries = entries + (block + BLOCK_N - first).to(tl.uint32) // PAGE_SIZE
                    if phase + 1 < PHASES:
                        # The same for all keys of a block, and written as if it were not: the interpreter wants a mask
                        # of the shape of what it loads.
                        page = tl.load(next_entries, mask=block + BLOCK_N + 0 * offs_n < last_block)
                    else:
                        page = tl.load(next_entries, mask=key + BLOCK_N < high, other=0)
                elif BY_PAGE:
                    in_page = (key.to(tl.uint32) % PAGE_SIZE).to(tl.int32)
                    k_offset = wide_product(page, within(stride_k_page, block, TALL))
                    k_offset += wide_product(in_page, within(stride_k_token, block, TALL))
                    if K_SCALE_PER_TOKEN:
                        k_scale_offset = wide_product(page, stride_k_scale_page) + wide_product(
                            in_page, stride_k_scale_token
                        )
                    if V_SCALE_PER_TOKEN and not LATENT:
                        v_scale_offset = wide_product(page, stride_v_scale_page) + wide_product(
                            in_page, stride_v_scale_token
                        )
                    if SAME_STRIDES:
                        v_offset = k_offset
                    else:
                        v_offset = wide_product(page, within(stride_v_page, block, TALL))
                        v_offset += wide_product(in_page, within(stride_v_token, block, TALL))
                    page = load_page_ids(page_ids, key + BLOCK_N, high, PAGE_SIZE)
                else:
                    k_offset = wide_product(key, within(stride_k_token, block, TALL))
                    v_offset = wide_product(key, within(stride_v_token, block, TALL))
                    if K_SCALE_PER_TOKEN:
                        k_scale_offset = wide_product(key, stride_k_scale_token)
                    if V_SCALE_PER_TOKEN:
                        v_scale_offset = wide_product(key, stride_v_scale_token)
                if not WHOLE_PAGES:
                    k_offset *= KV_VECTOR // PER_K
                    if not LATENT:
                        v_offset *= KV_VECTOR // PER_V

                WHOLE: tl.constexpr = TALL and phase + 1 < PHASES
                k_mask = (offs_k < HEAD_DIM // PER_K)[None, :]
                v_mask = (offs_v < HEAD_DIM_V // PER_V)[None, :]
                if not WHOLE:
                    k_mask = in_part[:, None] & k_mask
                    v_mask = in_part[:, None] & v_mask
                if WHOLE_PAGES:
                    k = tl.load(rows_moved(k_page_0, page_offset, k_ptr, KV_VECTOR), mask=k_mask, other=0.0)
                    v = tl.load(rows_moved(v_page_0, page_offset, v_ptr, KV_VECTOR), mask=v_mask, other=0.0)
                elif not EXACT:
                    k = tl.load(row_pointers(k_rows, k_offset, offs_k, KV_VECTOR // PER_K), mask=k_mask, other=0.0)
                    if TALL:
                        v = tl.load(row_pointers(v_base, v_offset, offs_v, KV_VECTOR // PER_V), mask=v_mask, other=0.0)
                if K_PAIRS:
                    k, k_odd = decode_pairs(k, KV_FORMAT)
                elif not EXACT:
                    k = decoded(k, KV_FORMAT, TYPE, NATIVE)
                if WIDE_PRODUCTS and not EXACT:
                    k = k.to(tl.float32)
                if EXACT:
                    scores = add_products(
                        tl.zeros([BLOCK_M, BLOCK_N], tl.float32), q, k_rows, k_offset, in_part, 0, BLOCK_D, HEAD_DIM,
                        PIECE, KV_VECTOR, KV_FORMAT, NATIVE,
                    )  # fmt: skip
                    scores = add_products(
                        scores, q_tail, k_rows, k_offset, in_part, BLOCK_D, BLOCK_D_TAIL, HEAD_DIM, TAIL_PIECE,
                        KV_VECTOR, KV_FORMAT, NATIVE,
                    )  # fmt: skip
                elif not TWO_SUMS:
                    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
                if K_PAIRS:
                    scores = tl.dot(q_odd, tl.trans(k_odd), scores)
                if BLOCK_D_TAIL and not EXACT:
                    k_tail = tl.load(
                        row_pointers(k_rows, k_offset, offs_k_tail, KV_VECTOR // PER_K),
                        mask=in_part[:, None] & (offs_k_tail < HEAD_DIM // PER_K)[None, :],
                        other=0.0,
                    )
                    if K_PAIRS:
                        k_tail, k_tail_odd = decode_pairs(k_tail, KV_FORMAT)
                        scores = tl.dot(q_tail_odd, tl.trans(k_tail_odd), scores)
                    else:
                        k_tail = decoded(k_tail, KV_FORMAT, TYPE, NATIVE)
                    if WIDE_PRODUCTS:
                        k_tail = k_tail.to(tl.float32)
                    if TWO_SUMS:
                        # Scaled before they are added, or the compiler would make one sum of them.
                        scores = tl.dot(q, tl.trans(k)) * score_scale + tl.dot(q_tail, tl.trans(k_tail)) * score_scale
                    else:
                        scores = tl.dot(q_tail, tl.trans(k_tail), scores, input_precision="ieee")
                if not FOLD and not TWO_SUMS:
                    scores *= score_scale
                if K_SCALE_PER_TOKEN:
                    k_scale = tl.load(k_scales + k_scale_offset, mask=in_part, other=0.0)
                    scores *= k_scale[None, :]
                if HAS_SOFTCAP:
                    scores = softcap * tanh(scores * inverse_cap)
                if alibi_ptr is not None:
                    stands = key
                    if SHARDED:
                        stands = key_first + key * shard_step
                    scores -= slope[:, None] * tl.abs(position[:, None] - stands[None, :]).to(tl.float32)
                if HAS_SOFTCAP or alibi_ptr is not None:
                    scores *= LOG2E
                if WHOLE and tree_ptr is None:
                    # What hides keys on the right comes after; what hides some on the left may be anywhere.
                    if ROW_MASK and (FIRST_KEYS or HAS_WINDOW):
                        if block < seen_from:
                            scores = tl.where(key[None, :] >= first_key[:, None], scores, float("-inf"))
                elif not ROW_MASK and APART:
                    if (block < low) | (block + BLOCK_N > high):
                        scores = tl.where(in_part[None, :], scores, float("-inf"))
                elif not ROW_MASK:
                    scores = tl.where(in_part[None, :], scores, float("-inf"))
                elif tree_ptr is None or phase == 0:
                    if LATENT:
                        # The first block may begin before the first key.
                        scores = tl.where(in_part[None, :], scores, float("-inf"))
                    if RIGHT_BOUND or FIRST_KEYS or HAS_WINDOW:
                        if (block < seen_from) | (block + BLOCK_N > seen_to):
                            if RIGHT_BOUND:
                                seen = key[None, :] <= last_key[:, None]
                            else:
                                seen = in_part[None, :]
                            if FIRST_KEYS or HAS_WINDOW:
                                seen = seen & (key[None, :] >= first_key[:, None])
                            scores = tl.where(seen, scores, float("-inf"))
                else:
                    seen = in_part[None, :] & row_live[:, None]
                    if FIRST_KEYS or HAS_WINDOW:
                        seen = seen & (key[None, :] >= first_key[:, None])
                    # Lengths on the device may exceed the mask's: bits that it lacks are 0.
                    draft = key - first_position
                    if SHARDED:
                        draft = key_first + key * shard_step - first_position
                    in_tree = in_part & (draft >= 0) & (draft < tree_len)
                    word = tl.load(
                        tree_ptr
                        + b.to(tl.int64) * stride_tree_batch
                        + token.to(tl.int64)[:, None] * stride_tree_row
                        + (draft // 32)[None, :],
                        mask=(row_live & (token < tree_len))[:, None] & in_tree[None, :],
                        other=0,
                    )
                    seen = seen & ((draft < 0)[None, :] | (((word >> (draft & 31)[None, :]) & 1) != 0))
                    scores = tl.where(seen, scores, float("-inf"))

                if FOLD:
                    new_max = tl.maximum(row_max, tl.max(scores, 1) * score_scale)
                else:
                    new_max = tl.maximum(row_max, tl.max(scores, 1))
                SEES_NONE: tl.constexpr = ROW_MASK and (not WHOLE or FIRST_KEYS or HAS_WINDOW)
                shift = finite_or_zero(new_max) if SEES_NONE else new_max
                decay = tl.exp2(row_max - shift)
                if WEIGHT_BITS:
                    shift -= WEIGHT_BITS
                if FOLD:
                    probs = tl.exp2(scores * score_scale - shift[:, None])
                else:
                    probs = tl.exp2(scores - shift[:, None])
                if EXACT and ROW_SUMS:
                    row_sum, row_lost = add_exactly(row_sum * decay, row_lost * decay, tl.sum(probs, 1))
                elif EXACT:
                    column_sums, columns_lost = add_exactly(
                        column_sums * decay[:, None], columns_lost * decay[:, None], probs
                    )
                elif ROW_SUMS:
                    row_sum = row_sum * decay + tl.sum(probs, 1)
                else:
                    column_sums = column_sums * decay[:, None] + probs
                row_max = new_max
                if LATENT and EXACT:
                    # Keys came in pieces.
                    v = tl.load(row_pointers(k_rows, k_offset, offs_v, KV_VECTOR), mask=v_mask, other=0.0)
                    v = decoded(v, KV_FORMAT, TYPE, NATIVE)
                elif LATENT:
                    v = k
                    if PAIRS:
                        v_odd = k_odd
                else:
                    if not TALL:
                        v = tl.load(row_pointers(v_base, v_offset, offs_v, KV_VECTOR // PER_V), mask=v_mask, other=0.0)
                    if PAIRS:
                        v, v_odd = decode_pairs(v, KV_FORMAT)
                    else:
                        v = decoded(v, KV_FORMAT, TYPE, NATIVE)
                if tree_ptr is not None and phase == 1:
                    # A draft token that no row of the tile sees may hold anything, and 0 · NaN is NaN. Zeroed here and
                    # not in the load's mask, so that the load need not wait for the tree's words.
                    wanted = tl.max(seen.to(tl.int32), 0) > 0
                    v = tl.where(wanted[:, None], v, 0.0)
                    if PAIRS:
                        v_odd = tl.where(wanted[:, None], v_odd, 0.0)
                if V_SCALE_PER_TOKEN:
                    if LATENT:
                        scale = k_scale
                    else:
                        scale = tl.load(v_scales + v_scale_offset, mask=in_part, other=0.0)
                    if tree_ptr is not None and phase == 1:
                        scale = tl.where(wanted, scale, 0.0)
                    top_inverse, new_top = power_towards(tl.maximum(v_top, tl.max(tl.abs(scale), 0)), 0)
                    probs *= (scale * top_inverse)[None, :]
                    decay *= v_top * top_inverse
                    v_top = new_top
                weights = round_to(probs, TYPE, WIDE_PRODUCTS)
                if WIDE_PRODUCTS:
                    weights = weights.to(tl.float32)
                    v = v.to(tl.float32)
                if EXACT:
                    weighed = tl.dot(weights, v, input_precision="ieee")
                    acc, acc_lost = add_exactly(acc * decay[:, None], acc_lost * decay[:, None], weighed)
                else:
                    acc = tl.dot(weights, v, acc * decay[:, None], input_precision="ieee")
                if PAIRS:
                    acc_odd = tl.dot(weights, v_odd, acc_odd * decay[:, None])
                if BLOCK_DV_TAIL:
                    v_tail = tl.load(
                        row_pointers(v_base, v_offset, offs_v_tail, KV_VECTOR // PER_V),
                        mask=in_part[:, None] & (offs_v_tail < HEAD_DIM_V // PER_V)[None, :],
                        other=0.0,
                    )
                    if PAIRS:
                        v_tail, v_tail_odd = decode_pairs(v_tail, KV_FORMAT)
                    else:
                        v_tail = decoded(v_tail, KV_FORMAT, TYPE, NATIVE)
                    if tree_ptr is not None and phase == 1:
                        v_tail = tl.where(wanted[:, None], v_tail, 0.0)
                        if PAIRS:
                            v_tail_odd = tl.where(wanted[:, None], v_tail_odd, 0.0)
                    if WIDE_PRODUCTS:
                        v_tail = v_tail.to(tl.float32)
                    if EXACT:
                        weighed = tl.dot(weights, v_tail, input_precision="ieee")
                        acc_tail, tail_lost = add_exactly(
                            acc_tail * decay[:, None], tail_lost * decay[:, None], weighed
                        )
                    else:
                        acc_tail = tl.dot(weights, v_tail, acc_tail * decay[:, None], input_precision="ieee")
                    if PAIRS:
                        acc_tail_odd = tl.dot(weights, v_tail_odd, acc_tail_odd * decay[:, None])

        if PAIRS:
            acc = tl.interleave(acc, acc_odd)
            if BLOCK_DV_TAIL:
                acc_tail = tl.interleave(acc_tail, acc_tail_odd)
        if EXACT:
            acc = settled(acc, acc_lost)
            if BLOCK_DV_TAIL:
                acc_tail = settled(acc_tail, tail_lost)
            if ROW_SUMS:
                row_sum = settled(row_sum, row_lost)
            else:
                column_sums = settled(column_sums, columns_lost)
        # Leave the result, or a partial for the merge.
        if not ROW_SUMS:
            row_sum = tl.sum(column_sums, 1)
        has_keys = row_sum != 0  # not > 0: a NaN among the scores is a NaN in the result, not a row without keys
        if WEIGHT_BITS:
            row_max -= WEIGHT_BITS
        lse = tl.where(has_keys, row_max * LN2 + tl.log(tl.where(has_keys, row_sum, 1.0)), float("-inf"))
        value_scale = 1.0
        if QUANTIZED:
            value_scale = v_scale
            if V_SCALE_PER_TOKEN:
                value_scale *= v_top
            elif HAS_V_SCALE:
                value_scale *= tl.load(v_scales)
        if (parts == 1) & (offset == 0):
            denominator = row_sum
            if sinks_ptr is not None:
                sink = tl.load(sinks_ptr + head, mask=row_live, other=float("-inf")).to(tl.float32) * LOG2E
                denominator += tl.where(has_keys, tl.exp2(sink - finite_or_zero(row_max)), 0.0)
            inverse = value_scale / tl.where(has_keys, denominator, 1.0)
            out_offset = (
                q_batch.to(tl.int64) * stride_out_batch
                + q_token.to(tl.int64) * stride_out_token
                + head.to(tl.int64) * stride_out_head
            )
            out_type = out_ptr.dtype.element_ty
            tl.store(
                row_pointers(out_ptr, out_offset, offs_dv, Q_VECTOR),
                round_to(acc * inverse[:, None], out_type, WIDEN),
                mask=row_live[:, None] & (offs_dv < HEAD_DIM_V)[None, :],
            )
            if BLOCK_DV_TAIL:
                tl.store(
                    row_pointers(out_ptr, out_offset, offs_dv_tail, Q_VECTOR),
                    round_to(acc_tail * inverse[:, None], out_type, WIDEN),
                    mask=row_live[:, None] & (offs_dv_tail < HEAD_DIM_V)[None, :],
                )
            if has_lse != 0:
                lse_offset = (
                    q_batch.to(tl.int64) * stride_lse_batch
                    + q_token.to(tl.int64) * stride_lse_token
                    + head.to(tl.int64) * stride_lse_head
                )
                tl.store(lse_ptr + lse_offset, lse, mask=row_live)
        elif parts > 1:
            inverse = value_scale / tl.where(has_keys, row_sum, 1.0)
            if SCHEDULE == BALANCED:
                slot = tl.where(offset == 0, shares + share_id, share_id)
            else:
                slot = place
            # The workspace is aligned, so its rows are, as far as their width is.
            PARTIAL_VECTOR: tl.constexpr = 4 if HEAD_DIM_V % 4 == 0 else 1
            partial_row = (slot * NUM_KV_HEADS + kv_head).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
            tl.store(
                row_pointers(partial_out_ptr, partial_row * HEAD_DIM_V, offs_dv, PARTIAL_VECTOR),
                acc * inverse[:, None],
                mask=row_live[:, None] & (offs_dv < HEAD_DIM_V)[None, :],
            )
            if BLOCK_DV_TAIL:
                tl.store(
                    row_pointers(partial_out_ptr, partial_row * HEAD_DIM_V, offs_dv_tail, PARTIAL_VECTOR),
                    acc_tail * inverse[:, None],
                    mask=row_live[:, None] & (offs_dv_tail < HEAD_DIM_V)[None, :],
                )
            tl.store(partial_lse_ptr + partial_row, lse, mask=row_live)
        place += taken
    if DEPENDENT_LAUNCH and WAITS_LAST:
        # One program is enough for the kernel to end no sooner than the one before.
        if tl.program_id(0) == 0:
            gdc_wait()
