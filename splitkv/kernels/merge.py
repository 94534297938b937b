"""The merge kernels: fold partial results by their log-sum-exp."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from splitkv.kernels.jit import unspecialized
from splitkv.kernels.primitives import (
    BALANCED,
    FIXED_TOKENS,
    LIST_HEADER,
    choose_shares,
    fold_partials,
    listed_shares,
    listed_weight,
    load_kv_range,
    part_tokens,
    request_begin,
    request_work,
    round_to,
    tile_weight,
)


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
    batch: tl.int32,
    q_len: tl.int32,
    total_q: tl.int32,
    capacity: tl.int32,
    window_left: tl.int32,
    shares: tl.int32,
    heaviest: tl.int32,
    has_lse: tl.int32,
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
):
    """Fold the partials of one query row into its output, and zero the rows that belong to no request.

    Grid: (query tokens, query heads, ceil(HEAD_DIM_V / BLOCK_DV)). Rows whose tile had one part are done already.

    Reads:  partial_out [slots, BLOCK_M, HEAD_DIM_V] fp32, partial_lse [slots, BLOCK_M] fp32, lengths
    Writes: out, and lse if has_lse
    """
    row_token = tl.program_id(0)
    head = tl.program_id(1)
    offs_d = tl.program_id(2) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    d_mask = offs_d < HEAD_DIM_V
    if qo_indptr_ptr is not None:
        # The request of a query token: the number of requests that end at or before it. Rows before the first request's
        # and past the last one's belong to none.
        b = 0
        for first in range(0, batch, BLOCK_B):
            offs_b = first + tl.arange(0, BLOCK_B)
            ends = tl.load(qo_indptr_ptr + 1 + offs_b, mask=offs_b < batch, other=0x7FFFFFFF)
            b += tl.sum((ends <= row_token).to(tl.int32), 0)
        out_row = row_token.to(tl.int64) * stride_out_token + head.to(tl.int64) * stride_out_head
        lse_row = row_token.to(tl.int64) * stride_lse_token + head.to(tl.int64) * stride_lse_head
        q_first = tl.load(qo_indptr_ptr + tl.minimum(b, batch - 1), mask=batch > 0, other=0)
        if (b >= batch) | (row_token < q_first):
            if DEPENDENT_LAUNCH:
                gdc_wait()
                gdc_launch_dependents()
            tl.store(out_ptr + out_row + offs_d, tl.zeros([BLOCK_DV], out_ptr.dtype.element_ty), mask=d_mask)
            if has_lse != 0:
                tl.store(lse_ptr + lse_row, float("-inf"))
            return
    else:
        b = row_token // q_len
        out_row = (
            b.to(tl.int64) * stride_out_batch
            + (row_token % q_len).to(tl.int64) * stride_out_token
            + head.to(tl.int64) * stride_out_head
        )
        lse_row = (
            b.to(tl.int64) * stride_lse_batch
            + (row_token % q_len).to(tl.int64) * stride_lse_token
            + head.to(tl.int64) * stride_lse_head
        )

    # Where on the axis lies its tile, and by how many shares is it cut? The same arithmetic as in split_decode_kernel.
    if list_ptr is not None:
        tiles_each = tl.cdiv(q_len * GROUP_SIZE, BLOCK_M)
        by_work, each, share, _ = listed_shares(list_ptr, batch, tiles_each, shares)
        begin = tl.load(list_ptr + LIST_HEADER + b) * tiles_each
        weight = listed_weight(list_ptr, b, by_work, each)
    else:
        by_work, each, share, _ = choose_shares(
            batch, lens_ptr, indptr_ptr, kv_start_ptr, qo_indptr_ptr, capacity, q_len, total_q, window_left, shares,
            heaviest, PAGE_SIZE, KV_KIND, GROUP_SIZE, BLOCK_M, HAS_WINDOW, RIGHT_BOUND, SCHEDULE, PARTS, MIN_CHUNK,
            SEGMENT_COST, TILE_COST, BLOCK_B,
        )  # fmt: skip
        begin = request_begin(
            b, by_work, each, lens_ptr, indptr_ptr, kv_start_ptr, qo_indptr_ptr, capacity, q_len, total_q, window_left,
            heaviest, PAGE_SIZE, KV_KIND, GROUP_SIZE, BLOCK_M, HAS_WINDOW, RIGHT_BOUND, TILE_COST, BLOCK_B,
        )  # fmt: skip
        _, span = request_work(
            b, True, lens_ptr, indptr_ptr, kv_start_ptr, qo_indptr_ptr, capacity, q_len, total_q, window_left,
            PAGE_SIZE, KV_KIND, GROUP_SIZE, BLOCK_M, HAS_WINDOW, RIGHT_BOUND,
        )  # fmt: skip
        weight = tile_weight(span, by_work, each, heaviest, TILE_COST)
    if qo_indptr_ptr is not None:
        token = row_token - tl.maximum(q_first, 0)
    else:
        token = row_token % q_len
    tile_row = token * GROUP_SIZE + head % GROUP_SIZE
    begin += tile_row // BLOCK_M * weight
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
    if SCHEDULE == BALANCED:
        # Where no tile was cut there is nothing to do, and programs make room at once, but for the first: the grid must
        # not end before split_decode_kernel has, on whose results later kernels wait through it. Where some tiles were
        # cut all wait: left alone, the few that merge would keep their multiprocessors from taking all of the next
        # kernel's programs.
        if (parts == 1) & (not by_work):
            if DEPENDENT_LAUNCH:
                if (tl.program_id(0) == 0) & (head == 0) & (tl.program_id(2) == 0):
                    gdc_launch_dependents()
                    gdc_wait()
            return
    if DEPENDENT_LAUNCH:
        # Lengths were final before split_decode_kernel began; partials are there once it has ended.
        gdc_wait()
        gdc_launch_dependents()
    if parts == 1:
        return
    slot_row = (head // GROUP_SIZE).to(tl.int64) * BLOCK_M + tile_row % BLOCK_M
    sink = 0.0
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
    out, lse = fold_partials(
        partial_out_ptr + slot_row * HEAD_DIM_V,
        partial_lse_ptr + slot_row,
        NUM_KV_HEADS * BLOCK_M * HEAD_DIM_V,
        NUM_KV_HEADS * BLOCK_M,
        first_slot,
        next_slot,
        parts,
        sink,
        offs_d,
        d_mask,
        sinks_ptr is not None,
        BLOCK_P,
        BLOCK_DV,
        4 if HEAD_DIM_V % 4 == 0 else 1,
    )
    tl.store(out_ptr + out_row + offs_d, round_to(out, out_ptr.dtype.element_ty, WIDEN), mask=d_mask)
    if has_lse != 0:
        tl.store(lse_ptr + lse_row, lse)


@triton.jit
def merge_kernel(
    outs_ptr,
    lses_ptr,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    parts: tl.int32,
    stride_outs_part: tl.int64,
    stride_outs_row: tl.int64,
    stride_outs_head: tl.int64,
    stride_lses_part: tl.int64,
    stride_lses_row: tl.int64,
    stride_lses_head: tl.int64,
    stride_out_row: tl.int64,
    stride_out_head: tl.int64,
    stride_lse_row: tl.int64,
    stride_lse_head: tl.int64,
    HEAD_DIM_V: tl.constexpr,
    HAS_LSE: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Fold `parts` partials of one row and head, however they are strided.

    Grid: (rows, heads, ceil(HEAD_DIM_V / BLOCK_DV)).

    Reads:  outs [parts, rows, heads, HEAD_DIM_V], lses [parts, rows, heads], natural log; sinks [heads]
    Writes: out [rows, heads, HEAD_DIM_V], lse [rows, heads]
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    offs_d = tl.program_id(2) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    d_mask = offs_d < HEAD_DIM_V
    sink = 0.0
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
    out, lse = fold_partials(
        outs_ptr + row * stride_outs_row + head * stride_outs_head,
        lses_ptr + row * stride_lses_row + head * stride_lses_head,
        stride_outs_part,
        stride_lses_part,
        0,
        1,
        parts,
        sink,
        offs_d,
        d_mask,
        sinks_ptr is not None,
        BLOCK_P,
        BLOCK_DV,
        1,
    )
    tl.store(
        out_ptr + row * stride_out_row + head * stride_out_head + offs_d,
        round_to(out, out_ptr.dtype.element_ty, WIDEN),
        mask=d_mask,
    )
    if HAS_LSE:
        tl.store(lse_ptr + row * stride_lse_row + head * stride_lse_head, lse)
