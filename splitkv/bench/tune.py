"""`python -m splitkv tune`: sweep tile sizes on this GPU and write those that are fastest over several cells.

Every candidate's answers are checked before it is timed. Candidates that are far behind on the first cell are not timed
on the others; the best few are timed again at length beside the built-in choice, and the least geometric mean wins.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from splitkv import _interpreter
from splitkv import tiles as tile_sizes
from splitkv.bench import table
from splitkv.bench.cells import DTYPE_NAMES, KV_DTYPE_NAMES, Cell, select, workspace_config
from splitkv.bench.problem import DoesNotFit, Expected, Problem, expect
from splitkv.bench.record import describe_run
from splitkv.bench.run import Session, decode_launch, measure
from splitkv.bench.timing import METHOD
from splitkv.config import WorkspaceConfig, next_power_of_2
from splitkv.tiles import Target, Tiles
from splitkv.tiles_io import TileKey, TileTable

SWEEP: dict[str, tuple[int, ...]] = {
    "block_n": (16, 32, 64, 128),
    "num_warps": (2, 4, 8),
    "num_stages": (1, 2, 3, 4),
    "programs_per_sm": (1, 2, 3, 4, 6),
}
"""Values to try, by field of `Tiles`; fields that are not named keep the built-in choice."""

CELLS = ("b8-4k", "b1-4k", "b64-512", "b32-4k", "b128-1k", "ragged64")
FINALISTS = 8
HOPELESS = 1.4  # times the best of the first cell


def tile_key(config: WorkspaceConfig, target: Target, cell: Cell | None = None) -> TileKey:
    """What a choice of tiles for one query token per request holds for.

    Args:
        config, target: Of the workspace.
        cell: What kind of cache it is for; None: a plain one.
    """
    sizes = config.dtype, config.head_dim, config.head_dim_v
    cache: dict[str, Any] = {}
    if cell is not None:
        cache = dict(kv_dtype=cell.torch_kv_dtype, latent=cell.latent is not None)
    rows = min(config.q_tile_rows, max(16, next_power_of_2(config.group_size)))
    return TileKey.of(target.arch, *sizes, tile_sizes.fit_rows(target, *sizes, rows, **cache), **cache)


def candidates(target: Target, key: TileKey, sweep: Mapping[str, Sequence[int]]) -> list[Tiles]:
    """The built-in choice, then every combination of the sweep that fits a program's shared memory.

    Combinations that compile alike stand next to each other.

    >>> target = Target("cuda:90", num_sms=132, shared_memory=232448, sm_shared_memory=233472)
    >>> key = TileKey("cuda:90", "bfloat16", 128, 128, 16)
    >>> [t.num_stages for t in candidates(target, key, {"block_n": [128], "num_stages": [2, 3, 4]})]
    [3, 2, 3, 4]

    Raises:
        ValueError: a field that Tiles lacks.
    """
    fields = {field.name for field in dataclasses.fields(Tiles)}
    unknown = sorted(sweep.keys() - fields)
    if unknown:
        raise ValueError(f"sweep: expected fields among {', '.join(sorted(fields))}, given {', '.join(unknown)}")
    sizes = DTYPE_NAMES[key.dtype], key.head_dim, key.head_dim_v, key.rows
    cache: dict[str, Any] = dict(kv_dtype=KV_DTYPE_NAMES.get(key.kv_dtype), latent=key.latent)
    built_in = tile_sizes.choose(target, *sizes, **cache)
    found = [built_in]
    for values in itertools.product(*sweep.values()):
        chosen = dict(zip(sweep, values, strict=True))
        tiles = dataclasses.replace(built_in, **chosen)
        if "min_chunk" not in chosen:
            tiles = dataclasses.replace(tiles, min_chunk=tiles.block_n)
        needed = tile_sizes.shared_bytes(target, *sizes, tiles.block_n, tiles.num_stages, **cache)
        if needed <= target.shared_memory and tiles not in found:
            found.append(tiles)
    return found


def mean_us(times: Iterable[float]) -> float:
    """Geometric mean.

    >>> round(mean_us([1.0, 4.0]), 6)
    2.0
    """
    logs = [math.log(time) for time in times]
    return math.exp(sum(logs) / len(logs))


@dataclass
class Tuned:
    """What a sweep found.

    Attributes:
        key: What it holds for.
        tiles: The best over all cells.
        built_in: The choice without a table.
        times: {tiles: {cell: µs}} of the finalists.
        refused: Candidates that failed or answered wrongly, and why.
        tried: Candidates in all.
    """

    key: TileKey
    tiles: Tiles
    built_in: Tiles
    times: dict[Tiles, dict[str, float]]
    refused: dict[Tiles, str]
    tried: int

    def table(self, run: Mapping[str, Any]) -> TileTable:
        """As a file keeps it: the tiles, and the times that led to them."""
        best_per_cell = {}
        for cell in self.times[self.tiles]:
            best = min(self.times, key=lambda tiles: self.times[tiles][cell])
            best_per_cell[cell] = {"us": self.times[best][cell], "tiles": dataclasses.asdict(best)}
        about = {
            "measured": {
                "run": dict(run),
                "us": self.times[self.tiles],
                "built_in": dataclasses.asdict(self.built_in),
                "built_in_us": self.times.get(self.built_in),
                "best_per_cell": best_per_cell,
                "candidates": self.tried,
                "refused": len(self.refused),
            }
        }
        return TileTable({self.key: self.tiles}, {self.key: about})


def sweep_tiles(
    cells: Sequence[Cell],
    session: Session,
    sweep: Mapping[str, Sequence[int]],
    *,
    tell: Callable[[str], None] = lambda text: None,
) -> Tuned:
    """Find the tiles with the least geometric mean of times over cells of one geometry.

    Args:
        cells: What to time; the first decides whom it is worth timing on the others.
        session: On a CUDA device.
        sweep: Values to try, by field of `Tiles`.
        tell: Called with a line of text before each candidate, and before each finalist.

    Raises:
        ValueError: cells of several geometries.
        RuntimeError: no candidate gives right answers, or the device is no longer usable.
        DoesNotFit: the device lacks the memory for a cell.
    """
    if len({cell.geometry for cell in cells}) != 1:
        raise ValueError(f"cells: expected one geometry, given {len({cell.geometry for cell in cells})}")
    target = Target.of(session.device)
    key = tile_key(workspace_config(cells[0], session.max_batch_size), target, cells[0])
    problems: list[tuple[Problem, Expected]] = []
    for cell in cells:
        problem = session.problem(cell)
        problems.append((problem, expect(problem, problem.copies - 1)))
    tried = candidates(target, key, sweep)
    refused: dict[Tiles, str] = {}

    def time(tiles: Tiles, budget_ms: float, repeats: int, limit: float) -> dict[str, float] | None:
        """{cell: µs}, None where refused; only the first cell where that alone takes more than `limit`."""
        session.budget_ms, session.repeats = budget_ms, repeats
        workspace = session.workspace(cells[0], TileTable({key: tiles}))
        times: dict[str, float] = {}
        for problem, expected in problems:
            timing = measure(lambda p: decode_launch(p, workspace), problem, expected, session, tidy=False)
            if timing.us is None:
                refused[tiles] = timing.note
                return None
            times[problem.cell.name] = timing.us
            if timing.us > limit:
                break
            limit = math.inf
        return times

    first: dict[Tiles, dict[str, float]] = {}
    best = math.inf
    for tiles in tried:
        tell(_text(tiles))
        times = time(tiles, 6.0, 3, HOPELESS * best)
        if times is not None and len(times) == len(cells):
            first[tiles] = times
            best = min(best, times[cells[0].name])
    if not first:
        raise RuntimeError(f"tune: no candidate of {len(tried)} gives right answers: {next(iter(refused.values()))}")
    finalists = sorted(first, key=lambda tiles: mean_us(first[tiles].values()))[:FINALISTS]
    if tried[0] in first and tried[0] not in finalists:
        finalists.append(tried[0])
    final = {}
    for tiles in finalists:
        tell("again: " + _text(tiles))
        times = time(tiles, 30.0, 7, math.inf)
        if times is not None:
            final[tiles] = times
    if not final:
        raise RuntimeError(f"tune: no finalist stayed right when timed again: {next(iter(refused.values()))}")
    winner = min(final, key=lambda tiles: mean_us(final[tiles].values()))
    return Tuned(key, winner, tried[0], final, refused, len(tried))


def _text(tiles: Tiles) -> str:
    return ", ".join(f"{field.name} {getattr(tiles, field.name)}" for field in dataclasses.fields(Tiles))


def show(tuned: Tuned) -> None:
    """Print the finalists' times."""
    cells = list(tuned.times[tuned.tiles])
    rows = []
    for tiles, times in sorted(tuned.times.items(), key=lambda item: mean_us(item[1].values())):
        mark = "best" if tiles == tuned.tiles else ""
        mark = f"{mark}, built in".removeprefix(", ") if tiles == tuned.built_in else mark
        rows.append((_text(tiles), mark, *(f"{times[cell]:.1f}" for cell in cells), f"{mean_us(times.values()):.2f}"))
    table.show(table.TextTable("finalists: microseconds per call", ("tiles", "", *cells, "geometric mean"), rows))
    if tuned.refused:
        print(
            f"{len(tuned.refused)} of {tuned.tried} candidates were refused, for example: "
            f"{next(iter(tuned.refused.values()))}"
        )


def check_candidates(
    session: Session, cell: Cell, tried: Sequence[Tiles], tell: Callable[[str], None]
) -> dict[Tiles, float]:
    """{tiles: error as a fraction of the budget} of candidates on a small cell; nothing is timed."""
    target = Target.of(session.device)
    key = tile_key(workspace_config(cell, session.max_batch_size), target, cell)
    problem = session.problem(cell)
    expected = expect(problem, problem.copies - 1)
    found = {}
    for tiles in tried:
        tell(_text(tiles))
        workspace = session.workspace(cell, TileTable({key: tiles}))
        timing = measure(lambda p, w=workspace: decode_launch(p, w), problem, expected, session, tidy=False)  # type: ignore[misc]
        found[tiles] = math.inf if timing.error_ratio is None else timing.error_ratio
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `tune`."""
    parser.add_argument(
        "--json", metavar="FILE", help="where to write the tiles (an existing file gets the entry added)"
    )
    parser.add_argument("--cells", nargs="+", metavar="NAME", help=f"lengths to time (default: {' '.join(CELLS)})")
    for name in ("q-heads", "kv-heads", "head-dim", "page-size"):
        parser.add_argument(f"--{name}", type=int, metavar="N", help="in place of the cells' own")
    parser.add_argument("--dtype", choices=list(DTYPE_NAMES), help="of queries and caches, in place of the cells' own")
    parser.add_argument("--kv-dtype", choices=list(KV_DTYPE_NAMES), help="of caches that are quantised")
    for name, values in SWEEP.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            nargs="+",
            metavar="N",
            help=f"values to try (default: {' '.join(map(str, values))})",
        )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="only check the answers of a few candidates on a small cell; needs no GPU",
    )


def main(args: argparse.Namespace) -> int:
    """Run `tune` with parsed arguments; returns the exit status."""
    try:
        return _main(args)
    except (ValueError, TypeError, DoesNotFit) as error:
        print(f"splitkv tune: {error}", file=sys.stderr)
        return 2


def _main(args: argparse.Namespace) -> int:
    given = {name: tuple(getattr(args, name)) for name in SWEEP if getattr(args, name) is not None}
    geometry: dict[str, Any] = dict(
        num_q_heads=args.q_heads,
        num_kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        dtype=args.dtype,
        kv_dtype=args.kv_dtype,
        page_size=args.page_size,
    )
    geometry = {name: value for name, value in geometry.items() if value is not None}
    cells = [dataclasses.replace(cell, **geometry) for cell in select(args.cells or CELLS)]
    usable = torch.cuda.is_available() and not _interpreter.interpreting()
    if args.dry_run:
        if args.json:
            raise ValueError("--json: expected no file with --dry-run (nothing is timed), given one")
        small = cells[0].shrunk()
        device = "cuda" if usable else "cpu"
        session = Session([small], device, timed=False)
        sweep = {**{name: values[1:3] for name, values in SWEEP.items()}, **given}
        # The interpreter knows neither warps nor stages: sizes that it does know are enough.
        names = SWEEP if usable else ("block_n", "programs_per_sm")
        target = Target.of(session.device)
        key = tile_key(workspace_config(small, session.max_batch_size), target, small)
        tried = candidates(target, key, {name: sweep[name] for name in names})
        with table.progress(len(tried), "tune") as tell:
            found = check_candidates(session, small, tried, tell)
        rows: list[tuple[str, ...]] = [(_text(tiles), f"{ratio:.2f}") for tiles, ratio in found.items()]
        table.show(table.TextTable("answers of candidates (nothing is timed)", ("tiles", "error ÷ budget"), rows))
        return 0 if all(ratio <= 1 for ratio in found.values()) else 1
    if not usable:
        print(
            "splitkv tune: no GPU that PyTorch can use was found here, and tuning needs one. --dry-run checks some "
            "candidates' answers under Triton's interpreter.",
            file=sys.stderr,
        )
        return 1
    if not args.json:
        raise ValueError("--json: expected a file for the tiles, given none")
    path = Path(args.json)
    known = TileTable.load(path) if path.exists() else TileTable()
    session = Session(cells, "cuda")
    sweep = {**SWEEP, **given}
    target = Target.of(session.device)
    key = tile_key(workspace_config(cells[0], session.max_batch_size), target, cells[0])
    total = len(candidates(target, key, sweep)) + FINALISTS + 1
    with table.progress(total, "tune") as tell:
        tuned = sweep_tiles(cells, session, sweep, tell=tell)
    show(tuned)
    known.merged(tuned.table(describe_run(session.device, METHOD))).save(path)
    built_in = tuned.times.get(tuned.built_in)
    if built_in is not None:
        gain = mean_us(built_in.values()) / mean_us(tuned.times[tuned.tiles].values())
        print(f"{gain:.3f} times as fast as the built-in choice, geometric mean over {len(cells)} cells")
    print(f"{path}: Workspace.allocate(config, device, tiles={str(path)!r})")
    return 0


def run(argv: Sequence[str] | None = None) -> int:
    """`python -m splitkv.bench.tune`."""
    parser = argparse.ArgumentParser(prog="splitkv tune", description=__doc__.splitlines()[0] if __doc__ else None)
    add_arguments(parser)
    return main(parser.parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(run())
