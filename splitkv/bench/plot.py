"""A record as a picture: every cell's time against the limit, and bandwidth against length."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from splitkv.bench.record import Figures, Measured, Record
from splitkv.bench.table import rivals, size_text

# Okabe and Ito's colours, told apart with every common colour blindness; markers differ too.
OURS = "#0072B2"
PEERS = ("#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8C8C00", "#555555")
MARKERS = ("s", "^", "D", "v", "P", "X", "<", ">")
KNOWN = (
    "SDPA",
    "fa3",
    "sglang_triton",
    "vllm_triton",
    "XQA (listed)",
    "FlashInfer (listed)",
    "FlexAttention",
    "flashmla",
)
"""Peers that look the same in every plot."""
INK, PAPER, FAINT = "#1a1a1a", "#ffffff", "#8a8a8a"
LABEL_TBS = 0.13  # TB/s that labels of neighbours are apart, at least


def figure(record: Record, figures: Figures | None = None) -> Any:
    """A matplotlib figure of the record's timed cells.

    Raises:
        ValueError: no cell of the record has a time.
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    timed = [m for m in record.cells if m.sol_us is not None and _ours_us(m) is not None]
    if not timed:
        raise ValueError("record: expected at least one cell with a time, given none")
    height = max(4.5, 1.6 + 0.36 * len(timed))
    # An opaque ground of its own: the picture reads the same on light and dark pages.
    picture = Figure(figsize=(14, height), facecolor=PAPER, layout="constrained")
    left, right = picture.subplots(1, 2, width_ratios=(1.25, 1))
    for axes in (left, right):
        axes.set_facecolor(PAPER)
        axes.tick_params(colors=INK)
        axes.grid(True, color="#d9d9d9", linewidth=0.7)
        axes.set_axisbelow(True)
        for spine in axes.spines.values():
            spine.set_color(FAINT)
    against_limit(left, timed, record, figures)
    # Variants of a cell, such as other page sizes, lie where the cell itself does.
    _bandwidth(right, [m for m in timed if m.label == m.cell.name] or timed)
    gpus = sorted({str(record.runs[m.run].get("gpu")) for m in timed}) if record.runs else []
    versions = sorted({f"torch {r['versions']['torch']}, Triton {r['versions']['triton']}" for r in record.runs})
    picture.suptitle("splitkv decode on " + ", ".join(gpus) + f" ({'; '.join(versions)})", color=INK, fontsize=12)
    return picture


def save(record: Record, path: str | Path, figures: Figures | None = None) -> None:
    """Write the figure as a PNG; raises as `figure`."""
    figure(record, figures).savefig(path, dpi=150, facecolor=PAPER, format="png")


def _ours_us(measured: Measured) -> float | None:
    best = measured.best_of_ours()
    return best[1].us if best else None


def against_limit(axes: Any, timed: list[Measured], record: Record, figures: Figures | None = None) -> None:
    """Draw every time of these cells, each with a time and a limit, over the cell's limit."""
    names = list(dict.fromkeys(name for m in timed for name in rivals(m, record, figures)))
    looks = {name: n for n, name in enumerate((*KNOWN, *(name for name in names if name not in KNOWN)))}
    places = range(len(timed))
    what = "a pure read of the same bytes" + (
        ", or a product of as many operations" if any(m.bound == "arithmetic" for m in timed) else ""
    )
    axes.axvline(1.0, color=INK, linewidth=1.5, linestyle="--", label=f"limit: {what}")
    for name in sorted(names, key=looks.__getitem__):
        n = looks[name]
        points = [
            (timing.us / m.sol_us, y)
            for y, m in zip(places, timed, strict=True)
            if (timing := rivals(m, record, figures).get(name)) is not None and timing.us is not None and m.sol_us
        ]
        xs, ys = zip(*points, strict=True)
        axes.scatter(
            xs, ys, s=34, marker=MARKERS[n % len(MARKERS)], color=PEERS[n % len(PEERS)], label=name,
            facecolors="none" if name.endswith("(listed)") else None, linewidths=1.2,
        )  # fmt: skip
    ratios = [(_ours_us(m) or 0.0) / (m.sol_us or 1.0) for m in timed]
    axes.scatter(ratios, places, s=64, marker="o", color=OURS, label="splitkv", zorder=3)
    for x, y in zip(ratios, places, strict=True):
        axes.hlines(y, 1.0, x, color=OURS, linewidth=2, zorder=2)
    axes.set_yticks(list(places), [f"{m.label}  ({size_text(m.cell.kv_bytes)}, {m.sol_us:.1f} µs)" for m in timed])
    axes.invert_yaxis()
    axes.set_xscale("log")
    top = axes.get_xlim()[1]
    ticks = [t for t in (1, 1.25, 1.5, 2, 3, 4, 6, 10, 20, 50, 100) if t <= max(top, 1.5)]
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()
    axes.set_xlabel("time ÷ limit (log scale; 1 is the limit)", color=INK)
    axes.set_ylabel("cell  (KV bytes, limit)", color=INK)
    axes.set_title("Time against the limit", color=INK)
    axes.legend(loc="best", fontsize=8, facecolor=PAPER, edgecolor=FAINT, labelcolor=INK)


def _bandwidth(axes: Any, timed: list[Measured]) -> None:
    timed = [m for m in timed if m.bound == "memory"]
    if not timed:
        axes.set_visible(False)
        return

    def points(us: Any) -> list[tuple[float, float, Measured]]:
        return [(m.cell.mean_len, m.cell.kv_bytes / us(m) / 1e6, m) for m in timed]

    limit, ours = points(lambda m: m.sol_us), points(_ours_us)
    for data, marker, colour, label, size in (
        (limit, "_", INK, "limit: a pure read of the same bytes", 160),
        (ours, "o", OURS, "splitkv", 46),
    ):
        axes.scatter(
            [x for x, _, _ in data], [y for _, y, _ in data], marker=marker, color=colour, label=label, s=size, zorder=3
        )
    # Cells that differ in length alone are joined.
    lines: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for x, y, m in ours:
        if m.cell.even:
            lines.setdefault((m.cell.geometry, m.cell.batch, m.cell.page_size, m.split_tokens), []).append((x, y))
    for line in lines.values():
        if len(line) > 1:
            xs, ys = zip(*sorted(line), strict=True)
            axes.plot(xs, ys, color=OURS, linewidth=1.2, zorder=2)
    for x, y, place, text in _spread_labels([(x, y, m.label) for x, y, m in ours], LABEL_TBS):
        leader = {"arrowstyle": "-", "color": FAINT, "linewidth": 0.6} if abs(place - y) > LABEL_TBS / 2 else None
        axes.annotate(
            text, (x, y), xytext=(x * 1.14, place), fontsize=7, color=INK, verticalalignment="center", arrowprops=leader
        )
    axes.set_xscale("log", base=2)
    lengths = sorted({m.cell.mean_len for m in timed})
    low, high = min(lengths).bit_length() - 1, max(lengths).bit_length()
    ticks = [2**n for n in range(low, high + 1)]
    axes.set_xticks(ticks, [f"{t // 1024}k" if t >= 1024 else str(t) for t in ticks])
    axes.set_xlim(2 ** (low - 0.5), 2 ** (high + 0.7))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("KV tokens per request (mean of the cell, log scale)", color=INK)
    axes.set_ylabel("KV bytes read per second (TB/s)", color=INK)
    axes.set_title("Bandwidth against length", color=INK)
    axes.legend(loc="lower right", fontsize=8, facecolor=PAPER, edgecolor=FAINT, labelcolor=INK)


def _spread_labels(points: list[tuple[float, float, str]], distance: float) -> list[tuple[float, float, float, str]]:
    """(x, y, y of the label, label) of every point: labels at about the same x lie at least so far apart.

    >>> _spread_labels([(4096, 1.0, "a"), (4100, 1.1, "b"), (64, 1.1, "c")], 0.5)
    [(64, 1.1, 1.1, 'c'), (4096, 1.0, 0.8, 'a'), (4100, 1.1, 1.3, 'b')]
    """
    placed = []
    columns: dict[int, list[tuple[float, float, str]]] = {}
    for point in sorted(points):
        columns.setdefault(round(math.log2(point[0])), []).append(point)
    for column in columns.values():
        column.sort(key=lambda point: point[1])
        places: list[float] = []
        for _, y, _ in column:
            places.append(max(y, places[-1] + distance) if places else y)
        back = sum(place - y for place, (_, y, _) in zip(places, column, strict=True)) / len(column)
        placed += [(x, y, round(place - back, 6), text) for place, (x, y, text) in zip(places, column, strict=True)]
    return placed
