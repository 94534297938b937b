"""Launches that are made again and again with the same tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton

from splitkv.kernels.launch import launch


class PreparedLaunch:
    """A kernel with tensors and constants that never change; integers and the grid may vary from call to call.

    Where the kernel is compiled, a call skips what Triton does per launch (binding, specialisation, the look-up of the
    compiled kernel), which is most of its cost. That is sound only because nothing of it can change: the integers
    must be named in the kernel's `do_not_specialize`.

    Args:
        kernel: A Triton kernel.
        device: Where the tensors live.
        operands: Tensors by parameter name.
        integers: Names of the integers that each call gives.
        constants: Compile-time constants by parameter name.
        num_warps: Warps per program.
    """

    def __init__(
        self,
        kernel: Any,
        device: torch.device,
        operands: Mapping[str, Any],
        integers: tuple[str, ...],
        constants: Mapping[str, Any],
        num_warps: int,
    ) -> None:
        self._kernel, self._device, self._num_warps = kernel, device, num_warps
        self._operands, self._constants = dict(operands), dict(constants)
        self._compiled: Any = None
        if device.type == "cuda" and isinstance(kernel, triton.JITFunction):
            missing = [name for name in integers if name not in kernel.do_not_specialize]
            if missing:
                raise ValueError(f"integers: expected names in do_not_specialize of the kernel, given {missing}")
            values = {**operands, **dict.fromkeys(integers, 1), **constants}
            with torch.cuda.device(device):
                self._compiled = kernel.warmup(**values, grid=(1, 1, 1), num_warps=num_warps, enable_fp_fusion=True)
                self._compiled[1, 1, 1]  # loads it, so that the first launch may be captured
            self._arguments = [values[name] for name in kernel.arg_names]
            self._places = [kernel.arg_names.index(name) for name in integers]
        self._integers = integers

    def __call__(self, programs: int, *integers: int) -> None:
        """Enqueue `programs` programs on the current stream of the device, whatever device is current.

        Args:
            programs: Size of the one-dimensional grid.
            integers: In the order of their names.
        """
        if self._compiled is None:
            given = dict(zip(self._integers, integers, strict=True))
            launch(
                self._kernel, (programs,), self._device, {**self._operands, **given}, self._constants, self._num_warps
            )
            return
        arguments = self._arguments.copy()
        for place, value in zip(self._places, integers, strict=True):
            arguments[place] = value
        if torch.cuda.current_device() == self._device.index:
            self._compiled[programs, 1, 1](*arguments)
        else:
            with torch.cuda.device(self._device):
                self._compiled[programs, 1, 1](*arguments)
