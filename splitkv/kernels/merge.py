"""The merge kernels: fold partial results by their log-sum-exp."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from splitkv.kernels.jit import unspecialized
from splitkv.kernels.primitives import (
    BALANCED,
    FIXED_TOKENS,
    GROUPS,
    LIST_HEADER,
    MAX_TOKENS,
    choose_shares,
    clamp,
    fold_partials,
    folded,
    listed_shares,
    listed_weight,
    load_kv_range,
    load_q_range,
    no_partials,
    part_tokens,
    place_of,
    request_begin,
    request_work,
    round_to,
    tile_weight,
)


@triton.jit
def tiles_on_axis(
    b,
    by_work,
    each,
    lens_ptr,
    indptr_ptr,
    kv_start_ptr,
    qo_indptr_ptr,
    capacity,
    q_len,
    total_q,
    window_left,
    heaviest,
    PAGE_SIZE: tl.constexpr,
    KV_KIND: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    RIGHT_BOUND: tl.constexpr,
    TILE_COST: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Where the tiles of request b begin on the axis of work, and how long each is."""
    begin = request_begin(
        b, by_work, each, lens_ptr, indptr_ptr, kv_start_ptr, qo_indptr_ptr, capacity, q_len, total_q, window_left,
        heaviest, PAGE_SIZE, KV_KIND, GROUP_SIZE, BLOCK_M, HAS_WINDOW, RIGHT_BOUND, TILE_COST, BLOCK_B,
    )  # fmt: skip
    _, span = request_work(
        b, True, lens_ptr, indptr_ptr, kv_start_ptr, qo_indptr_ptr, capacity, q_len, total_q, window_left,
        PAGE_SIZE, KV_KIND, GROUP_SIZE, BLOCK_M, HAS_WINDOW, RIGHT_BOUND,
    )  # fmt: skip
    return begin, tile_weight(span, by_work, each, heaviest, TILE_COST)


@triton.jit
def tile_slots(
    b,
    begin,
    weight,
    share,
    shares,
    lens_ptr,
    indptr_ptr,
    kv_start_ptr,
    capacity,
    PAGE_SIZE: tl.constexpr,
    KV_KIND: tl.constexpr,
    SCHEDULE: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The first slot of a tile of request b that begins there, the slot of its second part, and how many it has."""
    if SCHEDULE == BALANCED:
        first_share = begin // share
        parts = (begin + weight - 1) // share - first_share + 1
        first_slot = shares + first_share
        next_slot = first_share + 1
    else:
        if SCHEDULE == FIXED_TOKENS:
            _, seq_len, _ = load_kv_range(b, True, lens_ptr, indptr_ptr, kv_start_ptr, capacity, PAGE_SIZE, KV_KIND)
            parts = tl.maximum(tl.cdiv(seq_len, part_tokens(seq_len, SPLIT_TOKENS, PARTS)), 1)
        else:
            parts = PARTS
        first_slot = begin
        next_slot = begin + 1
    return first_slot, next_slot, parts


@triton.jit
def fold_tile(
    top,
    total,
    acc,
    partial_out_ptr,
    partial_lse_ptr,
    whole_out_ptr,
    whole_lse_ptr,
    row_token,
    head,
    tile_row,
    first_slot,
    next_slot,
    parts,
    offs_d,
    d_mask,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Take the parts of a row's tile into what is folded already; of a tile in one part, its row in whole_out."""
    slot_row = (head // GROUP_SIZE).to(tl.int64) * BLOCK_M + tile_row % BLOCK_M
    row_out_ptr = partial_out_ptr + slot_row * HEAD_DIM_V
    row_lse_ptr = partial_lse_ptr + slot_row
    if whole_out_ptr is not None:
        whole_row = row_token.to(tl.int64) * (NUM_KV_HEADS * GROUP_SIZE) + head
        row_out_ptr = tl.where(parts == 1, whole_out_ptr + whole_row * HEAD_DIM_V, row_out_ptr)
        row_lse_ptr = tl.where(parts == 1, whole_lse_ptr + whole_row, row_lse_ptr)
        first_slot = tl.where(parts == 1, 0, first_slot)
    top, total, acc = fold_partials(
        top,
        total,
        acc,
        row_out_ptr,
        row_lse_ptr,
        NUM_KV_HEADS * BLOCK_M * HEAD_DIM_V,
        NUM_KV_HEADS * BLOCK_M,
        first_slot,
        next_slot,
        parts,
        offs_d,
        d_mask,
        False,
        False,
        BLOCK_P,
        4 if HEAD_DIM_V % 4 == 0 else 1,
    )
    return top, total, acc


@unspecialized
def merge_splits_kernel(
    partial_out_ptr,
    partial_lse_ptr,
    out_ptr,
    lse_ptr,
    lens_ptr,
    indptr_ptr,
    kv_start_ptr,
    qo_indptr_ptr,
    sinks_ptr,
    list_ptr,
    whole_out_ptr,
    whole_lse_ptr,
    shared_out_ptr,
    shared_lse_ptr,
    groups_ptr,
    places_ptr,
    batch: tl.int32,
    q_len: tl.int32,
    total_q: tl.int32,
    capacity: tl.int32,
    window_left: tl.int32,
    shares: tl.int32,
    heaviest: tl.int32,
    has_lse: tl.int32,
    shared_shares: tl.int32,
    shared_heaviest: tl.int32,
    stride_out_batch: tl.int64,
    stride_out_token: tl.int64,
    stride_out_head: tl.int64,
    stride_lse_batch: tl.int64,
    stride_lse_token: tl.int64,
    stride_lse_head: tl.int64,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
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
    HAS_WINDOW: tl.constexpr,
    RIGHT_BOUND: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TOKENS: tl.constexpr,
    SHARED_BLOCK_M: tl.constexpr,
    SHARED_MIN_CHUNK: tl.constexpr,
    SHARED_SEGMENT_COST: tl.constexpr,
    SHARED_TILE_COST: tl.constexpr,
):
    """Fold the partials of query rows into their output, and zero the rows that belong to no request.

    Grid: (ceil(query tokens / TOKENS), query heads, ceil(HEAD_DIM_V / BLOCK_DV)). Rows whose tile had one part are done
    already; where most are, TOKENS spares what it costs to start a program for each.

    Reads:  partial_out [slots, BLOCK_M, HEAD_DIM_V] fp32, partial_lse [slots, BLOCK_M] fp32, lengths
    Writes: out, and lse if has_lse

    With groups_ptr (see group_kernel) a row was attended in two passes, over the keys that it shares with its group and
    over its own, and both are folded here. A tile in one part then left its rows in whole_out [2, total_q, query heads,
    HEAD_DIM_V] and whole_lse [2, total_q, query heads] fp32, own and shared; other partials over shared keys, in tiles
    of SHARED_BLOCK_M rows, are in shared_out and shared_lse.
    """
    head = tl.program_id(1)
    offs_d = tl.program_id(2) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    d_mask = offs_d < HEAD_DIM_V
    GROUPED: tl.constexpr = groups_ptr is not None
    # How was the batch shared? And for each row: where on the axis lies its tile, and by how many shares is it cut? The
    # same arithmetic as in split_decode_kernel.
    if list_ptr is not None:
        tiles_each = tl.cdiv(q_len * GROUP_SIZE, BLOCK_M)
        by_work, each, share, _ = listed_shares(list_ptr, batch, tiles_each, shares)
    else:
        by_work, each, share, _ = choose_shares(
            batch, lens_ptr, indptr_ptr, kv_start_ptr, qo_indptr_ptr, capacity, q_len, total_q, window_left, shares,
            heaviest, PAGE_SIZE, KV_KIND, GROUP_SIZE, BLOCK_M, HAS_WINDOW, RIGHT_BOUND, SCHEDULE, PARTS, MIN_CHUNK,
            SEGMENT_COST, TILE_COST, BLOCK_B,
        )  # fmt: skip
    for i in range(TOKENS):
        row_token = tl.program_id(0) * TOKENS + i
        belongs = row_token < total_q  # to a request
        out_row = head.to(tl.int64) * stride_out_head
        lse_row = head.to(tl.int64) * stride_lse_head
        if qo_indptr_ptr is not None:
            # The request of a query token: the number of requests that end at or before it. Rows before the first
            # request's and past the last one's belong to none.
            b = 0
            for first in range(0, batch, BLOCK_B):
                offs_b = first + tl.arange(0, BLOCK_B)
                ends = tl.load(qo_indptr_ptr + 1 + offs_b, mask=offs_b < batch, other=0x7FFFFFFF)
                b += tl.sum((ends <= row_token).to(tl.int32), 0)
            out_row += row_token.to(tl.int64) * stride_out_token
            lse_row += row_token.to(tl.int64) * stride_lse_token
            q_first = tl.load(qo_indptr_ptr + tl.minimum(b, batch - 1), mask=batch > 0, other=0)
            token = row_token - tl.maximum(q_first, 0)
            nobodys = (b >= batch) | (row_token < q_first)
            if belongs & nobodys:
                if DEPENDENT_LAUNCH:
                    gdc_wait()
                    gdc_launch_dependents()
                tl.store(out_ptr + out_row + offs_d, tl.zeros([BLOCK_DV], out_ptr.dtype.element_ty), mask=d_mask)
                if has_lse != 0:
                    tl.store(lse_ptr + lse_row, float("-inf"))
            belongs = belongs & (nobodys == 0)
        else:
            b = row_token // q_len
            token = row_token % q_len
            out_row += b.to(tl.int64) * stride_out_batch + token.to(tl.int64) * stride_out_token
            lse_row += b.to(tl.int64) * stride_lse_batch + token.to(tl.int64) * stride_lse_token
        if belongs:
            if list_ptr is not None:
                begin = tl.load(list_ptr + LIST_HEADER + b) * tiles_each
                weight = listed_weight(list_ptr, b, by_work, each)
            else:
                begin, weight = tiles_on_axis(
                    b, by_work, each, lens_ptr, indptr_ptr, kv_start_ptr, qo_indptr_ptr, capacity, q_len, total_q,
                    window_left, heaviest, PAGE_SIZE, KV_KIND, GROUP_SIZE, BLOCK_M, HAS_WINDOW, RIGHT_BOUND, TILE_COST,
                    BLOCK_B,
                )  # fmt: skip
            tile_row = token * GROUP_SIZE + head % GROUP_SIZE
            tile = tile_row // BLOCK_M
            if RIGHT_BOUND:
                _own_first, q_tokens = load_q_range(b, True, qo_indptr_ptr, q_len, total_q)
                tile = place_of(tile, tl.cdiv(q_tokens * GROUP_SIZE, BLOCK_M))
            begin += tile * weight
            first_slot, next_slot, parts = tile_slots(
                b, begin, weight, share, shares, lens_ptr, indptr_ptr, kv_start_ptr, capacity, PAGE_SIZE, KV_KIND,
                SCHEDULE, SPLIT_TOKENS, PARTS,
            )  # fmt: skip
            if qo_indptr_ptr is not None:
                # Sums that fall can claim more tiles than there is room for, and than 32 bits can count.
                room = shares.to(tl.int64) * share
                parts = tl.where((begin < 0) | (begin.to(tl.int64) + weight > room), 0, parts)
            if DEPENDENT_LAUNCH:
                # Where no tile was cut there is nothing to do, and programs make room at once, but for the first: the
                # grid must not end before split_decode_kernel has, on whose results later kernels wait through it.
                # Where some tiles were cut all wait: left alone, the few that merge would keep their multiprocessors
                # from taking all of the next kernel's programs. Lengths were final before split_decode_kernel began;
                # partials are there once it has ended.
                if SCHEDULE == BALANCED and not GROUPED:
                    if (parts == 1) & (not by_work):
                        if (row_token == 0) & (head == 0) & (tl.program_id(2) == 0):
                            gdc_launch_dependents()
                            gdc_wait()
                    else:
                        gdc_wait()
                        gdc_launch_dependents()
                else:
                    gdc_wait()
                    gdc_launch_dependents()
            if True if GROUPED else parts != 1:
                sink = 0.0
                if sinks_ptr is not None:
                    sink = tl.load(sinks_ptr + head).to(tl.float32)
                top, total, acc = no_partials(BLOCK_DV)
                top, total, acc = fold_tile(
                    top, total, acc, partial_out_ptr, partial_lse_ptr, whole_out_ptr, whole_lse_ptr, row_token, head,
                    tile_row, first_slot, next_slot, parts, offs_d, d_mask, NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM_V,
                    BLOCK_M, BLOCK_P,
                )  # fmt: skip
                if GROUPED:
                    place = tl.load(places_ptr + row_token)
                    if place >= 0:
                        # The same again among groups: their lengths are those of their common keys.
                        group = tl.load(places_ptr + total_q + row_token)
                        group_lens_ptr = groups_ptr + batch + 1
                        group_starts_ptr = groups_ptr + 2 * batch + 1
                        shared_by_work, shared_each, shared_share, _ = choose_shares(
                            batch, group_lens_ptr, None, group_starts_ptr, groups_ptr, MAX_TOKENS, 1, total_q, 0,
                            shared_shares, shared_heaviest, 1, GROUPS, GROUP_SIZE, SHARED_BLOCK_M, False, False,
                            SCHEDULE, PARTS, SHARED_MIN_CHUNK, SHARED_SEGMENT_COST, SHARED_TILE_COST, BLOCK_B,
                        )  # fmt: skip
                        group_begin, group_weight = tiles_on_axis(
                            group, shared_by_work, shared_each, group_lens_ptr, None, group_starts_ptr, groups_ptr,
                            MAX_TOKENS, 1, total_q, 0, shared_heaviest, 1, GROUPS, GROUP_SIZE, SHARED_BLOCK_M, False,
                            False, SHARED_TILE_COST, BLOCK_B,
                        )  # fmt: skip
                        shared_row = (place - tl.load(groups_ptr + group)) * GROUP_SIZE + head % GROUP_SIZE
                        group_begin += shared_row // SHARED_BLOCK_M * group_weight
                        shared_first, shared_next, shared_parts = tile_slots(
                            group, group_begin, group_weight, shared_share, shared_shares, group_lens_ptr, None,
                            group_starts_ptr, MAX_TOKENS, 1, GROUPS, SCHEDULE, SPLIT_TOKENS, PARTS,
                        )  # fmt: skip
                        whole = (total_q * NUM_KV_HEADS * GROUP_SIZE).to(tl.int64)
                        top, total, acc = fold_tile(
                            top, total, acc, shared_out_ptr, shared_lse_ptr, whole_out_ptr + whole * HEAD_DIM_V,
                            whole_lse_ptr + whole, row_token, head, shared_row, shared_first, shared_next, shared_parts,
                            offs_d, d_mask, NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM_V, SHARED_BLOCK_M, BLOCK_P,
                        )  # fmt: skip
                out, lse = folded(top, total, acc, sink, sinks_ptr is not None, False)
                tl.store(out_ptr + out_row + offs_d, round_to(out, out_ptr.dtype.element_ty, WIDEN), mask=d_mask)
                if has_lse != 0:
                    tl.store(lse_ptr + lse_row, lse)


@unspecialized
def merge_kernel(
    outs_ptr,
    lses_ptr,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    indptr_ptr,
    parts: tl.int32,
    inner: tl.int32,
    stride_outs_part: tl.int64,
    stride_outs_outer: tl.int64,
    stride_outs_inner: tl.int64,
    stride_outs_head: tl.int64,
    stride_lses_part: tl.int64,
    stride_lses_outer: tl.int64,
    stride_lses_inner: tl.int64,
    stride_lses_head: tl.int64,
    stride_out_outer: tl.int64,
    stride_out_inner: tl.int64,
    stride_out_head: tl.int64,
    stride_lse_outer: tl.int64,
    stride_lse_inner: tl.int64,
    stride_lse_head: tl.int64,
    HEAD_DIM_V: tl.constexpr,
    BASE2: tl.constexpr,
    WIDEN: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Fold the partials of one row and head, however they are strided.

    Grid: (rows, heads, ceil(HEAD_DIM_V / BLOCK_DV)). Row r lies at outer index r // inner and inner index r % inner.
    With one block of columns a program reads all that it folds before it writes, so that it may write over it.

    Reads:  outs [parts, outer, inner, heads, HEAD_DIM_V], lses [parts, outer, inner, heads], natural log or with BASE2
            to base 2; with indptr [rows + 1] those of row r are parts indptr[r] … indptr[r + 1], of `parts` in all;
            sinks [heads]
    Writes: out [outer, inner, heads, HEAD_DIM_V], lse [outer, inner, heads], of the same base

    VECTOR: elements to whose multiple every row of outs and out is aligned.
    """
    row = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    outer, place = (row // inner).to(tl.int64), (row % inner).to(tl.int64)
    offs_d = tl.program_id(2) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    d_mask = offs_d < HEAD_DIM_V
    outs_ptr += head * stride_outs_head
    lses_ptr += head * stride_lses_head
    if indptr_ptr is not None:
        # Data that the caller may overwrite at any time: no address outside the partials follows from it.
        first = clamp(tl.load(indptr_ptr + row), 0, parts)
        parts = clamp(tl.load(indptr_ptr + row + 1), first, parts) - first
    else:
        first = 0
        outs_ptr += outer * stride_outs_outer + place * stride_outs_inner
        lses_ptr += outer * stride_lses_outer + place * stride_lses_inner
    sink = 0.0
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
    top, total, acc = no_partials(BLOCK_DV)
    top, total, acc = fold_partials(
        top,
        total,
        acc,
        outs_ptr,
        lses_ptr,
        stride_outs_part,
        stride_lses_part,
        first,
        first + 1,
        parts,
        offs_d,
        d_mask,
        BASE2,
        True,
        BLOCK_P,
        VECTOR,
    )
    out, lse = folded(top, total, acc, sink, sinks_ptr is not None, BASE2)
    out_ptrs = out_ptr + (
        outer * stride_out_outer + place * stride_out_inner + head * stride_out_head + offs_d.to(tl.int64)
    )
    if VECTOR > 1:
        out_ptrs = tl.multiple_of(out_ptrs, VECTOR * out_ptr.dtype.element_ty.primitive_bitwidth // 8)
    tl.store(out_ptrs, round_to(out, out_ptr.dtype.element_ty, WIDEN), mask=d_mask)
    tl.store(lse_ptr + outer * stride_lse_outer + place * stride_lse_inner + head * stride_lse_head, lse)
