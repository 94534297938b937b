"""Drawing for the notebooks: one style, and the pictures that several of them share.

Figures have an opaque light ground of their own, so that they read the same on light and on dark pages. Colours are
Okabe and Ito's, which are told apart with every common colour blindness; where colour carries meaning, a label or a
hatch says it too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch, Rectangle

from splitkv import WorkspaceConfig
from splitkv.bench.plot import FAINT, INK, MARKERS, OURS, PAPER, PEERS
from splitkv.config import cdiv
from splitkv.schedule import Partition, Request

__all__ = ["FAINT", "INK", "MARKERS", "OURS", "PAPER"]

COLOURS = (OURS, *PEERS)
PALE = "#E8EDF2"  # what is hidden, or free


def use_style() -> None:
    """Set matplotlib's defaults for the notebooks."""
    plt.rcParams.update(
        {
            "figure.facecolor": PAPER,
            "figure.dpi": 100,
            "figure.figsize": (9, 3.6),
            "figure.constrained_layout.use": True,
            "savefig.facecolor": PAPER,
            "axes.facecolor": PAPER,
            "axes.edgecolor": FAINT,
            "axes.labelcolor": INK,
            "axes.titlecolor": INK,
            "axes.titlesize": 11,
            "axes.labelsize": 10,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.prop_cycle": plt.cycler(color=COLOURS),
            "grid.color": "#dddddd",
            "grid.linewidth": 0.7,
            "text.color": INK,
            "xtick.color": INK,
            "ytick.color": INK,
            "legend.fontsize": 9,
            "legend.frameon": False,
            "lines.linewidth": 1.8,
            "hatch.color": PAPER,
            "hatch.linewidth": 1.0,
        }
    )


def colour(index: int) -> str:
    """The colour of request `index`; they repeat after eight."""
    return COLOURS[index % len(COLOURS)]


def marker(index: int) -> str:
    """The marker of series `index`; they repeat."""
    return MARKERS[index % len(MARKERS)]


def ink_on(background: str) -> str:
    """Black or white, whichever reads better on a colour."""
    red, green, blue = (int(background[i : i + 2], 16) for i in (1, 3, 5))
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else PAPER


def bare(axes: Any) -> None:
    """No ticks, no grid, no frame: for drawings that have no scale."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)


def draw_sections(configs: Mapping[str, WorkspaceConfig]) -> None:
    """What workspaces hold, in megabytes: a bar per config, a colour per buffer."""
    figure, axes = plt.subplots(figsize=(9, 1.3 + 0.5 * len(configs)))
    for y, config in enumerate(configs.values()):
        left = 0.0
        for n, section in enumerate(config.sections()):
            size = section.nbytes / 1e6
            axes.barh(
                y, size, left=left, height=0.6, color=colour(n), edgecolor=PAPER, label=section.name if y == 0 else None
            )
            left += size
        axes.annotate(f"{config.nbytes / 1e6:.1f} MB", (left, y), xytext=(6, -3), textcoords="offset points")
    axes.set_yticks(range(len(configs)), list(configs))
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel("size (MB = 10⁶ bytes)")
    axes.set_title("Buffers of a workspace")
    figure.legend(ncols=4, loc="outside lower center")


def draw_pages(
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    num_pages: int,
    page_size: int,
    axes: Any = None,
    columns: int = 16,
    captions: bool = True,
) -> None:
    """A cache's pages in memory order: a colour per request, the page's place in the request, and how full it is."""
    rows = cdiv(num_pages, columns)
    if axes is None:
        _, axes = plt.subplots(figsize=(9, 0.7 + 0.5 * rows))
    bare(axes)
    for page in range(num_pages):
        axes.add_patch(
            Rectangle((page % columns, page // columns), 0.92, 0.86, facecolor=PALE, edgecolor=FAINT, lw=0.6)
        )
    lens = seq_lens.tolist()
    for b, length in enumerate(lens):
        for place, page in enumerate(page_table[b, : cdiv(length, page_size)].tolist()):
            x, y = page % columns, page // columns
            full = min(length - place * page_size, page_size) / page_size
            axes.add_patch(Rectangle((x, y), 0.92 * full, 0.86, facecolor=colour(b)))
            shade = ink_on(colour(b)) if full > 0.6 else INK
            axes.text(x + 0.46, y + 0.45, str(place), ha="center", va="center", fontsize=8, color=shade)
    axes.set_xlim(-0.1, columns)
    axes.set_ylim(rows, -0.1)
    if not captions:
        return
    axes.set_title(
        f"{num_pages} pages of {page_size} tokens in memory order; the number is the page's place in its request"
    )
    axes.legend(
        handles=[Patch(color=colour(b), label=f"request {b}: {length} tokens") for b, length in enumerate(lens)],
        ncols=min(len(lens), 4),
        loc="upper center",
        bbox_to_anchor=(0.5, 0.02),
    )


def loads(partition: Partition, lens: Sequence[int]) -> list[int]:
    """Keys that each program of one KV head attends."""
    keys = [0] * partition.shares
    for stretch in partition.stretches([Request(length) for length in lens]):
        keys[stretch.share] += stretch.tokens
    return keys


def draw_shares(
    partition: Partition,
    lens: Sequence[int],
    axes: Any = None,
    title: str = "",
    name_requests: bool = True,
) -> None:
    """Which keys each program of one KV head attends: a row per program, a colour per request.

    Hatched stretches are parts of a tile, which leave partials to merge; plain ones are whole tiles.
    """
    requests = [Request(length) for length in lens]
    rows = partition.shares
    if axes is None:
        _, axes = plt.subplots(figsize=(9, 1.2 + 0.26 * min(rows, 16)))
    filled = [0] * rows
    edge = 0.8 if rows <= 40 else 0.2
    for stretch in partition.stretches(requests):
        if not stretch.tokens:
            continue
        axes.barh(
            stretch.share, stretch.tokens, left=filled[stretch.share], height=0.84, color=colour(stretch.request),
            edgecolor=PAPER, linewidth=edge, hatch="///" if stretch.slot is not None and rows <= 40 else None,
        )  # fmt: skip
        filled[stretch.share] += stretch.tokens
    mean = sum(filled) / rows
    axes.axvline(mean, color=INK, linewidth=1.2, linestyle="--")
    axes.set_ylim(rows - 0.4, -0.6)
    axes.set_xlim(0, max(filled) * 1.05 or 1)
    axes.set_ylabel("program")
    axes.set_xlabel("keys attended")
    axes.grid(False, axis="y")
    busiest = max(filled) / mean if mean else 1.0
    axes.set_title(f"{title}\nbusiest program: {busiest:.2f} × the mean (dashed)" if title else "")
    if name_requests and len(lens) <= 8:
        axes.legend(
            handles=[Patch(color=colour(b), label=f"request {b}: {length}") for b, length in enumerate(lens)],
            loc="center left",
            bbox_to_anchor=(1.0, 0.5),
        )


def draw_mask(mask: torch.Tensor, axes: Any, title: str = "", first_query: int | None = None, step: int = 4) -> None:
    """A boolean mask [rows, keys]: what is seen dark, what is hidden pale."""
    rows, keys = mask.shape
    axes.imshow(
        mask.int(), cmap=ListedColormap([PALE, OURS]), vmin=0, vmax=1, aspect="auto" if rows < keys / 4 else "equal",
        interpolation="nearest",
    )  # fmt: skip
    axes.set_xticks(range(0, keys, step))
    axes.set_yticks(range(0, rows, max(1, rows // 8)))
    axes.grid(False)
    # Lines between the cells, so that they can be counted.
    axes.set_xticks([i - 0.5 for i in range(keys + 1)], minor=True)
    axes.set_yticks([i - 0.5 for i in range(rows + 1)], minor=True)
    axes.grid(True, which="minor", color=PAPER, linewidth=0.8)
    axes.tick_params(which="minor", length=0)
    if first_query is not None:
        axes.axvline(first_query - 0.5, color=PEERS[0], linewidth=2)
    axes.set_title(title)
    axes.set_xlabel("key")


def draw_tree(parents: Sequence[int], axes: Any, title: str = "") -> None:
    """A tree of draft tokens, root to the left, from each node's parent (-1: a root)."""
    bare(axes)
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    places: dict[int, tuple[float, float]] = {}
    leaves = 0

    def place(node: int, depth: int) -> float:
        nonlocal leaves
        heights = [place(child, depth + 1) for child in children.get(node, [])]
        if not heights:
            leaves += 1
        y = sum(heights) / len(heights) if heights else 1.0 - leaves
        places[node] = depth, y
        return y

    for root in children[-1]:
        place(root, 0)
    for node, parent in enumerate(parents):
        x, y = places[node]
        if parent >= 0:
            axes.plot([places[parent][0], x], [places[parent][1], y], color=FAINT, zorder=1)
        axes.scatter(x, y, s=420, color=OURS, zorder=2)
        axes.text(x, y, str(node), color=PAPER, ha="center", va="center", zorder=3)
    axes.margins(0.12, 0.2)
    axes.set_title(title)
