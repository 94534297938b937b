"""`python -m splitkv demo`: the main job on this machine, on real and on generated data."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import splitkv
from splitkv import testing
from splitkv._interpreter import why_not
from splitkv.config import cdiv
from splitkv.doctor import describe_device, found_versions, kernel_device, show_sections
from splitkv.screen import Screen, mebibytes

ACTIVATIONS = Path(__file__).parents[1] / "tests" / "data" / "smollm2_activations.pt"
PAGE_SIZE = 16
L2_MULTIPLE = 3  # caches in rotation hold at least so many times the L2 cache


@dataclass(frozen=True)
class Generated:
    """A decode call on normal variates: one query token per request, pages of 16 tokens in random places.

    Attributes:
        lens: KV tokens of each request.
        num_q_heads, num_kv_heads, head_dim, dtype: The geometry.
    """

    lens: tuple[int, ...]
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that the call reads."""
        return sum(self.lens) * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def num_pages(self) -> int:
        """Pages that hold them."""
        return sum(cdiv(length, PAGE_SIZE) for length in self.lens)

    @property
    def text(self) -> str:
        """Its lengths in words."""
        runs: list[list[int]] = []
        for length in self.lens:
            if runs and runs[-1][1] == length:
                runs[-1][0] += 1
            else:
                runs.append([1, length])
        return ", ".join(f"{count} × {length}" if count > 1 else str(length) for count, length in runs)


ON_CPU = tuple(
    Generated((500, 0, 33, 170), num_q_heads=8, num_kv_heads=2, dtype=dtype)
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
)
ON_GPU = (
    Generated((4096,)),
    Generated((32768,)),
    Generated((4096,) * 8),
    Generated((4096,) * 32),
    Generated((65536, *(1024,) * 63)),
)


@dataclass(frozen=True)
class Problem:
    """A query and caches that hold the same shapes.

    Attributes:
        q: [batch, num_q_heads, head_dim].
        views: One per cache; timed calls rotate over them.
        rules: Further arguments of decode.
        words: Each cache's memory as int32, for a plain read of as many bytes as decode reads.
    """

    q: Tensor
    views: list[splitkv.PagedKV]
    rules: dict[str, Any]
    words: list[Tensor]


def real_problem(layer: dict[str, Tensor], sm_scale: float, positions: Tensor, device: torch.device) -> Problem:
    """A layer's queries, each a request that sees the text up to its own token; all share the pages of one cache.

    Args:
        layer: "q" [queries, num_q_heads, head_dim], "k" and "v" [tokens, num_kv_heads, head_dim].
        sm_scale: The model's.
        positions: [queries] int32, each query's token.
    """
    tokens, num_kv_heads, head_dim = layer["k"].shape
    pages = cdiv(tokens, PAGE_SIZE)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(0))
    caches = []
    for name in ("k", "v"):
        cache = torch.zeros(pages * PAGE_SIZE, num_kv_heads, head_dim, dtype=layer[name].dtype)
        cache[:tokens] = layer[name]
        placed = torch.empty_like(cache).view(pages, PAGE_SIZE, num_kv_heads, head_dim)
        placed[table] = cache.view_as(placed)
        caches.append(placed.to(device))
    kv = splitkv.PagedKV(
        caches[0],
        caches[1],
        table.to(device, torch.int32)[None],
        (positions + 1).to(device, torch.int32),
        rows=torch.zeros(len(positions), dtype=torch.int32, device=device),
    )
    return Problem(layer["q"].to(device), [kv], {"sm_scale": sm_scale}, [])


def generated_problem(what: Generated, device: torch.device, copies: int) -> Problem:
    """Normal variates in `copies` caches."""
    generator = torch.Generator(device).manual_seed(0)
    caches = torch.empty(
        copies, 2, max(what.num_pages, 1), PAGE_SIZE, what.num_kv_heads, what.head_dim, dtype=what.dtype, device=device
    ).normal_(generator=generator)
    table = torch.full((len(what.lens), max(cdiv(max(what.lens), PAGE_SIZE), 1)), -1, dtype=torch.int32, device=device)
    places = torch.randperm(what.num_pages, generator=generator, device=device).to(torch.int32)
    for b, pages in enumerate(torch.split(places, [cdiv(length, PAGE_SIZE) for length in what.lens])):
        table[b, : len(pages)] = pages
    seq_lens = torch.tensor(what.lens, dtype=torch.int32, device=device)
    q = torch.empty(len(what.lens), what.num_q_heads, what.head_dim, dtype=what.dtype, device=device)
    return Problem(
        q.normal_(generator=generator),
        [splitkv.PagedKV(cache[0], cache[1], table, seq_lens) for cache in caches],
        {},
        [cache.view(-1).view(torch.int32)[: what.kv_bytes // 4] for cache in caches],
    )


def workspace_for(problem: Problem) -> splitkv.Workspace:
    """A workspace for this call."""
    batch, num_q_heads, head_dim = problem.q.shape
    config = splitkv.WorkspaceConfig(batch, num_q_heads, problem.views[0].num_kv_heads, head_dim, dtype=problem.q.dtype)
    return splitkv.Workspace.allocate(config, problem.q.device)


@dataclass(frozen=True)
class Errors:
    """How far a result is from the same computation in float64.

    Attributes:
        norm: ‖error‖₂ / ‖result‖₂.
        largest: Of one element.
        lse: The largest of the log-sum-exp.
        share: Of the error budget; at most 1 is right.
    """

    norm: float
    largest: float
    lse: float
    share: float

    COLUMNS = (">error, norm", ">largest", ">of LSE", ">share of budget")

    @property
    def cells(self) -> tuple[str, ...]:
        """Text for a table."""
        return f"{self.norm:.1e}", f"{self.largest:.1e}", f"{self.lse:.1e}", f"{self.share:.2f}"


def measure_errors(problem: Problem, workspace: splitkv.Workspace) -> Errors:
    """Decode over the last cache and compare."""
    kv = problem.views[-1]
    out, lse = splitkv.decode_with_lse(problem.q, kv, workspace, **problem.rules)
    expected = testing.expect(problem.q, kv, **problem.rules)
    error = out.double() - expected.out
    seen = expected.lse > -math.inf
    return Errors(
        norm=float(error.norm() / expected.out.norm()),
        largest=float(error.abs().max()),
        lse=float((lse.double() - expected.lse)[seen].abs().max()),
        share=max(expected.error_ratio(out), expected.lse_error_ratio(lse)),
    )


def copies_for(what: Generated, device: torch.device) -> int:
    """Caches that a timing on this GPU rotates over, so that its L2 cache serves none of them; 0 if they do not fit."""
    l2 = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 64 * 2**20
    copies = max(2, cdiv(L2_MULTIPLE * l2, what.kv_bytes))
    free, _ = torch.cuda.mem_get_info(device)
    return copies if copies * what.kv_bytes < free // 2 else 0


def times(problem: Problem, workspace: splitkv.Workspace, kv_bytes: int) -> tuple[str, ...]:
    """Text for a table: decode's time and bandwidth, and those of a plain read of the same bytes."""
    from splitkv.bench.timing import graph_time_us, speed_of_light_us

    def call(i: int) -> None:
        splitkv.decode(problem.q, problem.views[i], workspace, **problem.rules)

    decode_us = graph_time_us(call, len(problem.views), problem.q.device)
    read_us = speed_of_light_us(problem.words)
    return (
        f"{decode_us:.1f}",
        f"{kv_bytes / decode_us / 1e3:.0f}",
        f"{read_us:.1f}",
        f"{kv_bytes / read_us / 1e3:.0f}",
        f"{100 * read_us / decode_us:.0f} %",
    )


TIME_COLUMNS = (">µs", ">GB/s", ">plain read, µs", ">GB/s", ">of plain read")


def show_real(screen: Screen, device: torch.device) -> list[float]:
    """Decode the captured activations and show the errors; returns shares of the error budget."""
    if not ACTIVATIONS.exists():
        screen.line(
            f"No real activations: {ACTIVATIONS} is not there (it belongs to a checkout). Generated ones follow.\n"
        )
        return []
    data = torch.load(ACTIVATIONS, weights_only=True)
    count = len(data["query_positions"])
    # The interpreter takes a few of the queries, a GPU all.
    chosen = torch.linspace(0, count - 1, 3).long() if device.type == "cpu" else torch.arange(count)
    positions = data["query_positions"][chosen]
    rows, shares = [], []
    with screen.progress(len(data["layers"])) as tell:
        for name, layer in data["layers"].items():
            tell(f"layer {name}")
            picked = {"q": layer["q"][chosen], "k": layer["k"], "v": layer["v"]}
            problem = real_problem(picked, data["sm_scale"], positions, device)
            errors = measure_errors(problem, workspace_for(problem))
            rows.append((f"layer {name}", *errors.cells))
            shares.append(errors.share)
    screen.table(
        "Real activations: SmolLM2-135M-Instruct reading the first pages of a book",
        ["", *Errors.COLUMNS],
        rows,
        note=f"{len(chosen)} requests of {int(positions[0]) + 1} to {int(positions[-1]) + 1} tokens that share pages "
        f"of {PAGE_SIZE}; {layer['q'].shape[1]} query heads on {layer['k'].shape[1]} KV heads of width "
        f"{layer['k'].shape[2]}; float16. Errors are against float64.",
    )
    return shares


def show_generated(screen: Screen, device: torch.device) -> list[float]:
    """Decode generated data, show errors and on a GPU times; returns shares of the error budget."""
    timed = device.type == "cuda"
    calls = ON_GPU if timed else ON_CPU
    rows: list[tuple[object, ...]] = []
    shares = []
    with screen.progress(len(calls)) as tell:
        for what in calls:
            tell(what.text)
            copies = copies_for(what, device) if timed else 1
            size = (what.text, str(what.dtype).removeprefix("torch."), mebibytes(what.kv_bytes))
            if not copies:
                rows.append((*size, "does not fit the free memory"))
                continue
            problem = generated_problem(what, device, copies)
            workspace = workspace_for(problem)
            errors = measure_errors(problem, workspace)
            shares.append(errors.share)
            rows.append((*size, *errors.cells, *(times(problem, workspace, what.kv_bytes) if timed else ())))
    example = calls[-1]
    about = (
        "Times are medians per call of a CUDA graph of many calls, each on the next of several caches that together "
        "exceed the L2 cache; a plain read reads as many bytes once and does nothing else."
        if timed
        else "Times would say nothing: these kernels are interpreted."
    )
    screen.table(
        "Generated data",
        [">requests × tokens", "dtype", ">KV, MiB", *Errors.COLUMNS, *(TIME_COLUMNS if timed else ())],
        rows,
        note=f"{example.num_q_heads} query heads on {example.num_kv_heads} KV heads of width {example.head_dim}; "
        f"pages of {PAGE_SIZE} in random places. Errors are against float64. {about}",
    )
    config = splitkv.WorkspaceConfig(
        len(example.lens), example.num_q_heads, example.num_kv_heads, example.head_dim, dtype=example.dtype
    )
    show_sections(screen, config, f"Workspace for {len(example.lens)} such requests")
    return shares


def run(screen: Screen) -> int:
    """Show everything; return 0, or 1 where a result is outside the error budget or nothing can run."""
    device = kernel_device()
    versions = ", ".join(f"{name} {version}" for name, version in found_versions().items() if version)
    screen.table("Machine", ["", ""], [*describe_device(device), ("versions", versions)])
    refusal = why_not(device.type)
    if refusal is not None:
        screen.line(f"wrong: {refusal}", style="bold red")
        return 1
    shares = show_real(screen, device) + show_generated(screen, device)
    if not max(shares) <= 1:
        screen.line(f"wrong: an error is {max(shares):.2f} times the error budget", style="bold red")
        return 1
    screen.line(
        f"All results are within the error budget: the worst takes {max(shares):.2f} of it.", style="bold green"
    )
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `demo`: none."""


def main(args: argparse.Namespace) -> int:
    """Run `demo` and return its exit code."""
    return run(Screen())
