"""Kernels that write what an engine needs per step: what the host staged, `bind` and `advance`.

None of their integers is specialised: batch sizes and token counts change from step to step, and a step must not
compile.
"""

import triton
import triton.language as tl

from splitkv.kernels.primitives import clamp, find_request

INT32_MAX: tl.constexpr = tl.constexpr(0x7FFFFFFF)


@triton.jit
def cache_slot(row, position, live, table_ptr, stride_table_row, page_size, max_pages):
    """Cache slot of the token at `position` of a page-table row; -1 for dead lanes and where there is no page.

    A page so far back that its slots outgrow 32 bits counts as none.
    """
    column = position // page_size
    page = tl.load(
        table_ptr + row.to(tl.int64) * stride_table_row + column, mask=live & (column < max_pages), other=-1
    ).to(tl.int64)
    slot = page * page_size + position % page_size
    return tl.where((page >= 0) & (slot <= INT32_MAX), slot, -1).to(tl.int32)


@triton.jit(
    do_not_specialize=["words", "updates_at", "updates", "fresh", "max_pages", "stride_table_row"],
    do_not_specialize_on_alignment=["source_ptr"],
)
def stage_kernel(
    source_ptr,
    target_ptr,
    table_ptr,
    words: tl.int32,
    updates_at: tl.int32,
    updates: tl.int32,
    fresh: tl.int32,
    max_pages: tl.int32,
    stride_table_row: tl.int64,
    BLOCK: tl.constexpr,
):
    """Copy words, write pages into the page table, and clear what an earlier request left behind in rows that begin
    anew.

    Grid: (ceil(words / BLOCK) + ceil(updates / BLOCK) + fresh,). No two programs write the same entry: what is cleared
    lies right of the row's last update. The source may be memory of the host: each word of it is read once, by nothing
    but one load.

    Reads:  source: words from 0 on; at updates_at rows, columns and pages [updates] each, then rows and first columns
            to clear [fresh] each
    Writes: target [words], table
    """
    pid = tl.program_id(0)
    copiers = tl.cdiv(words, BLOCK)
    writers = tl.cdiv(updates, BLOCK)
    if pid < copiers:
        offs = pid * BLOCK + tl.arange(0, BLOCK)
        tl.store(target_ptr + offs, tl.load(source_ptr + offs, mask=offs < words, other=0), mask=offs < words)
    elif pid < copiers + writers:
        offs = (pid - copiers) * BLOCK + tl.arange(0, BLOCK)
        live = offs < updates
        source = source_ptr + updates_at
        row = tl.load(source + offs, mask=live, other=0).to(tl.int64)
        column = tl.load(source + updates + offs, mask=live, other=0)
        page = tl.load(source + 2 * updates + offs, mask=live, other=-1)
        tl.store(table_ptr + row * stride_table_row + column, page, mask=live)
    else:
        index = updates_at + 3 * updates + pid - copiers - writers
        cleared = table_ptr + tl.load(source_ptr + index).to(tl.int64) * stride_table_row
        first = tl.load(source_ptr + index + fresh)
        for start in range(first, max_pages, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            tl.store(cleared + columns, tl.full([BLOCK], -1, tl.int32), mask=columns < max_pages)


@triton.jit(
    do_not_specialize=[
        "live", "total_q", "padded_q", "tokens_at", "max_batch", "max_total_q", "max_tiles", "page_size", "max_pages",
        "steps", "stride_table_row",
    ]
)  # fmt: skip
def bind_kernel(
    staged_ptr,
    staged_ids_ptr,
    table_ptr,
    input_ids_ptr,
    position_ids_ptr,
    rows_ptr,
    seq_lens_ptr,
    pending_ptr,
    kv_indptr_ptr,
    qo_indptr_ptr,
    tile_batch_ptr,
    tile_index_ptr,
    out_cache_loc_ptr,
    needs_page_ptr,
    live: tl.int32,
    total_q: tl.int32,
    padded_q: tl.int32,
    tokens_at: tl.int32,
    max_batch: tl.int32,
    max_total_q: tl.int32,
    max_tiles: tl.int32,
    page_size: tl.int32,
    max_pages: tl.int32,
    steps: tl.int32,
    stride_table_row: tl.int64,
    BLOCK_B: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Write every buffer of a step from the few numbers that the host staged.

    Grid: (1 + ceil(max(max_total_q, max_tiles) / BLOCK_T),). The first program writes what there is one of per
    request, the others what there is one of per query token and per tile. Programs read the staged words and the page
    table alone, so their order is free. All entries of a buffer are written, past the live ones as padding; of
    input_ids only padded_q, and none where tokens_at is negative.

    Reads:  staged: rows [live], lengths [live], prefix sums of query lengths [live + 1] and of tiles [live + 1];
            staged_ids: the same memory in int64, token ids from tokens_at on; table
    Writes: all others
    """
    lens_at = staged_ptr + live
    qo_at = lens_at + live
    tiles_at = qo_at + live + 1
    pid = tl.program_id(0)
    if pid == 0:
        kv_tokens = tl.zeros([1], tl.int64)
        missing = tl.zeros([1], tl.int32)
        for start in range(0, max_batch, BLOCK_B):
            b = start + tl.arange(0, BLOCK_B)
            is_live = b < live
            row = tl.load(staged_ptr + b, mask=is_live, other=0)
            seq_len = tl.load(lens_at + b, mask=is_live, other=0)
            end = tl.load(qo_at + 1 + b, mask=is_live, other=total_q)
            first = tl.load(qo_at + b, mask=is_live, other=total_q)
            adds = (seq_len > 0) & (end > first)
            last_slot = cache_slot(
                row, tl.maximum(seq_len - 1, 0), adds, table_ptr, stride_table_row, page_size, max_pages
            )
            lacks = adds & (last_slot < 0)
            seq_len -= tl.where(lacks, end - first, 0)
            missing += tl.sum(lacks.to(tl.int32), 0)
            in_batch = b < max_batch
            tl.store(rows_ptr + b, row, mask=in_batch)
            tl.store(seq_lens_ptr + b, seq_len, mask=in_batch)
            tl.store(pending_ptr + b, tl.where(lacks, end - first, 0), mask=in_batch)
            tl.store(qo_indptr_ptr + 1 + b, end, mask=in_batch)
            kv_ends = tl.cumsum(seq_len.to(tl.int64), 0) + kv_tokens
            tl.store(kv_indptr_ptr + 1 + b, kv_ends.to(tl.int32), mask=in_batch)
            kv_tokens += tl.sum(seq_len.to(tl.int64), 0)
        tl.store(kv_indptr_ptr, 0)
        tl.store(qo_indptr_ptr, 0)
        tl.store(needs_page_ptr + tl.arange(0, 1), missing)
        return

    index = (pid - 1) * BLOCK_T + tl.arange(0, BLOCK_T)

    b = find_request(index, qo_at, live, steps)
    is_live = index < total_q
    row = tl.load(staged_ptr + b, mask=is_live, other=0)
    seq_len = tl.load(lens_at + b, mask=is_live, other=0)
    end = tl.load(qo_at + 1 + b, mask=is_live, other=0)
    adds = is_live & (seq_len > 0)
    position = tl.where(adds, seq_len - (end - index), 0)
    last_slot = cache_slot(row, tl.maximum(seq_len - 1, 0), adds, table_ptr, stride_table_row, page_size, max_pages)
    slot = cache_slot(row, position, adds & (last_slot >= 0), table_ptr, stride_table_row, page_size, max_pages)
    tl.store(position_ids_ptr + index, position.to(tl.int64), mask=index < max_total_q)
    tl.store(out_cache_loc_ptr + index, slot, mask=index < max_total_q)
    if tokens_at >= 0:
        ids = tl.load(staged_ids_ptr + tokens_at + index, mask=is_live, other=0)
        tl.store(input_ids_ptr + index, ids, mask=index < padded_q)

    b = find_request(index, tiles_at, live, steps)
    first_tile = tl.load(tiles_at + b, mask=b < live, other=0)
    tl.store(tile_batch_ptr + index, tl.where(b < live, b, -1), mask=index < max_tiles)
    tl.store(tile_index_ptr + index, tl.where(b < live, index - first_tile, -1), mask=index < max_tiles)


@triton.jit(
    do_not_specialize=["counts", "max_batch", "max_total_q", "page_size", "max_pages", "steps", "stride_table_row"],
    do_not_specialize_on_alignment=["num_new_ptr"],
)
def advance_kernel(
    num_new_ptr,
    table_ptr,
    position_ids_ptr,
    rows_ptr,
    seq_lens_ptr,
    pending_ptr,
    kv_indptr_ptr,
    qo_indptr_ptr,
    out_cache_loc_ptr,
    needs_page_ptr,
    counts: tl.int32,
    max_batch: tl.int32,
    max_total_q: tl.int32,
    page_size: tl.int32,
    max_pages: tl.int32,
    steps: tl.int32,
    stride_table_row: tl.int64,
    BLOCK_B: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Move every live request on by its count of tokens, or let it wait where it has no page for them.

    Grid: (1,). Prefix sums depend on all requests before, and tokens on their request's new length, so one program does
    first the requests and then the tokens, of which it loops over the live ones only.

    Reads:  num_new [counts], table, rows, qo_indptr
    Writes: seq_lens, pending, kv_indptr, needs_page; position_ids and out_cache_loc of live query tokens
    """
    kv_tokens = tl.zeros([1], tl.int64)
    missing = tl.zeros([1], tl.int32)
    for start in range(0, max_batch, BLOCK_B):
        b = start + tl.arange(0, BLOCK_B)
        live = b < max_batch
        row = tl.load(rows_ptr + b, mask=live, other=0)
        seq_len = tl.load(seq_lens_ptr + b, mask=live, other=0)
        pending = tl.load(pending_ptr + b, mask=live, other=0)
        tokens = tl.load(qo_indptr_ptr + 1 + b, mask=live, other=0) - tl.load(qo_indptr_ptr + b, mask=live, other=0)
        if num_new_ptr is not None:
            # More than the request's query tokens would make slots visible that nothing was written to.
            count = tl.load(num_new_ptr + b, mask=live & (b < counts), other=0)
            count = clamp(count, 0, tl.maximum(tokens, 0)).to(tl.int32)
        else:
            count = clamp(tokens, 0, 1)
        adds = tl.where(pending > 0, pending, tl.where(seq_len > 0, count, 0))
        fits = (adds > 0) & (seq_len <= INT32_MAX - adds)
        last_slot = cache_slot(
            row, tl.maximum(seq_len + adds - 1, 0), fits, table_ptr, stride_table_row, page_size, max_pages
        )
        stalls = (adds > 0) & (last_slot < 0)
        missing += tl.sum(stalls.to(tl.int32), 0)
        seq_len += tl.where(stalls, 0, adds)
        tl.store(seq_lens_ptr + b, seq_len, mask=live)
        tl.store(pending_ptr + b, tl.where(stalls, adds, 0), mask=live)
        kv_ends = tl.cumsum(seq_len.to(tl.int64), 0) + kv_tokens
        tl.store(kv_indptr_ptr + 1 + b, tl.minimum(kv_ends, INT32_MAX).to(tl.int32), mask=live)
        kv_tokens += tl.sum(seq_len.to(tl.int64), 0)
    tl.store(needs_page_ptr + tl.arange(0, 1), missing)
    # What the loop below reads was written by other threads of this program.
    tl.debug_barrier()

    total_q = clamp(tl.load(qo_indptr_ptr + max_batch), 0, max_total_q)
    for start in range(0, total_q, BLOCK_T):
        index = start + tl.arange(0, BLOCK_T)
        b = find_request(index, qo_indptr_ptr, max_batch, steps)
        live = (index < total_q) & (b < max_batch)
        row = tl.load(rows_ptr + b, mask=live, other=0)
        end = tl.load(qo_indptr_ptr + 1 + b, mask=live, other=0)
        pending = tl.load(pending_ptr + b, mask=live, other=0)
        wanted = tl.load(seq_lens_ptr + b, mask=live, other=0) + pending
        position = tl.where(wanted > 0, tl.maximum(wanted - (end - index), 0), 0)
        has_slot = live & (wanted > 0) & (pending == 0)
        slot = cache_slot(row, position, has_slot, table_ptr, stride_table_row, page_size, max_pages)
        tl.store(position_ids_ptr + index, position.to(tl.int64), mask=live)
        tl.store(out_cache_loc_ptr + index, slot, mask=live)
