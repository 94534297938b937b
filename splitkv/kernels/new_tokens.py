"""A kernel that says where new tokens go, for calls that append and attend in one."""

import triton.language as tl

from splitkv.kernels.jit import unspecialized

INT32_MAX: tl.constexpr = tl.constexpr(0x7FFFFFFF)


@unspecialized
def new_tokens_kernel(
    seq_lens_ptr,
    new_indptr_ptr,
    rows_ptr,
    table_ptr,
    slots_ptr,
    total_lens_ptr,
    batch: tl.int32,
    new_len: tl.int32,
    total_new: tl.int32,
    unit_tokens: tl.int32,
    capacity: tl.int32,
    stride_table_row: tl.int64,
    BLOCK_T: tl.constexpr,
):
    """Slots of the tokens that each request's cache is to get after those it has, and how many it has then.

    Grid: (batch + 1,). Program b writes request b's slots and length, the last one the slots that no request has a
    token for. Without new_indptr every request gets new_len tokens.

    Reads:  seq_lens [batch], new_indptr [batch + 1] prefix sums of new tokens, rows [batch], table [rows, columns] page
            ids, or none where row r of the cache holds slots r · unit_tokens and following
    Writes: slots [total_new], -1 where the cache has no room for a token or no page, or where its number outgrows 32
            bits; total_lens [batch]
    """
    b = tl.program_id(0)
    if b < batch:
        first = b * new_len
        last = first + new_len
        if new_indptr_ptr is not None:
            first = tl.minimum(tl.maximum(tl.load(new_indptr_ptr + b), 0), total_new)
            last = tl.minimum(tl.maximum(tl.load(new_indptr_ptr + b + 1), first), total_new)
        row = b
        if rows_ptr is not None:
            row = tl.load(rows_ptr + b)
        before = tl.minimum(tl.maximum(tl.load(seq_lens_ptr + b), 0), capacity)
        tl.store(total_lens_ptr + b, before + (last - first))
        for start in range(first, last, BLOCK_T):
            token = start + tl.arange(0, BLOCK_T)
            position = before + (token - first)
            fits = (token < last) & (position < capacity)
            unit = row.to(tl.int64)
            if table_ptr is not None:
                column = position // unit_tokens
                unit = tl.load(table_ptr + unit * stride_table_row + column, mask=fits, other=-1).to(tl.int64)
                position = position % unit_tokens
            slot = unit * unit_tokens + position
            slot = tl.where(fits & (unit >= 0) & (slot <= INT32_MAX), slot, -1)
            tl.store(slots_ptr + token, slot.to(tl.int32), mask=token < last)
    elif new_indptr_ptr is not None:
        end = tl.minimum(tl.maximum(tl.load(new_indptr_ptr + batch), 0), total_new)
        for start in range(end, total_new, BLOCK_T):
            token = start + tl.arange(0, BLOCK_T)
            tl.store(slots_ptr + token, tl.full([BLOCK_T], -1, tl.int32), mask=token < total_new)
