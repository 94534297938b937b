"""The public calls, as they are found by their names, and how to have each of them run in another state of PyTorch.

Default device, default dtype and autograd's modes must not matter.

    SPLITKV_TEST_STATE=meta,float64,inference_mode make unit

runs all tests with every public call in that state; what a test makes for itself stays where it would be.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

import splitkv
from splitkv import distributed, masks
from splitkv.kv import KVView
from splitkv.tiles import Tiles
from splitkv.tiles_io import TileKey, TileTable

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "grad": torch.enable_grad,
}

CHOSEN = os.environ.get("SPLITKV_TEST_STATE", "")
AUTOGRAD = not CHOSEN or CHOSEN.endswith(",grad")
"""Whether calls run where autograd follows them: what needs a gradient is refused there only."""


def shown(value: object) -> str:
    """How a message shows a value, which for tensors ends otherwise under another default dtype."""
    return repr(value)[:8] if isinstance(value, Tensor) else repr(value)


@contextlib.contextmanager
def state(device: str, dtype: str, mode: str) -> Iterator[None]:
    """Another default device and dtype, in a mode of autograd."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device), MODES[mode]():  # the device as torch.set_default_device sets it
            yield
    finally:
        torch.set_default_dtype(before)


def public_calls() -> Iterator[tuple[str, Any, str, Callable[..., Any]]]:
    """All functions, constructors and methods that users call: their names, and where they are found by which."""
    found = [(name, splitkv, name) for name in splitkv.__all__]
    found += [(f"masks.{name}", masks, name) for name in masks.__all__]
    found += [
        (f"distributed.{name}", distributed, name)
        for name, value in vars(distributed).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == distributed.__name__
    ]
    places = [(name, owner, attribute, getattr(owner, attribute)) for name, owner, attribute in found]
    places += [(each.__name__, None, "", each) for each in (KVView, TileTable, TileKey, Tiles)]
    for name, owner, attribute, value in places:
        if inspect.isfunction(value):
            yield name, owner, attribute, value
        elif inspect.isclass(value):
            if "allocate" not in vars(value):  # else its docstring says to use that
                yield name, value, "__init__", value
            for method, member in vars(value).items():
                function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
                if isinstance(function, property):
                    function = function.fset
                if (
                    not method.startswith("_")
                    and inspect.isfunction(function)
                    and inspect.signature(function).parameters.keys() - {"self"}
                ):
                    yield f"{name}.{method}", value, method, function


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors that can be reached from an argument or a result."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, KVView):
        yield from (tensor for tensor in value.tensors if tensor is not None)
    elif isinstance(value, (splitkv.Workspace, splitkv.StepState, distributed.Exchange, splitkv.Schedule)):
        yield from (member for member in vars(value).values() if isinstance(member, Tensor))
    elif isinstance(value, (list, tuple, dict)):
        for member in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(member)


def enter_in_calls(device: str, dtype: str, mode: str) -> None:
    """Have every public call run in that state, from now on and in all of this process."""

    def within(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with state(device, dtype, mode):
                return function(*args, **kwargs)

        return run

    for _, owner, attribute, _ in list(public_calls()):
        member = vars(owner).get(attribute)
        if isinstance(member, classmethod):
            setattr(owner, attribute, classmethod(within(member.__func__)))
        elif isinstance(member, property):
            setattr(owner, attribute, property(member.fget, within(member.fset) if member.fset else None))
        elif inspect.isfunction(member):
            setattr(owner, attribute, within(member))
