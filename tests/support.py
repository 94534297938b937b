"""What tests of decode share: cuts of the sequence, scattered pages, poisoned scratch between guards, tolerances."""

from __future__ import annotations

import dataclasses
import itertools
import math
import mmap
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
from torch import Tensor

import splitkv
from splitkv import checks
from splitkv.api import plan_decode
from splitkv.config import next_power_of_2
from splitkv.tiles import Target

GUARD_BYTE = 0xA5
GUARD_BYTES = 512
GARBAGE = {
    "nan": 0x7FC07FC0,  # a NaN as float32, float16 and bfloat16
    "huge": 0x7B7B7B7B,  # 1.3e36 as float32 and bfloat16, 61000 as float16
    "plausible": 0x3F803F80,  # about 1 as float32 and bfloat16
}
"""Bit patterns that scratch is filled with; a kernel writes none of them by chance to more than a few places."""


@dataclass(frozen=True)
class Cut:
    """How a sequence is cut: num_splits of the call, or split_tokens of the workspace, or the default schedule."""

    num_splits: int | None = None
    split_tokens: int | None = None
    max_parts: int = 8

    def __str__(self) -> str:
        if self.num_splits is not None:
            return f"splits{self.num_splits}"
        return "default" if self.split_tokens is None else f"tokens{self.split_tokens}"

    def parts(self, seq_len: int) -> int | None:
        """Parts that a tile over seq_len keys is attended in; None where the schedule decides."""
        if self.num_splits is not None:
            return self.num_splits
        if self.split_tokens is None:
            return None
        needed = math.ceil(seq_len / self.split_tokens)
        return max(1, math.ceil(needed / max(1, math.ceil(needed / self.max_parts))))


WHOLE = Cut(num_splits=1)
DEFAULT = Cut()
LAYOUTS = ("paged", "contiguous", "csr", "ragged", "hnd")


def each_way(tokens: int, splits: int = 3) -> pytest.MarkDecorator:
    """Parametrise a test's `cut` and `layout`.

    Unsplit, in `splits` parts and in parts of `tokens`, each paged and contiguous; each of the other layouts once; and
    the default schedule, which leaves short sequences whole.
    """
    parts, fixed = Cut(num_splits=splits), Cut(split_tokens=tokens)
    ways = [
        (WHOLE, "paged"),
        (WHOLE, "contiguous"),
        (parts, "paged"),
        (parts, "contiguous"),
        (fixed, "paged"),
        (fixed, "contiguous"),
        (WHOLE, "csr"),
        (parts, "hnd"),
        (fixed, "ragged"),
        (DEFAULT, "paged"),
    ]
    return pytest.mark.parametrize(("cut", "layout"), ways, ids=[f"{cut}-{layout}" for cut, layout in ways])


def ints(values: Any, device: torch.device) -> Tensor:
    """An int32 tensor."""
    return torch.tensor(values, dtype=torch.int32, device=device)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on this device with the same strides, which `.to` keeps of dense tensors alone."""
    if tensor.device == device:
        return tensor
    flat = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    return flat.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Raises where torch would wait for the GPU."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def index_probe(
    device: torch.device,
    batch: int,
    max_len: int,
    *,
    heads: int = 1,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Keys of 0, values that are the token's index: out is the mean of the visible indices, exp(lse) their number."""
    k = torch.zeros(batch, max_len, heads, head_dim, dtype=dtype, device=device)
    v = k + torch.arange(max_len, device=device, dtype=dtype)[:, None, None]
    return k, v


def masked(values: Tensor, mask: Tensor, fill: float) -> Tensor:
    """The values but `fill` where the mask says so, of 8-bit floats too."""
    if values.element_size() > 1:
        return values.masked_fill(mask, fill)
    code = int(torch.tensor(fill).to(values.dtype).view(torch.uint8))
    return values.view(torch.uint8).masked_fill(mask, code).view(values.dtype)


def view_of(
    layout: str,
    k: Tensor,
    v: Tensor,
    seq_lens: Sequence[int],
    *,
    page_size: int = 4,
    poison: float = math.nan,
    **options: Any,
) -> splitkv.kv.KVView:
    """The first seq_lens[b] tokens of each row of k and v [batch, max_len, heads, width] as a view of this layout.

    Everything that no request owns is poison: slots past a row's length, the tail of its last page, whole spare pages.
    Pages lie in shuffled order, and table entries past a row's last page are -1.
    """
    device, max_len = k.device, k.shape[1]
    if layout == "contiguous":
        dead = torch.arange(max_len, device=device)[None, :] >= torch.tensor(seq_lens, device=device)[:, None]
        k, v = (masked(t, dead[:, :, None, None], poison) for t in (k, v))
        return splitkv.ContiguousKV(k, v, ints(seq_lens, device), **options)
    if layout == "ragged":
        indptr = [sum(seq_lens[:b]) for b in range(len(seq_lens) + 1)]
        spare = [k.new_full((3, *k.shape[2:]), poison), v.new_full((3, *v.shape[2:]), poison)]
        k, v = (
            torch.cat([*(t[b, :n] for b, n in enumerate(seq_lens)), tail])
            for t, tail in zip((k, v), spare, strict=True)
        )
        return splitkv.RaggedKV(k, v, ints(indptr, device), **options)
    pages = [math.ceil(n / page_size) for n in seq_lens]
    ids = torch.randperm(sum(pages) + 2).tolist()
    caches = []
    for t in (k, v):
        cache = t.new_full((len(ids), page_size, *t.shape[2:]), poison)
        for b, n in enumerate(seq_lens):
            for j in range(pages[b]):
                page = t[b, j * page_size : min((j + 1) * page_size, n)]
                cache[ids[sum(pages[:b]) + j], : page.shape[0]] = page
        caches.append(cache)
    if layout == "csr":
        indptr = [sum(pages[:b]) for b in range(len(pages) + 1)]
        tails = [n - (count - 1) * page_size if count else 1 for n, count in zip(seq_lens, pages, strict=True)]
        return splitkv.PagedKV.from_csr(
            *caches, ints(indptr, device), ints(ids[: sum(pages)], device), ints(tails, device), **options
        )
    table = [
        [ids[sum(pages[:b]) + j] if j < pages[b] else -1 for j in range(max(*pages, 1) + 1)] for b in range(len(pages))
    ]
    if layout == "hnd":
        caches = [cache.transpose(1, 2).contiguous() for cache in caches]
        options["layout"] = "HND"
    return splitkv.PagedKV(*caches, ints(table, device), ints(seq_lens, device), **options)


class Scratch:
    """A workspace over exactly `config.nbytes` bytes of garbage between two guards."""

    def __init__(self, config: splitkv.WorkspaceConfig, device: torch.device, garbage: str = "nan") -> None:
        self.config, self.pattern = config, GARBAGE[garbage]
        self.block = torch.full((config.nbytes + 2 * GUARD_BYTES + 256,), GUARD_BYTE, dtype=torch.uint8, device=device)
        self.start = GUARD_BYTES + -(self.block.data_ptr() + GUARD_BYTES) % 256
        self.buffer = self.block[self.start : self.start + config.nbytes]
        self.buffer.view(torch.int32).fill_(self.pattern)
        self.workspace = splitkv.Workspace.from_buffer(config, self.buffer)

    def changed(self, tensor: Tensor) -> Tensor:
        """Which 4-byte words of a section no longer hold the garbage."""
        start = tensor.data_ptr() - self.buffer.data_ptr()
        return (
            self.buffer[start : start + tensor.numel() * tensor.element_size() // 4 * 4].view(torch.int32)
            != self.pattern
        )

    def partial_tiles(self, rows: int) -> tuple[int, int]:
        """Partial tiles (of `rows` rows) that hold the result of a key, and those that were written at all."""
        lse = self.workspace.partial_lse.view(-1)
        count = lse.numel() // rows * rows
        written = self.changed(self.workspace.partial_lse)[:count].view(-1, rows)
        keyed = written & lse[:count].view(-1, rows).isfinite()
        return int(keyed.any(1).sum()), int(written.any(1).sum())

    def assert_guards(self) -> None:
        """Nothing was written outside the buffer, nor in the gaps between its sections."""
        assert (self.block[: self.start] == GUARD_BYTE).all(), "written before the workspace"
        assert (self.block[self.start + self.config.nbytes :] == GUARD_BYTE).all(), "written past the workspace"
        sections = self.config.sections()
        words = self.buffer.view(torch.int32)
        for section, following in itertools.pairwise(sections):
            gap = words[math.ceil(section.end / 4) : following.offset // 4]
            assert (gap == self.pattern).all(), f"written past {section.name}"

    def assert_unused(self, name: str, elements: int) -> None:
        """Of the section `name`, nothing past its first `elements` was written."""
        section: Tensor = getattr(self.workspace, name)
        used = math.ceil(elements * section.element_size() / 4)
        assert not self.changed(section)[used:].any(), f"workspace.{name}: written past the call's rows"


@dataclass(frozen=True)
class Result:
    """What a decode call left.

    Attributes:
        out, lse: Clones of the results.
        parts: Partials per query tile that hold the result of a key, 0 for uncut tiles; the mean over the call.
        written: Partials per query tile that were written, those without keys included; the mean over the call.
        scratch: The workspace that it used.
    """

    out: Tensor
    lse: Tensor
    parts: float
    written: float
    scratch: Scratch


def config_for(q: Tensor, kv: splitkv.kv.KVView, cut: Cut = WHOLE, batch: int | None = None) -> splitkv.WorkspaceConfig:
    """The smallest workspace in which this call fits, cut like this."""
    batch = q.shape[0] if batch is None else batch
    total_q = q.shape[:-2].numel()
    group = q.shape[-2] // kv.num_kv_heads
    rows = max(16, min(64, next_power_of_2(group * (total_q if batch == 0 else math.ceil(total_q / max(batch, 1))))))
    config = splitkv.WorkspaceConfig(
        max_batch_size=max(batch, 1),
        num_q_heads=q.shape[-2],
        num_kv_heads=kv.num_kv_heads,
        head_dim=kv.head_dim,
        head_dim_v=kv.head_dim_v,
        max_total_q=max(total_q, 1),
        max_splits=None if cut.split_tokens is not None else 64,
        q_tile_rows=rows,
        split_tokens=cut.split_tokens,
        max_parts=cut.max_parts,
        dtype=q.dtype,
    )
    if cut.num_splits is None or cut.split_tokens is not None:
        return config
    needed = config.max_q_tiles * kv.num_kv_heads * cut.num_splits
    return dataclasses.replace(config, max_splits=needed if cut.num_splits > 1 else 1)


def attend(
    q: Tensor,
    kv: splitkv.kv.KVView,
    cut: Cut = WHOLE,
    *,
    garbage: str = "nan",
    given: bool = False,
    sm_scale: float | None = 1.0,
    qo_indptr: Tensor | None = None,
    **rules: Any,
) -> Result:
    """Decode into NaN with a workspace of garbage between guards, and see that nothing else was written.

    Args:
        q, kv, rules: The call.
        cut: How it is cut.
        garbage: What the workspace holds before.
        given: Whether out and lse are tensors of the caller, strided and guarded, and not the workspace's.
    """
    batch = None if qo_indptr is None else qo_indptr.shape[0] - 1
    scratch = Scratch(config_for(q, kv, cut, batch), q.device, garbage)
    workspace = scratch.workspace
    rules = dict(rules, sm_scale=sm_scale, qo_indptr=qo_indptr)
    if cut.num_splits is not None:
        rules["num_splits"] = cut.num_splits
    rows, width = q.shape[:-1], kv.head_dim_v
    if given:
        wide = torch.full((*rows, width + 8), math.nan, dtype=q.dtype, device=q.device)
        guarded = torch.full((*rows[:-1], rows[-1] + 1), math.nan, dtype=torch.float32, device=q.device)
        rules["out"], rules["lse"] = wide[..., :width], guarded[..., : rows[-1]]
        out = splitkv.decode(q, kv, workspace, **rules)
        lse = rules["lse"]
        assert out is rules["out"]
        assert wide[..., width:].isnan().all(), "written past a row of out"
        assert guarded[..., rows[-1] :].isnan().all(), "written past a row of lse"
        scratch.assert_unused("out", 0)
        scratch.assert_unused("lse", 0)
    else:
        workspace.out.view(-1)[: rows.numel() * width].fill_(math.nan)
        workspace.lse.view(-1)[: rows.numel()].fill_(math.nan)
        out, lse = splitkv.decode_with_lse(q, kv, workspace, **rules)
        assert out.data_ptr() == workspace.out.data_ptr() and lse.data_ptr() == workspace.lse.data_ptr()
        scratch.assert_unused("out", rows.numel() * width)
        scratch.assert_unused("lse", rows.numel())
    assert out.shape == (*rows, width) and out.dtype == q.dtype
    assert lse.shape == rows and lse.dtype == torch.float32
    scratch.assert_guards()
    q_lens = [q.shape[1] if q.dim() == 4 else 1] * q.shape[0]
    if qo_indptr is not None:
        q_lens = [last - first for first, last in itertools.pairwise(qo_indptr.tolist())]
    launches = plan_decode(q, kv, workspace, **rules).launches  # whose tiles may be smaller than a workspace allows
    tile_rows = launches[0].constants["BLOCK_M"] if launches else scratch.config.q_tile_rows
    tiles = kv.num_kv_heads * sum(math.ceil(n * scratch.config.group_size / tile_rows) for n in q_lens)
    keyed, written = scratch.partial_tiles(tile_rows)
    return Result(out.clone(), lse.clone(), keyed / max(tiles, 1), written / max(tiles, 1), scratch)


def assert_cut(result: Result, cut: Cut, *seq_lens: int, all_seen: bool = True) -> None:
    """Each request's tiles (all with as many rows) were cut in as many parts as `cut` says, 1 being uncut.

    all_seen: each key is seen by some row of each tile, so that no part with keys is left empty by a window.
    """
    parts = [cut.parts(n) for n in seq_lens]
    if None in parts:
        return  # the default schedule: tests that rely on its cuts look at result.parts themselves
    pairs = [(p, n) for p, n in zip(parts, seq_lens, strict=True) if p is not None]
    keyed = sum(min(p, n) if p > 1 else 0 for p, n in pairs) / len(pairs)
    written = sum(p if p > 1 else 0 for p, _ in pairs) / len(pairs)
    assert result.parts == pytest.approx(keyed) if all_seen else result.parts <= keyed
    # With split_tokens parts that a length has no use for may be written too.
    assert result.written == pytest.approx(written) if cut.split_tokens is None else result.written >= written - 1e-6


def ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """One unit in the last place of a 16-bit dtype at these magnitudes."""
    info = torch.finfo(dtype)
    exponent = torch.floor(torch.log2(values.abs().clamp(min=info.tiny)))
    return torch.exp2(exponent) * info.eps


def assert_values(actual: Tensor, expected: Any, *, zero: float = 0.0) -> None:
    """Relative 1e-5 in float32, one unit in the last place in 16 bits; infinities and zeros exactly.

    `expected` is anything that broadcasts to the shape of `actual`; `zero` is the tolerance where a 0 is expected.
    """
    got = actual.detach().double().cpu()
    want = torch.as_tensor(expected, dtype=torch.float64).expand(got.shape)
    limit = 1e-5 * want.abs() if actual.dtype == torch.float32 else ulp(want, actual.dtype)
    limit = torch.where(want == 0, torch.full_like(want, zero), limit)
    fine = torch.where(want.isinf(), got == want, (got - want).abs() <= limit)
    assert fine.all(), (
        f"expected {want[~fine][:8].tolist()}, got {got[~fine][:8].tolist()} at {(~fine).nonzero()[:8].tolist()}"
    )


def assert_rows(result: Result, outs: Any, lses: Any) -> None:
    """Each row's output (the same in all columns) and lse; both of the shape of lse, or broadcast to it."""
    shape = result.lse.shape
    want_out = torch.as_tensor(outs, dtype=torch.float64).expand(shape)[..., None]
    assert_values(result.out, want_out)
    assert_values(result.lse, lses, zero=1e-5)


H200 = Target("cuda:90", num_sms=132, shared_memory=232448, sm_shared_memory=233472)
"""As `Target.of` makes it where there is one."""

STEP = 2**30 + 512  # elements of `spacious`: fits 32 bits itself, and twice it does not


def spacious(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[elements], more than 32-bit offsets reach. On a CPU this is address space: touched pages alone take memory."""
    nbytes = elements * dtype.itemsize
    if device.type == "cuda":
        if torch.cuda.mem_get_info(device)[0] < nbytes + 2**30:
            pytest.skip(f"needs {nbytes / 2**30:.1f} GiB of free GPU memory")
        return torch.empty(elements, dtype=dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        return torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=dtype)
    except OSError as error:
        pytest.skip(f"needs {nbytes / 2**30:.1f} GiB of address space: {error}")


def run_script(script: str, **variables: str) -> str:
    """What a script prints, in a process of its own."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": path} | variables, capture_output=True,
        text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class CheckedMemory:
    """Lets Triton's interpreter load and store within the operands of the running kernel only."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton.runtime import interpreter

        self.interpreter = interpreter._interpreter
        monkeypatch.setattr(interpreter, "_interpreter", self)
        self.first, self.last = np.empty(0, np.uint64), np.empty(0, np.uint64)
        self.accesses = 0
        launch = triton.runtime.jit.KernelInterface.__getitem__

        def watched(kernel: Any, grid: Any) -> Any:
            def run(**operands: Any) -> Any:
                self.allow([checks.extent(t) for t in operands.values() if isinstance(t, Tensor) and t.numel()])
                return launch(kernel, grid)(**operands)

            return run

        monkeypatch.setattr(triton.runtime.jit.KernelInterface, "__getitem__", watched)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.interpreter, name)

    def allow(self, spans: list[tuple[int, int]]) -> None:
        """These stretches of addresses, and no others from now on."""
        joined: list[list[int]] = []
        for first, last in sorted(spans):
            if joined and first <= joined[-1][1]:
                joined[-1][1] = max(joined[-1][1], last)
            else:
                joined.append([first, last])
        self.first, self.last = np.array(joined, dtype=np.uint64).reshape(-1, 2).T

    def check(self, what: str, pointers: Any, mask: Any, size: int) -> None:
        live = pointers[np.broadcast_to(mask, pointers.shape)].astype(np.uint64)
        if live.size:
            self.accesses += live.size
            place = np.searchsorted(self.first, live, side="right") - 1
            inside = (place >= 0) & (live + np.uint64(size) <= self.last[place])
            assert inside.all(), f"{what} outside of the operands: {(~inside).sum()} of {live.size} addresses"

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self.check("load", pointers, mask, np.dtype(dtype).itemsize)
        return self.interpreter.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        self.check("store", pointers, mask, value.dtype.itemsize)
        return self.interpreter.store(pointers, value, mask)
