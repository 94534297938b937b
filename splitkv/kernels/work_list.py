"""The kernel that makes a work list."""

import triton.language as tl

from splitkv.kernels.jit import unspecialized
from splitkv.kernels.primitives import LIST_HEADER, choose_shares, request_work, tile_weight


@unspecialized
def work_list_kernel(
    list_ptr,
    lens_ptr,
    indptr_ptr,
    kv_start_ptr,
    batch: tl.int32,
    rows: tl.int32,
    capacity: tl.int32,
    shares: tl.int32,
    heaviest: tl.int32,
    PAGE_SIZE: tl.constexpr,
    KV_KIND: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    SEGMENT_COST: tl.constexpr,
    TILE_COST: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Share a batch as split_decode_kernel would, and write down where each request begins.

    Grid: (1,). Requests past the batch, up to `rows`, weigh as little as any, so that every one of them has a place.

    Reads:  lengths
    Writes: list [LIST_HEADER + rows + 1] int32
    """
    by_work, each, share, _total = choose_shares(
        batch, lens_ptr, indptr_ptr, kv_start_ptr, None, capacity, 1, batch, 0, shares, heaviest, PAGE_SIZE, KV_KIND,
        GROUP_SIZE, BLOCK_M, False, True, 0, 1, MIN_CHUNK, SEGMENT_COST, TILE_COST,
        BLOCK_B,
    )  # fmt: skip
    tl.store(list_ptr, by_work.to(tl.int32))
    tl.store(list_ptr + 1, each)
    tl.store(list_ptr + 2, share)
    tl.store(list_ptr + LIST_HEADER, 0)
    begin = 0
    for first in range(0, rows, BLOCK_B):
        b = first + tl.arange(0, BLOCK_B)
        _tiles, span = request_work(
            b, b < batch, lens_ptr, indptr_ptr, kv_start_ptr, None, capacity, 1, batch, 0,
            PAGE_SIZE, KV_KIND, GROUP_SIZE, BLOCK_M, False, True,
        )  # fmt: skip
        weights = tl.where(b < rows, tile_weight(span, by_work, each, heaviest, TILE_COST), 0)
        tl.store(list_ptr + LIST_HEADER + 1 + b, begin + tl.cumsum(weights, 0), mask=b < rows)
        begin += tl.sum(weights, 0)
