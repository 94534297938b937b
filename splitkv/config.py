"""Sizes, in plain integers: what a workspace holds and how many bytes that takes. No tensors, no GPU."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch

ALIGNMENT = 256  # bytes; every section starts at a multiple, as allocators of GPU memory themselves guarantee
MIN_TILE_ROWS = 16  # the least M of a tensor-core instruction
MAX_TILE_ROWS = 128
MAX_HEAD_DIM = 576
DEFAULT_MAX_SPLITS = 2048
DEFAULT_PARTIAL_BYTES = 64 * 10**6
MAX_HEADS = 65535  # the second dimension of a grid
MAX_COUNT = 2**30  # of requests and tokens: sums of two still fit 32 bits
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FNUZ_DTYPES = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
"""8-bit floats of AMD's gfx940 … gfx942: without infinities and a negative zero, whose code means NaN."""
QUANTIZED_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, *FNUZ_DTYPES)
"""Of caches only: numbers of one byte, which a scale may multiply."""


def cdiv(a: int, b: int) -> int:
    """Ceiling of a / b."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least n (1 for n ≤ 1)."""
    return 1 << max(n - 1, 0).bit_length()


def align_up(n: int, alignment: int = ALIGNMENT) -> int:
    """Smallest multiple of `alignment` that is at least n."""
    return cdiv(n, alignment) * alignment


def require_int(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raise unless `value` is an integer in low…high: TypeError for another type (bool too), ValueError outside."""
    bounds = f"an integer ≥ {low}" if high is None else f"an integer in {low}…{high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected {bounds}, given {value!r}")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name}: expected {bounds}, given {value}")


def tile_bound(num_requests: int, total_q: int, group_size: int, rows: int) -> int:
    """Most query tiles of `rows` rows that `total_q` query tokens of `num_requests` requests can need per KV head.

    A request with n tokens takes ceil(n · group_size / rows) tiles, and how the tokens are spread is known on the
    device alone, so this bounds the sum over every spread.
    """
    return min(total_q * cdiv(group_size, rows), (total_q * group_size + num_requests * (rows - 1)) // rows)


@dataclass(frozen=True)
class Section:
    """One buffer inside a block of bytes.

    Attributes:
        name: The buffer's attribute name.
        shape: Its shape, in elements.
        dtype: Its dtype.
        offset: Byte offset of its first element, a multiple of 256.
        nbytes: Its size in bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """Byte offset just past the section."""
        return self.offset + self.nbytes


def lay_out(buffers: list[tuple[str, tuple[int, ...], torch.dtype]]) -> tuple[Section, ...]:
    """Place buffers one after another, each at the next multiple of 256 bytes."""
    sections: list[Section] = []
    offset = 0
    for name, shape, dtype in buffers:
        section = Section(name, shape, dtype, offset, math.prod(shape) * dtype.itemsize)
        sections.append(section)
        offset = align_up(section.end)
    return tuple(sections)


@dataclass(frozen=True)
class WorkspaceConfig:
    """Capacity of a `Workspace`. Pure integers: needs no GPU and makes no tensor.

    >>> config = WorkspaceConfig(max_batch_size=128, num_q_heads=64, num_kv_heads=8, head_dim=128)
    >>> config.q_tile_rows, config.max_splits, config.nbytes
    (16, 2048, 19038208)

    Args:
        max_batch_size: Most requests in one call, 1…2³⁰.
        num_q_heads: Query heads, a multiple of num_kv_heads, at most 65535.
        num_kv_heads: Key/value heads, ≥ 1.
        head_dim: Width of a query and of a key, 1…576 elements.
        head_dim_v: Width of a value and of an output row, 1…576 elements. None: head_dim.
        max_total_q: Query tokens of all requests in one call that `out` and `lse` of the workspace have room for. None:
            one per request. A call that is given its out (and lse) may have more.
        max_splits: Partial tiles that the workspace holds. None: 2048, or fewer so that partials stay within
            64·10⁶ bytes; with split_tokens, as many as every request's max_parts can need.
        q_tile_rows: Capacity of one query tile in rows (query tokens times heads of a group), a power of two in 16…128.
            None: the group size rounded up to a power of two, in 16…64; 64 where max_total_q > max_batch_size, and 128
            where requests have query tokens for as many rows on average (max_total_q · group ≥ 128 · max_batch_size).
            With 64, calls whose requests all fill 128 rows take tiles of 128, unless their parts are fixed.
        split_tokens: Fixed split size in tokens. With it, a row's bits depend on its own request alone
            (batch invariance). None: splits follow the number of programs that the GPU keeps in flight.
        max_parts: With split_tokens, most parts of one tile; longer sequences get parts of a multiple of split_tokens.
        dtype: torch.float16, torch.bfloat16 or torch.float32, of queries and outputs.

    They size buffers and bound nothing else: any call fits that needs no more elements of each buffer than it holds.
    Defaults given as None are replaced by their values, so that every field can be read.

    Raises:
        TypeError, ValueError: a field out of range, named with what was expected and given.
    """

    max_batch_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int = None  # type: ignore[assignment]
    max_total_q: int = None  # type: ignore[assignment]
    max_splits: int = None  # type: ignore[assignment]
    q_tile_rows: int = None  # type: ignore[assignment]
    split_tokens: int | None = None
    max_parts: int = 32
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        def default(name: str, value: int) -> None:
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

        require_int("max_batch_size", self.max_batch_size, 1, MAX_COUNT)
        require_int("num_kv_heads", self.num_kv_heads, 1, MAX_HEADS)
        require_int("num_q_heads", self.num_q_heads, 1, MAX_HEADS)
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads: expected a multiple of num_kv_heads = {self.num_kv_heads}, given {self.num_q_heads}"
            )
        require_int("head_dim", self.head_dim, 1, MAX_HEAD_DIM)
        default("head_dim_v", self.head_dim)
        require_int("head_dim_v", self.head_dim_v, 1, MAX_HEAD_DIM)
        default("max_total_q", self.max_batch_size)
        require_int("max_total_q", self.max_total_q, 1, MAX_COUNT)
        rows = min(64, max(MIN_TILE_ROWS, next_power_of_2(self.group_size)))
        if self.max_total_q > self.max_batch_size:
            rows = 64
            if self.max_total_q * self.group_size >= MAX_TILE_ROWS * self.max_batch_size:
                rows = MAX_TILE_ROWS
        default("q_tile_rows", rows)
        require_int("q_tile_rows", self.q_tile_rows, MIN_TILE_ROWS, MAX_TILE_ROWS)
        if self.q_tile_rows != next_power_of_2(self.q_tile_rows):
            raise ValueError(f"q_tile_rows: expected a power of two, given {self.q_tile_rows}")
        require_int("max_parts", self.max_parts, 1, MAX_COUNT)
        if self.split_tokens is not None:
            require_int("split_tokens", self.split_tokens, 1, MAX_COUNT)
            default("max_splits", self.max_q_tiles * self.num_kv_heads * self.max_parts)
        else:
            partial_bytes = self.q_tile_rows * (self.head_dim_v + 1) * 4
            default("max_splits", min(DEFAULT_MAX_SPLITS, DEFAULT_PARTIAL_BYTES // partial_bytes))
        require_int("max_splits", self.max_splits, 1, MAX_COUNT)
        if not isinstance(self.dtype, torch.dtype) or self.dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {', '.join(map(str, DTYPES))}, given {self.dtype}")

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def max_q_tiles(self) -> int:
        """Most query tiles per KV head in one call."""
        return tile_bound(self.max_batch_size, self.max_total_q, self.group_size, self.q_tile_rows)

    def sections(self) -> tuple[Section, ...]:
        """Name, shape, dtype, byte offset and size of each buffer, in the order of a single allocation."""
        return lay_out(
            [
                ("partial_out", (self.max_splits, self.q_tile_rows, self.head_dim_v), torch.float32),
                ("partial_lse", (self.max_splits, self.q_tile_rows), torch.float32),
                ("out", (self.max_total_q, self.num_q_heads, self.head_dim_v), self.dtype),
                ("lse", (self.max_total_q, self.num_q_heads), torch.float32),
            ]
        )

    @property
    def nbytes(self) -> int:
        """Bytes of one allocation that holds every section."""
        return self.sections()[-1].end

    @classmethod
    def cover(cls, *configs: WorkspaceConfig) -> WorkspaceConfig:
        """A config whose buffers are large enough for each of several geometries, such as the layers of one model.

        The geometry (heads, widths, tile rows) is that of the config with the largest partials; its capacities grow
        until every buffer has at least the elements of each config's.

        >>> local = WorkspaceConfig(8, 16, 8, 256)
        >>> wide = WorkspaceConfig(8, 16, 1, 512)
        >>> both = WorkspaceConfig.cover(local, wide)
        >>> all(b.nbytes >= s.nbytes for c in (local, wide) for b, s in zip(both.sections(), c.sections()))
        True

        Raises:
            ValueError: no config, or configs that differ in dtype, split_tokens or max_parts.
        """
        if not configs:
            raise ValueError("configs: expected at least one WorkspaceConfig, given none")
        for config in configs:
            if not isinstance(config, WorkspaceConfig):
                raise TypeError(f"configs: expected WorkspaceConfig, given {type(config).__name__}")
        for name in ("dtype", "split_tokens", "max_parts"):
            values = {getattr(config, name) for config in configs}
            if len(values) > 1:
                raise ValueError(f"configs: expected one {name}, given {', '.join(map(str, values))}")
        base = max(configs, key=lambda config: config.sections()[0].nbytes)

        def most(section: int) -> int:
            return max(math.prod(config.sections()[section].shape) for config in configs)

        rows = base.q_tile_rows
        return dataclasses.replace(
            base,
            max_batch_size=max(config.max_batch_size for config in configs),
            max_splits=max(cdiv(most(0), rows * base.head_dim_v), cdiv(most(1), rows)),
            max_total_q=max(
                cdiv(most(2), base.num_q_heads * base.head_dim_v),
                cdiv(most(3), base.num_q_heads),
            ),
        )


@dataclass(frozen=True)
class StepConfig:
    """Capacity of a `StepState`. Pure integers: needs no GPU and makes no tensor.

    >>> config = StepConfig(max_batch_size=64)
    >>> config.max_total_q, config.max_q_tiles, config.max_page_updates, config.nbytes
    (64, 65, 16384, 334088)

    Args:
        max_batch_size: Most requests in one step, ≥ 1.
        max_total_q: Most new tokens of all requests in one step. None: one per request.
        tile_tokens: Query tokens per entry of the tile maps, ≥ 1.
        max_mask_len: Longest mask that `StepState.decode_mask` can make; 0: none is kept.
        max_page_updates: Most page-table updates in one bind. None: 16384, or one per request and new token where that
            is more. Each takes 20 bytes on the device, and in each of sixteen pieces of host memory.

    Defaults given as None are replaced by their values, so that every field can be read.

    Raises:
        TypeError, ValueError: a field out of range, named with what was expected and given.
    """

    max_batch_size: int
    max_total_q: int = None  # type: ignore[assignment]
    tile_tokens: int = 64
    max_mask_len: int = 0
    max_page_updates: int = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        def default(name: str, value: int) -> None:
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

        require_int("max_batch_size", self.max_batch_size, 1, MAX_COUNT)
        default("max_total_q", self.max_batch_size)
        require_int("max_total_q", self.max_total_q, 1, MAX_COUNT)
        require_int("tile_tokens", self.tile_tokens, 1, MAX_COUNT)
        require_int("max_mask_len", self.max_mask_len, 0, MAX_COUNT)
        default("max_page_updates", max(16384, self.max_batch_size + self.max_total_q))
        require_int("max_page_updates", self.max_page_updates, 1, MAX_COUNT)

    @property
    def max_q_tiles(self) -> int:
        """Most tiles of tile_tokens query tokens in one step, however the tokens are spread over the requests."""
        return self.max_batch_size + self.max_total_q // self.tile_tokens

    @property
    def staged_words(self) -> int:
        """Most 32-bit words that one bind copies to the device."""
        words = 4 * self.max_batch_size + 2 + 5 * self.max_page_updates
        return align_up(words, 2) + 2 * self.max_total_q

    def sections(self) -> tuple[Section, ...]:
        """Name, shape, dtype, byte offset and size of each buffer, in the order of a single allocation."""
        batch, tokens, tiles = self.max_batch_size, self.max_total_q, self.max_q_tiles
        return lay_out(
            [
                ("input_ids", (tokens,), torch.int64),
                ("position_ids", (tokens,), torch.int64),
                ("req_pool_indices", (batch,), torch.int32),
                ("seq_lens", (batch,), torch.int32),
                ("pending", (batch,), torch.int32),
                ("kv_indptr", (batch + 1,), torch.int32),
                ("qo_indptr", (batch + 1,), torch.int32),
                ("inc", (batch + 1,), torch.int32),
                ("q_tile_to_batch", (tiles,), torch.int32),
                ("q_tile_to_index", (tiles,), torch.int32),
                ("out_cache_loc", (tokens,), torch.int32),
                ("needs_page", (1,), torch.int32),
                ("arange", (self.max_mask_len,), torch.int64),
                ("input_mask", (batch, 1, self.max_mask_len), torch.bool),
                ("staged", (self.staged_words,), torch.int32),
            ]
        )

    @property
    def nbytes(self) -> int:
        """Bytes of one allocation that holds every section."""
        return self.sections()[-1].end
