"""`python -m splitkv bench`: its options, and what it does with them."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import splitkv
from splitkv import _interpreter
from splitkv.bench import plot, table
from splitkv.bench import run as runner
from splitkv.bench.cells import DTYPE_NAMES, GROUPS, KV_DTYPE_NAMES, Cell, custom, select
from splitkv.bench.peers import DENSE, DENSE_NOTE, Peers
from splitkv.bench.record import Figures, Measured, Record, Timing, describe_run
from splitkv.bench.timing import METHOD

HOST_CELLS = ("b1-1k", "b8-4k", "b32-4k")
FIGURES = Path(splitkv.__file__).parents[1] / "notebooks" / "data" / "reference_figures.json"
NO_GPU = (
    "splitkv bench: no GPU that PyTorch can use was found here (or TRITON_INTERPRET is set), and timing needs one.\n"
    "--dry-run runs every kind of cell in small under Triton's interpreter and checks the answers; "
    "--from FILE.json shows a recorded run."
)


def _group_text(name: str) -> str:
    return f"{name}: {' '.join(cell.name for cell in GROUPS[name])}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench`."""
    what = parser.add_argument_group("what is timed")
    what.add_argument(
        "--cells",
        nargs="+",
        metavar="NAME",
        help=f"named cells, or groups of them (default: grid). {'; '.join(_group_text(name) for name in GROUPS)}",
    )
    what.add_argument("--lens", nargs="+", type=int, metavar="N", help="instead: KV tokens, of all requests or of each")
    what.add_argument("--batch", type=int, metavar="N", help="with one --lens: how many requests of that length")
    what.add_argument("--q-heads", type=int, metavar="N", help="with --lens: query heads (default: 32)")
    what.add_argument("--kv-heads", type=int, metavar="N", help="with --lens: KV heads (default: 8)")
    what.add_argument("--head-dim", type=int, metavar="N", help="with --lens: width of keys and values (default: 128)")
    what.add_argument("--dtype", choices=list(DTYPE_NAMES), help="of queries and caches (default: bfloat16)")
    what.add_argument(
        "--kv-dtype", choices=list(KV_DTYPE_NAMES), help="of caches that are quantised (default: as queries)"
    )
    what.add_argument("--layout", choices=("paged", "contiguous"), help="of the caches (default: paged)")
    what.add_argument("--page-size", type=int, metavar="N", help="tokens per page, randomly placed (default: 16)")
    how = parser.add_argument_group("how")
    how.add_argument("--split-tokens", type=int, metavar="N", help="of the workspace (default: balanced over the GPU)")
    how.add_argument("--tiles", metavar="FILE", help="of the workspace: tile sizes that `tune` wrote")
    how.add_argument(
        "--peers", metavar="FILE", help="a Python file that offers PEERS and Unavailable: see splitkv/bench/peers.py"
    )
    how.add_argument("--no-peers", action="store_true", help="time ours and the limit alone")
    how.add_argument(
        "--host", action="store_true", help=f"host time of eager calls instead (default cells: {' '.join(HOST_CELLS)})"
    )
    how.add_argument("--repeats", type=int, metavar="N", help="replays of which the median counts (default: 7)")
    how.add_argument("--dry-run", action="store_true", help="small shapes, answers only; needs no GPU")
    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help="write a record; one that is there already is merged into")
    output.add_argument("--commit", metavar="HASH", help="what the record says where the tree is no git checkout")
    output.add_argument("--plot", metavar="FILE.png", help="draw times against the limit, and bandwidth against length")
    output.add_argument("--markdown", metavar="FILE", help="write the tables in Markdown")
    output.add_argument("--from", dest="source", metavar="FILE.json", help="show this record instead of measuring")
    output.add_argument(
        "--figures", metavar="FILE", help="listed times to compare with too (default: the repository's)"
    )


_MEASURING = (
    "cells", "lens", "batch", "q_heads", "kv_heads", "head_dim", "dtype", "kv_dtype", "layout", "page_size",
    "split_tokens", "tiles", "peers", "no_peers", "host", "repeats", "dry_run", "json", "commit",
)  # fmt: skip
_OF_OWN_SIZES = ("batch", "q_heads", "kv_heads", "head_dim")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _set(args: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Which of these options were given."""
    return [_option(name) for name in names if getattr(args, name) not in (None, False)]


def _refuse(args: argparse.Namespace, names: Sequence[str], why: str) -> None:
    given = _set(args, names)
    if given:
        raise ValueError(f"{given[0]}: expected it left out {why}, given it")


def chosen_cells(args: argparse.Namespace) -> list[Cell]:
    """The cells that the options name; raises ValueError or TypeError."""
    if args.layout == "contiguous":
        _refuse(args, ("page_size",), "with --layout contiguous")
    changes: dict[str, Any] = {}
    if args.dtype is not None:
        changes["dtype"] = args.dtype
    if args.kv_dtype is not None:
        changes["kv_dtype"] = args.kv_dtype
    if args.layout == "contiguous" or args.page_size is not None:
        changes["page_size"] = args.page_size
    if args.lens is not None:
        _refuse(args, ("cells",), "with --lens")
        for option, name in (("q_heads", "num_q_heads"), ("kv_heads", "num_kv_heads"), ("head_dim", "head_dim")):
            if getattr(args, option) is not None:
                changes[name] = getattr(args, option)
        return [custom(args.batch, args.lens, **changes)]
    _refuse(args, _OF_OWN_SIZES, "without --lens")
    default = HOST_CELLS if args.host else ("grid",)
    return [dataclasses.replace(cell, **changes) for cell in select(args.cells or default)]


def load_figures(args: argparse.Namespace) -> Figures | None:
    """Listed figures: those named, else the repository's where there are any; none without peers."""
    if args.no_peers:
        _refuse(args, ("figures",), "with --no-peers")
        return None
    if args.figures is not None:
        return Figures.load(args.figures)
    return Figures.load(FIGURES) if FIGURES.is_file() else None


def main(args: argparse.Namespace) -> int:
    """Run `bench` with parsed arguments; returns the exit status: 0, 1 (a wrong answer, or no GPU), 2 (bad options)."""
    try:
        return _main(args)
    except (ValueError, TypeError, FileNotFoundError) as error:
        print(f"splitkv bench: {error}", file=sys.stderr)
        return 2


def _main(args: argparse.Namespace) -> int:
    # What would fail at the end fails before anything is measured.
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot: expected matplotlib to be installed (pip install 'splitkv[bench]'), given none")
    if args.plot is not None and Path(args.plot).suffix.lower() != ".png":
        raise ValueError(f"--plot: expected a name that ends in .png, given {args.plot!r}")
    for name in ("json", "plot", "markdown"):
        target = getattr(args, name)
        if target is not None and not Path(target).resolve().parent.is_dir():
            raise ValueError(f"{_option(name)}: expected a file in a folder that exists, given {target!r}")
    if args.source is not None:
        _refuse(args, _MEASURING, "with --from")
        record = Record.load(args.source)
        _put_out(args, record, load_figures(args))
        return 0
    cells = chosen_cells(args)
    figures = load_figures(args)
    if args.no_peers:
        _refuse(args, ("peers",), "with --no-peers")
    if args.repeats is not None and args.repeats < 1:
        raise ValueError(f"--repeats: expected at least 1, given {args.repeats}")
    usable = torch.cuda.is_available() and not _interpreter.interpreting()
    if args.dry_run:
        _refuse(args, ("json", "commit", "plot", "markdown", "host", "repeats", "tiles"), "with --dry-run")
        return _dry_run(args, cells, "cuda" if usable else "cpu")
    if not usable:
        print(NO_GPU, file=sys.stderr)
        return 1
    if args.host:
        _refuse(args, ("plot", "repeats"), "with --host")
    before = Record()
    if args.json is not None and Path(args.json).exists():
        before = Record.load(args.json)
    device = torch.device("cuda", torch.cuda.current_device())
    run = describe_run(device, METHOD)
    if args.commit is not None:
        if run["commit"] is not None:
            raise ValueError(
                f"--commit: expected it left out in a git checkout (at {run['commit']}), given {args.commit}"
            )
        run["commit"] = args.commit
    record = Record(runs=[run])
    try:
        _measure(args, cells, device, record, before)
    except KeyboardInterrupt:
        print("stopped; what was measured until then:", file=sys.stderr)
    _put_out(args, record, figures)
    return 1 if any(timing.us is None for measured in record.cells for timing in measured.ours.values()) else 0


def _peers(args: argparse.Namespace) -> Peers:
    return Peers({}) if args.no_peers else Peers(file=args.peers)


def _measure(
    args: argparse.Namespace, cells: Sequence[Cell], device: torch.device, record: Record, before: Record
) -> None:
    """Fill the record cell by cell, written out after each."""
    peers = _peers(args)
    repeats = 7 if args.repeats is None else args.repeats
    session = runner.Session(cells, device, split_tokens=args.split_tokens, tiles=args.tiles, repeats=repeats)
    total = len(cells) * (1 + len(peers)) if args.host else runner.steps(cells, peers, session)
    with table.progress(total, "bench") as tell:
        for cell in cells:
            if args.host:
                record.host.append(runner.time_host(cell, session, peers, tell=tell))
            else:
                record.cells.append(runner.time_decode(cell, session=session, peers=peers, tell=tell))
            if args.json is not None:
                before.merged(record).save(args.json)


def _dry_run(args: argparse.Namespace, cells: Sequence[Cell], device: str) -> int:
    peers = _peers(args)
    torch.manual_seed(0)  # so that its errors repeat
    small, session = runner.dry_session(cells, device, split_tokens=args.split_tokens)
    with table.progress(runner.steps(small, peers, session), "dry run") as tell:
        found = [runner.time_decode(cell, session=session, peers=peers, tell=tell) for cell in small]
    table.show(dry_run_table(found))
    for line in table.notes(Record(cells=found)):
        print(line)
    right = all(timing.error_ratio is not None and timing.error_ratio <= 1 for m in found for timing in m.ours.values())
    print("small shapes, answers only: nothing was timed" if right else "wrong answers")
    return 0 if right else 1


def dry_run_table(found: Sequence[Measured]) -> table.TextTable:
    """One row per cell: sizes, and everyone's error as a fraction of the budget."""
    ours = list(dict.fromkeys(name for m in found for name in m.ours))
    peers = list(dict.fromkeys(name for m in found for name in m.peers))
    rows = []
    for m in found:
        cell = m.cell
        ratios = [(m.ours | m.peers).get(name, Timing()).error_ratio for name in (*ours, *peers)]
        lens = f"{cell.batch} × {cell.longest}" if cell.even else " ".join(map(str, cell.lens))
        texts = ["–" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        rows.append((m.label, lens, f"{cell.num_q_heads}/{cell.num_kv_heads}", *texts))
    header = ("cell, in small", "lengths", "heads", *(f"ours ({name})" for name in ours), *peers)
    return table.TextTable("error ÷ budget against float64 (1 is the limit)", header, rows)


def _put_out(args: argparse.Namespace, record: Record, figures: Figures | None) -> None:
    extra = [DENSE_NOTE] if any(name in DENSE for m in record.cells for name in m.peers) else []
    listed = any(" (listed)" in name for m in record.cells for name in table.rivals(m, record, figures))
    if figures is not None and listed:
        extra.append(figures.source)
    table.show_record(record, figures, extra)
    if args.markdown is not None:
        grids = [table.main_table(record, figures), table.peers_table(record, figures)] if record.cells else []
        grids += [table.host_table(record)] if record.host else []
        text = "\n\n".join(f"{grid.title}:\n\n{table.markdown(grid)}" for grid in grids)
        lines = [table.summarise(record, figures).text(), *table.notes(record), *extra, *table.run_text(record)]
        Path(args.markdown).write_text(
            text + "\n\n" + "\n".join(f"- {line}" for line in lines if line) + "\n", encoding="utf-8"
        )
    if args.plot is not None:
        plot.save(record, args.plot, figures)


def run(argv: Sequence[str] | None = None) -> int:
    """`python -m splitkv.bench`."""
    parser = argparse.ArgumentParser(
        prog="splitkv bench", description="Time decode beside its peers and the limit of the memory."
    )
    add_arguments(parser)
    return main(parser.parse_args(argv))
