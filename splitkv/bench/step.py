"""Host time and launches of an engine's step: `python -m splitkv.bench.step`.

What is timed is how long the host is kept by a call, from its start to its return, with an idle device before each.
Hosts share their cores with others, so all calls are timed in several passes, and of each pass the median is kept.
Under the interpreter, which computes in that time, it says nothing about a GPU: such tables are labelled.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton

import splitkv
from splitkv.config import cdiv
from splitkv.kernels.append import append_kernel, move_kernel
from splitkv.kernels.groups import group_kernel
from splitkv.kernels.merge import merge_kernel, merge_splits_kernel
from splitkv.kernels.split_decode import split_decode_kernel
from splitkv.kernels.step import advance_kernel, bind_kernel, stage_kernel
from splitkv.kernels.work_list import work_list_kernel

KERNELS = (
    append_kernel, move_kernel, advance_kernel, bind_kernel, stage_kernel, group_kernel, merge_kernel,
    merge_splits_kernel, split_decode_kernel, work_list_kernel,
)  # fmt: skip
BATCHES = (1, 16, 128, 512)
INTERPRETED_BATCHES = (1, 16)
PAGE_SIZE, MAX_PAGES, PARTS = 16, 64, 4


@dataclass(frozen=True)
class Sizes:
    """Of the layers that a step is timed with."""

    length: int
    q_heads: int
    kv_heads: int
    head_dim: int


COMPILED, INTERPRETED = Sizes(500, 32, 8, 128), Sizes(40, 2, 1, 16)


@dataclass(frozen=True)
class Row:
    """One call at one batch size.

    Attributes:
        call: What was called.
        batch: Requests, of one new token each.
        host_us: Microseconds of host time: the median of the passes' medians.
        host_us_least: The least of them.
        host_us_p90: What nine calls of ten stay under, in all passes together.
        passes_us: The median of each pass, in their order.
        launches: Kernels that one call launches.
        copies: Copies to or on the device that one call makes; None where they can't be observed.
    """

    call: str
    batch: int
    host_us: float
    host_us_least: float
    host_us_p90: float
    passes_us: tuple[float, ...]
    launches: int
    copies: int | None


def calls(batch: int, device: torch.device) -> dict[str, Callable[[], Any]]:
    """The calls of a step at a batch size, by name."""
    sizes = COMPILED if device.type == "cuda" else INTERPRETED
    heads, q_heads, head_dim = sizes.kv_heads, sizes.q_heads, sizes.head_dim
    table = torch.full((batch, MAX_PAGES), -1, dtype=torch.int32, device=device)
    step = splitkv.StepState.allocate(splitkv.StepConfig(batch), table, PAGE_SIZE, device)
    rows, lens, tokens = list(range(batch)), [sizes.length] * batch, list(range(1000, 1000 + batch))
    prompt_pages = [(row, column, row * MAX_PAGES + column) for row in rows for column in range(MAX_PAGES)]
    step.bind(rows, lens, tokens=tokens, page_updates=prompt_pages[: step.config.max_page_updates])
    some_pages = [(row, 40, row) for row in range(cdiv(batch, 16))]  # a new page for one request in sixteen
    shape = (batch * MAX_PAGES, PAGE_SIZE, heads, head_dim)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kv = splitkv.PagedKV(
        torch.zeros(shape, dtype=dtype, device=device),
        torch.zeros(shape, dtype=dtype, device=device),
        table,
        step.seq_lens,
        rows=step.req_pool_indices,
    )
    new = torch.ones(batch, heads, head_dim, dtype=dtype, device=device)
    sampled = torch.zeros(batch, dtype=torch.int64, device=device)
    slots = step.out_cache_loc.clone()
    config = splitkv.WorkspaceConfig(batch, q_heads, heads, head_dim, dtype=dtype, q_tile_rows=64)
    workspace, schedule = splitkv.Workspace.allocate(config, device), splitkv.Schedule.allocate(config, device)
    q = torch.ones(batch, q_heads, head_dim, dtype=dtype, device=device)
    # One group: the first half of every request's tokens are those of the first.
    shared_table = torch.arange(batch * MAX_PAGES, dtype=torch.int32, device=device).view(batch, MAX_PAGES)
    shared_table[:, : MAX_PAGES // 4] = shared_table[0, : MAX_PAGES // 4].clone()
    shared = splitkv.PagedKV(kv.k, kv.v, shared_table, step.seq_lens)
    groups = torch.zeros(batch, dtype=torch.int32, device=device)
    prefixes = torch.full((batch,), sizes.length // 2, dtype=torch.int32, device=device)
    outs = torch.ones(PARTS, batch, q_heads, head_dim, dtype=dtype, device=device)
    lses = torch.zeros(PARTS, batch, q_heads, device=device)
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    return {
        "fill_input_ids": lambda: step.fill_input_ids(tokens),
        "fill_input_ids_from_device": lambda: step.fill_input_ids_from_device(sampled),
        "bind": lambda: step.bind(rows, lens, tokens=tokens),
        "bind with new pages": lambda: step.bind(rows, lens, tokens=tokens, page_updates=some_pages),
        "advance": step.advance,
        "append_kv": lambda: splitkv.append_kv(new, new, kv, slots),
        "move_kv": lambda: splitkv.move_kv(kv, slots, slots),
        "Schedule.update": lambda: schedule.update(kv),
        "decode": lambda: splitkv.decode(q, shared, workspace),
        "decode_shared_prefix": lambda: splitkv.decode_shared_prefix(q, shared, workspace, groups, prefixes),
        "merge": lambda: splitkv.merge(outs, lses, out=out, lse=lse),
        "merge, outputs made": lambda: splitkv.merge(outs, lses),
    }


def host_times(call: Callable[[], Any], device: torch.device, repeats: int) -> list[float]:
    """Microseconds of host time of each of `repeats` calls, each on an idle device."""
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    return times


def count(call: Callable[[], Any], device: torch.device) -> tuple[int, int | None]:
    """(launches, copies) of one call: what the profiler saw on a GPU, what the interpreter ran without one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        # With acc_events, since without it the profiler warns that there may be several cycles.
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            call()
            torch.cuda.synchronize(device)
        names = [e.name for e in profile.events() or [] if str(e.device_type).endswith("CUDA")]
        copies = sum(name.startswith("Memcpy") for name in names)
        return len(names) - copies, copies
    seen: list[int] = []

    def hook(*_: Any, **__: Any) -> None:
        seen.append(1)

    for kernel in KERNELS:
        kernel.add_pre_run_hook(hook)
    try:
        call()
    finally:
        for kernel in KERNELS:
            kernel.pre_run_hooks.remove(hook)
    return len(seen), None


def measure(device: torch.device, batches: tuple[int, ...] = BATCHES, repeats: int = 300, passes: int = 1) -> list[Row]:
    """Time every call at every batch size, `repeats` times in each pass over all of them."""
    cases = [(batch, name, call) for batch in batches for name, call in calls(batch, device).items()]
    counts, times = [], []
    for _, _, call in cases:
        for _ in range(min(repeats, 20)):
            call()  # compiles, fills caches, and pins pages
        counts.append(count(call, device))
        times.append([host_times(call, device, repeats)])
    for _ in range(passes - 1):
        for (_, _, call), own in zip(cases, times, strict=True):
            own.append(host_times(call, device, repeats))
    rows = []
    for (batch, name, _), (launches, copies), own in zip(cases, counts, times, strict=True):
        medians = tuple(statistics.median(each) for each in own)
        everything = sorted(time for each in own for time in each)
        p90 = everything[min(len(everything) - 1, int(0.9 * len(everything)))]
        rows.append(Row(name, batch, statistics.median(medians), min(medians), p90, medians, launches, copies))
    return rows


def machine(device: torch.device) -> dict[str, str]:
    """What the figures depend on."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, Triton's interpreter",
        "splitkv": splitkv.__version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def show(rows: list[Row], where: dict[str, str]) -> None:
    """Print the table, with rich where it is installed."""
    title = "Host time of an engine's step: " + ", ".join(f"{k} {v}" if k != "device" else v for k, v in where.items())
    header = ["call", "batch", "host µs (median)", "least pass", "passes", "p90", "launches", "copies"]
    cells = [
        [
            row.call,
            str(row.batch),
            f"{row.host_us:.1f}",
            f"{row.host_us_least:.1f}",
            " ".join(f"{time:.1f}" for time in row.passes_us),
            f"{row.host_us_p90:.1f}",
            str(row.launches),
            "–" if row.copies is None else str(row.copies),
        ]
        for row in rows
    ]
    print_table(title, header, cells)


def print_table(title: str, header: list[str], cells: list[list[str]]) -> None:
    """Print a table whose first column is text, with rich where it is installed."""
    if importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title)
        for column, name in enumerate(header):
            table.add_column(name, justify="right" if column else "left")
        for line in cells:
            table.add_row(*line)
        console = Console()
        (console if console.is_terminal else Console(width=160)).print(table)  # a file has no width
        return
    widths = [max(len(line[i]) for line in [header, *cells]) for i in range(len(header))]
    print(title)
    for line in [header, *cells]:
        padded = [
            text.rjust(width) if i else text.ljust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(padded))


def _spaced(numbers: tuple[int, ...]) -> str:
    return " ".join(map(str, numbers))


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m splitkv.bench.step", description="Time an engine's step on the host."
    )
    parser.add_argument(
        "--batch", type=int, nargs="+", default=None,
        help=f"requests (default: {_spaced(BATCHES)}; {_spaced(INTERPRETED_BATCHES)} without a GPU)",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=None, help="calls per pass (default: 300; 3 without a GPU)")
    parser.add_argument("--passes", type=int, default=None, help="passes over all calls (default: 5; 1 without a GPU)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, default=None, help="also write the figures there")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    batches = tuple(options.batch or (BATCHES if device.type == "cuda" else INTERPRETED_BATCHES))
    if min(batches) < 1:
        parser.error(f"--batch: expected counts ≥ 1, given {min(batches)}")
    repeats = options.repeats if options.repeats is not None else 300 if device.type == "cuda" else 3
    if repeats < 1:
        parser.error(f"--repeats: expected a count ≥ 1, given {repeats}")
    passes = options.passes if options.passes is not None else 5 if device.type == "cuda" else 1
    if passes < 1:
        parser.error(f"--passes: expected a count ≥ 1, given {passes}")
    rows, where = measure(device, batches, repeats, passes), machine(device)
    show(rows, where)
    if options.json is not None:
        record = {"machine": where, "repeats": repeats, "passes": passes, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
