"""Tile sizes by GPU, dtype and widths. Pure: reads no device and times nothing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from splitkv.config import FNUZ_DTYPES, MAX_COUNT, cdiv, next_power_of_2, require_int

# Architectures for which the compiler keeps more of float32 products in registers at a time than there are.
FLOAT32_SPILLS = (86, 87, 89, 120, 121)
RESERVED = 1024  # bytes of a multiprocessor's shared memory that the system takes per program


@dataclass(frozen=True)
class Target:
    """What the choice of tiles depends on of a device.

    Attributes:
        arch: "cuda:90", "hip:gfx942", or "cpu" for Triton's interpreter.
        num_sms: Streaming multiprocessors (compute units).
        shared_memory: Bytes of shared memory that one program may take.
        sm_shared_memory: Bytes of shared memory of one multiprocessor.
    """

    arch: str
    num_sms: int
    shared_memory: int
    sm_shared_memory: int = 0

    @property
    def dependent_launch(self) -> bool:
        """Whether a kernel may start while the one before it ends (programmatic dependent launch)."""
        return _cuda_arch(self) >= 90

    @property
    def converts_float8(self) -> bool:
        """Whether it has instructions that make float16 of 8-bit floats (NVIDIA's sm_89 and newer)."""
        return _cuda_arch(self) >= 89

    @property
    def rdna(self) -> bool:
        """Whether it is a GPU of AMD's whose waves have 32 lanes and at most 256 registers each."""
        return self.arch.startswith(("hip:gfx11", "hip:gfx12"))

    @property
    def fnuz(self) -> bool:
        """Whether it has the 8-bit floats without a negative zero (float8_e4m3fnuz, float8_e5m2fnuz)."""
        return self.arch in ("hip:gfx940", "hip:gfx941", "hip:gfx942")

    @classmethod
    def given(cls, target: object) -> Target:
        """What is set as the `target` of a workspace or schedule.

        Raises:
            TypeError: no Target.
        """
        if not isinstance(target, cls):
            raise TypeError(f"target: expected a splitkv.tiles.Target, given {type(target).__name__}")
        return target

    @classmethod
    def of(cls, device: torch.device) -> Target:
        """The target that a torch device is."""
        if device.type != "cuda":
            # The interpreter runs programs one after another: a few, so that sequences are still cut.
            return cls(arch="cpu", num_sms=4, shared_memory=1 << 30, sm_shared_memory=1 << 30)
        props: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks some of its fields
        if torch.version.hip:
            arch = "hip:" + props.gcnArchName.split(":")[0]
            return cls(arch, props.multi_processor_count, 65536, sm_shared_memory=65536)
        return cls(
            arch=f"cuda:{props.major}{props.minor}",
            num_sms=props.multi_processor_count,
            shared_memory=props.shared_memory_per_block_optin,
            sm_shared_memory=props.shared_memory_per_multiprocessor,
        )


class Blocks(Enum):
    """Which blocks of keys a program of few rows attends at a time. Measured on an H200.

    LONG ones, for two programs per multiprocessor, keep more bytes in flight, for which a program needs many tokens:
    where tiles are few, or requests long. SHORT ones, for four, hide each other's beginnings and ends, of which many
    short requests have many. FEW: short ones for two programs, where all that there is to do takes microseconds and
    every program that is started or merged counts.
    """

    LONG = 1
    SHORT = 2
    FEW = 3


@dataclass(frozen=True)
class Tiles:
    """How a kernel is cut for a device.

    Attributes:
        block_n: Tokens per block of keys and values.
        num_warps: Warps per program.
        num_stages: Depth of the software pipeline.
        programs_per_sm: Programs that are in flight on one multiprocessor.
        min_chunk: Least tokens of a part, below which cutting costs more than it gains.
        segment_cost: What it costs a program to begin and end within tiles, in tokens that it could attend meanwhile.
        tile_cost: What it costs a program to begin another tile, in such tokens; a multiple of 8.
        max_registers: Registers per thread that the compiler may use, so that programs_per_sm fit; 0 leaves it the
            choice.
    """

    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    min_chunk: int
    segment_cost: int = 128
    tile_cost: int = 0
    max_registers: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("block_n", 16, 1024), ("num_warps", 1, 32), ("num_stages", 1, 16), ("programs_per_sm", 1, 32),
            ("min_chunk", 1, MAX_COUNT), ("segment_cost", 0, MAX_COUNT), ("tile_cost", 0, MAX_COUNT),
            ("max_registers", 0, 255),
        ):  # fmt: skip
            require_int(name, getattr(self, name), low, high)
        for name in ("block_n", "num_warps"):
            if getattr(self, name) != next_power_of_2(getattr(self, name)):
                raise ValueError(f"{name}: expected a power of two, given {getattr(self, name)}")
        if self.tile_cost % 8:
            raise ValueError(f"tile_cost: expected a multiple of 8, given {self.tile_cost}")


# Tiles of 128 rows over 16-bit keys and values of up to 128 columns (more than 64), by architecture. They are bound by
# arithmetic and by what follows each product; where others are measured to be faster, this is the line to change.
TALL = {"cuda:90": Tiles(block_n=64, num_warps=8, num_stages=3, programs_per_sm=1, min_chunk=64, tile_cost=128)}
# The same where programs of low tiles, which are bound by memory, run beside them: these find 128 registers per thread.
TALL_BESIDE = {
    "cuda:90": Tiles(
        block_n=64, num_warps=8, num_stages=3, programs_per_sm=1, min_chunk=64, tile_cost=128, max_registers=192
    )
}


def split_width(width: int) -> tuple[int, int]:
    """A width as a block and a tail, both powers of two of at least 16 (no tail: 0), with the least padding.

    >>> split_width(128), split_width(576), split_width(96), split_width(59)
    ((128, 0), (512, 64), (64, 32), (64, 0))
    """
    whole = max(16, next_power_of_2(width))
    if whole == width or whole <= 32:
        return whole, 0
    block = whole // 2
    tail = max(16, next_power_of_2(width - block))
    return (block, tail) if block + tail < whole else (whole, 0)


def split_latent_width(width: int, width_v: int) -> tuple[int, int]:
    """The width of a latent row as a block that holds its value, and a tail.

    >>> split_latent_width(576, 512), split_latent_width(24, 16), split_latent_width(64, 64), split_latent_width(80, 40)
    ((512, 64), (16, 16), (64, 0), (64, 16))
    """
    block = max(16, next_power_of_2(width_v))
    return block, max(16, next_power_of_2(width - block)) if width > block else 0


def check_dtype(target: Target, dtype: torch.dtype) -> None:
    """Raise TypeError where a target cannot compute in a dtype.

    >>> check_dtype(Target("cuda:75", num_sms=40, shared_memory=65536), torch.bfloat16)
    Traceback (most recent call last):
    TypeError: q: expected float16 or float32 on cuda:75, which has no bfloat16 arithmetic, given torch.bfloat16
    """
    if dtype == torch.bfloat16 and 0 < _cuda_arch(target) < 80:
        raise TypeError(
            f"q: expected float16 or float32 on {target.arch}, which has no bfloat16 arithmetic, given {dtype}"
        )


def check_cache_dtype(target: Target, dtype: torch.dtype) -> None:
    """Raise TypeError where a target cannot read caches of a dtype.

    >>> H100 = Target("cuda:90", num_sms=132, shared_memory=232448)
    >>> check_cache_dtype(H100, torch.float8_e4m3fnuz)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    TypeError: kv: expected torch.float8_e4m3fn or torch.float8_e5m2 on cuda:90, which lacks FNUZ formats, given ...
    """
    if dtype in FNUZ_DTYPES and not target.fnuz:
        raise TypeError(
            f"kv: expected torch.float8_e4m3fn or torch.float8_e5m2 on {target.arch}, which lacks FNUZ formats, given "
            f"{dtype}"
        )


def _cuda_arch(target: Target) -> int:
    """90 for "cuda:90"; 0 where it is no CUDA device."""
    return int(target.arch[5:]) if target.arch.startswith("cuda:") else 0


def _without_tensor_cores(target: Target, dtype: torch.dtype) -> bool:
    """Whether products are computed in float32 by ordinary instructions; Triton has no others before sm_80."""
    return dtype.itemsize == 4 or 0 < _cuda_arch(target) < 80


def _widths(head_dim: int, head_dim_v: int, latent: bool) -> tuple[int, int]:
    """Columns of a block of keys and of one of values, padding included."""
    if latent:
        block, tail = split_latent_width(head_dim, head_dim_v)
        return block + tail, block
    return sum(split_width(head_dim)), sum(split_width(head_dim_v))


def _quantized(kv_dtype: torch.dtype | None) -> bool:
    return kv_dtype is not None and kv_dtype.itemsize == 1


def _latent_warp_groups(target: Target, dtype: torch.dtype, rows: int, kv_dtype: torch.dtype | None) -> bool:
    """Whether a tile of many rows over latent rows is computed by Hopper's products of warp groups.

    Both of its products read the one block of keys in shared memory, and the results of 64 rows fill the registers.
    """
    return rows == 64 and dtype.itemsize == 2 and not _quantized(kv_dtype) and 90 <= _cuda_arch(target) < 100


def shared_bytes(
    target: Target,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    rows: int,
    block_n: int,
    num_stages: int,
    *,
    kv_dtype: torch.dtype | None = None,
    latent: bool = False,
    tree: bool = False,
) -> int:
    """Upper estimate of the shared memory of one program: buffered keys and values, the query and the weights.

    Args:
        target, dtype, head_dim, head_dim_v, rows, kv_dtype, latent, tree: As for `choose`.
        block_n, num_stages: As for `Tiles`.
    """
    width, width_v = _widths(head_dim, head_dim_v, latent)
    # Of latent rows in float32 products take pieces of keys, so that values are buffered apart.
    columns = width if latent and dtype.itemsize == 2 else width + width_v
    itemsize = 4 if _without_tensor_cores(target, dtype) else dtype.itemsize
    quantized = _quantized(kv_dtype)
    query = rows * width
    block_v = split_latent_width(head_dim, head_dim_v)[0] if latent else split_width(head_dim_v)[0]
    masks = 0
    if tree and num_stages > 1:
        # Words of the mask are copied ahead like keys, and values, once those that no row sees are zeroed, may take a
        # place of their own.
        masks = 4 * (num_stages - 1) * block_n * rows + itemsize * block_n * block_v
    # Results change from the layout of products to that of stores, when no block is held any more but latent ones that
    # were not copied ahead.
    results = 0 if target.arch.startswith("hip:") else 4 * rows * block_v
    if latent and num_stages == 1:
        results += itemsize * block_n * columns
    if 90 <= _cuda_arch(target) < 120 and rows >= 64 and dtype.itemsize == 2 and num_stages > 1 and not quantized:
        # Products of warp groups run on while the next block is copied, which takes a buffer more. Their weights stay
        # in registers, but where eight warps share them.
        weights = rows * block_n if rows * max(width, width_v) >= 64 * 256 else 0
        barriers = 1024 if _cuda_arch(target) < 100 else 1152
        return max(itemsize * (num_stages * block_n * columns + query + weights) + masks + barriers, results)
    buffers = (num_stages - 1) * block_n * columns * (1 if quantized else itemsize)
    if num_stages == 1:
        # Without a pipeline values take the place of their keys, and on AMD both that of the query.
        buffers = itemsize * block_n * max(width, width_v)
        if target.arch.startswith("hip:"):
            buffers = max(buffers - itemsize * query, 0)
    if quantized:
        buffers += 2 * 4 * num_stages * block_n  # scales of tokens
    return max(buffers + itemsize * (query + rows * block_n) + masks + 4 * rows * 16, results)


def _candidates(
    target: Target,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    rows: int,
    aligned: bool,
    blocks: Blocks,
    kv_dtype: torch.dtype | None,
    latent: bool,
    tree: bool,
) -> list[tuple[int, int, int]]:
    """(block_n, num_stages, shared bytes) of the tiles that fit a target, the best first."""
    wide = max(_widths(head_dim, head_dim_v, latent))
    long_spills = 64 * 128 if 80 <= _cuda_arch(target) < 90 or 100 <= _cuda_arch(target) < 120 else 64 * 256
    if rows == 128:
        long_spills += 1  # its eight warps have as much to keep as four have of half the rows
    cuts = [(64, 3), (64, 2), (32, 3), (32, 2), (16, 2), (16, 1)]
    if not aligned or 0 < _cuda_arch(target) < 80:
        # Element by element, or before sm_80, nothing can be copied ahead, and what is loaded fills the registers.
        cuts = cuts[-1:]
    elif target.rdna:
        # As compiled for gfx1100: longer blocks spill, and so do deeper pipelines, but of low and narrow tiles.
        cuts = cuts[4:] if rows <= 16 and wide <= 64 and dtype.itemsize == 2 else cuts[-1:]
    elif dtype.itemsize == 4 and _quantized(kv_dtype):
        # Blocks copied ahead, once more as float32, and operands of ordinary products do not find the registers.
        cuts = cuts[-1:]
    elif dtype.itemsize == 4 and target.arch.startswith("hip:") and rows * wide >= 64 * 128:
        # As compiled for each target, here and below: what is more in flight spills.
        cuts = cuts[-1:]
    elif dtype.itemsize == 4 and (
        _cuda_arch(target) in FLOAT32_SPILLS
        or wide > 256
        or (rows * wide >= 64 * 128 and wide <= 128 and _cuda_arch(target) == 80)
    ):
        cuts = [(16, 3), (16, 2), (16, 1)]
    elif _quantized(kv_dtype) and target.arch.startswith("hip:") and wide > 256:
        cuts = cuts[4:]
    elif latent and _latent_warp_groups(target, dtype, rows, kv_dtype):
        pass
    elif latent and dtype.itemsize == 2 and rows <= 16 and wide > 320 and not _quantized(kv_dtype):
        # Measured on an H200 for widths of 576 and 512: one program of eight warps and long blocks, where they fit; but
        # two of short blocks where every tile is cut, and where blocks are converted.
        cuts = [cuts[0], *cuts[2:]] if blocks != Blocks.LONG else cuts[2:]
    elif dtype.itemsize == 4 or rows * wide >= long_spills or latent:
        cuts = cuts[2:]
    elif _quantized(kv_dtype):
        # Tokens of half as many bytes, or less: as many bytes in flight take longer blocks. Where numbers are not
        # converted by instructions of their own, what that takes fills the registers.
        cuts = cuts if target.converts_float8 and wide <= 256 else cuts[2:]
    elif rows <= 16 and wide <= 128 and blocks != Blocks.LONG:
        cuts = cuts[2:]
    if dtype.itemsize == 4 and tree:
        cuts = [cut for cut in cuts if cut[1] < 3]  # the masks' words take the registers of a deeper pipeline
    cache: dict[str, Any] = dict(kv_dtype=kv_dtype, latent=latent, tree=tree)
    sized = [(*cut, shared_bytes(target, dtype, head_dim, head_dim_v, rows, *cut, **cache)) for cut in cuts]
    return [cut for cut in sized if cut[2] <= target.shared_memory]


def fit_rows(
    target: Target,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    rows: int,
    *,
    aligned: bool = True,
    kv_dtype: torch.dtype | None = None,
    latent: bool = False,
    tree: bool = False,
) -> int:
    """Most rows of a query tile, up to `rows`, that a target's registers and shared memory have room for.

    >>> H100 = Target("cuda:90", num_sms=132, shared_memory=232448, sm_shared_memory=233472)
    >>> fit_rows(H100, torch.float16, 128, 128, 64), fit_rows(H100, torch.float16, 576, 512, 64)
    (64, 32)
    >>> fit_rows(H100, torch.float16, 576, 512, 128, latent=True)
    64

    Args:
        target, dtype, head_dim, head_dim_v, aligned, kv_dtype, latent, tree: As for `choose`.
        rows: At most so many.
    """
    if _quantized(kv_dtype) or not aligned or tree:
        # Warp-group products (64 rows on Hopper) of values that come through registers, not by an asynchronous copy,
        # read wrong shared memory where key and value widths differ (seen with Triton 3.6).
        rows = min(rows, 32)
    if target.arch == "cpu":
        return rows
    # Seen in the code compiled for each target: larger tiles of results than these spill, whatever the block.
    if target.arch.startswith("hip:"):
        rows = min(rows, 64)
    wide = max(_widths(head_dim, head_dim_v, latent))
    most = 64 * 288
    if _without_tensor_cores(target, dtype):
        most //= 4 if _cuda_arch(target) in FLOAT32_SPILLS else 2
    if dtype.itemsize == 4 and (not aligned or _quantized(kv_dtype) or 0 < _cuda_arch(target) < 80):
        # Such blocks come through registers.
        most = min(most, 64 * (36 if target.arch.startswith("hip:") else 72))
    while rows > 16 and (
        (rows * wide > most and not (latent and _latent_warp_groups(target, dtype, rows, kv_dtype)))
        or not _candidates(target, dtype, head_dim, head_dim_v, rows, aligned, Blocks.SHORT, kv_dtype, latent, tree)
    ):
        rows //= 2
    return rows


def choose(
    target: Target,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    rows: int,
    *,
    aligned: bool = True,
    blocks: Blocks = Blocks.SHORT,
    kv_dtype: torch.dtype | None = None,
    latent: bool = False,
    tree: bool = False,
    beside: bool = False,
) -> Tiles:
    """Tiles for a geometry on a target.

    Args:
        target: The device.
        dtype: Of queries.
        head_dim, head_dim_v: Key and value width.
        rows: Rows of a query tile.
        aligned: Whether rows of keys and values can be copied 16 bytes at a time.
        blocks: What `prefer_blocks` says.
        kv_dtype: Of caches; None: that of queries.
        latent: Whether values are the first columns of keys, and loaded with them.
        tree: Whether there is a tree mask.
        beside: Whether another kernel, of low tiles, should find room on the same multiprocessors.

    Raises:
        ValueError: nothing fits the shared memory of a program; names the widths and the limit.
    """
    if target.arch == "cpu":
        return Tiles(block_n=32, num_warps=4, num_stages=1, programs_per_sm=4, min_chunk=16)
    wide = max(_widths(head_dim, head_dim_v, latent))
    fitting = _candidates(target, dtype, head_dim, head_dim_v, rows, aligned, blocks, kv_dtype, latent, tree)
    if not fitting:
        least = shared_bytes(
            target, dtype, head_dim, head_dim_v, rows, 16, 1, kv_dtype=kv_dtype, latent=latent, tree=tree
        )
        raise ValueError(
            f"head_dim: expected widths whose tiles fit {target.shared_memory} bytes of shared memory on "
            f"{target.arch}, given head_dim {head_dim}, head_dim_v {head_dim_v} with {rows} rows of {dtype} "
            f"({least} bytes)"
        )
    plain = aligned and dtype.itemsize == 2 and not latent and not _quantized(kv_dtype)
    if rows == 128 and 64 < wide <= 128 and plain and target.arch in TALL:
        return (TALL_BESIDE if beside else TALL)[target.arch]
    block_n, num_stages, needed = fitting[0]
    # Products in float32 keep operands in registers, where those of tensor cores read shared memory.
    heavy = 64 * 64 if _without_tensor_cores(target, dtype) else 64 * 256
    num_warps = 8 if wide > 256 or rows * wide >= heavy or (rows == 128 and wide > 64) else 4
    narrow = dtype.itemsize == 2 and wide <= 128 and rows <= 16 and block_n == 32
    most = 4 if narrow and blocks == Blocks.SHORT else 2
    if latent and dtype.itemsize == 2 and rows <= 16 and block_n == 32:
        # The products of a block wait for one another: of two programs one computes while the other waits.
        num_warps = 4
    elif _quantized(kv_dtype) and dtype.itemsize == 2 and wide in (16, 32, 64, 128) and rows <= 16 and block_n == 64:
        # Conversion keeps a program busy between its loads: four hide each other's, whatever the lengths.
        most = 2 if blocks == Blocks.FEW else 4
    if target.rdna:
        num_warps = 16 if rows * wide * dtype.itemsize >= 16 * 256 * 2 else 8
    if num_warps >= 8 or (target.arch.startswith("hip:") and rows * wide >= 32 * 256):
        most = 1  # more would not find the registers
    elif target.arch.startswith("hip:") and _quantized(kv_dtype):
        most = min(most, 2)
    programs = min(most, max(1, target.sm_shared_memory // (needed + RESERVED)))
    return Tiles(
        block_n=block_n,
        num_warps=num_warps,
        num_stages=num_stages,
        programs_per_sm=programs,
        min_chunk=2 * block_n if narrow and blocks == Blocks.FEW else block_n,
        tile_cost=128 if block_n >= 64 else 64,
        max_registers={3: 168, 4: 128}.get(programs, 0) if target.arch.startswith("cuda:") else 0,
    )


def prefer_blocks(target: Target, tiles: int, len_hint: int | None, *, latent: bool = False) -> Blocks:
    """Which blocks promise most for a balanced launch.

    >>> H100 = Target("cuda:90", num_sms=132, shared_memory=232448)
    >>> cases = ((64, None), (8, 4096), (256, 4096), (512, 512), (512, None))
    >>> [prefer_blocks(H100, tiles, hint).name for tiles, hint in cases]
    ['LONG', 'FEW', 'LONG', 'SHORT', 'SHORT']

    Args:
        target: The device.
        tiles: Query tiles of all heads.
        len_hint: Typical length of a request in tokens, or None.
        latent: As for `choose`.
    """
    if 2 * tiles > target.num_sms:
        return Blocks.LONG if len_hint is not None and len_hint >= 4096 and not latent else Blocks.SHORT
    return Blocks.FEW if len_hint is not None and len_hint * tiles < 512 * target.num_sms else Blocks.LONG


def share_count(
    target: Target,
    tiles: Tiles,
    num_kv_heads: int,
    q_tiles: int,
    slots: int,
    len_hint: int | None,
) -> int:
    """Shares per KV head of a balanced launch.

    As many as programs run at a time, since one that overshoots costs a whole wave, and so that two partials of each
    share fit the workspace's slots. One share per head cuts no tile and needs no slot. Where requests are few and known
    to be short, no more than there are parts to attend, though at least a program per multiprocessor, should they grow.

    >>> H100 = Target("cuda:90", num_sms=132, shared_memory=232448)
    >>> [share_count(H100, Tiles(32, 4, 3, 2, 64), 8, 1, 2048, hint) for hint in (None, 4096, 1024, 100)]
    [33, 33, 16, 16]

    Args:
        target, tiles: The device, and its tiles.
        num_kv_heads: KV heads.
        q_tiles: Query tiles per head.
        slots: Partial tiles that the workspace holds.
        len_hint: Typical length of a request in tokens, or None.
    """
    resident = min(target.num_sms * tiles.programs_per_sm, slots // 2) // num_kv_heads
    if len_hint is not None:
        parts = q_tiles * max(cdiv(len_hint, tiles.min_chunk), 1)
        resident = min(resident, max(parts, target.num_sms // num_kv_heads))
    return max(1, resident)
