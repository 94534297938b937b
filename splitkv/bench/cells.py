"""What is timed: named cells, each one decode call's lengths and geometry. Plain data and integers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from splitkv.config import (
    DTYPES,
    FNUZ_DTYPES,
    MAX_HEAD_DIM,
    QUANTIZED_DTYPES,
    WorkspaceConfig,
    align_up,
    cdiv,
    require_int,
)

DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
KV_DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in QUANTIZED_DTYPES if dtype not in FNUZ_DTYPES}
VIEW_PAGE = 16  # a contiguous cache is a multiple of this long, so that peers can read it as pages


@dataclass(frozen=True)
class Cell:
    """One decode call: query tokens of each request against a cache of given lengths.

    >>> cell = Cell("b8-4k", (4096,) * 8)
    >>> cell.batch, cell.kv_bytes // 2**20, cell.num_pages
    (8, 128, 2048)
    >>> Cell("window", (4096,) * 8, window_left=1023).kv_bytes // 2**20  # what is visible
    32

    Attributes:
        name: How tables and the command line call it.
        lens: KV tokens of each request, those of its query tokens included.
        num_q_heads, num_kv_heads, head_dim: The geometry; values are as wide as keys.
        dtype: "bfloat16", "float16" or "float32", of queries and caches.
        kv_dtype: Of caches that are quantised, such as "float8_e4m3fn", with a scale for all numbers; "": as queries.
        latent: Width of values that are the first columns of keys (a LatentKV); None: they lie apart, as wide as keys.
        page_size: Tokens per page of a paged cache, its pages randomly placed; None for a contiguous cache.
        q_len: Query tokens of each request.
        tree: Whether they are draft tokens with a tree mask: a binary tree, or as much of it as there are.
        window_left, softcap: As for `splitkv.decode`.
        sinks: Whether each head has a logit that joins the softmax.
        shared: How many tokens, whole pages, all requests have in common at their beginning.
    """

    name: str
    lens: tuple[int, ...]
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    page_size: int | None = 16
    q_len: int = 1
    tree: bool = False
    window_left: int | None = None
    softcap: float | None = None
    sinks: bool = False
    kv_dtype: str = ""
    latent: int | None = None
    shared: int = 0

    def __post_init__(self) -> None:
        if not self.lens:
            raise ValueError("lens: expected at least one length, given none")
        require_int("q_len", self.q_len, 1)
        for length in self.lens:
            require_int("lens", length, self.q_len)
        if self.window_left is not None:
            require_int("window_left", self.window_left, 0)
        require_int("shared", self.shared, 0, min(self.lens) - self.q_len)
        if self.shared and (self.page_size is None or self.shared % self.page_size or self.window_left is not None):
            raise ValueError(
                f"shared: expected whole pages and no window, given {self.shared} tokens with {self.layout} and "
                f"window_left {self.window_left}"
            )
        require_int("num_kv_heads", self.num_kv_heads, 1)
        require_int("num_q_heads", self.num_q_heads, 1)
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads: expected a multiple of num_kv_heads = {self.num_kv_heads}, given {self.num_q_heads}"
            )
        require_int("head_dim", self.head_dim, 1, MAX_HEAD_DIM)
        if self.dtype not in DTYPE_NAMES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPE_NAMES)}, given {self.dtype!r}")
        if self.kv_dtype not in ("", *KV_DTYPE_NAMES):
            raise ValueError(f"kv_dtype: expected one of {', '.join(KV_DTYPE_NAMES)}, given {self.kv_dtype!r}")
        if self.page_size is not None:
            require_int("page_size", self.page_size, 1)
        if self.latent is not None:
            require_int("latent", self.latent, 1, self.head_dim)
            if self.num_kv_heads != 1 or self.page_size is None:
                raise ValueError(
                    f"latent: expected pages and num_kv_heads = 1, given {self.layout} and {self.num_kv_heads}"
                )

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
    def torch_kv_dtype(self) -> torch.dtype:
        return KV_DTYPE_NAMES[self.kv_dtype] if self.kv_dtype else self.torch_dtype

    @property
    def head_dim_v(self) -> int:
        return self.latent or self.head_dim

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values, all heads."""
        columns = self.head_dim if self.latent is not None else 2 * self.head_dim
        return columns * self.num_kv_heads * self.torch_kv_dtype.itemsize

    def first_visible(self, length: int) -> int:
        """The first token of a request of this length that a query token sees."""
        return 0 if self.window_left is None else max(0, length - self.q_len - self.window_left)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that a decode call has to read: those that some query token sees, once."""
        own = sum(length - self.first_visible(length) - self.shared for length in self.lens)
        return (self.shared + own) * self.token_bytes

    @property
    def flops(self) -> int:
        """Operations of both matrix products, over the keys that each query token sees by the causal rule."""
        most = self.longest if self.window_left is None else self.window_left + 1
        pairs = sum(min(length - back, most) for length in self.lens for back in range(self.q_len))
        return 2 * pairs * self.num_q_heads * (self.head_dim + self.head_dim_v)

    @property
    def num_pages(self) -> int:
        """Pages that hold the cell's tokens; of a contiguous cache as peers see it, those of the padded rows."""
        if self.page_size is None:
            return self.batch * (self.max_len // VIEW_PAGE)
        return sum(self.own_pages) + self.shared // self.page_size

    @property
    def own_pages(self) -> tuple[int, ...]:
        """Pages of each request that it has for itself; of a paged cell."""
        assert self.page_size is not None
        return tuple(cdiv(length - self.shared, self.page_size) for length in self.lens)

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
    def geometry(self) -> tuple[int, int, int, str, str, int | None]:
        return self.num_q_heads, self.num_kv_heads, self.head_dim, self.dtype, self.kv_dtype, self.latent

    def shrunk(self) -> Cell:
        """The same kind of cell, small enough for Triton's interpreter: at most 3 requests, 96 tokens, 2 KV heads.

        Even lengths stay even, uneven ones uneven, the group keeps its size, and every rule its effect.

        >>> Cell("skew", (131072,) + (1024,) * 63).shrunk().lens
        (96, 11, 40)
        """
        longest = min(96, self.longest)
        shared = 0 if self.page_size is None else min(64 // self.page_size * self.page_size, self.shared)
        lens = (longest,) * min(3, self.batch)
        if not self.even:
            lens = (longest, *(min(shared + n, longest) for n in (11, 40)))
        heads = min(2, self.num_kv_heads)
        return dataclasses.replace(
            self,
            lens=lens,
            q_len=min(17, self.q_len),
            window_left=None if self.window_left is None else min(25, self.window_left),
            num_kv_heads=heads,
            num_q_heads=heads * (self.num_q_heads // self.num_kv_heads),
            head_dim=min(32 if self.latent is None else 48, self.head_dim),
            latent=None if self.latent is None else min(32, self.latent),
            shared=shared,
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
"""The cells of plain decode. All of a run's cells share one capacity, so that it tells nothing about their lengths."""

RULES = (
    Cell("tree-b8-4k", (4096,) * 8, q_len=4, tree=True),
    Cell("tree-b32-4k", (4096,) * 32, q_len=4, tree=True),
    Cell("extend-512", (8192 + 512,) * 4, q_len=512),
    Cell("extend-2048", (8192 + 2048,) * 4, q_len=2048),
    Cell("gpt-oss-window", (8192,) * 32, 64, 8, 64, window_left=127, sinks=True),
    Cell("gpt-oss-full", (8192,) * 32, 64, 8, 64, sinks=True),
    Cell("gemma-2-window", (8192,) * 32, 16, 8, 256, window_left=4095, softcap=50.0),
    Cell("gemma-2-full", (8192,) * 32, 16, 8, 256, softcap=50.0),
)
"""Cells of several query tokens and of models' rules. The trees are b8-4k and b32-4k with 4 query tokens each."""

_MLA: dict[str, Any] = dict(num_q_heads=16, num_kv_heads=1, head_dim=576, latent=512, page_size=64)
_FP8: dict[str, Any] = dict(kv_dtype="float8_e4m3fn")
FORMATS = (
    Cell("fp8-b32-4k", (4096,) * 32, **_FP8),
    Cell("int8-b32-4k", (4096,) * 32, kv_dtype="int8"),
    Cell("fp8-b128-1k", (1024,) * 128, **_FP8),
    Cell("fp8-b256-4k", (4096,) * 256, **_FP8),
    Cell("mla-1x8k", (8192,), **_MLA),
    Cell("mla-32x8k", (8192,) * 32, **_MLA),
    Cell("mla-128x4k", (4096,) * 128, **_MLA),
    Cell("mla-h128-64x4k", (4096,) * 64, **{**_MLA, "num_q_heads": 128}),
    Cell("mla-fp8-32x8k", (8192,) * 32, **_MLA, **_FP8),
    Cell("mla-fp8-128x4k", (4096,) * 128, **_MLA, **_FP8),
)
"""Quantised caches of cells of the grid, and latent rows."""

PREFIX = (
    Cell("prefix-32k-b64", (32768 + 512,) * 64, shared=32768),
    Cell("prefix-4k-b64", (4096 + 512,) * 64, shared=4096),
    Cell("prefix-1k-b16", (1024 + 512,) * 16, shared=1024),
)
"""Cells of requests with the same beginning, such as a system prompt."""

NAMED = {cell.name: cell for cells in (GRID, RULES, FORMATS, PREFIX) for cell in cells}
GROUPS = {
    "grid": GRID,
    "rules": RULES,
    "prefix": PREFIX,
    # Half the bytes should take half the time: what is halved is timed in the same run.
    "formats": (*(NAMED[name] for name in ("b32-4k", "b128-1k", "b256-4k")), *FORMATS),
}

MIN_CAPACITY = (256, 131072)  # requests, tokens per request


def select(names: Iterable[str]) -> list[Cell]:
    """Cells by name, or by the name of a group of them, in the order given.

    >>> [cell.name for cell in select(["b1-1k", "rules"])][:3]
    ['b1-1k', 'tree-b8-4k', 'tree-b32-4k']

    Raises:
        ValueError: an unknown name; lists the known ones.
    """
    chosen: list[Cell] = []
    for name in names:
        if name in GROUPS:
            chosen += GROUPS[name]
        elif name in NAMED:
            chosen.append(NAMED[name])
        else:
            raise ValueError(f"cells: expected names among {', '.join((*GROUPS, *NAMED))}, given {name!r}")
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


def workspace_config(
    cell: Cell, max_batch_size: int, split_tokens: int | None = None, q_tile_rows: int | None = None
) -> WorkspaceConfig:
    """The workspace of every cell of this geometry with as many query tokens, at least one per request."""
    return WorkspaceConfig(
        max_batch_size=max_batch_size,
        max_total_q=max(max_batch_size, cell.batch * cell.q_len),
        q_tile_rows=q_tile_rows,  # type: ignore[arg-type]
        num_q_heads=cell.num_q_heads,
        num_kv_heads=cell.num_kv_heads,
        head_dim=cell.head_dim,
        head_dim_v=cell.head_dim_v,
        split_tokens=split_tokens,
        dtype=cell.torch_dtype,
    )
