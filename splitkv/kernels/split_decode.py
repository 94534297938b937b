"""The attention kernel: one packed query tile against one part of its keys."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from splitkv.kernels.primitives import (
    BALANCED,
    CONTIGUOUS,
    CSR,
    FIXED_TOKENS,
    LN2,
    LOG2E,
    PAGED,
    balanced_chunk,
    even_edge,
    finite_or_zero,
    load_kv_range,
    load_q_range,
    part_tokens,
    parts_of,
    request_work,
    round_to,
    tanh,
)


@triton.jit
def find_unit(
    unit,
    batch,
    chunk,
    lens_ptr,
    indptr_ptr,
    kv_start_ptr,
    qo_indptr_ptr,
    capacity,
    q_len,
    total_q,
    window_left,
    PAGE_SIZE: tl.constexpr,
    KV_KIND: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    RIGHT_BOUND: tl.constexpr,
    SCHEDULE: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """The request that owns a unit (batch if none does), the unit's place in it, and partial slots per head before it.

    Without a list, the request is found by counting those whose units all come earlier.
    """
    before = 0
    request = 0
    first_unit = 0
    first_slot = 0
    for first in range(0, batch, BLOCK_B):
        b = first + tl.arange(0, BLOCK_B)
        live = b < batch
        tiles, span = request_work(
            b, live, lens_ptr, indptr_ptr, kv_start_ptr, qo_indptr_ptr, capacity, q_len, total_q, window_left,
            PAGE_SIZE, KV_KIND, GROUP_SIZE, BLOCK_M, HAS_WINDOW, RIGHT_BOUND,
        )  # fmt: skip
        if SCHEDULE == BALANCED:
            parts = parts_of(tiles, span, span, chunk, SCHEDULE, SPLIT_TOKENS, PARTS)
            slots = tl.where(parts > 1, tiles * parts, 0)
        else:
            parts = tiles * 0 + PARTS
            slots = tiles * PARTS
        ends = before + tl.cumsum(tiles * parts, 0)
        earlier = live & (ends <= unit)
        request += tl.sum(earlier.to(tl.int32), 0)
        first_unit = tl.maximum(first_unit, tl.max(tl.where(earlier, ends, 0), 0))
        first_slot += tl.sum(tl.where(earlier, slots, 0), 0)
        before += tl.sum(tiles * parts, 0)
    return request, unit - first_unit, first_slot


@triton.jit
def row_pointers(base, row_offset, offs, VECTOR: tl.constexpr):
    """Pointers [rows, columns] of which the host guarantees that every row starts at a multiple of VECTOR elements.

    The hint sits on the pointers themselves. On an offset or a base it would be lost wherever the compiler folds the
    operation that carries it (times a head that is always 0, plus a slot that is always 0), and with it the 16-byte copies.
    """
    pointers = base + row_offset[:, None] + offs[None, :]
    return tl.multiple_of(pointers, [1, VECTOR * base.dtype.element_ty.primitive_bitwidth // 8])


@triton.jit
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
    batch: tl.int32,
    q_len: tl.int32,
    total_q: tl.int32,
    capacity: tl.int32,
    window_left: tl.int32,
    resident: tl.int32,
    slots: tl.int32,
    sm_scale: tl.float32,
    softcap: tl.float32,
    stride_q_batch: tl.int64,
    stride_q_token: tl.int64,
    stride_q_head: tl.int64,
    stride_out_batch: tl.int64,
    stride_out_token: tl.int64,
    stride_out_head: tl.int64,
    stride_lse_batch: tl.int64,
    stride_lse_token: tl.int64,
    stride_lse_head: tl.int64,
    stride_k_page: tl.int64,
    stride_k_token: tl.int64,
    stride_k_head: tl.int64,
    stride_v_page: tl.int64,
    stride_v_token: tl.int64,
    stride_v_head: tl.int64,
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
    MAX_WAVES: tl.constexpr,
    WAVE_COST: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
    MULTI_TOKEN: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_LSE: tl.constexpr,
    Q_VECTOR: tl.constexpr,
    KV_VECTOR: tl.constexpr,
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
    """Attend one packed query tile to one part of its keys, leaving a partial, or the result where there is one part.

    Grid: (units · NUM_KV_HEADS,). Tile row r is query token r // GROUP_SIZE, head r % GROUP_SIZE of one KV head; rows
    past the last are padding.

    Reads:  q, K and V pages, page table, lengths
    Writes: partial_out [slots, BLOCK_M, HEAD_DIM_V] fp32, partial_lse [slots, BLOCK_M] fp32, natural log: tiles in parts
            out, lse: tiles in one part
    A part without keys writes (0, -inf), the merge identity. Every slot that the merge reads is written: the workspace
    needs no initialisation. No atomics.

    Widths that are no power of two are attended as a block and a tail (576 = 512 + 64), since a block must be one.
    KV_VECTOR and Q_VECTOR are what the host guarantees of addresses, in elements; without it rows could not be copied
    16 bytes at a time. WIDEN computes products in float32, for Triton's interpreter, whose bfloat16 products are wrong.
    """
    if DEPENDENT_LAUNCH:
        # This kernel may be started while the one before it ends, and lets the merge be started while it runs itself:
        # only the cost of starting overlaps, since each waits for the memory of the one before.
        gdc_wait()
        gdc_launch_dependents()
    pid = tl.program_id(0)
    kv_head = pid % NUM_KV_HEADS
    unit = pid // NUM_KV_HEADS
    RIGHT_BOUND: tl.constexpr = CAUSAL and tree_ptr is None

    # Which request, tile and part is this?
    chunk = 1
    if SCHEDULE == BALANCED:
        chunk = balanced_chunk(
            batch, lens_ptr, indptr_ptr, kv_start_ptr, qo_indptr_ptr, capacity, q_len, total_q, window_left, resident, slots,
            NUM_KV_HEADS, PAGE_SIZE, KV_KIND, GROUP_SIZE, BLOCK_M, HAS_WINDOW, RIGHT_BOUND, MAX_WAVES, WAVE_COST,
            MIN_CHUNK, BLOCK_B,
        )  # fmt: skip
    if SCHEDULE == BALANCED or qo_indptr_ptr is not None:
        b, place, first_slot = find_unit(
            unit, batch, chunk, lens_ptr, indptr_ptr, kv_start_ptr, qo_indptr_ptr, capacity, q_len, total_q, window_left,
            PAGE_SIZE, KV_KIND, GROUP_SIZE, BLOCK_M, HAS_WINDOW, RIGHT_BOUND, SCHEDULE, SPLIT_TOKENS, PARTS, BLOCK_B,
        )  # fmt: skip
    else:
        units_each = tl.cdiv(q_len * GROUP_SIZE, BLOCK_M) * PARTS
        b = unit // units_each
        place = unit % units_each
        first_slot = b * units_each
    if b >= batch:
        return
    start, seq_len, pool_first = load_kv_range(
        b, True, lens_ptr, indptr_ptr, kv_start_ptr, capacity, PAGE_SIZE, KV_KIND
    )
    q_first, q_tokens = load_q_range(b, True, qo_indptr_ptr, q_len, total_q)
    tiles, span = request_work(
        b, True, lens_ptr, indptr_ptr, kv_start_ptr, qo_indptr_ptr, capacity, q_len, total_q, window_left,
        PAGE_SIZE, KV_KIND, GROUP_SIZE, BLOCK_M, HAS_WINDOW, RIGHT_BOUND,
    )  # fmt: skip
    parts = parts_of(tiles, span, seq_len, chunk, SCHEDULE, SPLIT_TOKENS, PARTS)
    # Tiles vary fastest: those of one request read the same keys, so that they meet in the L2 cache.
    part = place // tiles
    tile = place % tiles
    if part >= parts:
        return
    if SCHEDULE == BALANCED:
        slot = (first_slot + tile * parts + part) * NUM_KV_HEADS + kv_head
    else:
        slot = (first_slot + tile * PARTS + part) * NUM_KV_HEADS + kv_head

    # Which keys may its rows see? Row r stands at position p = seq_len - q_tokens + token.
    offs_r = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_live = offs_r < q_tokens * GROUP_SIZE
    token = offs_r // GROUP_SIZE
    head = kv_head * GROUP_SIZE + offs_r % GROUP_SIZE
    position = seq_len - q_tokens + token
    low = start
    high = seq_len
    if HAS_WINDOW:
        low = tl.maximum(low, seq_len - q_tokens + tile * BLOCK_M // GROUP_SIZE - window_left)
    if MULTI_TOKEN and RIGHT_BOUND:
        last_token = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP_SIZE, q_tokens - 1)
        high = tl.minimum(high, seq_len - q_tokens + last_token + 1)

    # Which of them are this part's?
    if SCHEDULE == BALANCED:
        visible = tl.maximum(high - low, 0)
        high = low + even_edge(part + 1, parts, visible)
        low = low + even_edge(part, parts, visible)
    elif SCHEDULE == FIXED_TOKENS:
        distance = part_tokens(seq_len, SPLIT_TOKENS, PARTS)
        low = tl.maximum(low, part * distance)
        high = tl.minimum(high, tl.minimum(part + 1, tl.cdiv(seq_len, distance)) * distance)
    else:
        low = tl.maximum(low, even_edge(part, parts, seq_len))
        high = tl.minimum(high, even_edge(part + 1, parts, seq_len))

    # Queries.
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    q_offset = (
        b.to(tl.int64) * stride_q_batch
        + (q_first + token).to(tl.int64) * stride_q_token
        + head.to(tl.int64) * stride_q_head
    )
    q = tl.load(
        row_pointers(q_ptr, q_offset, offs_d, Q_VECTOR),
        mask=row_live[:, None] & (offs_d < HEAD_DIM)[None, :],
        other=0.0,
    )
    if BLOCK_D_TAIL:
        offs_d_tail = BLOCK_D + tl.arange(0, BLOCK_D_TAIL)
        q_tail = tl.load(
            row_pointers(q_ptr, q_offset, offs_d_tail, Q_VECTOR),
            mask=row_live[:, None] & (offs_d_tail < HEAD_DIM)[None, :],
            other=0.0,
        )
        if WIDEN:
            q_tail = q_tail.to(tl.float32)
    if WIDEN:
        q = q.to(tl.float32)
    if alibi_ptr is not None:
        slope = tl.load(alibi_ptr + head, mask=row_live, other=0.0).to(tl.float32)

    # Keys and values: where the request's tokens lie.
    offs_dv = tl.arange(0, BLOCK_DV)
    head64 = kv_head.to(tl.int64)
    k_base = k_ptr + head64 * stride_k_head
    v_base = v_ptr + head64 * stride_v_head
    if KV_KIND == PAGED or KV_KIND == CONTIGUOUS:
        row = b
        if rows_ptr is not None:
            row = tl.load(rows_ptr + b)
        row = row.to(tl.int64)
        if KV_KIND == CONTIGUOUS:
            k_base += row * stride_k_page
            v_base += row * stride_v_page
        else:
            table_ptr += row * stride_table_row
    elif KV_KIND == CSR:
        table_ptr += pool_first
    else:
        k_base += pool_first.to(tl.int64) * stride_k_token
        v_base += pool_first.to(tl.int64) * stride_v_token
    BY_PAGE: tl.constexpr = KV_KIND == PAGED or KV_KIND == CSR

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    if BLOCK_DV_TAIL:
        offs_dv_tail = BLOCK_DV + tl.arange(0, BLOCK_DV_TAIL)
        acc_tail = tl.zeros([BLOCK_M, BLOCK_DV_TAIL], tl.float32)
    # Without a per-row mask or an unbounded bias, every row of a block that has a key sees one.
    ROW_MASK: tl.constexpr = MULTI_TOKEN and (RIGHT_BOUND or HAS_WINDOW or tree_ptr is not None)
    inverse_cap = 1.0 / softcap
    score_scale = sm_scale if HAS_SOFTCAP or alibi_ptr is not None else sm_scale * LOG2E
    if BY_PAGE:
        # Page ids travel one block ahead through the loop: loaded in the block that uses them, they would keep the
        # software pipeline from buffering more than one block of keys and values.
        page = tl.load(table_ptr + (low + offs_n) // PAGE_SIZE, mask=low + offs_n < high, other=0)
    for block in tl.range(low, high, BLOCK_N, num_stages=NUM_STAGES):
        key = block + offs_n
        in_part = key < high
        if BY_PAGE:
            page64 = page.to(tl.int64)
            slot_in_page = (key % PAGE_SIZE).to(tl.int64)
            k_offset = page64 * stride_k_page + slot_in_page * stride_k_token
            v_offset = page64 * stride_v_page + slot_in_page * stride_v_token
            ahead = key + BLOCK_N
            page = tl.load(table_ptr + ahead // PAGE_SIZE, mask=ahead < high, other=0)
        else:
            k_offset = key.to(tl.int64) * stride_k_token
            v_offset = key.to(tl.int64) * stride_v_token

        k = tl.load(
            row_pointers(k_base, k_offset, offs_d, KV_VECTOR),
            mask=in_part[:, None] & (offs_d < HEAD_DIM)[None, :],
            other=0.0,
        )
        if WIDEN:
            k = k.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if BLOCK_D_TAIL:
            k_tail = tl.load(
                row_pointers(k_base, k_offset, offs_d_tail, KV_VECTOR),
                mask=in_part[:, None] & (offs_d_tail < HEAD_DIM)[None, :],
                other=0.0,
            )
            if WIDEN:
                k_tail = k_tail.to(tl.float32)
            scores = tl.dot(q_tail, tl.trans(k_tail), scores, input_precision="ieee")
        scores *= score_scale
        if HAS_SOFTCAP:
            scores = softcap * tanh(scores * inverse_cap)
        if alibi_ptr is not None:
            scores -= slope[:, None] * tl.abs(position[:, None] - key[None, :]).to(tl.float32)
        if HAS_SOFTCAP or alibi_ptr is not None:
            scores *= LOG2E
        seen = in_part[None, :]
        if ROW_MASK:
            seen = seen & row_live[:, None]
            if RIGHT_BOUND:
                seen = seen & (key[None, :] <= position[:, None])
            if HAS_WINDOW:
                seen = seen & (key[None, :] >= position[:, None] - window_left)
            if tree_ptr is not None:
                draft = key - (seq_len - q_tokens)
                is_draft = in_part & (draft >= 0)
                word = tl.load(
                    tree_ptr
                    + b.to(tl.int64) * stride_tree_batch
                    + token.to(tl.int64)[:, None] * stride_tree_row
                    + (draft // 32)[None, :],
                    mask=row_live[:, None] & is_draft[None, :],
                    other=-1,
                )
                seen = seen & (((word >> tl.where(is_draft, draft % 32, 0)[None, :]) & 1) != 0)
        scores = tl.where(seen, scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shift = finite_or_zero(new_max) if ROW_MASK else new_max
        decay = tl.exp2(row_max - shift)
        probs = tl.exp2(scores - shift[:, None])
        row_sum = row_sum * decay + tl.sum(probs, 1)
        row_max = new_max
        v = tl.load(
            row_pointers(v_base, v_offset, offs_dv, KV_VECTOR),
            mask=in_part[:, None] & (offs_dv < HEAD_DIM_V)[None, :],
            other=0.0,
        )
        if tree_ptr is not None:
            # A draft token that no row sees weighs 0, but its value may be NaN.
            v_seen = tl.max(seen.to(tl.int32), 0)[:, None] > 0
            v = tl.where(v_seen, v, tl.zeros([1, 1], v.dtype))
        weights = round_to(probs, v.dtype, WIDEN)
        if WIDEN:
            weights = weights.to(tl.float32)
            v = v.to(tl.float32)
        acc = tl.dot(weights, v, acc * decay[:, None], input_precision="ieee")
        if BLOCK_DV_TAIL:
            v_tail = tl.load(
                row_pointers(v_base, v_offset, offs_dv_tail, KV_VECTOR),
                mask=in_part[:, None] & (offs_dv_tail < HEAD_DIM_V)[None, :],
                other=0.0,
            )
            if tree_ptr is not None:
                v_tail = tl.where(v_seen, v_tail, tl.zeros([1, 1], v_tail.dtype))
            if WIDEN:
                v_tail = v_tail.to(tl.float32)
            acc_tail = tl.dot(weights, v_tail, acc_tail * decay[:, None], input_precision="ieee")

    # Leave the result, or a partial for the merge.
    has_keys = row_sum > 0
    lse = tl.where(has_keys, row_max * LN2 + tl.log(tl.where(has_keys, row_sum, 1.0)), float("-inf"))
    if parts == 1:
        denominator = row_sum
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + head, mask=row_live, other=float("-inf")).to(tl.float32) * LOG2E
            denominator += tl.where(has_keys, tl.exp2(sink - finite_or_zero(row_max)), 0.0)
        inverse = 1.0 / tl.where(has_keys, denominator, 1.0)
        out_offset = (
            b.to(tl.int64) * stride_out_batch
            + (q_first + token).to(tl.int64) * stride_out_token
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
        if HAS_LSE:
            lse_offset = (
                b.to(tl.int64) * stride_lse_batch
                + (q_first + token).to(tl.int64) * stride_lse_token
                + head.to(tl.int64) * stride_lse_head
            )
            tl.store(lse_ptr + lse_offset, lse, mask=row_live)
    else:
        inverse = 1.0 / tl.where(has_keys, row_sum, 1.0)
        partial_row = slot.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(
            partial_out_ptr + partial_row[:, None] * HEAD_DIM_V + offs_dv[None, :],
            acc * inverse[:, None],
            mask=row_live[:, None] & (offs_dv < HEAD_DIM_V)[None, :],
        )
        if BLOCK_DV_TAIL:
            tl.store(
                partial_out_ptr + partial_row[:, None] * HEAD_DIM_V + offs_dv_tail[None, :],
                acc_tail * inverse[:, None],
                mask=row_live[:, None] & (offs_dv_tail < HEAD_DIM_V)[None, :],
            )
        tl.store(partial_lse_ptr + partial_row, lse, mask=row_live)
