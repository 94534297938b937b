"""Kernels that write masks: boolean ones, and tree masks in words of 32 bits."""

import triton
import triton.language as tl

from splitkv.kernels.primitives import find_request


@triton.jit(
    do_not_specialize=[
        "batch", "q_len", "rows", "max_len", "window_left", "steps",
        "stride_out_batch", "stride_out_token",
    ]
)  # fmt: skip
def attention_mask_kernel(
    out_ptr,
    seq_lens_ptr,
    kv_start_ptr,
    qo_indptr_ptr,
    batch: tl.int32,
    q_len: tl.int32,
    rows: tl.int32,
    max_len: tl.int32,
    window_left: tl.int32,
    steps: tl.int32,
    stride_out_batch: tl.int64,
    stride_out_token: tl.int64,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write which keys each query token sees; rows past the last request's see none.

    Grid: (ceil(rows / BLOCK_R), ceil(max_len / BLOCK_N)). A row is a query token: token row % q_len of request row //
    q_len, or with qo_indptr the row-th token of all requests.

    Reads:  seq_lens [batch], kv_start [batch], qo_indptr [batch + 1]
    Writes: out [rows, max_len] uint8, 0 or 1
    """
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    key = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_out = row < rows
    if qo_indptr_ptr is not None:
        b = find_request(row, qo_indptr_ptr, batch, steps)
        live = in_out & (b < batch)
        # Where a query token stands, counted from the end of its request's tokens.
        behind = tl.load(qo_indptr_ptr + 1 + b, mask=live, other=0) - row
        out_row = row.to(tl.int64) * stride_out_token
    else:
        b = row // q_len
        live = in_out
        behind = q_len - row % q_len
        out_row = b.to(tl.int64) * stride_out_batch + (row % q_len).to(tl.int64) * stride_out_token
    seq_len = tl.maximum(tl.load(seq_lens_ptr + b, mask=live, other=0), 0)
    position = seq_len - behind
    seen = (key[None, :] < seq_len[:, None]) & live[:, None]
    if kv_start_ptr is not None:
        seen = seen & (key[None, :] >= tl.load(kv_start_ptr + b, mask=live, other=0)[:, None])
    if CAUSAL:
        seen = seen & (key[None, :] <= position[:, None])
    if HAS_WINDOW:
        # Not position - window_left, which could wrap around.
        seen = seen & (position[:, None] - key[None, :] <= window_left)
    tl.store(
        out_ptr + out_row[:, None] + key[None, :],
        seen.to(tl.uint8),
        mask=in_out[:, None] & (key < max_len)[None, :],
    )


@triton.jit(do_not_specialize=["batch", "total_len", "stride_position", "stride_out_batch"])
def position_mask_kernel(
    out_ptr,
    position_ids_ptr,
    batch: tl.int32,
    total_len: tl.int32,
    stride_position: tl.int64,
    stride_out_batch: tl.int64,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write whether each position is at or past each index.

    Grid: (ceil(batch / BLOCK_R), ceil(total_len / BLOCK_N)).

    Reads:  position_ids [batch]
    Writes: out [batch, total_len] uint8, 0 or 1
    """
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    index = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = row < batch
    position = tl.load(position_ids_ptr + row.to(tl.int64) * stride_position, mask=live, other=-1)
    tl.store(
        out_ptr + (row.to(tl.int64) * stride_out_batch)[:, None] + index[None, :],
        (position[:, None] >= index[None, :]).to(tl.uint8),
        mask=live[:, None] & (index < total_len)[None, :],
    )


@triton.jit(
    do_not_specialize=[
        "rows", "q_len", "stride_mask_batch", "stride_mask_row", "stride_mask_column", "stride_out_batch",
        "stride_out_row",
    ]
)  # fmt: skip
def pack_tree_mask_kernel(
    out_ptr,
    mask_ptr,
    rows: tl.int32,
    q_len: tl.int32,
    stride_mask_batch: tl.int64,
    stride_mask_row: tl.int64,
    stride_mask_column: tl.int64,
    stride_out_batch: tl.int64,
    stride_out_row: tl.int64,
    BLOCK_R: tl.constexpr,
):
    """Pack 32 cells of each row into a word; cells past the last are 0.

    Grid: (ceil(rows / BLOCK_R), words). A row is draft token row % q_len of request row // q_len.

    Reads:  mask [rows, q_len] uint8, 0 or not
    Writes: out [rows, words] int32
    """
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    word = tl.program_id(1)
    bit = tl.arange(0, 32)
    column = word * 32 + bit
    live = row < rows
    b = (row // q_len).to(tl.int64)
    token = (row % q_len).to(tl.int64)
    cells = tl.load(
        mask_ptr
        + (b * stride_mask_batch + token * stride_mask_row)[:, None]
        + (column.to(tl.int64) * stride_mask_column)[None, :],
        mask=live[:, None] & (column < q_len)[None, :],
        other=0,
    )
    # Each bit is added once, so that the sum is their union.
    words = tl.sum((cells != 0).to(tl.int32) << bit[None, :], 1)
    tl.store(out_ptr + b * stride_out_batch + token * stride_out_row + word, words, mask=live)


@triton.jit(
    do_not_specialize=[
        "rows", "q_len", "words", "stride_parents_batch", "stride_parents_node", "stride_out_batch", "stride_out_row",
    ]
)  # fmt: skip
def tree_mask_from_parents_kernel(
    out_ptr,
    parents_ptr,
    rows: tl.int32,
    q_len: tl.int32,
    words: tl.int32,
    stride_parents_batch: tl.int64,
    stride_parents_node: tl.int64,
    stride_out_batch: tl.int64,
    stride_out_row: tl.int64,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Write which nodes lie on each node's way to its root: itself, its parent, the parent's parent, …

    Grid: (ceil(rows / BLOCK_R), ceil(words / BLOCK_W)). A row is node row % q_len of request row // q_len.

    A parent lies before its child; whatever else an entry holds makes its node a root. So every step of a way leads to
    a smaller index, and no way is endless or leaves the tensor.

    Reads:  parents [rows] int32 or int64
    Writes: out [rows, words] int32
    """
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    word = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    live = row < rows
    b = (row // q_len).to(tl.int64)
    token = row % q_len
    seen = tl.zeros([BLOCK_R, BLOCK_W], tl.int32)
    node = tl.where(live, token, -1)
    while tl.max(node, 0) >= 0:
        on_way = node >= 0
        here = on_way[:, None] & (word[None, :] == (node // 32)[:, None])
        seen = seen | tl.where(here, (1 << (tl.where(on_way, node, 0) % 32))[:, None], 0)
        parent = tl.load(
            parents_ptr + b * stride_parents_batch + node.to(tl.int64) * stride_parents_node, mask=on_way, other=-1
        )
        node = tl.where((parent >= 0) & (parent < node), parent, -1).to(tl.int32)
    tl.store(
        out_ptr + (b * stride_out_batch + token.to(tl.int64) * stride_out_row)[:, None] + word[None, :],
        seen,
        mask=live[:, None] & (word < words)[None, :],
    )
