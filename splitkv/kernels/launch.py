"""Launching a kernel on the device of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    device: torch.device,
    operands: Mapping[str, Any],
    constants: Mapping[str, Any],
    num_warps: int,
) -> None:
    """Enqueue `kernel` on the current stream of `device`, whatever device is current; does nothing for an empty grid.

    Args:
        kernel: A Triton kernel.
        grid: Programs per dimension.
        device: Where the tensors live.
        operands: Tensors (or None), integers and floats by parameter name.
        constants: Compile-time constants by parameter name.
        num_warps: Warps per program.
    """
    if 0 in grid:
        return
    with torch.cuda.device(device) if device.type == "cuda" else _quiet_numpy():
        # Fusing a multiply and an add is what every hand-written kernel does; Triton wants it said.
        kernel[grid](**operands, **constants, num_warps=num_warps, enable_fp_fusion=True)


def _quiet_numpy() -> AbstractContextManager[object]:
    """No NumPy warnings from the interpreter: masked lanes compute numbers that nobody reads, as they do on a GPU."""
    import numpy

    return numpy.errstate(all="ignore")
