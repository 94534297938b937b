"""Records as tables: on a terminal (with rich where it is installed), and in Markdown."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from splitkv.bench.cells import GRID
from splitkv.bench.record import Figures, Measured, Record, Timing


@dataclass(frozen=True)
class TextTable:
    """A table as text.

    Attributes:
        title: Above it.
        header: Column titles with units.
        rows: As many texts each.
    """

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


def size_text(nbytes: int) -> str:
    """Bytes in a binary unit.

    >>> size_text(4 * 2**20), size_text(3 * 2**29), size_text(24576)
    ('4 MiB', '1.5 GiB', '24 KiB')
    """
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"


def us_text(us: float | None) -> str:
    """Microseconds with one digit after the point; a dash for none."""
    return "–" if us is None else f"{us:.1f}"


def rivals(measured: Measured, record: Record, figures: Figures | None) -> dict[str, Timing]:
    """Peers of the cell that have a time, and listed figures of those that were not measured here."""
    table = {name: timing for name, timing in measured.peers.items() if timing.us is not None}
    if figures is not None:
        gpu = record.runs[measured.run].get("gpu") if record.runs else None
        for name, timing in figures.for_cell(measured, gpu, GRID).items():
            if name.removesuffix(" (listed)") not in table:
                table[name] = timing
    return table


def best_rival(measured: Measured, record: Record, figures: Figures | None) -> tuple[str, float] | None:
    """(name, µs) of the fastest of `rivals`."""
    times = [(timing.us, name) for name, timing in rivals(measured, record, figures).items() if timing.us is not None]
    if not times:
        return None
    us, name = min(times)
    return name, us


def main_table(record: Record, figures: Figures | None = None) -> TextTable:
    """One row per cell: the limit, ours, the best peer, and how they compare."""
    variants = len({name for measured in record.cells for name in measured.ours}) > 1
    rows: list[tuple[str, ...]] = []
    for measured in record.cells:
        variant, ours = measured.best_of_ours() or ("", Timing(note=measured.note))
        rival = best_rival(measured, record, figures)
        if ours.us is not None:
            shown = us_text(ours.us) + (f" ({variant})" if variants else "")
        else:
            shown = ours.note or measured.note or "–"
        rows.append(
            (
                measured.label,
                size_text(measured.cell.kv_bytes),
                us_text(measured.sol_us) + (" (arithmetic)" if measured.bound == "arithmetic" else ""),
                shown,
                f"{measured.sol_us / ours.us:.2f}" if measured.sol_us is not None and ours.us is not None else "–",
                f"{us_text(rival[1])} {rival[0]}" if rival else "–",
                f"{rival[1] / ours.us:.2f}" if rival and ours.us is not None else "–",
                "–" if ours.error_ratio is None else f"{ours.error_ratio:.2f}",
            )
        )
    header = (
        "cell",
        "KV bytes",
        "limit µs",
        "ours µs",
        "limit ÷ ours",
        "best peer µs",
        "peer ÷ ours",
        "error ÷ budget",
    )
    return TextTable("decode: microseconds per call", header, rows)


def peers_table(record: Record, figures: Figures | None = None) -> TextTable:
    """One row per cell, one column per variant of ours and per peer."""
    variants = list(dict.fromkeys(name for measured in record.cells for name in measured.ours))
    tables = [rivals(measured, record, figures) for measured in record.cells]
    names = list(dict.fromkeys(name for table in tables for name in table))
    rows = []
    for measured, table in zip(record.cells, tables, strict=True):
        times = [measured.ours.get(name, Timing()).us for name in variants]
        times += [table.get(name, Timing()).us for name in names]
        rows.append((measured.label, us_text(measured.sol_us), *map(us_text, times)))
    ours = [f"ours ({name})" if len(variants) > 1 else "ours" for name in variants]
    return TextTable("every implementation: microseconds per call", ("cell", "limit", *ours, *names), rows)


def host_table(record: Record) -> TextTable:
    """One row per cell: host time of one eager call."""
    names = list(dict.fromkeys(name for entry in record.host for name in entry.times))
    rows = []
    for entry in record.host:
        texts = [
            f"{entry.times[name]['median']:.1f} ({entry.times[name]['p90']:.1f})" if name in entry.times else "–"
            for name in names
        ]
        rows.append((entry.cell.name, *texts))
    return TextTable("host: microseconds of one eager call, median (90th percentile)", ("cell", *names), rows)


@dataclass(frozen=True)
class Summary:
    """How ours stands against the best peer over the cells that have both.

    Attributes:
        cells: How many.
        mean: Geometric mean of best peer's time ÷ ours; None for no cells.
        behind: {label: best peer's time ÷ ours} of the cells where a peer is faster.
        without: Labels of cells without a time of ours.
    """

    cells: int
    mean: float | None
    behind: dict[str, float]
    without: tuple[str, ...]

    def text(self) -> str:
        lines = []
        if self.mean is not None:
            lines.append(f"geometric mean of best peer ÷ ours over {self.cells} cells: {self.mean:.3f}")
        if self.behind:
            lines.append("behind at " + ", ".join(f"{label} ({ratio:.2f})" for label, ratio in self.behind.items()))
        if self.without:
            lines.append("no time of ours at " + ", ".join(self.without))
        return "\n".join(lines)


def summarise(record: Record, figures: Figures | None = None) -> Summary:
    """The geometric mean against the best peer, measured or listed."""
    ratios: dict[str, float] = {}
    without = []
    for measured in record.cells:
        best = measured.best_of_ours()
        rival = best_rival(measured, record, figures)
        if best is None or best[1].us is None:
            without.append(measured.label)
        elif rival is not None:
            ratios[measured.label] = rival[1] / best[1].us
    mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios)) if ratios else None
    behind = {label: ratio for label, ratio in ratios.items() if ratio < 1}
    return Summary(len(ratios), mean, behind, tuple(without))


def notes(record: Record) -> list[str]:
    """Why a peer has no time somewhere, one line per peer and reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for measured in record.cells:
        for name, timing in measured.peers.items():
            if timing.us is None and timing.note != "not timed":
                found.setdefault((name, timing.note), []).append(measured.label)
    lines = [f"{name}: {note} ({', '.join(labels)})" for (name, note), labels in found.items()]
    if any(measured.bound == "arithmetic" for measured in record.cells):
        lines.append(
            "limits of arithmetic: a matrix product by cuBLAS of as many operations as the cell's products have"
        )
    return lines


def run_text(record: Record) -> list[str]:
    """One line per run: GPU, versions, date, commit."""
    lines = []
    for run in record.runs:
        versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items() if version)
        commit = (run["commit"] or "no commit")[:12] + (" with changes" if run["uncommitted_changes"] else "")
        lines.append(f"{run['gpu'] or 'no GPU'}; {versions}; {run['date']}; {commit}")
    return lines


def markdown(grid: TextTable) -> str:
    """The table in Markdown, numbers to the right."""
    marks = ["---", *["---:"] * (len(grid.header) - 1)]
    rows = [grid.header, tuple(marks), *grid.rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def plain(grid: TextTable) -> str:
    """The table in aligned columns."""
    rows = [grid.header, *grid.rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(grid.header))]
    lines = [
        "  ".join(
            text.ljust(width) if i == 0 else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([grid.title, lines[0], "-" * len(lines[0]), *lines[1:]])


def has_rich() -> bool:
    return importlib.util.find_spec("rich") is not None


def show(grid: TextTable, file: TextIO | None = None) -> None:
    """Print a table: through rich where it is installed, else in aligned columns."""
    file = file or sys.stdout
    if not has_rich():
        print(plain(grid), file=file)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for i, title in enumerate(grid.header):
        table.add_column(title, justify="left" if i == 0 else "right", no_wrap=i == 0)
    for row in grid.rows:
        # A peer ahead is bold as well as red: colour alone is not to be relied on.
        table.add_row(
            *(f"[bold red]{text}[/]" if _is_behind(grid.header[i], text) else text for i, text in enumerate(row))
        )
    console = Console(file=file)
    # Where output is no terminal, lines are as long as the table needs: a file is not to be wrapped.
    if not console.is_terminal:
        console = Console(
            file=file,
            width=max(
                console.width,
                40 + sum(max(map(len, column)) + 3 for column in zip(grid.header, *grid.rows, strict=True)),
            ),
        )
    console.print(grid.title, markup=False)  # as a title of the table it would be wrapped to its width
    console.print(table)


def _is_behind(title: str, text: str) -> bool:
    try:
        return title == "peer ÷ ours" and float(text) < 1
    except ValueError:
        return False


@contextlib.contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[str], None]]:
    """A function that is called before each of `total` steps with what it does.

    A progress bar on a terminal with rich, a line per step on the standard error without.
    """
    if not has_rich():
        done = 0

        def line(text: str) -> None:
            nonlocal done
            done += 1
            print(f"[{done}/{total}] {text}", file=sys.stderr, flush=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns: list[Any] = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        started = 0

        def step(text: str) -> None:
            nonlocal started
            bar.update(task, description=text, completed=started)
            started += 1

        yield step
        bar.update(task, completed=total)


def show_record(record: Record, figures: Figures | None = None, extra_notes: Sequence[str] = ()) -> None:
    """Print everything that a record says: tables, summary, notes, runs."""
    if record.cells:
        show(main_table(record, figures))
        if any(rivals(measured, record, figures) for measured in record.cells):
            show(peers_table(record, figures))
        text = summarise(record, figures).text() if any(m.sol_us is not None for m in record.cells) else ""
        if text:
            print(text)
    if record.host:
        show(host_table(record))
    for line in (*notes(record), *extra_notes, *run_text(record)):
        print(line)
