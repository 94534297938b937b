"""Launching a kernel on the device of its tensors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    device: torch.device,
    operands: Mapping[str, Any],
    constants: Mapping[str, Any],
    num_warps: int,
    dependent: bool = False,
    max_registers: int = 0,
) -> None:
    """Enqueue `kernel` on the current stream of `device`, whatever device is current; does nothing for an empty grid.

    Args:
        kernel: A Triton kernel.
        grid: Programs per dimension.
        device: Where the tensors live.
        operands: Tensors (or None), integers and floats by parameter name.
        constants: Compile-time constants by parameter name.
        num_warps: Warps per program.
        dependent: Start the kernel while the one before it ends (programmatic dependent launch, sm_90 and newer). The
            kernel itself then waits for the other's memory.
        max_registers: Registers per thread that the compiler may use; 0 leaves it the choice.
    """
    if 0 in grid:
        return
    with torch.cuda.device(device) if device.type == "cuda" else _quiet_numpy():
        kernel[grid](**operands, **constants, **compile_options(num_warps, dependent, max_registers))


def compile_options(num_warps: int, dependent: bool = False, max_registers: int = 0) -> dict[str, Any]:
    """What Triton compiles a kernel with, besides its constants. It knows a compiled kernel by their very order."""
    # Fusing a multiply and an add is what every hand-written kernel does; Triton wants it said.
    options: dict[str, Any] = {"num_warps": num_warps, "enable_fp_fusion": True}
    if dependent:
        options["launch_pdl"] = True
    if max_registers:
        options["maxnreg"] = max_registers
    return options


@contextmanager
def _quiet_numpy() -> Iterator[None]:
    """No NumPy warnings from the interpreter.

    Masked lanes compute numbers that nobody reads, as they do on a GPU, and Triton 3.6 turns one-element arrays into
    integers in a way that NumPy calls deprecated.
    """
    import numpy

    with numpy.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
