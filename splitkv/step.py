"""What an engine writes per step, kept on the device at fixed addresses."""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections.abc import Sequence
from itertools import accumulate
from operator import sub
from typing import Any

import torch
import triton
from torch import Tensor

from splitkv import _interpreter, checks, masks, operators
from splitkv.config import StepConfig, align_up, cdiv, next_power_of_2, require_int
from splitkv.kernels.launch import launch
from splitkv.kernels.prepared import PreparedLaunch, read_in_place
from splitkv.kernels.step import advance_kernel, bind_kernel, stage_kernel
from splitkv.workspace import aligned_bytes, carve

INT32_MAX = 2**31 - 1
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
STAGING_BUFFERS = 4
COPIES_PER_BUFFER = 4
BLOCK_T = 512
ADVANCED = "position_ids", "seq_lens", "pending", "kv_indptr", "out_cache_loc", "needs_page"  # what advance writes
FEW_UPDATES = 256  # up to so many Python's own loops take less time than torch's operations

SEQUENCES = (list, tuple, range, array)
HostIntegers = Sequence[int] | Tensor | Any
"""A list, tuple, range or array of integers, a NumPy array of integers, or an integer tensor on the CPU."""


class StagingSlot:
    """Host memory that one copy reads: as tensors for the device, and as memory views for the host to write."""

    def __init__(self, words: Tensor) -> None:
        self.words, self.address = words, words.data_ptr()
        memory = memoryview((ctypes.c_char * (4 * words.numel())).from_address(self.address)).cast("B")
        # Of unsigned integers, as which the host has checked what it writes, and of signed ones, such as page -1.
        self.counts, self.pages, self.ids = memory.cast("I"), memory.cast("i"), memory.cast("Q")

    def put_ids(self, at: int, ids: _Ids) -> None:
        """Write ids from the `at`-th 64-bit integer on."""
        if isinstance(ids.owner, array):
            self.ids[at : at + ids.count] = ids.owner
        elif ids.count:
            ctypes.memmove(self.address + 8 * at, ids.address, 8 * ids.count)


class StagingBuffer:
    """Host memory for a few copies, and the event of the last one's end.

    One event for several copies, since recording one takes the host as long as half a copy.
    """

    def __init__(self, memory: Tensor, device: torch.device) -> None:
        words = memory.numel() // COPIES_PER_BUFFER
        self.slots = [StagingSlot(memory[i * words :][:words]) for i in range(COPIES_PER_BUFFER)]
        self.used = 0
        self.event: Any = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def free(self) -> bool:
        """Whether the copies from here have run. Not asked while slots are being taken."""
        return self.event is None or bool(self.event.query())


def _host_words(words: int, device: torch.device) -> Tensor:
    """[words] int32 of host memory, pinned where there is a GPU."""
    if device.type == "cuda":
        try:
            return torch.empty(words, dtype=torch.int32, device="cpu", pin_memory=True)
        except RuntimeError:
            pass  # no memory may be locked here: copies from pageable memory are staged by the driver, and as safe
    return torch.empty(words, dtype=torch.int32, device="cpu")


class StepState:
    """Everything between "these requests run" and "call the layers", on the device and at fixed addresses.

    `bind` writes a step from host numbers in two launches, of which the first reads them in pinned host memory (where
    kernels cannot read that, a staged copy and at most two launches); `advance` makes the next decode step from this
    one without the host. Layers read the buffers, which never move, so all but `bind` can lie in a CUDA graph.

    >>> import torch, splitkv
    >>> table = torch.full((8, 4), -1, dtype=torch.int32)  # 8 rows of up to 4 pages
    >>> step = StepState.allocate(StepConfig(max_batch_size=4), table, page_size=16, device="cpu")
    >>> step.bind(rows=[5, 2], seq_lens=[17, 3], tokens=[101, 102], page_updates=[(5, 0, 9), (5, 1, 6), (2, 0, 4)])
    >>> step.seq_lens, step.out_cache_loc  # token 16 of row 5 is the first of page 6
    (tensor([17,  3,  0,  0], dtype=torch.int32), tensor([96, 66, -1, -1], dtype=torch.int32))
    >>> step.advance()
    >>> step.seq_lens, step.position_ids, step.out_cache_loc
    (tensor([18,  4,  0,  0], dtype=torch.int32), tensor([17,  3,  0,  0]), tensor([97, 67, -1, -1], dtype=torch.int32))

    **Streams.** Everything is enqueued on the current stream of the state's device. Call `bind`, `fill_input_ids` and
    `advance` on the stream that runs the steps. The host may then prepare step N + 1 while N runs: its numbers lie in a
    memory of their own until the copy's turn comes, after everything of step N. On another stream the copy could
    overwrite what step N still reads; order the streams by events where that cannot be avoided. There is memory for
    sixteen copies, so the host never waits for the device unless it is twelve copies or more ahead of it.

    **Threads.** A state may be made on one thread and used on another, inside inference mode or outside; its buffers
    are plain tensors always. Use it from one thread at a time. The current stream is a thread's own.

    **Missing pages.** A negative entry of the page table is a page that is missing. A request that lacks one for its
    new tokens waits: they get slot -1, its seq_len stays without them, and it is counted in `needs_page`. What the
    layers compute for it meanwhile means nothing. Give it the page, and its tokens again, by `bind`; until then every
    `advance` tries to place the same tokens. StepState keeps -1 past a row's live pages: see `page_updates` of `bind`.
    Pages of a row come in order: that of the last new token tells whether one is missing, and a gap before it is not
    seen.

    Attributes:
        config: The `StepConfig`; below B is its max_batch_size.
        page_table: [rows, max_pages] int32, the caller's.
        page_size: Tokens per page.
        device: Where all buffers live.
        input_ids, position_ids: [max_total_q] int64, this step's tokens and their positions.
        req_pool_indices: [B] int32, each request's row of the page table: `rows` of a cache view.
        seq_lens: [B] int32, KV tokens of each request, the new ones included. 0 past the live requests.
        kv_indptr, qo_indptr: [B + 1] int32, prefix sums of KV tokens (at most 2³¹ - 1) and of query tokens. Flat past
            the live requests.
        inc: [B + 1] int32, 0…B.
        q_tile_to_batch, q_tile_to_index: [B + max_total_q // tile_tokens] int32, request and index within it of each
            tile of tile_tokens query tokens; -1 past the live tiles.
        out_cache_loc: [max_total_q] int32, cache slot of each new token, page · page_size + offset; -1 for none.
        needs_page: [1] int32, requests that wait for a page.
        pending: [B] int32, new tokens of each request that waits, else 0.
        arange: [max_mask_len] int64, 0…max_mask_len - 1.
        input_mask: [B, 1, max_mask_len] bool, what `decode_mask` writes.
        staged: int32, where what bind staged lands.
    """

    input_ids: Tensor
    position_ids: Tensor
    req_pool_indices: Tensor
    seq_lens: Tensor
    pending: Tensor
    kv_indptr: Tensor
    qo_indptr: Tensor
    inc: Tensor
    q_tile_to_batch: Tensor
    q_tile_to_index: Tensor
    out_cache_loc: Tensor
    needs_page: Tensor
    arange: Tensor
    input_mask: Tensor
    staged: Tensor

    def __init__(self, config: StepConfig, page_table: Tensor, page_size: int, buffer: Tensor) -> None:
        """Use `allocate` or `from_buffer`."""
        self._check(config, page_table, page_size, buffer.device)
        self.config, self.page_table, self.page_size, self.device = config, page_table, page_size, buffer.device
        self.max_pages = page_table.shape[1]
        checks.check_apart("page_table", page_table, [("the buffer", buffer)])
        for name, view in carve(buffer, config.sections()).items():
            setattr(self, name, view)
        with torch.inference_mode(False):
            for section in config.sections():
                getattr(self, section.name).zero_()
            for name in ("q_tile_to_batch", "q_tile_to_index", "out_cache_loc"):
                getattr(self, name).fill_(-1)
            torch.arange(self.inc.numel(), out=self.inc, device=self.device)
            torch.arange(self.arange.numel(), out=self.arange, device=self.device)
        words = COPIES_PER_BUFFER * align_up(config.staged_words, 4)
        with torch.inference_mode(False):
            memory = _host_words(STAGING_BUFFERS * words, self.device)
            parts = [memory[i * words :][:words] for i in range(STAGING_BUFFERS)]
            self._input_view = self.input_ids[:0]
        self._staging = [StagingBuffer(part, self.device) for part in parts]
        self._staging_index = 0
        self._reads_host = read_in_place(memory, self.device)
        self._raw_stream: int | None = None
        self._stream: Any = None
        self._streams: set[int] = set()  # that the host memory is known to be read on
        self._counting = memoryview(array("I", range(config.max_batch_size + 1)))
        self._prepare()

    @classmethod
    def allocate(cls, config: StepConfig, page_table: Tensor, page_size: int, device: torch.device | str) -> StepState:
        """Make the buffers in one allocation of `config.nbytes` bytes, and compile the kernels where there is a GPU.

        Args:
            config: The capacity.
            page_table: [rows, max_pages] int32 on `device`, any row stride. Kept, not copied. Entries past what a
                request has should be -1; `bind` keeps them so for the pages that it is given.
            page_size: Tokens per page, ≥ 1. Page size 1 is a table of token slots; a table [rows, 1] that holds
                0…rows - 1, with page_size = max_len, gives the slots of a contiguous cache.
            device: Where.

        Raises:
            TypeError, ValueError: naming the argument, what was expected and given.
        """
        device = checks.as_device(device)
        cls._check(config, page_table, page_size, page_table.device if isinstance(page_table, Tensor) else None)
        return cls(config, page_table, page_size, aligned_bytes(config.nbytes, device))

    @classmethod
    def from_buffer(cls, config: StepConfig, page_table: Tensor, page_size: int, buffer: Tensor) -> StepState:
        """Lay the buffers over one caller-supplied tensor.

        >>> config, table = StepConfig(max_batch_size=4), torch.full((8, 4), -1, dtype=torch.int32)
        >>> buffer = aligned_bytes(config.nbytes, "cpu")
        >>> StepState.from_buffer(config, table, page_size=16, buffer=buffer).inc
        tensor([0, 1, 2, 3, 4], dtype=torch.int32)

        Args:
            config, page_table, page_size: As for `allocate`.
            buffer: [≥ config.nbytes] uint8, contiguous, its start aligned to 256 bytes. Its content is overwritten.

        Raises:
            TypeError, ValueError: dtype, rank, alignment, or size, naming the bytes needed and given.
        """
        checks.check_tensor("buffer", buffer)
        return cls(config, page_table, page_size, buffer)

    @staticmethod
    def _check(config: object, page_table: object, page_size: object, device: torch.device | None) -> None:
        if not isinstance(config, StepConfig):
            raise TypeError(f"config: expected a StepConfig, given {type(config).__name__}")
        table = checks.check_tensor("page_table", page_table)
        checks.check_dtype("page_table", table, torch.int32)
        checks.check_rank("page_table", table, 2)
        if 0 in table.shape:
            raise ValueError(f"page_table: expected no empty dimension, given shape {checks.shape_text(table.shape)}")
        checks.check_last_stride("page_table", table)
        checks.check_no_overlap("page_table", table)
        require_int("page_size", page_size, 1, INT32_MAX)
        if device is not None:
            checks.check_device("page_table", table, device, "the state")
            refusal = _interpreter.why_not(device.type)
            if refusal is not None:
                raise ValueError(f"page_table: {refusal}")

    def _prepare(self) -> None:
        config = self.config
        common = dict(
            table_ptr=self.page_table,
            position_ids_ptr=self.position_ids,
            rows_ptr=self.req_pool_indices,
            seq_lens_ptr=self.seq_lens,
            pending_ptr=self.pending,
            kv_indptr_ptr=self.kv_indptr,
            qo_indptr_ptr=self.qo_indptr,
            out_cache_loc_ptr=self.out_cache_loc,
            needs_page_ptr=self.needs_page,
        )
        constants = _blocks(config.max_batch_size)
        sizes = ("page_size", "max_pages", "steps", "stride_table_row")
        self._sizes = (
            self.page_size,
            self.max_pages,
            config.max_batch_size.bit_length(),
            self.page_table.stride(0),
        )

        def staging(target: Tensor) -> PreparedLaunch:
            return PreparedLaunch(
                stage_kernel,
                self.device,
                dict(source_ptr=self._staging[0].slots[0].words, target_ptr=target, table_ptr=self.page_table),
                ("words", "updates_at", "updates", "fresh", "max_pages", "stride_table_row"),
                dict(BLOCK=BLOCK_T),
                num_warps=4,
                given=("source_ptr",),
            )

        self._stage, self._fill = staging(self.staged), staging(self.input_ids.view(torch.int32))
        self._table_sizes = self.max_pages, self.page_table.stride(0)
        self._bind = PreparedLaunch(
            bind_kernel,
            self.device,
            dict(
                **common,
                staged_ptr=self.staged,
                staged_ids_ptr=self.staged.view(torch.int64),
                input_ids_ptr=self.input_ids,
                tile_batch_ptr=self.q_tile_to_batch,
                tile_index_ptr=self.q_tile_to_index,
            ),
            ("live", "total_q", "padded_q", "tokens_at", "max_batch", "max_total_q", "max_tiles", *sizes),
            constants,
            num_warps=4,
        )
        entries = max(config.max_total_q, config.max_q_tiles)
        self._bind_programs = 1 + cdiv(entries, BLOCK_T)
        self._bind_sizes = config.max_batch_size, config.max_total_q, config.max_q_tiles, *self._sizes

        device = self.device

        def advancing(num_new: Tensor | None) -> PreparedLaunch:
            return PreparedLaunch(
                advance_kernel,
                device,
                dict(**common, num_new_ptr=num_new),
                ("counts", "max_batch", "max_total_q", *sizes),
                constants,
                num_warps=4,
                given=() if num_new is None else ("num_new_ptr",),
            )

        self._advance = advancing(None)
        self._advance_sizes = config.max_batch_size, config.max_total_q, *self._sizes
        # Counts are the caller's tensor, another one each time perhaps: compiled when the first of a dtype comes.
        self._advancing = advancing
        self._advance_by: dict[torch.dtype, PreparedLaunch] = {}
        self._advanced = [checks.extent(getattr(self, name)) for name in ADVANCED]

    # Staging.

    def _acquire(self, name: str) -> StagingSlot:
        """Memory that no copy in flight reads, for `name`. The copy must be sent to the stream that is current now."""
        buffer = self._staging[self._staging_index]
        if self.device.type == "cuda":
            raw_stream = triton.runtime.driver.active.get_current_stream(self.device.index)
            if raw_stream != 0 and self._capturing():  # the default stream cannot be captured
                raise RuntimeError(
                    f"{name}: expected a stream that is not being captured (a replay would copy what the staging "
                    "buffer holds by then), given one that is: call it before each replay instead"
                )
            if raw_stream != self._raw_stream:
                if buffer.used:  # its copies so far went elsewhere
                    buffer = self._close(buffer)
                self._raw_stream, self._stream = raw_stream, torch.cuda.current_stream(self.device)
                if self._reads_host:
                    self._note_stream(raw_stream)
        if buffer.used == COPIES_PER_BUFFER:
            buffer = self._close(buffer)
        slot = buffer.slots[buffer.used]
        buffer.used += 1
        return slot

    def _close(self, buffer: StagingBuffer) -> StagingBuffer:
        """Mark the end of a buffer's copies; the next one whose copies have run.

        Waits for the oldest only where all are in flight.
        """
        if buffer.event is not None:
            buffer.event.record(self._stream)
        oldest = index = (self._staging_index + 1) % STAGING_BUFFERS
        while not self._staging[index].free():
            index = (index + 1) % STAGING_BUFFERS
            if index == oldest:
                self._staging[index].event.synchronize()
                break
        self._staging_index, buffer = index, self._staging[index]
        buffer.used = 0
        return buffer

    def _note_stream(self, raw_stream: int) -> None:
        """Let torch know that the host memory is read on the current stream, so that it outlives the state for that.

        A copy of torch's does, and once is enough: what is freed is not used again before the work that these streams
        have by then is done. Of kernels that read it torch knows nothing.
        """
        if raw_stream not in self._streams:
            self._streams.add(raw_stream)
            self._staging[0].slots[0].words[:1].to(self.device, non_blocking=True)

    def _copy(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source, non_blocking=self.device.type == "cuda")

    def _send(self, slot: StagingSlot, words: int, updates: int, update_words: int, fresh: int) -> None:
        """Bring the first words of a slot to `staged`, and do the page updates that follow them.

        By one launch where kernels can read the host's memory, else by a copy and, with updates, a launch.
        """
        programs = cdiv(updates, BLOCK_T) + fresh
        if self._reads_host:
            programs += cdiv(words, BLOCK_T)
            self._stage(programs, words, words, updates, fresh, *self._table_sizes, given=(slot.words,))
            return
        end = words + update_words
        self._copy(slot.words[:end], self.staged[:end])
        if updates:
            self._stage(programs, 0, words, updates, fresh, *self._table_sizes, given=(self.staged,))

    def _capturing(self) -> bool:
        # Changing to the device and back would cost more than the question.
        if torch.cuda.current_device() == self.device.index:
            return torch.cuda.is_current_stream_capturing()
        with torch.cuda.device(self.device):
            return torch.cuda.is_current_stream_capturing()

    # Writing a step.

    def bind(
        self,
        rows: HostIntegers,
        seq_lens: HostIntegers,
        *,
        q_lens: HostIntegers | None = None,
        tokens: HostIntegers | None = None,
        page_updates: Sequence[tuple[int, int, int]] | Any = None,
        pad_to: int | None = None,
    ) -> None:
        """Write a step: which requests run, how long they are, and where their new tokens go.

        Two launches on the current stream; where kernels cannot read the host's memory, a staged copy and a launch, or
        two with page updates. The host does not wait (see the class for streams). Everything is checked before anything
        is written. All buffers but input_ids are written in full: whatever was bound before, what lies past the live
        requests, tokens and tiles is padding.

        >>> table = torch.arange(32, dtype=torch.int32).reshape(4, 8)
        >>> step = StepState.allocate(StepConfig(4, max_total_q=256), table, page_size=32, device="cpu")
        >>> step.bind([0, 1, 2], [200, 10, 130], q_lens=[70, 10, 130])  # prompts, the first one's second part
        >>> step.qo_indptr, step.q_tile_to_batch[:6], step.q_tile_to_index[:6]
        (tensor([  0,  70,  80, 210, 210], dtype=torch.int32), tensor([0, 0, 1, 2, 2, 2], dtype=torch.int32), \
tensor([0, 1, 0, 0, 1, 2], dtype=torch.int32))

        Sequences of integers may be lists, tuples, ranges, arrays, NumPy arrays, or tensors on the CPU.

        Args:
            rows: Row of the page table of each request. No two requests with tokens share one.
            seq_lens: KV tokens of each request, the new ones included; at most max_pages · page_size.
            q_lens: New tokens of each request, 0 ≤ q_len ≤ seq_len. None: a decode step, one per request, in which a
                request of length 0 is padding.
            tokens: Ids of all new tokens, request by request. None: input_ids is left as it is.
            page_updates: (row, column, page) triples to write into the page table: a sequence of them, or an [n, 3]
                array or CPU tensor. Page -1 removes an entry. An update of column 0 begins its row anew: entries
                right of the row's last column in this call become -1, so that nothing of an earlier request stays
                reachable.
            pad_to: Rows that the step will run with, such as a graph's batch size; at least the number of requests.
                Where tokens are given, input_ids is 0 from the last of them up to there. None: the number of requests.

        Raises:
            TypeError, ValueError: more requests, tokens or page updates than the config has room for; a row, column,
                length or id out of range; a slot or a sum of lengths past 32 bits; sequences of unequal length. Names
                the argument, what was expected and given; nothing was written.
            RuntimeError: the current stream is being captured in a graph.
        """
        config = self.config
        row_words, row_list = _words("rows", rows, self.page_table.shape[0] - 1)
        len_words, len_list = _words("seq_lens", seq_lens, min(self.max_pages * self.page_size, INT32_MAX))
        live = len(row_list)
        if live > config.max_batch_size:
            raise ValueError(f"rows: expected at most {config.max_batch_size} (max_batch_size), given {live}")
        if pad_to is not None:
            require_int("pad_to", pad_to, live, config.max_batch_size)
        _check_count("seq_lens", len_list, live)
        kv_tokens = sum(len_list)
        if kv_tokens > INT32_MAX:
            raise ValueError(f"seq_lens: expected a sum of at most {INT32_MAX}, given {kv_tokens}")
        if len(set(row_list)) < live:
            _check_distinct(row_list, len_list)

        # Prefix sums of query tokens and of tiles.
        qo_words: array[int] | memoryview
        tile_words: array[int] | memoryview
        if q_lens is None:
            qo_words = tile_words = self._counting[: live + 1]
            total_q = live
            if total_q > config.max_total_q:
                raise ValueError(f"rows: expected at most {config.max_total_q} (max_total_q), given {live}")
        else:
            _, q_list = _words("q_lens", q_lens, config.max_total_q)
            _check_count("q_lens", q_list, live)
            total_q = sum(q_list)
            if total_q > config.max_total_q:
                raise ValueError(
                    f"q_lens: expected a sum of at most {config.max_total_q} (max_total_q), given {total_q}"
                )
            if live and min(map(sub, len_list, q_list)) < 0:
                b = next(b for b in range(live) if len_list[b] < q_list[b])
                raise ValueError(
                    f"seq_lens: expected at least q_len = {q_list[b]} in row {b} (new tokens are included), "
                    f"given {len_list[b]}"
                )
            qo_words = array("I", accumulate(q_list, initial=0))
            tile = config.tile_tokens
            tile_words = array("I", accumulate([(q + tile - 1) // tile for q in q_list], initial=0))
        ids = None
        if tokens is not None:
            ids = _Ids("tokens", tokens)
            if ids.count != total_q:
                raise ValueError(f"tokens: expected {total_q}, one per new token, given {ids.count}")
        updates, update_words, fresh = 0, array("i"), 0
        if page_updates is not None:
            updates, update_words, fresh = self._page_updates(page_updates)

        # What the kernels read, one after another; the ids at an even word.
        slot = self._acquire("bind")
        counts, qo_at, words = slot.counts, 2 * live, 4 * live + 2
        counts[:live] = row_words
        counts[live:qo_at] = len_words
        counts[qo_at : qo_at + live + 1] = qo_words
        counts[qo_at + live + 1 : words] = tile_words
        tokens_at = -1
        if ids is not None:
            tokens_at = words // 2
            slot.put_ids(tokens_at, ids)
            words += 2 * total_q
        if updates:
            slot.pages[words : words + len(update_words)] = update_words
        self._send(slot, words, updates, len(update_words), fresh)
        padded_q = min(max(total_q, live if pad_to is None else pad_to), config.max_total_q)
        self._bind(self._bind_programs, live, total_q, padded_q, tokens_at, *self._bind_sizes)

    def _page_updates(self, page_updates: Any) -> tuple[int, array[int], int]:
        """Number of updates, the words that say them and what to clear, and the number of rows that begin anew."""
        columns = _triples(page_updates)
        if columns is None:
            return 0, array("i"), 0
        rows, cols, pages = (_array_of("page_updates", "i", _listed("page_updates", column)) for column in columns)
        updates = len(rows)
        if updates > self.config.max_page_updates:
            raise ValueError(
                f"page_updates: expected at most {self.config.max_page_updates} (max_page_updates), given {updates}"
            )
        _check_range("page_updates (rows)", rows, 0, self.page_table.shape[0] - 1)
        _check_range("page_updates (columns)", cols, 0, self.max_pages - 1)
        _check_range("page_updates (pages)", pages, -1, (INT32_MAX + 1) // self.page_size - 1)
        words = rows + cols + pages
        if updates == 1 and cols[0]:
            return updates, words, 0
        fresh, cleared = (_fresh_rows if updates <= FEW_UPDATES else _fresh_rows_of_many)(rows, cols, self.max_pages)
        return updates, words + array("i", fresh) + array("i", cleared), len(fresh)

    def advance(self, num_new: Tensor | None = None) -> None:
        """Move every live request on by one token, or by a count of its own. One launch, which a CUDA graph can hold.

        Query lengths stay as bound; seq_lens and positions grow by the count, and out_cache_loc names the next slots,
        of pages that the table has by then. input_ids is not touched: see `fill_input_ids_from_device`. Requests of
        length 0 stay so, and requests without query tokens in this step do not move. A request whose new tokens lack
        a page waits (see the class).

        >>> table = torch.arange(8, dtype=torch.int32).reshape(2, 4)
        >>> step = StepState.allocate(StepConfig(2, max_total_q=6), table, page_size=4, device="cpu")
        >>> step.bind([0, 1], [9, 5], q_lens=[3, 3])  # a token and two drafts each
        >>> step.advance(torch.tensor([3, 1], dtype=torch.int32))  # all accepted; none of the drafts
        >>> step.seq_lens, step.position_ids
        (tensor([12,  6], dtype=torch.int32), tensor([ 9, 10, 11,  3,  4,  5]))

        Args:
            num_new: [≤ max_batch_size] int32 or int64 on the device: tokens that each request moves on by, clamped on
                the device to 0…its query tokens. Requests past its end do not move. None: one each.
                The first call with counts compiles: make it before a capture.

        Raises:
            TypeError, ValueError: dtype, rank, size, stride or device of num_new, or a part of the state that is
                written; with SPLITKV_DEBUG=1 also a count that would be clamped. Nothing was launched.
        """
        if operators.tracing(self.seq_lens):
            torch.ops.splitkv.advance(
                num_new, self.page_table, self.req_pool_indices, self.qo_indptr, self.position_ids, self.seq_lens,
                self.pending, self.kv_indptr, self.out_cache_loc, self.needs_page, self.page_size,
            )  # fmt: skip
            return
        if num_new is None:
            self._advance(1, 0, *self._advance_sizes)
            return
        counts = _check_counts(num_new, self.config.max_batch_size, self.device)
        if checks.touches(checks.extent(num_new), self._advanced):
            checks.check_apart("num_new", num_new, ((name, getattr(self, name)) for name in ADVANCED))
        if checks.debugging(self.device):
            ends = self.qo_indptr.tolist()
            for row, (count, tokens) in enumerate(zip(num_new.tolist(), map(sub, ends[1:], ends), strict=False)):
                if tokens and not 0 <= count <= tokens:
                    raise ValueError(f"num_new: expected values in 0…{tokens}, given {count} in row {row}")
        advance = self._advance_by.get(num_new.dtype)
        if advance is None:
            advance = self._advance_by[num_new.dtype] = self._advancing(num_new)
        advance(1, counts, *self._advance_sizes, given=(num_new,))

    def fill_input_ids(self, ids: HostIntegers) -> Tensor:
        """Copy token ids from the host into input_ids, on the current stream and without waiting for it.

        One launch, or a copy where kernels cannot read the host's memory.

        >>> table = torch.zeros(2, 4, dtype=torch.int32)
        >>> step = StepState.allocate(StepConfig(2, max_total_q=6), table, page_size=4, device="cpu")
        >>> step.fill_input_ids([5, 6, 7])
        tensor([5, 6, 7])

        Args:
            ids: Token ids ≥ 0: a list, tuple, range or array of integers, a NumPy array, or an integer tensor on the
                CPU.

        Returns:
            [len(ids)] int64: the first elements of input_ids, whose address never changes.

        Raises:
            TypeError: anything but integers. ValueError: more than max_total_q of them, a negative one, one past 64
                bits, or another rank than 1. Nothing was written.
            RuntimeError: the current stream is being captured in a graph.
        """
        source = _Ids("ids", ids)
        if source.count > self.config.max_total_q:
            raise ValueError(f"ids: expected at most {self.config.max_total_q} (max_total_q), given {source.count}")
        view = self._ids_view(source.count)
        if source.count:
            slot = self._acquire("fill_input_ids")
            slot.put_ids(0, source)
            words = 2 * source.count
            if self._reads_host:
                self._fill(cdiv(words, BLOCK_T), words, 0, 0, 0, *self._table_sizes, given=(slot.words,))
            else:
                self._copy(slot.words[:words].view(torch.int64), view)
        return view

    def fill_input_ids_from_device(self, tokens: Tensor) -> Tensor:
        """Copy token ids that lie on the device into input_ids. One launch, which a CUDA graph can hold.

        >>> table = torch.zeros(2, 4, dtype=torch.int32)
        >>> step = StepState.allocate(StepConfig(2), table, page_size=4, device="cpu")
        >>> step.fill_input_ids_from_device(torch.tensor([5, 6]))
        tensor([5, 6])

        Args:
            tokens: [≤ max_total_q] of an integer dtype on the state's device, any stride, such as a sampler's result.

        Returns:
            [len(tokens)] int64: the first elements of input_ids, whose address never changes.

        Raises:
            TypeError, ValueError: dtype, rank, size or device; nothing was launched.
        """
        tokens = checks.check_tensor("tokens", tokens)
        checks.check_dtype("tokens", tokens, *INTEGERS)
        checks.check_rank("tokens", tokens, 1)
        checks.check_device("tokens", tokens, self.device, "the state")
        count = tokens.shape[0]
        if count > self.config.max_total_q:
            raise ValueError(f"tokens: expected at most {self.config.max_total_q} (max_total_q), given {count}")
        if operators.tracing(tokens):  # a graph copies as if apart
            return self.input_ids[:count].copy_(tokens)
        view = self._ids_view(count)
        if tokens.data_ptr() != view.data_ptr() or tokens.stride() != view.stride():
            checks.check_apart("tokens", tokens, [("input_ids", view)])
        view.copy_(tokens)
        return view

    def _ids_view(self, count: int) -> Tensor:
        """The first ids, by a view that steps of one size share, one after another."""
        if self._input_view.shape[0] != count:
            with torch.inference_mode(False):
                self._input_view = self.input_ids[:count]
        return self._input_view

    def decode_mask(self, position_ids: Tensor, total_len: int) -> Tensor:
        """Which indices lie at or before each position: position ≥ index. One launch, which a CUDA graph can hold.

        >>> table = torch.zeros(2, 4, dtype=torch.int32)
        >>> step = StepState.allocate(StepConfig(2, max_mask_len=8), table, page_size=4, device="cpu")
        >>> step.decode_mask(torch.tensor([2, 0]), total_len=4)[:, 0].int()
        tensor([[1, 1, 1, 0],
                [1, 0, 0, 0]], dtype=torch.int32)

        Args:
            position_ids: [batch] or [batch, 1] int64 or int32 on the state's device.
            total_len: Indices, 0…max_mask_len.

        Returns:
            [batch, 1, total_len] bool, a view of input_mask. Its rows lie max_mask_len apart, whatever total_len is.

        Raises:
            TypeError, ValueError: batch or total_len over capacity, dtype, rank or device; nothing was launched.
        """
        position_ids = checks.check_tensor("position_ids", position_ids)
        checks.check_rank("position_ids", position_ids, 1, 2)
        batch = position_ids.shape[0]
        if batch > self.config.max_batch_size:
            raise ValueError(f"position_ids: expected at most {self.config.max_batch_size} rows, given {batch}")
        require_int("total_len", total_len, 0, self.config.max_mask_len)
        return masks.position_mask(self.input_mask[:batch, :, :total_len], position_ids)


def _blocks(max_batch: int) -> dict[str, Any]:
    """The constants of the kernels that lay requests and tokens out."""
    return dict(BLOCK_B=min(512, max(32, next_power_of_2(max_batch))), BLOCK_T=BLOCK_T)


def _check_counts(num_new: object, most: int, device: torch.device) -> int:
    """Check what `advance` is given, and return how many counts there are."""
    num_new = checks.check_tensor("num_new", num_new)
    checks.check_dtype("num_new", num_new, torch.int32, torch.int64)
    checks.check_rank("num_new", num_new, 1)
    checks.check_last_stride("num_new", num_new)
    checks.check_device("num_new", num_new, device, "the state")
    if num_new.shape[0] > most:
        raise ValueError(f"num_new: expected at most {most} counts (max_batch_size), given {num_new.shape[0]}")
    return num_new.shape[0]


@operators.operator(
    "advance(Tensor? num_new, Tensor page_table, Tensor rows, Tensor qo_indptr, Tensor(a!) position_ids, "
    "Tensor(b!) seq_lens, Tensor(c!) pending, Tensor(d!) kv_indptr, Tensor(e!) out_cache_loc, Tensor(f!) needs_page, "
    "SymInt page_size)"
)
def _advance_operator(
    num_new: Tensor | None,
    page_table: Tensor,
    rows: Tensor,
    qo_indptr: Tensor,
    position_ids: Tensor,
    seq_lens: Tensor,
    pending: Tensor,
    kv_indptr: Tensor,
    out_cache_loc: Tensor,
    needs_page: Tensor,
    page_size: int,
) -> None:
    max_batch = seq_lens.shape[0]
    launch(
        advance_kernel,
        (1,),
        seq_lens.device,
        operands=dict(
            num_new_ptr=num_new,
            table_ptr=page_table,
            position_ids_ptr=position_ids,
            rows_ptr=rows,
            seq_lens_ptr=seq_lens,
            pending_ptr=pending,
            kv_indptr_ptr=kv_indptr,
            qo_indptr_ptr=qo_indptr,
            out_cache_loc_ptr=out_cache_loc,
            needs_page_ptr=needs_page,
            counts=0 if num_new is None else _check_counts(num_new, max_batch, seq_lens.device),
            max_batch=max_batch,
            max_total_q=out_cache_loc.shape[0],
            page_size=page_size,
            max_pages=page_table.shape[1],
            steps=max_batch.bit_length(),
            stride_table_row=page_table.stride(0),
        ),
        constants=_blocks(max_batch),
        num_warps=4,
    )


def _array_of(name: str, typecode: str, values: Any) -> array[int]:
    try:
        return array(typecode, values)
    except TypeError as error:
        raise TypeError(f"{name}: expected integers, given other elements ({error})") from None
    except OverflowError:
        bits = 8 * array(typecode).itemsize
        raise ValueError(f"{name}: expected integers of {bits} bits, given one past that") from None


def _is_numpy(values: object) -> bool:
    numpy = sys.modules.get("numpy")  # not a dependency, and not loaded for the question
    return numpy is not None and isinstance(values, numpy.ndarray)


def _check_host_vector(name: str, values: Any) -> None:
    """Raise unless this tensor or NumPy array is a vector of integers on the CPU."""
    if isinstance(values, Tensor):
        checks.check_tensor(name, values)
        if values.device.type != "cpu":
            raise ValueError(f"{name}: expected a tensor on the CPU, given one on {values.device}")
        checks.check_dtype(name, values, *INTEGERS)
    elif values.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integers, given {values.dtype}")
    if values.ndim != 1:
        raise ValueError(f"{name}: expected 1 dimension, given shape {checks.shape_text(values.shape)}")


def _listed(name: str, values: Any) -> Any:
    """Host integers as a sequence of Python's."""
    if isinstance(values, SEQUENCES):
        return values
    if isinstance(values, Tensor) or _is_numpy(values):
        _check_host_vector(name, values)
        return values.tolist()
    raise _no_integers(name, values)


def _no_integers(name: str, values: object) -> TypeError:
    return TypeError(f"{name}: expected a list, NumPy array or CPU tensor of integers, given {type(values).__name__}")


def _words(name: str, values: Any, high: int) -> tuple[array[int], list[int]]:
    """Host integers in 0…high, at most 2³¹ - 1, as 32-bit words and as Python's."""
    values = _listed(name, values)
    try:
        words = array("I", values)  # a negative one would not fit
    except (TypeError, OverflowError):
        _check_range(name, _array_of(name, "i", values), 0, high)
        raise
    numbers = words.tolist()
    if numbers and max(numbers) > high:
        _check_range(name, numbers, 0, high)
    return words, numbers


_HIGH_BYTES = slice(7 if sys.byteorder == "little" else 0, None, 8)


class _Ids:
    """Token ids in host memory: their address, as 64-bit integers, and their number. Raises unless all are ≥ 0."""

    def __init__(self, name: str, values: Any) -> None:
        # Each branch holds on to the memory that it found the address of.
        self.owner: Any
        lowest: int
        if isinstance(values, SEQUENCES):
            lowest = 0
            try:
                self.owner = array("Q", values)  # a negative one would not fit
            except (TypeError, OverflowError):
                _array_of(name, "q", values)
                lowest = min(values)
            else:
                self.address, self.count = self.owner.buffer_info()
                # Bytes below 128, the highest of each, are ASCII: the quickest way to ask all of them.
                if not self.owner.tobytes()[_HIGH_BYTES].isascii():
                    _array_of(name, "q", values)
        elif isinstance(values, Tensor):
            _check_host_vector(name, values)
            self.owner = values.to(torch.int64).contiguous()
            self.address, self.count = self.owner.data_ptr(), self.owner.numel()
            lowest = int(self.owner.min()) if self.count else 0
        elif _is_numpy(values):
            _check_host_vector(name, values)
            self.owner = values.astype("=i8", order="C", copy=not values.flags.c_contiguous)
            self.address, self.count = self.owner.__array_interface__["data"][0], self.owner.size
            lowest = int(self.owner.min()) if self.count else 0
        else:
            raise _no_integers(name, values)
        if lowest < 0:
            # Unsigned ids past 63 bits have become negative too.
            raise ValueError(f"{name}: expected ids in 0…2⁶³ - 1, given {lowest} (as a signed 64-bit integer)")


def _triples(page_updates: Any) -> list[Any] | None:
    """Columns of a sequence of triples or of an [n, 3] array or tensor; None where there are none."""
    if isinstance(page_updates, Tensor) or _is_numpy(page_updates):
        if page_updates.ndim != 2 or page_updates.shape[1] != 3:
            raise ValueError(f"page_updates: expected shape [n, 3], given {checks.shape_text(page_updates.shape)}")
        return [page_updates[:, i] for i in range(3)] if page_updates.shape[0] else None
    try:
        columns = list(zip(*page_updates, strict=True))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"page_updates: expected (row, column, page) triples, given {type(page_updates).__name__} ({error})"
        ) from None
    if columns and len(columns) != 3:
        raise ValueError(f"page_updates: expected (row, column, page) triples, given tuples of {len(columns)}")
    return columns or None


def _fresh_rows(rows: array[int], cols: array[int], width: int) -> tuple[list[int], list[int]]:
    """The rows that begin anew, and past which of their columns; raises where an entry is updated twice."""
    keys = [row * width + col for row, col in zip(rows, cols, strict=True)]
    if len(set(keys)) < len(keys):
        _refuse_twice(next(key for i, key in enumerate(keys) if key in keys[:i]), width)
    if min(cols):
        return [], []
    last = {row: 0 for row, col in zip(rows, cols, strict=True) if col == 0}
    for row, col in zip(rows, cols, strict=True):
        if row in last and col > last[row]:
            last[row] = col
    return list(last), [col + 1 for col in last.values()]


def _fresh_rows_of_many(rows: array[int], cols: array[int], width: int) -> tuple[list[int], list[int]]:
    """The same, without a loop over entries: slower for few."""
    keys = torch.frombuffer(rows, dtype=torch.int32).long() * width + torch.frombuffer(cols, dtype=torch.int32)
    # Sorted by row and column, equal entries are neighbours, and a row's last column is followed by another row.
    keys = keys.sort().values
    twice = keys[1:][keys[1:] == keys[:-1]]
    if twice.numel():
        _refuse_twice(int(twice[0]), width)
    begins = keys[keys % width == 0]
    last = keys[torch.searchsorted(keys, begins + width) - 1]
    return (begins // width).tolist(), (last - begins + 1).tolist()


def _refuse_twice(key: int, width: int) -> None:
    raise ValueError(f"page_updates: expected one update per entry, given several of {divmod(key, width)}")


def _check_count(name: str, values: Sequence[int], count: int) -> None:
    if len(values) != count:
        raise ValueError(f"{name}: expected {count} (one per request in rows), given {len(values)}")


def _check_range(name: str, values: Sequence[int], low: int, high: int) -> None:
    if values and (min(values) < low or max(values) > high):
        index, value = next((i, v) for i, v in enumerate(values) if not low <= v <= high)
        raise ValueError(f"{name}: expected integers in {low}…{high}, given {value} at index {index}")


def _check_distinct(rows: Sequence[int], lens: Sequence[int]) -> None:
    seen = set()
    for row, length in zip(rows, lens, strict=True):
        if length and row in seen:
            raise ValueError(f"rows: expected a row of its own for each request, given {row} twice")
        if length:
            seen.add(row)
