"""The record of bench runs: JSON that says what was measured, where, with what, and when."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import itertools
import json
import math
import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from splitkv.bench.cells import NAMED, Cell

FORMAT = "splitkv-bench/1"
PACKAGES = ("flashinfer-python", "flash-attn", "flash-attn-3")


@dataclass(frozen=True)
class Timing:
    """One implementation on one cell.

    Attributes:
        us: Microseconds per call; None where it was not timed or its answer was wrong.
        error_ratio: Its error as a fraction of the error budget; None where it did not run.
        note: Why there is no time, else "".
    """

    us: float | None = None
    error_ratio: float | None = None
    note: str = ""


@dataclass
class Measured:
    """One cell of one run.

    Attributes:
        cell: What was timed.
        run: Index into `Record.runs`.
        split_tokens: The workspace's, or None for the balanced schedule.
        tiles: The tiles file that the workspace was given, or None for the built-in choice.
        copies: Caches that calls rotated over.
        sol_us: The limit in microseconds: of a pure read of the cell's KV bytes, or where that takes longer of a matrix
            product of as many operations; None where nothing was timed.
        bound: Which of them it is: "memory" or "arithmetic".
        ours: By variant of ours.
        peers: By name.
        note: Why the cell could not be run, else "".
    """

    cell: Cell
    run: int = 0
    split_tokens: int | None = None
    tiles: str | None = None
    copies: int = 0
    sol_us: float | None = None
    bound: str = "memory"
    ours: dict[str, Timing] = field(default_factory=dict)
    peers: dict[str, Timing] = field(default_factory=dict)
    note: str = ""

    @property
    def label(self) -> str:
        """The cell's name, and what of it differs from the grid's own setting."""
        extras = [] if self.cell.page_size == 16 else [self.cell.layout]
        extras += [] if self.split_tokens is None else [f"split {self.split_tokens}"]
        extras += [] if self.cell.dtype == "bfloat16" else [self.cell.dtype]
        extras += [] if not self.cell.kv_dtype or self.cell.name in NAMED else [self.cell.kv_dtype]
        extras += [] if self.tiles is None else [f"tiles {self.tiles}"]
        return ", ".join([self.cell.name, *extras])

    def best_of_ours(self) -> tuple[str, Timing] | None:
        """(variant, timing) of our fastest, or of one without a time where none has any."""
        return _best(self.ours)


def _best(table: dict[str, Timing]) -> tuple[str, Timing] | None:
    return min(table.items(), key=lambda item: math.inf if item[1].us is None else item[1].us, default=None)


@dataclass(frozen=True)
class HostMeasured:
    """Host time of eager calls on one cell: {implementation: {"median": µs, "p90": µs}}."""

    cell: Cell
    run: int
    times: dict[str, dict[str, float]]


@dataclass
class Record:
    """Runs and what they measured.

    Attributes:
        runs: One description per run: GPU, versions, date, commit, method.
        cells: Measured cells; each names its run.
        host: Host times; each names its run.
    """

    runs: list[dict[str, Any]] = field(default_factory=list)
    cells: list[Measured] = field(default_factory=list)
    host: list[HostMeasured] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "runs": self.runs,
            "cells": [_to_json(entry) for entry in self.cells],
            "host": [_to_json(entry) for entry in self.host],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Record:
        if data.get("format") != FORMAT:
            raise ValueError(f"record: expected format {FORMAT!r}, given {data.get('format')!r}")
        cells = []
        for entry in data["cells"]:
            entry = dict(entry)
            for key in ("ours", "peers"):
                entry[key] = {name: Timing(**timing) for name, timing in entry[key].items()}
            cells.append(Measured(**{**entry, "cell": _cell_from_json(entry["cell"])}))
        host = [HostMeasured(**{**entry, "cell": _cell_from_json(entry["cell"])}) for entry in data["host"]]
        return cls(list(data["runs"]), cells, host)

    def save(self, path: str | Path) -> None:
        """Write as JSON: all or nothing, so that an interrupted run leaves the last whole record."""
        path = Path(path)
        scratch = path.with_name(path.name + ".part")
        scratch.write_text(json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(scratch, path)

    @classmethod
    def load(cls, path: str | Path) -> Record:
        """Read a record; raises ValueError for a file that is none."""
        try:
            return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"record: expected a record of splitkv bench, given {path} ({error!r})") from error

    def merged(self, newer: Record) -> Record:
        """Both records as one; a cell that `newer` measured again on the same kind of GPU is replaced.

        Runs that no cell refers to any more are dropped.
        """
        runs = [*self.runs, *newer.runs]

        def key(entry: Measured | HostMeasured) -> tuple[Any, ...]:
            extra = (entry.split_tokens, entry.tiles) if isinstance(entry, Measured) else ("host",)
            return (runs[entry.run].get("gpu"), entry.cell, *extra)

        shifted_cells = [dataclasses.replace(entry, run=entry.run + len(self.runs)) for entry in newer.cells]
        shifted_host = [dataclasses.replace(entry, run=entry.run + len(self.runs)) for entry in newer.host]
        cells = list({key(entry): entry for entry in (*self.cells, *shifted_cells)}.values())
        host = list({key(entry): entry for entry in (*self.host, *shifted_host)}.values())
        used = sorted({*(entry.run for entry in cells), *(entry.run for entry in host)})
        place = {old: new for new, old in enumerate(used)}
        return Record(
            [runs[old] for old in used],
            [dataclasses.replace(entry, run=place[entry.run]) for entry in cells],
            [dataclasses.replace(entry, run=place[entry.run]) for entry in host],
        )


def _to_json(entry: Measured | HostMeasured) -> dict[str, Any]:
    data = dataclasses.asdict(entry)
    data["cell"]["lens"] = [[len(list(group)), length] for length, group in itertools.groupby(entry.cell.lens)]
    data["cell"]["kv_bytes"] = entry.cell.kv_bytes
    for table in (data.get("ours", {}), data.get("peers", {})):
        for timing in table.values():
            if timing["error_ratio"] is not None and not math.isfinite(timing["error_ratio"]):
                timing["error_ratio"] = 1e30  # JSON has no infinity; the note says that the answer is wrong
    return data


def _cell_from_json(data: dict[str, Any]) -> Cell:
    data = {key: value for key, value in data.items() if key != "kv_bytes"}
    data["lens"] = tuple(length for count, length in data["lens"] for _ in range(count))
    return Cell(**data)


def describe_run(device: torch.device, method: str) -> dict[str, Any]:
    """GPU, versions, date and commit, as a record keeps them."""
    import triton

    import splitkv

    versions = {
        "splitkv": splitkv.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
    }
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    commit, changed = _commit()
    run: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit,
        "uncommitted_changes": changed,
        "gpu": None,
        "versions": versions,
        "method": method,
    }
    if device.type == "cuda":
        props = torch.cuda.get_device_properties(device)
        run["gpu"] = props.name
        run["multiprocessors"] = props.multi_processor_count
        run["memory_bytes"] = props.total_memory
        run["l2_bytes"] = getattr(props, "L2_cache_size", None)
    return run


def _commit() -> tuple[str | None, bool | None]:
    """(commit, whether tracked files differ from it) of the tree that the package lies in; Nones outside of one."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()

    try:
        # A package installed into some other project's environment is not at that project's commit.
        root = Path(git("rev-parse", "--show-toplevel")).resolve()
        if root != Path(__file__).resolve().parents[2]:
            return None, None
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None, None


@dataclass(frozen=True)
class Figure:
    """A time that was measured earlier, of a peer that is not run here."""

    peer: str
    cell: str
    us: float
    page_size: int | None


@dataclass(frozen=True)
class Figures:
    """Times listed for one kind of GPU and the grid's own geometry.

    Attributes:
        gpu: As torch names it.
        dtype: Of all figures.
        figures: One per peer, cell and page size.
        source: Where they come from, with versions.
    """

    gpu: str
    dtype: str
    figures: tuple[Figure, ...]
    source: str

    @classmethod
    def load(cls, path: str | Path) -> Figures:
        """Read a file of listed figures; raises ValueError for a file that is none."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            figures = tuple(
                Figure(entry["peer"], entry["cell"], float(entry["us"]), entry["page_size"])
                for entry in data["figures"]
            )
            return cls(data["gpu"], data["dtype"], figures, data["source"])
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"figures: expected a file of listed figures, given {path} ({error!r})") from error

    def for_cell(self, measured: Measured, gpu: str | None, grid: Iterable[Cell]) -> dict[str, Timing]:
        """{peer: listed time} that hold for this cell: the grid's of that name, on that GPU, with that page size."""
        cell = measured.cell
        same = any(dataclasses.replace(known, page_size=cell.page_size) == cell for known in grid)
        if gpu != self.gpu or not same or cell.dtype != self.dtype:
            return {}
        return {
            f"{figure.peer} (listed)": Timing(us=figure.us)
            for figure in self.figures
            if figure.cell == cell.name and figure.page_size == cell.page_size
        }
