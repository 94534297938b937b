"""Host time and launches of an engine's step: `python -m splitkv.bench.step`.

What is timed is how long the host is kept by a call, from its start to its return, with an idle device before each.
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
from splitkv.kernels.append import append_kernel
from splitkv.kernels.step import advance_kernel, bind_kernel, stage_kernel

KERNELS = (append_kernel, advance_kernel, bind_kernel, stage_kernel)
BATCHES = (1, 16, 128, 512)
PAGE_SIZE, MAX_PAGES, HEADS, HEAD_DIM = 16, 64, 8, 128


@dataclass(frozen=True)
class Row:
    """One call at one batch size.

    Attributes:
        call: What was called.
        batch: Requests, of one new token each.
        host_us: Median microseconds of host time.
        host_us_p90: What nine calls of ten stay under.
        launches: Kernels that one call launches.
        copies: Copies to or on the device that one call makes; None where they can't be observed.
    """

    call: str
    batch: int
    host_us: float
    host_us_p90: float
    launches: int
    copies: int | None


def calls(batch: int, device: torch.device) -> dict[str, Callable[[], Any]]:
    """The calls of a step at a batch size, by name."""
    table = torch.full((batch, MAX_PAGES), -1, dtype=torch.int32, device=device)
    step = splitkv.StepState.allocate(splitkv.StepConfig(batch), table, PAGE_SIZE, device)
    rows, lens, tokens = list(range(batch)), [500] * batch, list(range(1000, 1000 + batch))
    prompt_pages = [(row, column, row * MAX_PAGES + column) for row in rows for column in range(MAX_PAGES)]
    step.bind(rows, lens, tokens=tokens, page_updates=prompt_pages[: step.config.max_page_updates])
    some_pages = [(row, 40, row) for row in range(cdiv(batch, 16))]  # a new page for one request in sixteen
    shape = (batch * MAX_PAGES, PAGE_SIZE, HEADS, HEAD_DIM)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kv = splitkv.PagedKV(
        torch.zeros(shape, dtype=dtype, device=device),
        torch.zeros(shape, dtype=dtype, device=device),
        table,
        step.seq_lens,
        rows=step.req_pool_indices,
    )
    new = torch.ones(batch, HEADS, HEAD_DIM, dtype=dtype, device=device)
    sampled = torch.zeros(batch, dtype=torch.int64, device=device)
    slots = step.out_cache_loc.clone()
    return {
        "fill_input_ids": lambda: step.fill_input_ids(tokens),
        "fill_input_ids_from_device": lambda: step.fill_input_ids_from_device(sampled),
        "bind": lambda: step.bind(rows, lens, tokens=tokens),
        "bind with new pages": lambda: step.bind(rows, lens, tokens=tokens, page_updates=some_pages),
        "advance": step.advance,
        "append_kv": lambda: splitkv.append_kv(new, new, kv, slots),
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


def measure(device: torch.device, batches: tuple[int, ...] = BATCHES, repeats: int = 300) -> list[Row]:
    """Time every call at every batch size."""
    rows = []
    for batch in batches:
        for name, call in calls(batch, device).items():
            for _ in range(min(repeats, 20)):
                call()  # compiles, fills caches, and pins pages
            launches, copies = count(call, device)
            times = host_times(call, device, repeats)
            p90 = sorted(times)[min(len(times) - 1, int(0.9 * len(times)))]
            rows.append(Row(name, batch, statistics.median(times), p90, launches, copies))
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
    header = ["call", "batch", "host µs (median)", "host µs (p90)", "launches", "copies"]
    cells = [
        [
            row.call,
            str(row.batch),
            f"{row.host_us:.1f}",
            f"{row.host_us_p90:.1f}",
            str(row.launches),
            "–" if row.copies is None else str(row.copies),
        ]
        for row in rows
    ]
    if importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title)
        for column, name in enumerate(header):
            table.add_column(name, justify="right" if column else "left")
        for line in cells:
            table.add_row(*line)
        Console().print(table)
        return
    widths = [max(len(line[i]) for line in [header, *cells]) for i in range(len(header))]
    print(title)
    for line in [header, *cells]:
        padded = [
            text.rjust(width) if i else text.ljust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(padded))


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m splitkv.bench.step", description="Time an engine's step on the host."
    )
    parser.add_argument("--batch", type=int, nargs="+", default=list(BATCHES), help="requests (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=None, help="timed calls (default: 300; 3 without a GPU)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, default=None, help="also write the figures there")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    if min(options.batch) < 1:
        parser.error(f"--batch: expected counts ≥ 1, given {min(options.batch)}")
    repeats = options.repeats if options.repeats is not None else 300 if device.type == "cuda" else 3
    if repeats < 1:
        parser.error(f"--repeats: expected a count ≥ 1, given {repeats}")
    rows, where = measure(device, tuple(options.batch), repeats), machine(device)
    show(rows, where)
    if options.json is not None:
        record = {"machine": where, "repeats": repeats, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
