"""Kernels that write tokens into a cache at given slots, and that move tokens from slots to slots.

A slot counts tokens: slot // unit_tokens is a page (a row of a contiguous cache; a token of a ragged one, where
unit_tokens is 1), slot % unit_tokens the token in it.
"""

import triton
import triton.language as tl

from splitkv.kernels.formats import INT8, PLAIN, encode_bytes, largest


@triton.jit
def slot_offset(slot, stride_unit, stride_token, unit_tokens):
    """Where a slot's token lies, in elements."""
    return (slot // unit_tokens).to(tl.int64) * stride_unit + (slot % unit_tokens).to(tl.int64) * stride_token


@triton.jit
def copy_rows(
    source_ptr,
    source_row,
    target_ptr,
    target_row,
    live,
    WIDTH: tl.constexpr,
    SOURCE_VECTOR: tl.constexpr,
    TARGET_VECTOR: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Copy rows of WIDTH elements. The host guarantees that rows start at multiples of SOURCE_ and TARGET_VECTOR
    elements."""
    ELEMENT: tl.constexpr = source_ptr.dtype.element_ty.primitive_bitwidth // 8
    for first in tl.static_range(0, WIDTH, BLOCK_D):
        offs = first + tl.arange(0, BLOCK_D)
        mask = live[:, None] & (offs < WIDTH)[None, :]
        source = tl.multiple_of(source_ptr + source_row[:, None] + offs[None, :], [1, SOURCE_VECTOR * ELEMENT])
        target = tl.multiple_of(target_ptr + target_row[:, None] + offs[None, :], [1, TARGET_VECTOR * ELEMENT])
        tl.store(target, tl.load(source, mask=mask, other=0.0), mask=mask)


@triton.jit
def row_scale(
    source_ptr,
    source_row,
    live,
    WIDTH: tl.constexpr,
    SOURCE_VECTOR: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """The scale of each row with which its largest finite number becomes the largest of the format; 1 where all are 0.

    NaN where the row holds one that the format cannot.
    """
    ELEMENT: tl.constexpr = source_ptr.dtype.element_ty.primitive_bitwidth // 8
    top = tl.zeros_like(source_row).to(tl.float32)
    broken = tl.zeros_like(source_row).to(tl.int32)
    for first in tl.static_range(0, WIDTH, BLOCK_D):
        offs = first + tl.arange(0, BLOCK_D)
        mask = live[:, None] & (offs < WIDTH)[None, :]
        source = tl.multiple_of(source_ptr + source_row[:, None] + offs[None, :], [1, SOURCE_VECTOR * ELEMENT])
        x = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        size = tl.abs(x)
        top = tl.maximum(top, tl.max(tl.where(size < float("inf"), size, 0.0), 1))
        if FORMAT == INT8:
            broken |= tl.max((x != x).to(tl.int32), 1)
    scale = tl.where(top > 0, tl.div_rn(top, tl.zeros_like(top) + largest(FORMAT)), 1.0)
    if FORMAT == INT8:
        scale = tl.where(broken != 0, float("nan"), scale)
    return scale


@triton.jit
def quantize_rows(
    source_ptr,
    source_row,
    target_ptr,
    target_row,
    scale,
    live,
    WIDTH: tl.constexpr,
    SOURCE_VECTOR: tl.constexpr,
    TARGET_VECTOR: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """As copy_rows, each number divided by the scale of its row and made a byte of the format."""
    ELEMENT: tl.constexpr = source_ptr.dtype.element_ty.primitive_bitwidth // 8
    for first in tl.static_range(0, WIDTH, BLOCK_D):
        offs = first + tl.arange(0, BLOCK_D)
        mask = live[:, None] & (offs < WIDTH)[None, :]
        source = tl.multiple_of(source_ptr + source_row[:, None] + offs[None, :], [1, SOURCE_VECTOR * ELEMENT])
        target = tl.multiple_of(target_ptr + target_row[:, None] + offs[None, :], [1, TARGET_VECTOR])
        x = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        divisor = tl.zeros_like(x) + scale[:, None]
        tl.store(target, encode_bytes(tl.div_rn(x, divisor), FORMAT), mask=mask)


@triton.jit
def append_rows(
    new_ptr,
    new_row,
    cache_ptr,
    cache_row,
    scale_ptr,
    scale_row,
    number,
    live,
    WIDTH: tl.constexpr,
    NEW_VECTOR: tl.constexpr,
    KV_VECTOR: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE_PER_TOKEN: tl.constexpr,
):
    """Write rows into K or V: as they are, or quantised by number · *scale_ptr, or by scales that are computed and
    written where every token has its own."""
    if FORMAT == PLAIN:
        copy_rows(new_ptr, new_row, cache_ptr, cache_row, live, WIDTH, NEW_VECTOR, KV_VECTOR, BLOCK_D)
    else:
        if SCALE_PER_TOKEN:
            scale = row_scale(new_ptr, new_row, live, WIDTH, NEW_VECTOR, BLOCK_D, FORMAT)
            tl.store(scale_ptr + scale_row, scale, mask=live)
        elif scale_ptr is not None:
            scale = tl.load(scale_ptr + scale_row, mask=live, other=1.0)
        else:
            scale = tl.zeros_like(new_row).to(tl.float32) + number
        quantize_rows(
            new_ptr, new_row, cache_ptr, cache_row, scale, live, WIDTH, NEW_VECTOR, KV_VECTOR, BLOCK_D, FORMAT
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "num_slots", "stride_k_new_token", "stride_v_new_token"])
def append_kernel(
    k_new_ptr,
    v_new_ptr,
    k_ptr,
    v_ptr,
    slots_ptr,
    k_scale_ptr,
    v_scale_ptr,
    rows: tl.int64,
    num_slots: tl.int64,
    unit_tokens: tl.int32,
    k_scale: tl.float32,
    v_scale: tl.float32,
    stride_k_new_token: tl.int64,
    stride_k_new_head: tl.int64,
    stride_v_new_token: tl.int64,
    stride_v_new_head: tl.int64,
    stride_k_unit: tl.int64,
    stride_k_token: tl.int64,
    stride_k_head: tl.int64,
    stride_v_unit: tl.int64,
    stride_v_token: tl.int64,
    stride_v_head: tl.int64,
    stride_k_scale_unit: tl.int64,
    stride_k_scale_token: tl.int64,
    stride_k_scale_head: tl.int64,
    stride_v_scale_unit: tl.int64,
    stride_v_scale_token: tl.int64,
    stride_v_scale_head: tl.int64,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    NEW_VECTOR: tl.constexpr,
    KV_VECTOR: tl.constexpr,
    FORMAT: tl.constexpr,
    K_SCALE_PER_TOKEN: tl.constexpr,
    V_SCALE_PER_TOKEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Scatter new tokens into the cache. Row r is head r % NUM_KV_HEADS of token r // NUM_KV_HEADS.

    Grid: (ceil(rows / BLOCK_R),). Tokens whose slot is negative or past the cache's end are dropped. Without v_new_ptr
    values are part of the keys. FORMAT: PLAIN where the numbers are copied as they are.

    Reads:  k_new, v_new [tokens, NUM_KV_HEADS, width], slots [≥ tokens], scales that do not belong to tokens
    Writes: k, v at the slots, and the scales of those tokens
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = row < rows
    token = row // NUM_KV_HEADS
    head = row % NUM_KV_HEADS
    slot = tl.load(slots_ptr + token, mask=live, other=-1)
    live = live & (slot >= 0) & (slot < num_slots)
    slot = tl.where(live, slot, 0)
    append_rows(
        k_new_ptr,
        token * stride_k_new_token + head * stride_k_new_head,
        k_ptr,
        slot_offset(slot, stride_k_unit, stride_k_token, unit_tokens) + head * stride_k_head,
        k_scale_ptr,
        slot_offset(slot, stride_k_scale_unit, stride_k_scale_token, unit_tokens) + head * stride_k_scale_head,
        k_scale, live, HEAD_DIM, NEW_VECTOR, KV_VECTOR, BLOCK_D, FORMAT, K_SCALE_PER_TOKEN,
    )  # fmt: skip
    if v_new_ptr is not None:
        append_rows(
            v_new_ptr,
            token * stride_v_new_token + head * stride_v_new_head,
            v_ptr,
            slot_offset(slot, stride_v_unit, stride_v_token, unit_tokens) + head * stride_v_head,
            v_scale_ptr,
            slot_offset(slot, stride_v_scale_unit, stride_v_scale_token, unit_tokens) + head * stride_v_scale_head,
            v_scale, live, HEAD_DIM_V, NEW_VECTOR, KV_VECTOR, BLOCK_DV, FORMAT, V_SCALE_PER_TOKEN,
        )  # fmt: skip


@triton.jit
def move_columns(
    cache_ptr,
    source,
    target,
    stride_unit,
    stride_token,
    unit_tokens,
    live,
    offs,
    WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Move some columns of tokens; every load of this program is done before its first store."""
    BYTES: tl.constexpr = VECTOR * cache_ptr.dtype.element_ty.primitive_bitwidth // 8
    mask = live[:, None] & (offs < WIDTH)[None, :]
    from_row = slot_offset(source, stride_unit, stride_token, unit_tokens)
    to_row = slot_offset(target, stride_unit, stride_token, unit_tokens)
    values = tl.load(tl.multiple_of(cache_ptr + from_row[:, None] + offs[None, :], [1, BYTES]), mask=mask, other=0.0)
    # A slot may be the source of one thread and the target of another.
    tl.debug_barrier()
    tl.store(tl.multiple_of(cache_ptr + to_row[:, None] + offs[None, :], [1, BYTES]), values, mask=mask)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["moves", "num_slots"])
def move_kernel(
    k_ptr,
    v_ptr,
    source_ptr,
    target_ptr,
    k_scale_ptr,
    v_scale_ptr,
    moves: tl.int32,
    num_slots: tl.int64,
    unit_tokens: tl.int32,
    stride_k_unit: tl.int64,
    stride_k_token: tl.int64,
    stride_k_head: tl.int64,
    stride_v_unit: tl.int64,
    stride_v_token: tl.int64,
    stride_v_head: tl.int64,
    stride_k_scale_unit: tl.int64,
    stride_k_scale_token: tl.int64,
    stride_k_scale_head: tl.int64,
    stride_v_scale_unit: tl.int64,
    stride_v_scale_token: tl.int64,
    stride_v_scale_head: tl.int64,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    KV_VECTOR: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Move tokens within the cache, BLOCK_T at a time in their order; within a block as if all moved at once.

    Grid: (heads, ceil(max(HEAD_DIM, HEAD_DIM_V) / BLOCK_D)). A program moves all tokens of its own columns, so that
    what one move overwrites and another reads stays within one program, which can order it. Without v_ptr values are
    part of the keys. Scales are given where every token has its own.

    Reads:  source, target [moves]
    Writes: k, v and scales at the targets
    """
    head = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    # One stage: a load that were prefetched would pass the stores of the block before it.
    for start in tl.range(0, moves, BLOCK_T, num_stages=1):
        index = start + tl.arange(0, BLOCK_T)
        source = tl.load(source_ptr + index, mask=index < moves, other=-1)
        target = tl.load(target_ptr + index, mask=index < moves, other=-1)
        live = (source >= 0) & (source < num_slots) & (target >= 0) & (target < num_slots)
        source = tl.where(live, source, 0)
        target = tl.where(live, target, 0)
        move_columns(
            k_ptr + head * stride_k_head, source, target, stride_k_unit, stride_k_token, unit_tokens, live, offs,
            HEAD_DIM, KV_VECTOR,
        )  # fmt: skip
        if v_ptr is not None:
            move_columns(
                v_ptr + head * stride_v_head, source, target, stride_v_unit, stride_v_token, unit_tokens, live, offs,
                HEAD_DIM_V, KV_VECTOR,
            )  # fmt: skip
        if k_scale_ptr is not None:
            move_columns(
                k_scale_ptr + head * stride_k_scale_head, source, target, stride_k_scale_unit, stride_k_scale_token,
                unit_tokens, live, offs, 1, 1,
            )  # fmt: skip
        if v_scale_ptr is not None:
            move_columns(
                v_scale_ptr + head * stride_v_scale_head, source, target, stride_v_scale_unit, stride_v_scale_token,
                unit_tokens, live, offs, 1, 1,
            )  # fmt: skip
