"""How the kernels run on this machine: compiled for a GPU, or under Triton's interpreter where there is none.

Triton reads `TRITON_INTERPRET` while it is imported, so the choice is made before that. A value that the user has set is
kept. This is the only side effect of `import splitkv`.
"""

import importlib.util
import os
import sys

import torch

TRITON_WAS_IMPORTED = "triton" in sys.modules
HAS_GPU = torch.cuda.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available())

if not HAS_GPU and not TRITON_WAS_IMPORTED:
    os.environ.setdefault("TRITON_INTERPRET", "1")


def interpreting() -> bool:
    """Whether the kernels of this process run under Triton's interpreter."""
    from triton.runtime.interpreter import InterpretedFunction

    from splitkv.kernels.split_decode import split_decode_kernel

    return isinstance(split_decode_kernel, InterpretedFunction)


def why_not(device_type: str) -> str | None:
    """None where kernels can run on tensors of this device type, else what the user can do about it."""
    if device_type != "cpu":
        return None
    if interpreting():
        if importlib.util.find_spec("numpy") is None:
            return "Triton's CPU interpreter needs numpy, which is not installed: pip install numpy"
        return None
    if HAS_GPU:
        return (
            "expected tensors on the GPU, given tensors on the CPU: move them with .to('cuda'), or set "
            "TRITON_INTERPRET=1 before Python starts to run every kernel in Triton's slow CPU interpreter"
        )
    return (
        "this machine has no GPU, and triton was imported before splitkv, so that its CPU interpreter is off: import "
        "splitkv first, or set TRITON_INTERPRET=1 before Python starts"
    )
