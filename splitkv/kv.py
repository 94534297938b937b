"""Views of a KV cache. They hold the caller's tensors, copy nothing, and say where each token lies.

All come down to one description that the kernels take (`Addressing`): where request b's tokens are found, and the
strides between them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from splitkv import checks
from splitkv.config import MAX_HEAD_DIM, QUANTIZED_DTYPES, cdiv
from splitkv.work_list import Schedule

MAX_TOKENS = 2**30  # longer lengths are clamped to it: sums of two still fit 32 bits

View = TypeVar("View", bound="KVView")

# Kinds of addressing, as the kernels know them.
PAGED = 0  # page_table[row, t // page_size] is the page of token t
CONTIGUOUS = 1  # cache[row, t]
RAGGED = 2  # cache[kv_indptr[b] + t]
CSR = 3  # page_indices[page_indptr[b] + t // page_size] is the page of token t

# What the bytes of a cache mean, as the kernels know it.
FORMATS = {
    torch.float8_e4m3fn: 1,
    torch.float8_e5m2: 2,
    torch.int8: 3,
    torch.float8_e4m3fnuz: 4,
    torch.float8_e5m2fnuz: 5,
}

# The kernels' names of a view's tensors.
OPERANDS = (
    "k_ptr", "v_ptr", "lens_ptr", "indptr_ptr", "table_ptr", "rows_ptr", "kv_start_ptr", "list_ptr", "k_scale_ptr",
    "v_scale_ptr", "shard_lens_ptr", "shard_starts_ptr",
)  # fmt: skip


@dataclass(frozen=True)
class Addressing:
    """Where the kernels find request b's tokens, in elements. One description for every layout.

    Attributes:
        kind: PAGED, CONTIGUOUS, RAGGED or CSR.
        page_size: Tokens per page; 1 where there are no pages.
        capacity: Most tokens (CSR: page indices) that a length on the device may claim; longer ones are clamped.
        lens: [≥ batch] int32 lengths in tokens; CSR: tokens in the last page; None for RAGGED.
        indptr: [≥ batch + 1] int32 prefix sums of tokens (RAGGED) or pages (CSR), else None.
        table: Page ids: [rows, max_pages] int32 (PAGED), [num_indices] int32 (CSR), else None.
        stride_table_row: Elements between two rows of the table.
        stride_k, stride_v: Elements between pages (CONTIGUOUS: rows; RAGGED: 0), tokens and heads of K and V.
    """

    kind: int
    page_size: int
    capacity: int
    lens: Tensor | None
    indptr: Tensor | None
    table: Tensor | None
    stride_table_row: int
    stride_k: tuple[int, ...]
    stride_v: tuple[int, ...]


@dataclass(frozen=True)
class Scale:
    """What the numbers of a quantised cache are multiplied by, as the kernels take it: a number times a tensor's entry.

    Attributes:
        number: 1 where a tensor says it.
        tensor: float32, or None.
        strides: Elements of the tensor between pages (rows), tokens and heads; 0 where one entry serves all.
        per_token: Whether every token has a scale of its own, per head.
    """

    number: float = 1.0
    tensor: Tensor | None = None
    strides: tuple[int, int, int] = (0, 0, 0)
    per_token: bool = False

    @classmethod
    def of(cls, scale: Tensor | float | None, per_token: Callable[[Tensor], tuple[int, int, int]]) -> Scale:
        """A scale that was checked.

        Args:
            scale: As a view takes it.
            per_token: The strides of one per token and head.
        """
        if scale is None:
            return cls()
        if not isinstance(scale, Tensor):
            return cls(float(scale))
        if scale.dim() > 1:
            return cls(1.0, scale, per_token(scale), True)
        return cls(1.0, scale, (0, 0, scale.stride(0) if scale.dim() else 0))

    @property
    def form(self) -> tuple[Hashable, ...]:
        """All that checks and constants depend on of it."""
        return self.number, self.tensor is None, self.strides, self.per_token


@dataclass(frozen=True)
class Positions:
    """Where the tokens of a view stand in the longer sequences that they are a shard of.

    Token j of request b stands at starts[b] + j, or without starts at first + j · step.

    Attributes:
        seq_lens: [≥ batch] int32 lengths of the whole sequences.
        starts: [≥ batch] int32, or None.
        first, step: Where a view's first token stands, and how far apart neighbours are.
    """

    seq_lens: Tensor
    starts: Tensor | None
    first: int
    step: int


@dataclass(frozen=True)
class Shared:
    """Two tensors in one storage, as a graph must take them: what writes both would otherwise be given copies.

    Attributes:
        whole: A tensor that spans them.
        first, second: Shape, strides and offset in it of the one and the other.
    """

    whole: Tensor
    first: tuple[tuple[int, ...], tuple[int, ...], int]
    second: tuple[tuple[int, ...], tuple[int, ...], int]

    @classmethod
    def between(cls, a: Tensor, b: Tensor) -> Shared | None:
        """How two tensors of one dtype share a storage, or None where each has its own."""
        if torch.compiler.is_compiling():
            return None  # a graph knows where tensors come from that are made in it
        storage = a.untyped_storage()
        if storage._cdata != b.untyped_storage()._cdata:
            return None
        whole = a._base
        if whole is None or whole is not b._base or whole.dtype != a.dtype:
            with torch.inference_mode(False):
                whole = torch.empty(0, dtype=a.dtype, device=a.device)
                whole.set_(storage, 0, (storage.nbytes() // a.itemsize,), (1,))
        places = [(tuple(t.shape), t.stride(), int(t.storage_offset())) for t in (a, b)]
        return cls(whole, *places)

    def views(self) -> tuple[Tensor, Tensor]:
        """The two as views of the whole."""
        return self.whole.as_strided(*self.first), self.whole.as_strided(*self.second)


def _check_cache(name: str, cache: object, rank: int) -> Tensor:
    cache = checks.check_tensor(name, cache)
    checks.check_rank(name, cache, rank)
    checks.check_cache_dtype(name, cache)
    checks.check_last_stride(name, cache)
    if not 1 <= cache.shape[-1] <= MAX_HEAD_DIM:
        raise ValueError(f"{name}: expected a width in 1…{MAX_HEAD_DIM}, given {cache.shape[-1]}")
    if 0 in cache.shape[1:]:
        # The first dimension may be empty (no page, no token yet): nothing then has a length to read.
        raise ValueError(f"{name}: expected no empty dimension, given shape {checks.shape_text(cache.shape)}")
    return cache


def _check_pair(k_name: str, k: Tensor, v_name: str, v: Tensor) -> None:
    checks.check_dtype(v_name, v, k.dtype)
    checks.check_device(v_name, v, k.device, k_name)
    checks.check_shape(v_name, v, [*k.shape[:-1], "head_dim_v"])


class KVView:
    """What all views share. Use PagedKV, ContiguousKV, RaggedKV or LatentKV.

    Attributes:
        k, v: The caller's caches; of a LatentKV views of its one cache.
        num_kv_heads, head_dim, head_dim_v: Their sizes.
        dtype, device: Theirs.
        k_scale, v_scale: What the numbers of a quantised cache are multiplied by, as given.
        scales: The same, of K and of V, as the kernels take it.
        latent: Whether values are the first columns of keys by construction, so that a token is read once.
        rows: [≥ batch] int32, each request's row of the table or cache; None for row b.
        kv_start: [≥ batch] int32, tokens before it are invisible; None for 0.
        len_hint: Typical length in tokens, or None. May steer tile sizes, never results.
        schedule: A `Schedule` that saves decode its prefix sum over the lengths, or None.
        positions: Where the tokens stand in longer sequences, or None where the view holds those whole (see `shard`).
        addressing: Where tokens lie, as the kernels take it.
        shared, shared_scales: Where k and v, or their scales, share a storage: graphs must see that they do. Else None.
        tensors: Every tensor that decode may read of it, in the order of `OPERANDS`.
        form: All that decode's checks and constants depend on, addresses aside.
    """

    k: Tensor
    v: Tensor
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    k_scale: Tensor | float | None
    v_scale: Tensor | float | None
    scales: tuple[Scale, Scale]
    latent: bool = False
    rows: Tensor | None
    kv_start: Tensor | None
    len_hint: int | None
    schedule: Schedule | None
    positions: Positions | None
    addressing: Addressing
    shared: Shared | None = None
    shared_scales: Shared | None = None
    tensors: tuple[Tensor | None, ...]
    form: tuple[Hashable, ...]

    def __setattr__(self, name: str, value: object) -> None:
        # Calls that were checked once are not checked again for the same form.
        if "form" in self.__dict__:
            raise AttributeError(
                f"{name}: expected no change of a view (its tensors' content may change): make another"
            )
        super().__setattr__(name, value)

    def _seal(self, addressing: Addressing) -> None:
        """Complete the view, which cannot be changed from then on."""
        self.addressing = where = addressing
        written = None if self.schedule is None else self.schedule.buffer
        # A quantised cache is bytes to the kernels, on whatever GPU: its dtype is a constant of theirs.
        k, v = (cache.view(torch.uint8) if self.quantized else cache for cache in (self.k, self.v))
        k_scale, v_scale = self.scales
        stand = self.positions
        self.tensors = (
            k,
            None if self.latent else v,
            where.lens,
            where.indptr,
            where.table,
            self.rows,
            self.kv_start,
            written,
            k_scale.tensor,
            None if self.latent else v_scale.tensor,
            None if stand is None else stand.seq_lens,
            None if stand is None else stand.starts,
        )
        self.form = (
            where.kind,
            where.page_size,
            where.capacity,
            where.stride_k,
            where.stride_v,
            where.stride_table_row,
            self.k.shape,
            self.v.shape,
            self.num_kv_heads,
            self.k.dtype,
            self.k.device,
            self.latent,
            k_scale.form,
            v_scale.form,
            self.max_batch,
            self.rows is None,
            self.kv_start is None,
            self.len_hint,
            # Which of a schedule's limits a call keeps decides whether it reads the list.
            None if self.schedule is None else (self.schedule.max_batch_size, self.schedule.config.max_q_tiles),
            None if stand is None else (stand.first, stand.step, stand.starts is None),
        )

    def _hold(
        self,
        k: Tensor,
        v: Tensor,
        num_kv_heads: int,
        rows: Tensor | None,
        kv_start: Tensor | None,
        len_hint: int | None,
        schedule: Schedule | None,
    ) -> None:
        self.k, self.v = k, v
        self.num_kv_heads, self.head_dim, self.head_dim_v = num_kv_heads, k.shape[-1], v.shape[-1]
        if rows is not None:
            checks.check_index_vector("rows", rows, k.device, "the cache")
        if kv_start is not None:
            checks.check_index_vector("kv_start", kv_start, k.device, "the cache")
        if len_hint is not None:
            checks.require_int("len_hint", len_hint, 0)
        if schedule is not None:
            if not isinstance(schedule, Schedule):
                raise TypeError(f"schedule: expected a splitkv.Schedule, given {type(schedule).__name__}")
            if schedule.device != k.device:
                raise ValueError(f"schedule: expected device {k.device} (that of the cache), given {schedule.device}")
        self.rows, self.kv_start, self.len_hint, self.schedule = rows, kv_start, len_hint, schedule
        self.positions = None
        if not self.latent:
            self.shared = Shared.between(k, v)

    def shard(
        self: View, seq_lens: Tensor, *, starts: Tensor | None = None, rank: int | None = None, size: int | None = None
    ) -> View:
        """This view as a shard of longer sequences, of which other devices or calls attend the rest.

        `splitkv.decode` attends a shard's own tokens alone, each by its position in the whole sequence: causal,
        window_left, alibi_slopes and tree_mask mean what they mean there. Results of all shards, made without sinks,
        merge into that of the whole (`splitkv.merge`, `splitkv.distributed.decode`). Lengths and kv_start of the view
        count its own tokens.

        >>> k = torch.zeros(2, 32, 2, 64)
        >>> kv = ContiguousKV(k, k.clone(), torch.tensor([20, 7], dtype=torch.int32))
        >>> shard = kv.shard(torch.tensor([60, 14], dtype=torch.int32), rank=0, size=3)  # tokens 0, 3, 6, …
        >>> shard.positions.step
        3

        Args:
            seq_lens: [≥ batch] int32, tokens of the whole sequences, the current ones included.
            starts: [≥ batch] int32, position of the view's first token of each request: contiguous shards.
            rank, size: Token j of every request stands at position rank + j · size: shards in turn.

        Raises:
            TypeError, ValueError: naming the argument; also where not exactly one of both forms is given.
        """
        checks.check_index_vector("seq_lens", seq_lens, self.device, "the view")
        if (starts is None) == (rank is None and size is None):
            raise ValueError(
                f"starts: expected either starts, or rank and size, given {'neither' if starts is None else 'both'}"
            )
        first, step = 0, 1
        if starts is not None:
            checks.check_index_vector("starts", starts, self.device, "the view")
        else:
            checks.require_int("size", size, 1, MAX_TOKENS)
            assert size is not None
            checks.require_int("rank", rank, 0, size - 1)
            assert rank is not None
            first, step = rank, size
        view = object.__new__(type(self))
        sealed = ("addressing", "tensors", "form")
        view.__dict__.update((name, value) for name, value in self.__dict__.items() if name not in sealed)
        view.positions = Positions(seq_lens, starts, first, step)
        view._seal(self.addressing)
        return view

    def _hold_scales(
        self,
        k_scale: Tensor | float | None,
        v_scale: Tensor | float | None,
        per_token: Callable[[Tensor], tuple[int, int, int]],
    ) -> None:
        """Check and keep the scales of K and V. `per_token`: the strides of a scale per token and head."""
        for name, scale, cache in (("k_scale", k_scale, self.k), ("v_scale", v_scale, self.v)):
            checks.check_scale(name, scale, cache, cache.shape[:-1], self.num_kv_heads)
        self.k_scale, self.v_scale = k_scale, v_scale
        self.scales = Scale.of(k_scale, per_token), Scale.of(v_scale, per_token)
        if isinstance(k_scale, Tensor) and isinstance(v_scale, Tensor):
            self.shared_scales = Shared.between(k_scale, v_scale)

    @property
    def dtype(self) -> torch.dtype:
        return self.k.dtype

    @property
    def quantized(self) -> bool:
        """Whether the cache holds numbers of one byte."""
        return self.k.dtype in QUANTIZED_DTYPES

    @property
    def format(self) -> int:
        """What its elements are, as the kernels know it: an entry of FORMATS, 0 where it is not quantised."""
        return FORMATS.get(self.k.dtype, 0)

    @property
    def device(self) -> torch.device:
        return self.k.device

    def _limits(self) -> list[tuple[str, int]]:
        """Per-request tensors by name, and for how many requests each has entries."""
        where = self.addressing
        limits: list[tuple[str, int]] = []
        if where.lens is not None:
            limits.append(("last_page_len" if where.kind == CSR else "seq_lens", where.lens.shape[0]))
        if where.indptr is not None:
            limits.append(("page_indptr" if where.kind == CSR else "kv_indptr", where.indptr.shape[0] - 1))
        if self.rows is not None:
            limits.append(("rows", self.rows.shape[0]))
        elif where.kind == PAGED and where.table is not None:
            limits.append(("page_table", where.table.shape[0]))
        elif where.kind == CONTIGUOUS:
            limits.append(("k", self.k.shape[0]))
        if self.kv_start is not None:
            limits.append(("kv_start", self.kv_start.shape[0]))
        if self.positions is not None:
            limits.append(("seq_lens", self.positions.seq_lens.shape[0]))
            if self.positions.starts is not None:
                limits.append(("starts", self.positions.starts.shape[0]))
        return limits

    @property
    def max_batch(self) -> int:
        """Most requests that the view has entries for."""
        return min(entries for _, entries in self._limits())

    def check_batch(self, batch: int) -> None:
        """Raise ValueError unless every per-request tensor of the view has an entry for each of `batch` requests."""
        for name, entries in self._limits():
            if entries < batch:
                raise ValueError(f"{name}: expected entries for a batch of {batch}, given {entries}")

    def check_values(self, q_lens: Sequence[int], window_left: int | None) -> None:
        """Read lengths, rows and page ids back from the device and raise where one is out of range.

        Waits for the device.

        Args:
            q_lens: Query tokens of each request.
            window_left: As for `splitkv.decode`: page ids left of every query token's window are never followed.

        Raises:
            ValueError: naming the tensor, the row, what was expected and given.
        """
        where, batch = self.addressing, len(q_lens)
        rows: Sequence[int] = range(batch)
        if self.rows is not None:
            rows = self.rows[:batch].tolist()
            entries = where.table if where.kind == PAGED and where.table is not None else self.k
            checks.check_values("rows", rows, 0, entries.shape[0] - 1)
        starts = [0] * batch if self.kv_start is None else self.kv_start[:batch].tolist()
        checks.check_values("kv_start", starts, 0)
        if self.positions is not None:
            self._check_positions(batch)
        bounds: list[int] = []
        if where.indptr is not None:
            bounds = where.indptr[: batch + 1].tolist()
            name = "kv_indptr" if where.kind == RAGGED else "page_indptr"
            checks.check_prefix_sums(name, bounds, where.capacity)
        if where.lens is None:
            return
        lens = where.lens[:batch].tolist()
        if where.kind == CSR:
            pages = [last - first for first, last in pairwise(bounds)]
            for b, (count, tail) in enumerate(zip(pages, lens, strict=True)):
                if count > 0 and not 1 <= tail <= where.page_size:
                    raise ValueError(f"last_page_len: expected values in 1…{where.page_size}, given {tail} in row {b}")
            lens = [(n - 1) * where.page_size + tail if n else 0 for n, tail in zip(pages, lens, strict=True)]
        else:
            checks.check_values("seq_lens", lens, 0, where.capacity)
        if where.table is None:
            return
        for b, (row, start, seq_len, q_len) in enumerate(zip(rows, starts, lens, q_lens, strict=True)):
            low = start if window_left is None else max(start, self._first_seen(b, seq_len, q_len, window_left))
            first, last = max(low, 0) // where.page_size, cdiv(seq_len, where.page_size)
            if q_len == 0 or last <= first:
                continue
            ids = (
                where.table[row, first:last]
                if where.kind == PAGED
                else where.table[bounds[b] + first : bounds[b] + last]
            )
            for place, page in enumerate(ids.tolist(), start=first):
                if not 0 <= page < self.k.shape[0]:
                    raise ValueError(
                        f"{'page_table' if where.kind == PAGED else 'page_indices'}: expected page ids in 0…"
                        f"{self.k.shape[0] - 1} for the {seq_len} tokens of row {b}, given {page} for its page {place}"
                    )

    def lengths(self, batch: int) -> list[int]:
        """Read back how many tokens the view has of each request, clamped as the kernels clamp it."""
        where = self.addressing
        lens = [] if where.lens is None else where.lens[:batch].tolist()
        if where.indptr is None:
            return [min(max(n, 0), where.capacity) for n in lens]
        edges = [min(max(edge, 0), where.capacity) for edge in where.indptr[: batch + 1].tolist()]
        counts = [max(last - first, 0) for first, last in pairwise(edges)]
        if where.kind == RAGGED:
            return counts
        return [
            (count - 1) * where.page_size + min(max(tail, 0), where.page_size) if count else 0
            for count, tail in zip(counts, lens, strict=True)
        ]

    def _first_seen(self, b: int, seq_len: int, q_len: int, window_left: int) -> int:
        """The first of request b's tokens that a window lets its query tokens see."""
        if self.positions is None:
            return seq_len - q_len - window_left
        stand = self.positions
        start = stand.first if stand.starts is None else int(stand.starts[b])
        return cdiv(int(stand.seq_lens[b]) - q_len - window_left - start, stand.step)

    def _check_positions(self, batch: int) -> None:
        """Raise where a token of a shard would stand past the end of its sequence."""
        stand = self.positions
        assert stand is not None
        totals = stand.seq_lens[:batch].tolist()
        starts = [stand.first] * batch if stand.starts is None else stand.starts[:batch].tolist()
        checks.check_values("seq_lens", totals, 0)
        checks.check_values("starts", starts, 0)
        for b, (count, start, total) in enumerate(zip(self.lengths(batch), starts, totals, strict=True)):
            end = start + (count - 1) * stand.step + 1 if count else 0
            if end > total:
                raise ValueError(
                    f"seq_lens: expected at least {end} in row {b}, whose shard of {count} tokens ends there, "
                    f"given {total}"
                )

    def check_shared(
        self, group_ids: Sequence[int], prefix_lens: Sequence[int], q_lens: Sequence[int], window_left: int | None
    ) -> None:
        """Read page ids back from the device and raise where requests of a group do not share those of their prefix.

        Args:
            group_ids, prefix_lens: As for `splitkv.decode_shared_prefix`, of each request.
            q_lens, window_left: As for `check_values`.

        Raises:
            ValueError: naming the tensor, the row, what was expected and given.
        """
        where, batch = self.addressing, len(group_ids)
        checks.check_values("group_ids", group_ids, -(2**31), batch - 1)
        checks.check_values("prefix_lens", prefix_lens, 0)
        if where.table is None:
            return
        rows = range(batch) if self.rows is None else self.rows[:batch].tolist()
        bounds = [] if where.indptr is None else where.indptr[: batch + 1].tolist()
        starts = [0] * batch if self.kv_start is None else self.kv_start[:batch].tolist()
        lens = self.lengths(batch)
        firsts: dict[int, int] = {}
        for b, group in enumerate(group_ids):
            if group < 0:
                continue
            a = firsts.setdefault(group, b)
            low = max(starts[a], starts[b])
            if window_left is not None:
                low = max(low, lens[a] - q_lens[a] - window_left, lens[b] - q_lens[b] - window_left)
            first, last = (
                low // where.page_size,
                cdiv(min(prefix_lens[a], prefix_lens[b], lens[a], lens[b]), where.page_size),
            )
            ids = [
                where.table[rows[c], first:last] if where.kind == PAGED
                else where.table[bounds[c] + first : bounds[c] + max(first, last)]
                for c in (a, b)
            ]  # fmt: skip
            for place, (known, other) in enumerate(zip(*(each.tolist() for each in ids), strict=True), start=first):
                if known != other:
                    name = "page_table" if where.kind == PAGED else "page_indices"
                    raise ValueError(
                        f"{name}: expected the pages of row {a} in the common prefix of row {b}, of the same group "
                        f"{group}: {known} for page {place}, given {other}"
                    )


def check_view(kv: object) -> KVView:
    """Raise TypeError unless this is a view."""
    if not isinstance(kv, KVView):
        raise TypeError(f"kv: expected a PagedKV, ContiguousKV, RaggedKV or LatentKV, given {type(kv).__name__}")
    return kv


def _paged_addressing(
    name: str,
    cache: Tensor,
    page_size: int,
    page_table: Tensor,
    seq_lens: Tensor,
    stride_k: tuple[int, ...],
    stride_v: tuple[int, ...],
) -> Addressing:
    """Check a page table and lengths, and say where the tokens of `cache`, the argument `name`, lie by them."""
    page_table = checks.check_tensor("page_table", page_table)
    checks.check_dtype("page_table", page_table, torch.int32)
    checks.check_rank("page_table", page_table, 2)
    checks.check_last_stride("page_table", page_table)
    checks.check_device("page_table", page_table, cache.device, name)
    checks.check_index_vector("seq_lens", seq_lens, cache.device, name)
    return Addressing(
        kind=PAGED,
        page_size=page_size,
        capacity=min(page_table.shape[1] * page_size, MAX_TOKENS),
        lens=seq_lens,
        indptr=None,
        table=page_table,
        stride_table_row=page_table.stride(0),
        stride_k=stride_k,
        stride_v=stride_v,
    )


class PagedKV(KVView):
    """A cache of pages, found through a page table.

    >>> k_cache = torch.zeros(8, 16, 2, 64); v_cache = torch.zeros(8, 16, 2, 64)
    >>> table = torch.tensor([[3, 1], [0, -1]], dtype=torch.int32)
    >>> kv = PagedKV(k_cache, v_cache, table, torch.tensor([20, 7], dtype=torch.int32))
    >>> kv.page_size, kv.num_kv_heads, kv.head_dim
    (16, 2, 64)

    Args:
        k_cache, v_cache: [num_pages, page_size, num_kv_heads, head_dim] ("HND": the middle two swapped); any strides
            with the last 1; float16, bfloat16 or float32, or quantised: float8_e4m3fn, float8_e5m2 or int8. The value
            width may differ. page_size 1 is a table of token slots.
        page_table: [rows, max_pages] int32, any row stride. Entries at or past ceil(seq_len / page_size) are never
            followed and may be -1.
        seq_lens: [≥ batch] int32, tokens in each request's cache, the current ones included. Clamped on the device to
            0…max_pages · page_size.
        rows: [≥ batch] int32, the table row of each request. None: request b uses row b.
        kv_start: [≥ batch] int32, tokens before it are invisible (left padding).
        k_scale, v_scale: Of a quantised cache, whose numbers they multiply: a number > 0; or float32 tensors that are
            read on the device: [] for all, [num_kv_heads], or [num_pages, page_size, num_kv_heads] (indexed as the
            cache), one per token and head. None: 1; of an int8 cache both must be given.
        layout: "NHD" or "HND".
        len_hint: Typical length in tokens, known to the host; may steer tile sizes, never results.
        schedule: A `Schedule`: how the step's requests are shared among programs. A hint too.

    Raises:
        TypeError, ValueError: dtype, rank, shape, stride or device, naming the argument.
    """

    def __init__(
        self,
        k_cache: Tensor,
        v_cache: Tensor,
        page_table: Tensor,
        seq_lens: Tensor,
        *,
        rows: Tensor | None = None,
        kv_start: Tensor | None = None,
        k_scale: Tensor | float | None = None,
        v_scale: Tensor | float | None = None,
        layout: str = "NHD",
        len_hint: int | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        self._hold_pages(k_cache, v_cache, layout, rows, kv_start, len_hint, schedule, k_scale, v_scale)
        self.page_table, self.seq_lens = page_table, seq_lens
        self._seal(
            _paged_addressing(
                "k_cache", k_cache, self.page_size, page_table, seq_lens, self._strides(k_cache), self._strides(v_cache)
            )
        )

    @classmethod
    def from_csr(
        cls,
        k_cache: Tensor,
        v_cache: Tensor,
        page_indptr: Tensor,
        page_indices: Tensor,
        last_page_len: Tensor,
        *,
        kv_start: Tensor | None = None,
        k_scale: Tensor | float | None = None,
        v_scale: Tensor | float | None = None,
        layout: str = "NHD",
        len_hint: int | None = None,
        schedule: Schedule | None = None,
    ) -> PagedKV:
        """A view from FlashInfer's form of a page table; lengths are derived on the device.

        >>> k_cache = torch.zeros(8, 16, 2, 64); v_cache = torch.zeros(8, 16, 2, 64)
        >>> indptr, indices = torch.tensor([0, 2, 3], dtype=torch.int32), torch.tensor([3, 1, 0], dtype=torch.int32)
        >>> kv = PagedKV.from_csr(k_cache, v_cache, indptr, indices, torch.tensor([4, 7], dtype=torch.int32))
        >>> kv.lengths(2)
        [20, 7]

        Args:
            k_cache, v_cache: As for PagedKV.
            page_indptr: [≥ batch + 1] int32, prefix sums of pages per request.
            page_indices: [num_indices] int32, the pages of all requests one after another.
            last_page_len: [≥ batch] int32, tokens in each request's last page, 1…page_size.
            kv_start, k_scale, v_scale, layout, len_hint, schedule: As for PagedKV.
        """
        view = cls.__new__(cls)
        view._hold_pages(k_cache, v_cache, layout, None, kv_start, len_hint, schedule, k_scale, v_scale)
        device = k_cache.device
        checks.check_index_vector("page_indptr", page_indptr, device, "k_cache", least=1)
        checks.check_index_vector("page_indices", page_indices, device, "k_cache")
        checks.check_index_vector("last_page_len", last_page_len, device, "k_cache")
        view.page_indptr, view.page_indices, view.last_page_len = page_indptr, page_indices, last_page_len
        addressing = Addressing(
            kind=CSR,
            page_size=view.page_size,
            capacity=page_indices.shape[0],
            lens=last_page_len,
            indptr=page_indptr,
            table=page_indices,
            stride_table_row=0,
            stride_k=view._strides(k_cache),
            stride_v=view._strides(v_cache),
        )
        view._seal(addressing)
        return view

    page_table: Tensor
    seq_lens: Tensor
    page_indptr: Tensor
    page_indices: Tensor
    last_page_len: Tensor

    def _hold_pages(
        self,
        k_cache: Tensor,
        v_cache: Tensor,
        layout: str,
        rows: Tensor | None,
        kv_start: Tensor | None,
        len_hint: int | None,
        schedule: Schedule | None,
        k_scale: Tensor | float | None,
        v_scale: Tensor | float | None,
    ) -> None:
        checks.check_choice("layout", layout, "NHD", "HND")
        _check_cache("k_cache", k_cache, 4)
        _check_cache("v_cache", v_cache, 4)
        _check_pair("k_cache", k_cache, "v_cache", v_cache)
        self.layout = layout
        tokens, heads = (1, 2) if layout == "NHD" else (2, 1)
        self.page_size = k_cache.shape[tokens]
        self._hold(k_cache, v_cache, k_cache.shape[heads], rows, kv_start, len_hint, schedule)
        self._hold_scales(k_scale, v_scale, self._strides)

    def _strides(self, tensor: Tensor) -> tuple[int, int, int]:
        """Elements between pages, tokens and heads of a cache or a scale."""
        page, second, third = tensor.stride()[:3]
        return (page, second, third) if self.layout == "NHD" else (page, third, second)


class ContiguousKV(KVView):
    """A cache with one stretch of tokens per request.

    >>> k = torch.zeros(2, 32, 2, 64)
    >>> kv = ContiguousKV(k, k.clone(), torch.tensor([20, 7], dtype=torch.int32))
    >>> kv.num_kv_heads
    2

    Args:
        k, v: [batch, max_len, num_kv_heads, head_dim], any strides with the last 1 (a [batch, heads, max_len, head_dim]
            cache is `cache.transpose(1, 2)`); dtypes as for PagedKV. The value width may differ.
        seq_lens: [≥ batch] int32, tokens of each request. Clamped on the device to 0…max_len.
        rows: [≥ batch] int32, the row of k and v of each request. None: request b uses row b.
        kv_start: [≥ batch] int32, tokens before it are invisible (left padding).
        k_scale, v_scale: As for PagedKV; per token and head [batch, max_len, num_kv_heads].
        len_hint: Typical length in tokens, known to the host; may steer tile sizes, never results.
        schedule: A `Schedule`: how the step's requests are shared among programs. A hint too.

    Raises:
        TypeError, ValueError: dtype, rank, shape, stride or device, naming the argument.
    """

    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        seq_lens: Tensor,
        *,
        rows: Tensor | None = None,
        kv_start: Tensor | None = None,
        k_scale: Tensor | float | None = None,
        v_scale: Tensor | float | None = None,
        len_hint: int | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        _check_cache("k", k, 4)
        _check_cache("v", v, 4)
        _check_pair("k", k, "v", v)
        checks.check_index_vector("seq_lens", seq_lens, k.device, "k")
        self._hold(k, v, k.shape[2], rows, kv_start, len_hint, schedule)
        self._hold_scales(k_scale, v_scale, lambda scale: (scale.stride(0), scale.stride(1), scale.stride(2)))
        self.seq_lens = seq_lens
        addressing = Addressing(
            kind=CONTIGUOUS,
            page_size=1,
            capacity=min(k.shape[1], MAX_TOKENS),
            lens=seq_lens,
            indptr=None,
            table=None,
            stride_table_row=0,
            stride_k=k.stride()[:3],
            stride_v=v.stride()[:3],
        )
        self._seal(addressing)


class RaggedKV(KVView):
    """The tokens of all requests one after another.

    >>> k = torch.zeros(27, 2, 64)
    >>> kv = RaggedKV(k, k.clone(), torch.tensor([0, 20, 27], dtype=torch.int32))
    >>> kv.head_dim
    64

    Args:
        k, v: [total_tokens, num_kv_heads, head_dim], any strides with the last 1; dtypes as for PagedKV. The value
            width may differ.
        kv_indptr: [≥ batch + 1] int32, prefix sums of tokens per request. Clamped on the device to 0…total_tokens.
        kv_start: [≥ batch] int32, tokens of a request before it are invisible.
        k_scale, v_scale: As for PagedKV; per token and head [total_tokens, num_kv_heads].
        len_hint: Typical length in tokens, known to the host; may steer tile sizes, never results.
        schedule: A `Schedule`: how the step's requests are shared among programs. A hint too.

    Raises:
        TypeError, ValueError: dtype, rank, shape, stride or device, naming the argument.
    """

    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        kv_indptr: Tensor,
        *,
        kv_start: Tensor | None = None,
        k_scale: Tensor | float | None = None,
        v_scale: Tensor | float | None = None,
        len_hint: int | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        _check_cache("k", k, 3)
        _check_cache("v", v, 3)
        _check_pair("k", k, "v", v)
        checks.check_index_vector("kv_indptr", kv_indptr, k.device, "k", least=1)
        self._hold(k, v, k.shape[1], None, kv_start, len_hint, schedule)
        self._hold_scales(k_scale, v_scale, lambda scale: (0, scale.stride(0), scale.stride(1)))
        self.kv_indptr = kv_indptr
        addressing = Addressing(
            kind=RAGGED,
            page_size=1,
            capacity=min(k.shape[0], MAX_TOKENS),
            lens=None,
            indptr=kv_indptr,
            table=None,
            stride_table_row=0,
            stride_k=(0, *k.stride()[:2]),
            stride_v=(0, *v.stride()[:2]),
        )
        self._seal(addressing)


class LatentKV(KVView):
    """A cache of latent rows, as multi-head latent attention (MLA) has them, found through a page table.

    All query heads share one key per token, its latent row; its value is the row's first columns. Each byte is read
    once. There is no default scale of scores: `decode` must be given sm_scale, which for MLA is not 1/√width.

    >>> cache = torch.zeros(8, 64, 576)
    >>> table = torch.tensor([[3, 1], [0, -1]], dtype=torch.int32)
    >>> kv = LatentKV(cache, table, torch.tensor([70, 7], dtype=torch.int32))
    >>> kv.num_kv_heads, kv.head_dim, kv.head_dim_v
    (1, 576, 512)

    Args:
        cache: [num_pages, page_size, width], any strides with the last 1; dtypes as for PagedKV. A cache with one
            stretch of tokens per request is one whose pages are these stretches.
        page_table, seq_lens: As for PagedKV.
        head_dim_v: Width of a value: the first so many columns of a row.
        rows, kv_start: As for PagedKV.
        scale: Of a quantised cache: a number > 0; or a float32 tensor that is read on the device: [] for all, or
            [num_pages, page_size], one per token. None: 1; of an int8 cache it must be given.
        len_hint, schedule: As for PagedKV.

    Raises:
        TypeError, ValueError: dtype, rank, shape, stride or device, naming the argument.
    """

    def __init__(
        self,
        cache: Tensor,
        page_table: Tensor,
        seq_lens: Tensor,
        *,
        head_dim_v: int = 512,
        rows: Tensor | None = None,
        kv_start: Tensor | None = None,
        scale: Tensor | float | None = None,
        len_hint: int | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        _check_cache("cache", cache, 3)
        checks.require_int("head_dim_v", head_dim_v, 1, cache.shape[-1])
        checks.check_scale("scale", scale, cache, cache.shape[:-1], None)
        k = cache.unsqueeze(2)
        self.latent = True
        self._hold(k, k[..., :head_dim_v], 1, rows, kv_start, len_hint, schedule)
        self.k_scale = self.v_scale = scale
        held = Scale.of(scale, lambda scale: (scale.stride(0), scale.stride(1), 0))
        self.scales = held, held
        self.cache, self.scale, self.page_size = cache, scale, cache.shape[1]
        self.page_table, self.seq_lens = page_table, seq_lens
        strides = (*cache.stride()[:2], 0)
        self._seal(_paged_addressing("cache", cache, self.page_size, page_table, seq_lens, strides, strides))

    page_table: Tensor
    seq_lens: Tensor
