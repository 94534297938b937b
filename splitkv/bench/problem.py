"""Decode problems on a device: caches over shared memory, page tables, views, and what the right answer is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from splitkv import masks, reference
from splitkv.bench.cells import VIEW_PAGE, Cell
from splitkv.config import cdiv
from splitkv.kv import ContiguousKV, KVView, LatentKV, PagedKV
from splitkv.work_list import Schedule

L2_MULTIPLE = 4  # caches in rotation hold at least so many times the L2 cache
DEFAULT_L2 = 64 * 2**20
MAX_COPIES = 1024  # cells below a quarter of a megabyte stay in the L2 cache: nothing but launches is to be seen there
REFERENCE_BYTES = 2**29  # of float64 keys at a time
INTEGER_SCALE = 1 / 32  # of caches of integers


class DoesNotFit(RuntimeError):
    """The device lacks the memory for a cell."""


def copies_for(cache_bytes: int, l2_bytes: int, limit_bytes: int, read_bytes: int | None = None) -> int:
    """How many caches to rotate over: two or more, together L2_MULTIPLE times the L2 cache if the memory allows it.

    >>> copies_for(4 * 2**20, 50 * 2**20, 80 * 2**30), copies_for(2**32, 50 * 2**20, 80 * 2**30)
    (50, 2)

    Args:
        cache_bytes: Of one cache.
        l2_bytes: Of the L2 cache.
        limit_bytes: That all caches may take.
        read_bytes: Of a cache that a call reads; None: all.

    Raises:
        DoesNotFit: not even one cache, or so few that the L2 cache would serve them.
    """
    read_bytes = read_bytes or cache_bytes
    wanted = min(MAX_COPIES, max(2, cdiv(L2_MULTIPLE * l2_bytes, read_bytes)))
    copies = min(wanted, limit_bytes // cache_bytes)
    if copies < 1 or copies * read_bytes < min(2 * l2_bytes, wanted * read_bytes):
        raise DoesNotFit(
            f"needs {wanted} caches of {cache_bytes / 2**30:.2f} GiB, {limit_bytes / 2**30:.2f} GiB are free"
        )
    return copies


class Buffers:
    """One stretch of memory, filled with normal variates, over which the caches of one cell after another are laid.

    Args:
        device: Where.
        dtype: Of the variates.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.data = torch.empty(0, dtype=dtype, device=device)
        if device.type == "cuda":
            props = torch.cuda.get_device_properties(device)
            self.l2_bytes = getattr(props, "L2_cache_size", 0) or DEFAULT_L2
        else:
            self.l2_bytes = 0

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.dtype.itemsize

    def limit(self) -> int:
        """Bytes that caches may take: half of what is free, since peers keep a copy of their own."""
        if self.device.type != "cuda":
            return 2**30
        torch.cuda.empty_cache()
        return max(self.nbytes, (torch.cuda.mem_get_info(self.device)[0] + self.nbytes) // 2)

    def reserve(self, nbytes: int) -> None:
        """Grow to this size. What was laid over the memory before is no longer to be used."""
        if nbytes <= self.nbytes:
            return
        # Freed first: both do not fit side by side where caches fill the device.
        self.data = torch.empty(0, dtype=self.dtype, device=self.device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.data = torch.empty(cdiv(nbytes, self.dtype.itemsize), dtype=self.dtype, device=self.device)
        self.fill()

    def fill(self) -> None:
        """Normal variates, of integers with a deviation of 32: INTEGER_SCALE times these are normal too."""
        if self.dtype.itemsize > 1:
            for part in torch.split(self.data, 2**30):
                part.normal_()
            return
        for part in torch.split(self.data.view(torch.uint8), 2**26):
            numbers = torch.randn(part.numel(), dtype=torch.float16, device=self.device)
            if not self.dtype.is_floating_point:
                numbers = numbers.div_(INTEGER_SCALE).round_().clamp_(-127, 127)
            part.copy_(numbers.to(self.dtype).view(torch.uint8))

    def copies(self, cell: Cell) -> int:
        """Caches of this cell to rotate over; raises DoesNotFit."""
        return copies_for(cell.cache_bytes, self.l2_bytes, self.limit(), cell.kv_bytes)


@dataclass
class Problem:
    """A cell on a device, in the form that peers take, and as our views.

    Attributes:
        cell: What it is.
        q: [batch, num_q_heads, head_dim], or of several query tokens or a tree [batch, q_len, num_q_heads, head_dim].
        k_caches, v_caches: One per copy, [num_pages, page_size, num_kv_heads, head_dim] each. A contiguous cell's are
            its rows as pages of 16 in order; values of a latent one are the first columns of its keys.
        scale: What numbers of both caches are multiplied by; 1 where they are not quantised.
        page_table: [batch, max_pages] int32, zeros past a request's pages: some peers read there.
        seq_lens: [batch] int32.
        lens: The same numbers on the host.
        views: Our view of each copy: PagedKV or LatentKV over these tensors, or ContiguousKV over the same memory.
        words: [kv_bytes / 4] int32 of each copy's memory: what the limit of the memory is measured on.
        rules: Keyword arguments of `splitkv.decode`: of window_left, softcap, sinks ([num_q_heads] of q's dtype) and
            tree_mask (of all requests the same) those that the cell has; sm_scale, head_dim ** -0.5, of a latent one.
    """

    cell: Cell
    q: Tensor
    k_caches: list[Tensor]
    v_caches: list[Tensor]
    page_table: Tensor
    seq_lens: Tensor
    lens: list[int]
    views: list[KVView]
    words: list[Tensor]
    rules: dict[str, Any]
    scale: float = 1.0

    @property
    def copies(self) -> int:
        return len(self.k_caches)

    @property
    def tokens(self) -> Tensor:
        """The queries as [batch, q_len, num_q_heads, head_dim]."""
        return self.q if self.q.dim() == 4 else self.q.unsqueeze(1)

    @property
    def shape_out(self) -> tuple[int, ...]:
        """Of the output: that of q, as wide as values."""
        return (*self.q.shape[:-1], self.cell.head_dim_v)

    @property
    def asks(self) -> frozenset[str]:
        """What a peer must know besides plain decode: "q_len" where there are several query tokens, names of rules,
        "latent" rows, dtypes of quantised caches."""
        more = {"q_len": self.cell.q_len > 1, "latent": self.cell.latent is not None}
        more |= {self.cell.kv_dtype: bool(self.cell.kv_dtype)}
        return (frozenset(self.rules) - {"sm_scale"}) | {name for name, asked in more.items() if asked}

    def sees(self, length: int) -> Tensor:
        """[q_len, visible keys] bool, from the first visible key of a request of this length on."""
        tree = self.rules.get("tree_mask")
        window_left = self.cell.window_left
        return reference.visible(
            self.cell.q_len,
            0,
            length,
            window_left=window_left,
            tree_mask=None if tree is None else tree[0],
            device=self.q.device,
        )[:, self.cell.first_visible(length) :]

    def view(self, copy: int, schedule: Schedule | None = None) -> KVView:
        """Our view of a copy."""
        cell, k, v = self.cell, self.k_caches[copy], self.v_caches[copy]
        more: dict[str, Any] = dict(len_hint=cell.longest, schedule=schedule)
        scale = self.scale if cell.kv_dtype else None
        if cell.latent is not None:
            return LatentKV(k[:, :, 0], self.page_table, self.seq_lens, head_dim_v=cell.latent, scale=scale, **more)
        more |= dict(k_scale=scale, v_scale=scale)
        if cell.page_size is None:
            rows = (cell.batch, cell.max_len, cell.num_kv_heads, cell.head_dim)
            return ContiguousKV(k.view(rows), v.view(rows), self.seq_lens, **more)
        return PagedKV(k, v, self.page_table, self.seq_lens, **more)

    def views_with(self, schedule: Schedule) -> list[KVView]:
        """The views again, with a work list."""
        return [self.view(copy, schedule) for copy in range(self.copies)]


def build(cell: Cell, buffers: Buffers, *, max_len: int, copies: int, seed: int = 0) -> Problem:
    """Lay a cell's caches over the buffers and place its pages at random.

    Args:
        cell: What to build.
        buffers: Memory; grown where too small.
        max_len: Tokens per request that the page table has columns for, ≥ the cell's longest.
        copies: Caches to rotate over.
        seed: Of queries and page places.
    """
    if max_len < cell.longest:
        raise ValueError(f"max_len: expected at least {cell.longest} (the longest request), given {max_len}")
    buffers.reserve(copies * cell.cache_bytes)
    device, dtype = buffers.device, cell.torch_dtype
    if cell.torch_kv_dtype != buffers.dtype:
        raise TypeError(f"buffers: expected {cell.torch_kv_dtype}, given {buffers.dtype}")
    generator = torch.Generator(device).manual_seed(seed)
    tokens = (cell.q_len,) if cell.q_len > 1 or cell.tree else ()
    shape_q = (cell.batch, *tokens, cell.num_q_heads, cell.head_dim)
    q = torch.randn(shape_q, dtype=dtype, device=device, generator=generator)
    rules: dict[str, Any] = {} if cell.latent is None else {"sm_scale": cell.head_dim**-0.5}
    if cell.window_left is not None:
        rules["window_left"] = cell.window_left
    if cell.softcap is not None:
        rules["softcap"] = cell.softcap
    if cell.sinks:
        rules["sinks"] = torch.randn(cell.num_q_heads, dtype=dtype, device=device, generator=generator)
    if cell.tree:
        parents = ((torch.arange(cell.q_len, dtype=torch.int32, device=device) - 1) // 2).expand(cell.batch, -1)
        words_shape = masks.tree_mask_shape(cell.batch, cell.q_len)
        tree = torch.empty(words_shape, dtype=torch.int32, device=device)
        rules["tree_mask"] = masks.tree_mask_from_parents(parents, tree)
    seq_lens = torch.tensor(cell.lens, dtype=torch.int32, device=device)
    page_size = cell.page_size or VIEW_PAGE
    shape = (cell.num_pages, page_size, cell.num_kv_heads, cell.head_dim)
    half = math.prod(shape)

    if cell.page_size is None:
        places = torch.arange(cell.num_pages, dtype=torch.int32, device=device)
        counts = [cell.max_len // VIEW_PAGE] * cell.batch
    else:
        places = torch.randperm(cell.num_pages, device=device, generator=generator).to(torch.int32)
        counts = list(cell.own_pages)
    shared = cell.shared // page_size
    page_table = torch.zeros(cell.batch, cdiv(max_len, page_size), dtype=torch.int32, device=device)
    page_table[:, :shared] = places[:shared]
    for b, pages in enumerate(torch.split(places[shared:], counts)):
        page_table[b, shared : shared + len(pages)] = pages

    k_caches, v_caches, words = [], [], []
    each = half if cell.latent is not None else 2 * half
    for copy in range(copies):
        both = buffers.data[each * copy : each * (copy + 1)]
        k = both[:half].view(shape)
        k_caches.append(k)
        v_caches.append(both[half:].view(shape) if cell.latent is None else k[..., : cell.latent])
        words.append(both.view(torch.int32)[: cell.kv_bytes // 4])
    scale = INTEGER_SCALE if cell.kv_dtype == "int8" else 1.0
    problem = Problem(cell, q, k_caches, v_caches, page_table, seq_lens, list(cell.lens), [], words, rules, scale)
    problem.views += [problem.view(copy) for copy in range(copies)]
    return problem


@dataclass(frozen=True)
class Expected:
    """The right answer, and how far from it a right computation in the problem's dtype may be.

    Attributes:
        out: The problem's shape_out, float64.
        norm_budget: Of ‖error‖₂ / ‖out‖₂.
        largest_budget: Of the largest |error|.
    """

    out: Tensor
    norm_budget: float
    largest_budget: float

    def error_ratio(self, out: Tensor) -> float:
        """Error as a fraction of the budget, the larger of both measures; above 1 is wrong, NaN is infinitely so."""
        error = out.reshape(self.out.shape).double() - self.out
        norm = (error.norm() / self.out.norm()).item() / self.norm_budget
        largest = error.abs().max().item() / self.largest_budget
        ratio = max(norm, largest)
        return ratio if math.isfinite(norm) and math.isfinite(largest) else math.inf


def expect(problem: Problem, copy: int) -> Expected:
    """Compute the answer over one copy in float64 on the problem's own device, a request and some heads at a time.

    The budget is twice the error that the same computation has in PyTorch with operands of the problem's dtype and a
    float32 softmax, plus two units in the last place of that dtype at the output's largest magnitude.
    """
    cell, device, dtype = problem.cell, problem.q.device, problem.q.dtype
    group, scale = cell.num_q_heads // cell.num_kv_heads, cell.head_dim**-0.5
    page_size = problem.k_caches[copy].shape[1]
    queries = problem.tokens.view(cell.batch, cell.q_len, cell.num_kv_heads, group, -1).transpose(1, 2)
    shape = (*queries.shape[:-1], cell.head_dim_v)
    right = torch.empty(shape, dtype=torch.float64, device=device)
    plain = torch.empty(shape, dtype=dtype, device=device)
    sinks = problem.rules.get("sinks")
    for b, length in enumerate(problem.lens):
        visible = slice(cell.first_visible(length), length)
        pages = problem.page_table[b, : cdiv(length, page_size)].long()
        keys, values = (
            _pages(cache, pages).flatten(0, 1)[visible].transpose(0, 1)  # [heads, tokens, head_dim]
            for cache in (problem.k_caches[copy], problem.v_caches[copy])
        )
        hidden = ~problem.sees(length).repeat_interleave(group, dim=0)  # a row per query token and head of the group
        step = max(1, REFERENCE_BYTES // (keys.shape[1] * max(cell.head_dim, len(hidden)) * 8))
        for first in range(0, cell.num_kv_heads, step):
            heads = slice(first, first + step)
            q, k, v = queries[b, heads].flatten(1, 2), keys[heads], values[heads]
            sink = None
            if sinks is not None:
                sink = sinks.view(-1, 1, group)[heads].expand(-1, cell.q_len, -1).flatten(1)[..., None]
            if cell.kv_dtype:
                # As an operand of the queries' dtype: exact, since the scale is a power of two.
                k, v = (numbers.to(dtype) * problem.scale for numbers in (k, v))
            weights = _weights(q.double() @ k.double().transpose(1, 2) * scale, hidden, cell.softcap, sink)
            right[b, heads] = (weights @ v.double()).view_as(right[b, heads])
            weights = _weights((q @ k.transpose(1, 2)).float() * scale, hidden, cell.softcap, sink)
            plain[b, heads] = (weights.to(dtype) @ v).view_as(plain[b, heads])
    right, plain = (t.transpose(1, 2).reshape(problem.shape_out) for t in (right, plain))
    error = plain.double() - right
    top = right.abs().max().item()
    two_ulps = 2 * torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(top))
    return Expected(
        out=right,
        norm_budget=2 * (error.norm() / right.norm()).item() + two_ulps / top,
        largest_budget=2 * error.abs().max().item() + two_ulps,
    )


def _pages(cache: Tensor, pages: Tensor) -> Tensor:
    """These pages of a cache; gathered as bytes where elements are, which all versions of PyTorch can."""
    return cache.view(torch.uint8)[pages].view(cache.dtype) if cache.element_size() == 1 else cache[pages]


def _weights(scores: Tensor, hidden: Tensor, softcap: float | None, sink: Tensor | None) -> Tensor:
    """Softmax weights [heads, rows, tokens] of scaled scores, in their dtype.

    Args:
        scores: [heads, rows, tokens].
        hidden: [rows, tokens] bool.
        softcap: As for `splitkv.decode`.
        sink: [heads, rows, 1] logits that join the softmax.
    """
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(hidden, -math.inf)
    if sink is None:
        return torch.softmax(scores, dim=-1)
    return torch.softmax(torch.cat([scores, sink.to(scores.dtype)], dim=-1), dim=-1)[..., :-1]
