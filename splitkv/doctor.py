"""`python -m splitkv doctor`: what was found here, what is wrong, and what decode would launch for given sizes."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby

import torch

import splitkv
from splitkv import _interpreter, tiles
from splitkv.api import plan_decode
from splitkv.config import DTYPES, cdiv
from splitkv.kernels.prepared import Launch
from splitkv.schedule import FIXED_PARTS, FIXED_TOKENS, GRAIN, Partition, Request, Stretch
from splitkv.screen import Screen, mebibytes

OLDEST = {"python": "3.10", "torch": "2.10", "triton": "3.6", "einops": "0.8"}
DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
PAGE_SIZE = 16
MOST_ROWS = 16  # of the schedule that are printed


@dataclass(frozen=True)
class Sizes:
    """A decode call: one query token per request.

    Attributes:
        lens: KV tokens of each request.
        num_q_heads, num_kv_heads, head_dim, dtype: The geometry.
        split_tokens: Of the workspace, or None.
        num_splits: Of the call, or None.
    """

    lens: tuple[int, ...]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    split_tokens: int | None
    num_splits: int | None


def found_versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that count here; None where one is not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in ("triton", "einops", "numpy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def version_faults(versions: Mapping[str, str | None]) -> list[str]:
    """What is missing or too old, with what to do.

    >>> version_faults({"python": "3.11.7", "torch": "2.9.1", "triton": "3.6.0", "einops": None})
    ["torch 2.9.1 is too old: pip install 'torch>=2.10'", 'einops is not installed: pip install einops']
    """
    faults = []
    for name, oldest in OLDEST.items():
        version = versions[name]
        if version is None:
            faults.append(f"{name} is not installed: pip install {name}")
        elif _interpreter.release(version) < _interpreter.release(oldest):
            what = "use Python 3.10 or newer" if name == "python" else f"pip install '{name}>={oldest}'"
            faults.append(f"{name} {version} is too old: {what}")
    return faults


def kernel_device() -> torch.device:
    """Where kernels run in this process: the GPU, or the CPU where they are interpreted or nothing else is there."""
    if torch.cuda.is_available() and not _interpreter.interpreting():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def how_kernels_run(device: torch.device) -> str:
    """One line about how kernels run on `kernel_device()`."""
    if device.type == "cuda":
        return "compiled for the GPU"
    return "Triton's CPU interpreter (slow)" if _interpreter.interpreting() else "not at all: see below"


def describe_device(device: torch.device) -> list[tuple[str, str]]:
    """Rows about a device."""
    rows = [("kernels run", how_kernels_run(device)), ("device", f"{device}: {platform.machine()} CPU")]
    if device.type == "cuda":
        props = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        target = tiles.Target.of(device)
        rows[1:] = [
            ("device", f"{device}: {props.name}, {target.arch}"),
            ("multiprocessors", str(target.num_sms)),
            (
                "shared memory",
                f"{target.shared_memory} bytes per program, {target.sm_shared_memory} per multiprocessor",
            ),
            ("L2 cache", f"{mebibytes(getattr(props, 'L2_cache_size', 0))} MiB"),
            ("memory", f"{mebibytes(free)} MiB free of {mebibytes(total)} MiB"),
        ]
    return rows


def small_decode(device: torch.device) -> str | None:
    """Decode something small in two parts; None if the result is right, else what is wrong."""
    config = splitkv.WorkspaceConfig(1, num_q_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    try:
        index = torch.arange(5, dtype=torch.float32, device=device)
        v = index[None, :, None, None].expand(1, 5, 1, 16).contiguous()
        kv = splitkv.ContiguousKV(torch.zeros_like(v), v, torch.full((1,), 5, dtype=torch.int32, device=device))
        out = splitkv.decode(
            torch.ones(1, 2, 16, device=device), kv, splitkv.Workspace.allocate(config, device), num_splits=2
        )
        worst = float((out - 2).abs().max())  # all scores are 0, so that the output is the mean of 0 … 4
    except Exception as error:  # a compiler or a driver may fail in any way
        text = str(error).strip().splitlines()
        return f"{type(error).__name__}: {text[0] if text else 'no message'}"
    return (
        None
        if worst < 1e-5
        else f"a small decode is wrong: the mean of 0 … 4 came out as {2 + worst:g} or {2 - worst:g}"
    )


def make_plan(
    sizes: Sizes, device: torch.device, target: tiles.Target | None = None, max_splits: int | None = None
) -> tuple[splitkv.WorkspaceConfig, tuple[Launch, ...]]:
    """The workspace's config and the launches of such a decode call, over a cache that is one page seen many times.

    Args:
        sizes: The call.
        device: Where its tensors are made. Nothing is launched.
        target: The GPU that it is planned for, which need not be here; None: the device.
        max_splits: As for `splitkv.WorkspaceConfig`.

    Raises:
        TypeError, ValueError: what decode or the config refuses.
    """
    config = splitkv.WorkspaceConfig(
        len(sizes.lens),
        sizes.num_q_heads,
        sizes.num_kv_heads,
        sizes.head_dim,
        max_splits=max_splits,  # type: ignore[arg-type]
        split_tokens=sizes.split_tokens,
        dtype=sizes.dtype,
    )
    page = torch.zeros(1, 1, 1, sizes.head_dim, dtype=sizes.dtype, device=device)
    cache = page.expand(1, PAGE_SIZE, sizes.num_kv_heads, sizes.head_dim)
    max_pages = max(cdiv(max(sizes.lens), PAGE_SIZE), 1)
    kv = splitkv.PagedKV(
        cache,
        cache,
        torch.zeros(1, 1, dtype=torch.int32, device=device).expand(len(sizes.lens), max_pages).contiguous(),
        torch.tensor(sizes.lens, dtype=torch.int32, device=device),
    )
    q = torch.zeros(len(sizes.lens), sizes.num_q_heads, sizes.head_dim, dtype=sizes.dtype, device=device)
    workspace = splitkv.Workspace.allocate(config, device)
    if target is not None:
        workspace.target = target
    return config, plan_decode(q, kv, workspace, num_splits=sizes.num_splits).launches


def show_sections(screen: Screen, config: splitkv.WorkspaceConfig, title: str) -> None:
    """Print what a workspace holds."""
    screen.table(
        title,
        ["buffer", "shape", "dtype", ">offset", ">bytes"],
        [
            (s.name, list(s.shape), str(s.dtype).removeprefix("torch."), f"{s.offset:,}", f"{s.nbytes:,}")
            for s in config.sections()
        ],
        note=f"{config.nbytes:,} bytes in all",
    )


def show_launches(screen: Screen, launches: tuple[Launch, ...]) -> None:
    """Print grids and tiles."""
    rows = []
    for launch in launches:
        c = launch.constants
        block = f"{c['BLOCK_M']} query rows × {c['BLOCK_N']} tokens" if "BLOCK_N" in c else f"{c['BLOCK_P']} partials"
        stages = c.get("NUM_STAGES", "–")
        rows.append((launch.kernel.__name__, " × ".join(map(str, launch.grid)), block, launch.num_warps, stages))
    screen.table("Launches", ["kernel", ">programs", "tile", ">warps", ">stages"], rows)


def show_schedule(screen: Screen, sizes: Sizes, partition: Partition) -> None:
    """Print who attends what."""
    requests = [Request(length) for length in sizes.lens]
    stretches = list(partition.stretches(requests))
    heads = partition.num_kv_heads
    by_request: dict[int, list[Stretch]] = {b: [] for b in range(len(requests))}
    loads: dict[int, int] = {}
    for each in stretches:
        by_request[each.request].append(each)
        loads[each.share] = loads.get(each.share, 0) + each.tokens

    def facts(b: int) -> tuple[object, ...]:
        tiles, _ = partition.request_work(requests[b])
        parts = [each.tokens for each in by_request[b] if each.tile == 0]
        return sizes.lens[b], tiles, len(parts), " … ".join(map(str, sorted({min(parts), max(parts)})))

    rows: list[tuple[object, ...]] = []
    for same, group in groupby(by_request, key=facts):
        alike = list(group)
        rows.append((alike[0] if len(alike) == 1 else f"{alike[0]} … {alike[-1]}", *same))
    if len(rows) > MOST_ROWS:
        rows = [*rows[: MOST_ROWS - 1], ("…", f"{len(rows) - MOST_ROWS + 1} rows more", "", "", "")]
    sharing = partition.choose_shares(requests)
    if partition.schedule == FIXED_PARTS:
        how = f"{partition.parts} parts per tile (num_splits), a program each"
    elif partition.schedule == FIXED_TOKENS:
        how = f"at multiples of {partition.split_tokens} tokens, at most {partition.parts} parts (split_tokens)"
    elif sharing.by_work:
        how = f"balanced, programs take {sharing.share * GRAIN} tokens each"
    else:
        how = f"balanced, {sharing.each} parts per tile, programs take up to {sharing.share} each"
    used = sum(each.slot is not None for each in stretches) * heads
    busy = f"{len(loads) * heads} of {partition.shares * heads} programs have work"
    screen.table(
        f"Schedule: {how}",
        [">request", ">tokens", ">tiles per KV head", ">parts per tile", ">tokens per part"],
        rows,
        note=f"{busy}, {max(loads.values())} tokens at most and "
        f"{sum(loads.values()) / len(loads):.0f} in the mean; {used} partials are left to merge",
    )


def run(screen: Screen, sizes: Sizes) -> int:
    """Print everything; return 0, or 1 where something is wrong."""
    device = kernel_device()
    versions = found_versions()
    screen.table(
        f"splitkv {splitkv.__version__}",
        ["", "found", "needed"],
        [(name, version or "–", f"≥ {OLDEST[name]}" if name in OLDEST else "") for name, version in versions.items()],
    )
    screen.table("Device", ["", ""], describe_device(device))
    faults = version_faults(versions)
    refusal = _interpreter.why_not(device.type)
    if refusal is not None:
        faults.append(refusal)
    else:
        fault = small_decode(device)
        if fault is not None:
            faults.append(f"decode fails here: {fault}")
        try:
            config, launches = make_plan(sizes, device)
        except (TypeError, ValueError) as error:
            faults.append(f"decode refuses these sizes: {error}")
        else:
            show_sections(screen, config, "Workspace")
            show_launches(screen, launches)
            split = launches[0]
            show_schedule(screen, sizes, Partition.of_launch(split.operands, split.constants))
    for fault in faults:
        screen.line(f"wrong: {fault}", style="bold red")
    if not faults:
        screen.line("Nothing is wrong.", style="bold green")
    return 1 if faults else 0


def _count(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected an integer ≥ {low}, given {text!r}") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"expected an integer ≥ {low}, given {value}")
        return value

    return parse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `doctor`."""
    parser.add_argument("--batch", type=_count(1), metavar="N", help="requests (default: one per length, or 8)")
    parser.add_argument(
        "--lens", type=_count(0), nargs="+", default=[4096], metavar="N",
        help="KV tokens of all requests, or of each (default: 4096)",
    )  # fmt: skip
    parser.add_argument("--q-heads", type=_count(1), default=32, metavar="N", help="query heads (default: 32)")
    parser.add_argument("--kv-heads", type=_count(1), default=8, metavar="N", help="KV heads (default: 8)")
    parser.add_argument("--head-dim", type=_count(1), default=128, metavar="N", help="width of a head (default: 128)")
    parser.add_argument("--dtype", choices=DTYPE_NAMES, default="bfloat16", help="of queries and caches")
    parser.add_argument(
        "--split-tokens", type=_count(1), metavar="N", help="the workspace's fixed split size in tokens"
    )
    parser.add_argument("--num-splits", type=_count(1), metavar="N", help="parts forced on every tile")


def main(args: argparse.Namespace) -> int:
    """Run `doctor` with parsed arguments and return its exit code."""
    batch = args.batch if args.batch is not None else len(args.lens) if len(args.lens) > 1 else 8
    if len(args.lens) not in (1, batch):
        args.parser.error(f"argument --lens: expected one length or {batch} (the batch), given {len(args.lens)}")
    sizes = Sizes(
        lens=tuple(args.lens) if len(args.lens) > 1 else (args.lens[0],) * batch,
        num_q_heads=args.q_heads,
        num_kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        dtype=DTYPE_NAMES[args.dtype],
        split_tokens=args.split_tokens,
        num_splits=args.num_splits,
    )
    return run(Screen(), sizes)
