"""What is timed: named cells, each one decode call's lengths and geometry. Plain data and integers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from splitkv.config import DTYPES, MAX_HEAD_DIM, WorkspaceConfig, align_up, cdiv, require_int

DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
VIEW_PAGE = 16  # a contiguous cache is a multiple of this long, so that peers can read it as pages


@dataclass(frozen=True)
class Cell:
    """One decode call: a query token per request against a cache of given lengths.

    >>> cell = Cell("b8-4k", (4096,) * 8)
    >>> cell.batch, cell.kv_bytes // 2**20, cell.num_pages
    (8, 128, 2048)

    Attributes:
        name: How tables and the command line call it.
        lens: KV tokens of each request, each ≥ 1.
        num_q_heads, num_kv_heads, head_dim: The geometry; values are as wide as keys.
        dtype: "bfloat16", "float16" or "float32", of queries and caches.
        page_size: Tokens per page of a paged cache, its pages randomly placed; None for a contiguous cache.
    """

    name: str
    lens: tuple[int, ...]
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    page_size: int | None = 16

    def __post_init__(self) -> None:
        if not self.lens:
            raise ValueError("lens: expected at least one length, given none")
        for length in self.lens:
            require_int("lens", length, 1)
        require_int("num_kv_heads", self.num_kv_heads, 1)
        require_int("num_q_heads", self.num_q_heads, 1)
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads: expected a multiple of num_kv_heads = {self.num_kv_heads}, given {self.num_q_heads}"
            )
        require_int("head_dim", self.head_dim, 1, MAX_HEAD_DIM)
        if self.dtype not in DTYPE_NAMES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPE_NAMES)}, given {self.dtype!r}")
        if self.page_size is not None:
            require_int("page_size", self.page_size, 1)

    @property
    def batch(self) -> int:
        return len(self.lens)

    @property
    def total_tokens(self) -> int:
        return sum(self.lens)

    @property
    def longest(self) -> int:
        return max(self.lens)

    @property
    def mean_len(self) -> int:
        """Tokens per request, rounded up."""
        return cdiv(self.total_tokens, self.batch)

    @property
    def even(self) -> bool:
        """Whether all requests are equally long."""
        return len(set(self.lens)) == 1

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPE_NAMES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values, all heads."""
        return 2 * self.num_kv_heads * self.head_dim * self.torch_dtype.itemsize

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that a decode call has to read."""
        return self.total_tokens * self.token_bytes

    @property
    def num_pages(self) -> int:
        """Pages that hold the cell's tokens; of a contiguous cache as peers see it, those of the padded rows."""
        if self.page_size is None:
            return self.batch * (self.max_len // VIEW_PAGE)
        return sum(cdiv(length, self.page_size) for length in self.lens)

    @property
    def max_len(self) -> int:
        """Tokens per row of a contiguous cache."""
        return align_up(self.longest, VIEW_PAGE)

    @property
    def cache_bytes(self) -> int:
        """Bytes of one cache that holds the cell: whole pages, or padded rows."""
        return self.num_pages * (self.page_size or VIEW_PAGE) * self.token_bytes

    @property
    def layout(self) -> str:
        """As tables say it: "page 16" or "contiguous"."""
        return "contiguous" if self.page_size is None else f"page {self.page_size}"

    @property
    def geometry(self) -> tuple[int, int, int, str]:
        return self.num_q_heads, self.num_kv_heads, self.head_dim, self.dtype

    def shrunk(self) -> Cell:
        """The same kind of cell, small enough for Triton's interpreter: at most 3 requests, 96 tokens, 2 KV heads.

        Even lengths stay even, uneven ones uneven, and the group keeps its size.

        >>> Cell("skew", (131072,) + (1024,) * 63).shrunk().lens
        (96, 11, 40)
        """
        longest = min(96, self.longest)
        lens = (longest,) * min(3, self.batch) if self.even else (longest, *(min(n, longest) for n in (11, 40)))
        heads = min(2, self.num_kv_heads)
        return dataclasses.replace(
            self,
            lens=lens,
            num_kv_heads=heads,
            num_q_heads=heads * (self.num_q_heads // self.num_kv_heads),
            head_dim=min(32, self.head_dim),
        )


# exp of 64 normal variates around 7.6, seed 7, no longer than 32768.
# fmt: off
RAGGED64 = (
    879, 2967, 4909, 498, 1690, 2657, 1052, 817, 5046, 1169, 626, 1261, 4058, 5501, 2515, 5944, 410, 1444,
    13716, 1436, 2436, 4368, 5648, 968, 1620, 1611, 325, 1414, 254, 3920, 532, 512, 1838, 1951, 2378, 19897,
    5203, 1030, 872, 1090, 492, 7312, 10310, 694, 1538, 1555, 3298, 2591, 1672, 1541, 1969, 1361, 102, 691,
    1467, 5086, 10140, 2001, 1290, 242, 6279, 1363, 1400, 4247,
)
# fmt: on

GRID = (
    Cell("b1-1k", (1024,)),
    Cell("b1-4k", (4096,)),
    Cell("b1-32k", (32768,)),
    Cell("b1-128k", (131072,)),
    Cell("b8-4k", (4096,) * 8),
    Cell("b32-4k", (4096,) * 32),
    Cell("b64-512", (512,) * 64),
    Cell("b128-1k", (1024,) * 128),
    Cell("b256-4k", (4096,) * 256),
    Cell("skew", (131072, *(1024,) * 63)),
    Cell("ragged64", RAGGED64),
    Cell("tp8-b32-8k", (8192,) * 32, num_q_heads=8, num_kv_heads=1),
    Cell("mha-b16-4k", (4096,) * 16, num_q_heads=32, num_kv_heads=32),
    Cell("q32b-b16-8k", (8192,) * 16, num_q_heads=64, num_kv_heads=8),
)
"""The named cells. All of a run's cells share one capacity, so that capacity tells nothing about their lengths."""

MIN_CAPACITY = (256, 131072)  # requests, tokens per request


def select(names: Iterable[str]) -> list[Cell]:
    """Cells of the grid by name, in the order given.

    Raises:
        ValueError: an unknown name; lists the known ones.
    """
    by_name = {cell.name: cell for cell in GRID}
    chosen = []
    for name in names:
        if name not in by_name:
            raise ValueError(f"cells: expected names among {', '.join(by_name)}, given {name!r}")
        chosen.append(by_name[name])
    return chosen


def custom(batch: int | None, lens: Sequence[int], **geometry: object) -> Cell:
    """A cell of the user's own sizes.

    >>> custom(4, [1000]).name, custom(None, [10, 20]).lens
    ('4x1000', (10, 20))

    Args:
        batch: Requests; None: one per length.
        lens: One length for all requests, or one per request.
        **geometry: Fields of `Cell` but its name and lengths.

    Raises:
        ValueError: lengths that are neither one nor as many as the batch.
    """
    if batch is not None:
        require_int("batch", batch, 1)
        if len(lens) not in (1, batch):
            raise ValueError(f"lens: expected one length or {batch} (the batch), given {len(lens)}")
    full = tuple(lens) * batch if batch is not None and len(lens) == 1 else tuple(lens)
    if len(set(full)) == 1:
        name = f"{len(full)}x{full[0]}"
    else:
        name = f"{len(full)}x{min(full)}-{max(full)}" if full else ""
    return Cell(name, full, **geometry)  # type: ignore[arg-type]


def capacity(cells: Iterable[Cell]) -> tuple[int, int]:
    """(requests, tokens per request) that workspaces and page tables of a run are made for.

    At least those of the grid, whichever of its cells are run.

    >>> capacity(GRID[:1])
    (256, 131072)
    """
    sizes = [MIN_CAPACITY, *((cell.batch, cell.longest) for cell in cells)]
    return max(batch for batch, _ in sizes), max(length for _, length in sizes)


def workspace_config(cell: Cell, max_batch_size: int, split_tokens: int | None = None) -> WorkspaceConfig:
    """The workspace of every cell of this geometry."""
    return WorkspaceConfig(
        max_batch_size=max_batch_size,
        num_q_heads=cell.num_q_heads,
        num_kv_heads=cell.num_kv_heads,
        head_dim=cell.head_dim,
        split_tokens=split_tokens,
        dtype=cell.torch_dtype,
    )
