"""Tile sizes by GPU, dtype and widths. Pure: reads no device and times nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from splitkv.config import MIN_TILE_ROWS, next_power_of_2

SMALLEST = (16, 1)
"""Tokens per block and stages of the pipeline that take the least shared memory."""


@dataclass(frozen=True)
class Target:
    """What the choice of tiles depends on of a device.

    Attributes:
        arch: "cuda:90", "hip:gfx942", or "cpu" for Triton's interpreter.
        num_sms: Streaming multiprocessors (compute units).
        shared_memory: Bytes of shared memory that one program may take.
        registers: 32-bit registers of one multiprocessor.
        sm_shared_memory: Bytes of shared memory of one multiprocessor.
    """

    arch: str
    num_sms: int
    shared_memory: int
    registers: int = 65536
    sm_shared_memory: int = 0

    @property
    def dependent_launch(self) -> bool:
        """Whether a kernel may start while the one before it ends (programmatic dependent launch)."""
        return self.arch.startswith("cuda:") and int(self.arch[5:]) >= 90

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
            registers=props.regs_per_multiprocessor,
            sm_shared_memory=props.shared_memory_per_multiprocessor,
        )


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
        max_registers: Registers per thread that the compiler may use, so that programs_per_sm fit; 0 leaves it the
            choice.
    """

    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    min_chunk: int
    segment_cost: int = 128
    max_registers: int = 0


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


def shared_bytes(rows: int, block_n: int, num_stages: int, head_dim: int, head_dim_v: int, itemsize: int) -> int:
    """Upper estimate of the shared memory of one program.

    In the loop it holds buffered keys and values, the query and the weights; after it, results on their way from the
    layout of products to that of stores, in float32.
    """
    width, width_v = sum(split_width(head_dim)), sum(split_width(head_dim_v))
    buffers = max(num_stages - 1, 1) * block_n * (width + width_v)
    loop = itemsize * (buffers + rows * (width + width_v + block_n)) + 4 * rows * 16
    return max(loop, 4 * rows * max(split_width(head_dim_v)))


def tile_rows(target: Target, dtype: torch.dtype, head_dim: int, head_dim_v: int, most: int) -> int:
    """Rows of a query tile: at most `most` (a power of two of at least 16), halved until some tiles fit the target.

    >>> h200 = Target("cuda:90", num_sms=132, shared_memory=232448)
    >>> tile_rows(h200, torch.bfloat16, 128, 128, 128), tile_rows(h200, torch.bfloat16, 576, 512, 128)
    (128, 64)
    """
    rows = most
    while rows > MIN_TILE_ROWS and target.arch != "cpu":
        if shared_bytes(rows, *SMALLEST, head_dim, head_dim_v, dtype.itemsize) <= target.shared_memory:
            break
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
    few_tiles: bool = False,
) -> Tiles:
    """Tiles for a geometry on a target.

    Args:
        target: The device.
        dtype: Of queries and caches.
        head_dim, head_dim_v: Key and value width.
        rows: Rows of a query tile.
        aligned: Whether rows of keys and values can be copied 16 bytes at a time.
        few_tiles: Whether the query tiles of all heads are few beside the multiprocessors.

    Raises:
        ValueError: nothing fits the shared memory of a program; names the widths and the limit.
    """
    if target.arch == "cpu":
        return Tiles(block_n=32, num_warps=4, num_stages=1, programs_per_sm=4, min_chunk=16)
    itemsize = dtype.itemsize
    wide = max(sum(split_width(head_dim)), sum(split_width(head_dim_v)))
    narrow = itemsize == 2 and wide <= 128 and rows <= 16
    candidates = [(64, 3), (64, 2), (32, 3), (32, 2), (16, 2), SMALLEST]
    if not aligned:
        # Element by element nothing can be copied ahead, and the pointers alone fill the registers.
        candidates = [SMALLEST]
    elif itemsize == 4 or (narrow and not few_tiles):
        candidates = candidates[2:]
    for block_n, num_stages in candidates:
        needed = shared_bytes(rows, block_n, num_stages, head_dim, head_dim_v, itemsize)
        if needed > target.shared_memory:
            continue
        # Measured on an H200: where tiles are few, two programs of long blocks keep more bytes in flight than four of
        # short ones; where they are many, four hide each other's beginnings and ends.
        fit = max(1, target.sm_shared_memory // needed)
        programs = min(4 if narrow and block_n == 32 else 2, fit)
        return Tiles(
            block_n=block_n,
            num_warps=8 if rows * wide >= 64 * 256 else 4,
            num_stages=num_stages,
            programs_per_sm=programs,
            min_chunk=block_n,
            max_registers=128 if programs > 2 and target.arch.startswith("cuda:") else 0,
        )
    raise ValueError(
        f"head_dim: expected widths whose tiles fit {target.shared_memory} bytes of shared memory on {target.arch}, "
        f"given head_dim {head_dim}, head_dim_v {head_dim_v} with {rows} rows of {dtype} ({needed} bytes)"
    )


def share_count(resident: int, num_kv_heads: int, slots: int) -> int:
    """Shares per KV head of a balanced launch.

    As many as programs run at a time, since one that overshoots costs a whole wave, and so that two partials of each
    share fit the workspace's slots. One share per head cuts no tile and needs no slot.
    """
    return max(1, min(resident, slots // 2) // num_kv_heads)
