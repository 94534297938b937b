"""A Hopper GPU that compiles for real and launches nothing, for CPU tensors: to count compilations without one.

Import it first, in a process of its own with TRITON_INTERPRET=0.
"""

import contextlib
from typing import Any, ClassVar

import torch
import triton
from triton.backends.compiler import GPUTarget

import splitkv
from splitkv import _interpreter
from splitkv.kernels import prepared
from splitkv.tiles import Target

TARGET = Target("cuda:90", 132, 232448, 233472)


class Utils:
    """Loads nothing."""

    def load_binary(self, name: str, kernel: bytes, shared: int, device: object) -> tuple[Any, ...]:
        return object(), name, 32, 0, 1024

    def get_device_properties(self, device: object) -> dict[str, int]:
        return {"max_shared_mem": TARGET.shared_memory}

    def unload_module(self, module: object) -> None:
        pass


class Launcher:
    """Notes what would be launched."""

    launches: ClassVar[list[tuple[str, tuple[int, ...], tuple[Any, ...]]]] = []
    launchers: ClassVar[list["Launcher"]] = []  # of each launch, which is to say which compiled kernel it was

    def __init__(self, source: Any, metadata: Any) -> None:
        self.parameters = len(source.fn.arg_names)

    def __call__(self, x: int, y: int, z: int, stream: int, function: str, packed: Any, metadata: Any, enter: Any,
                 leave: Any, *arguments: Any) -> None:  # fmt: skip
        assert stream == 7 and len(arguments) == self.parameters
        for hook in (enter, leave):
            if hook is not None:
                hook(metadata)
        self.launches.append((function, (x, y, z), arguments))
        self.launchers.append(self)


class Driver:
    """What Triton and splitkv ask of a driver."""

    launcher_cls = Launcher
    utils = Utils()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> None:
        return None  # the index of CPU tensors' device

    def get_current_stream(self, device: object) -> int:
        return 7


triton.runtime.driver.set_active(Driver())
prepared.compiled_by_hand = lambda device: True
_interpreter.why_not = lambda device_type: None
torch.cuda.device = lambda device: contextlib.nullcontext()  # type: ignore[assignment,misc]
compiled: list[str] = []


def _note(**what: Any) -> None:
    compiled.append(what["fn"].name)


triton.knobs.runtime.jit_post_compile_hook = _note


def workspace(config: splitkv.WorkspaceConfig) -> splitkv.Workspace:
    made = splitkv.Workspace.allocate(config, "cpu")
    made.target = TARGET
    return made
