"""How kernels are compiled that serve every call of a form."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl


def unspecialized(fn: Callable[..., Any]) -> Any:
    """`triton.jit` for a kernel that neither the values of its numbers nor the alignment of its pointers compile anew.

    Parameters are pointers first (no annotation), then numbers with their types, then constants. Triton would make a
    kernel of its own where an integer is 1 or a multiple of 16, or a pointer aligned; what such a kernel may rely on is
    said by its constants instead, which the host chooses and which can be listed (see `splitkv.warmup`).
    """
    parameters = inspect.signature(fn).parameters.values()
    pointers = [p.name for p in parameters if p.annotation is inspect.Parameter.empty]
    numbers = [p.name for p in parameters if p.name not in pointers and p.annotation is not tl.constexpr]
    return triton.jit(fn, do_not_specialize=numbers, do_not_specialize_on_alignment=pointers)
