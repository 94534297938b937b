"""How the kernels run on this machine: compiled for a GPU, or under Triton's interpreter where there is none.

Triton reads `TRITON_INTERPRET` while it is imported, so the choice is made before that. A value that the user has set
is kept. Besides it, `import splitkv` only registers the operators of its own namespace (`splitkv.operators`).
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys

import torch

TRITON_WAS_IMPORTED = "triton" in sys.modules
HAS_GPU = torch.cuda.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available())
HAS_NUMPY = importlib.util.find_spec("numpy") is not None

# Without NumPy the interpreter cannot even be imported: splitkv then stays importable, and says so at the call.
if not HAS_GPU and not TRITON_WAS_IMPORTED and HAS_NUMPY:
    os.environ.setdefault("TRITON_INTERPRET", "1")


def interpreting() -> bool:
    """Whether the kernels of this process run under Triton's interpreter."""
    from triton.runtime.jit import JITFunction

    from splitkv.kernels.split_decode import split_decode_kernel

    return not isinstance(split_decode_kernel, JITFunction)


def release(version: str) -> tuple[int, ...]:
    """The numbers that a version starts with.

    >>> release("3.6.0+git9844da95"), release("2.4.0rc1")
    ((3, 6, 0), (2, 4, 0))
    """
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers.group().split("."))) if numbers else ()


def numpy_fault(triton_version: str, numpy_version: str | None) -> str | None:
    """What keeps this Triton's interpreter from running with this NumPy (None: not installed), or None.

    >>> numpy_fault("3.6.0", "2.3.5") is None, numpy_fault("3.7.0", "2.4.0") is None
    (True, True)
    """
    if numpy_version is None:
        return "Triton's CPU interpreter needs numpy, which is not installed: pip install numpy"
    # Until 3.7 it makes integers of one-element arrays, which NumPy refuses since 2.4.
    if release(triton_version) < (3, 7) and release(numpy_version) >= (2, 4):
        return (
            f"the CPU interpreter of triton {triton_version} fails with numpy {numpy_version}: "
            "pip install 'numpy<2.4', or triton 3.7 or newer"
        )
    return None


@functools.lru_cache(maxsize=1)
def _numpy_fault_here() -> str | None:
    import triton

    if not HAS_NUMPY:
        return numpy_fault(triton.__version__, None)
    import numpy

    return numpy_fault(triton.__version__, numpy.__version__)


def why_not(device_type: str) -> str | None:
    """None where kernels can run on tensors of this device type, else what the user can do about it."""
    if device_type != "cpu":
        known = device_type in ("cuda", "xpu")
        return None if known else f"expected tensors on a device that kernels run on, given tensors on {device_type}"
    if interpreting():
        return _numpy_fault_here()
    if HAS_GPU:
        return (
            "expected tensors on the GPU, given tensors on the CPU: move them with .to('cuda'), or set "
            "TRITON_INTERPRET=1 before Python starts to run every kernel in Triton's slow CPU interpreter"
        )
    if TRITON_WAS_IMPORTED:
        return (
            "this machine has no GPU, and triton was imported before splitkv, so that its CPU interpreter is off: "
            "import splitkv first, or set TRITON_INTERPRET=1 before Python starts"
        )
    if not HAS_NUMPY:
        return _numpy_fault_here()
    return (
        f"this machine has no GPU, and TRITON_INTERPRET={os.environ.get('TRITON_INTERPRET')} keeps Triton's CPU "
        "interpreter off: set it to 1 or unset it before Python starts"
    )
