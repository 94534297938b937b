"""Launches that are made again and again: without what Triton does per launch, which is most of its cost."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor

from splitkv.kernels.launch import compile_options, launch

MAX_CALLS = 256  # forms of calls that are remembered; then it starts again
MAX_PLACES = 1024  # that prepared launches remember having been checked; then they start again
Prepared = TypeVar("Prepared")

_DEVICE_POINTER = 3  # CU_POINTER_ATTRIBUTE_DEVICE_POINTER of the CUDA driver


class Stretch(NamedTuple):
    """Part of a tensor that a call gives, as an operand of its own.

    Attributes:
        of: The tensor's name.
        offset: Bytes from its start.
        dtype: What lies there.
    """

    of: str
    offset: int
    dtype: torch.dtype

    def on(self, tensor: Tensor) -> Tensor:
        """All from there on, of a contiguous tensor."""
        return tensor.view(-1).view(torch.uint8)[self.offset :].view(self.dtype)


@dataclass(frozen=True)
class Launch:
    """One kernel launch: everything but the stream.

    Attributes:
        kernel: A Triton kernel.
        grid: Programs per dimension.
        operands: Tensors (or None), integers and floats by parameter name.
        constants: Compile-time constants by parameter name.
        num_warps, dependent, max_registers: As for `splitkv.kernels.launch.launch`.
        stretches: Operands that are stretches of other tensors, by parameter name; `operands` has them too.
    """

    kernel: Any
    grid: tuple[int, ...]
    operands: Mapping[str, Any]
    constants: Mapping[str, Any]
    num_warps: int
    dependent: bool = False
    max_registers: int = 0
    stretches: Mapping[str, Stretch] = field(default_factory=dict)

    def run(self, device: torch.device) -> None:
        """Enqueue it on the current stream of `device`, which is that of the tensors."""
        launch(
            self.kernel,
            self.grid,
            device,
            self.operands,
            self.constants,
            self.num_warps,
            self.dependent,
            self.max_registers,
        )

    def compile(self) -> Any:
        """Compile and load the kernel for the current device, launching nothing; what Triton keeps of it."""
        compiled = self.kernel.warmup(
            **self.operands,
            **self.constants,
            **compile_options(self.num_warps, self.dependent, self.max_registers),
            grid=(1, 1, 1),
        )
        compiled[1, 1, 1]  # loads it, so that its first launch may be captured
        return compiled


def compiled_by_hand(device: torch.device) -> bool:
    """Whether compiled kernels are launched past Triton there: not on HIP, where they depend on tensor sizes too."""
    return device.type == "cuda" and torch.version.hip is None and not triton.knobs.runtime.interpret


def read_in_place(memory: Tensor, device: torch.device) -> bool:
    """Whether kernels on `device` can read this host memory at the address that it has on the host.

    Pinned memory they can, where host and device share one address space, as on every 64-bit system.
    """
    if memory.device == device:
        return True
    if not compiled_by_hand(device) or not memory.is_pinned():
        return False
    address, found = memory.data_ptr(), ctypes.c_uint64()
    try:
        attribute = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute
    except (OSError, AttributeError):
        return False
    attribute.argtypes, attribute.restype = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64], ctypes.c_int
    with torch.cuda.device(device):
        status = attribute(ctypes.addressof(found), _DEVICE_POINTER, address)
    return status == 0 and found.value == address


class PreparedLaunches:
    """Launches one after another, of which calls change the tensors only, and of these the addresses only.

    On an NVIDIA GPU a call then costs a fraction of `Launch.run`. Elsewhere, and should a compiled kernel not be had
    that way, it runs them. Holds no tensor.

    The kernels must be `unspecialized`, so that one that was compiled fits whatever the addresses; or the addresses of
    each call must be multiples of 16 where those of the first were.

    Args:
        launches: What the first call would run.
        names: The operands that each call gives, all pointers of the kernels among them.
        device: Where the tensors live.
    """

    def __init__(self, launches: Sequence[Launch], names: Sequence[str], device: torch.device) -> None:
        launches = [step for step in launches if 0 not in step.grid]
        self._device, self._index, self._names = device, device.index, tuple(names)
        self._given = [
            [name for name in names if step.operands.get(name) is not None and name not in step.stretches]
            for step in launches
        ]
        self._launches = [
            replace(
                step,
                operands={
                    name: None if name in names or name in step.stretches else value
                    for name, value in step.operands.items()
                },
            )
            for step in launches
        ]
        self._places: set[tuple[int | None, ...]] = set()
        self._compiled: list[_CompiledLaunch] | None = None
        if compiled_by_hand(device):
            try:
                with torch.cuda.device(device):
                    self._compiled = [_CompiledLaunch(step, self._names) for step in launches]
            except Exception:  # whatever it was, the ordinary launch raises it too, or does without
                self._compiled = None

    def __call__(self, tensors: Sequence[Tensor | None], check: Callable[[], None] | None = None) -> None:
        """Enqueue them on the current stream of the device, whatever device is current.

        Args:
            tensors: In the order of the names; None where the first call had None.
            check: Raises where tensors at these addresses cannot be given together. Not asked again about addresses
                that it has passed.
        """
        # Addresses, since Triton would ask the driver about every tensor.
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        if check is not None:
            places = tuple(addresses)
            if places not in self._places:
                check()
                if len(self._places) >= MAX_PLACES:
                    self._places.clear()
                self._places.add(places)
        if self._compiled is None:
            by_name = dict(zip(self._names, tensors, strict=True))
            for step, given in zip(self._launches, self._given, strict=True):
                operands = {**step.operands, **{name: by_name[name] for name in given}}
                for name, stretch in step.stretches.items():
                    whole = by_name[stretch.of]
                    assert whole is not None
                    operands[name] = stretch.on(whole)
                replace(step, operands=operands).run(self._device)
            return
        addresses.append(None)  # of pointers that no call gives
        driver, observed = triton.runtime.driver.active, _observed()
        if driver.get_current_device() == self._index:
            stream = driver.get_current_stream(self._index)
            for compiled in self._compiled:
                compiled.enqueue(stream, addresses, observed)
        else:
            with torch.cuda.device(self._device):
                stream = driver.get_current_stream(self._index)
                for compiled in self._compiled:
                    compiled.enqueue(stream, addresses, observed)


class PreparedCalls(Generic[Prepared]):
    """What calls of a form need to be launched again, by their form, for those that have no workspace to keep it in.

    A form is all that checks, constants and specialisation depend on. Holds no tensor, and starts again when full.
    """

    def __init__(self) -> None:
        self._calls: dict[Hashable, Prepared] = {}

    def recall(self, form: Hashable) -> Prepared | None:
        return self._calls.get(form)

    def remember(self, form: Hashable, call: Prepared) -> None:
        if len(self._calls) >= MAX_CALLS:
            self._calls.clear()
        self._calls[form] = call


class _Compiled:
    """A kernel as Triton compiled it, launched by addresses and numbers.

    Pointers are addresses or None: of a tensor Triton would ask the driver. Streams are raw ones of the current device.
    """

    def __init__(self, launch: Launch) -> None:
        self._compiled = compiled = launch.compile()
        self._start, self._function, self._metadata = compiled.run, compiled.function, compiled.packed_metadata

    def start(self, grid: tuple[int, ...], stream: int, arguments: Sequence[Any], observed: bool) -> None:
        """Launch on `stream`, with one argument for each of the kernel's parameters."""
        if observed:
            self._compiled[grid](*arguments, stream=stream)
        else:
            self._start(*grid, stream, self._function, self._metadata, None, None, None, *arguments)


class _CompiledLaunch(_Compiled):
    """A launch as the compiled kernel takes it."""

    def __init__(self, launch: Launch, names: Sequence[str]) -> None:
        parameters = launch.kernel.arg_names
        pointers = [
            name
            for name in parameters
            if name in names or name in launch.stretches or (name in launch.operands and launch.operands[name] is None)
        ]
        if parameters[: len(pointers)] != pointers:
            raise ValueError(f"kernel: expected parameters that begin with the pointers, given {parameters}")
        values = {**launch.operands, **launch.constants}
        self._rest = tuple(values[name] for name in parameters[len(pointers) :])
        places = {name: place for place, name in enumerate(names)}
        places |= {name: places[stretch.of] for name, stretch in launch.stretches.items()}
        pick = itemgetter(*(places.get(name, len(names)) for name in pointers))
        self._pointers_of: Callable[[Sequence[int | None]], Sequence[int | None]] = pick
        if launch.stretches:
            offsets = [launch.stretches[name].offset if name in launch.stretches else 0 for name in pointers]
            self._pointers_of = lambda addresses: [
                address if address is None else address + offset
                for address, offset in zip(pick(addresses), offsets, strict=True)
            ]
        self._grid = (*launch.grid, 1, 1)[:3]
        super().__init__(launch)

    def enqueue(self, stream: int, addresses: Sequence[int | None], observed: bool) -> None:
        """Launch on `stream` with these addresses of all named tensors, and None."""
        if observed:
            self.start(self._grid, stream, (*self._pointers_of(addresses), *self._rest), observed)
        else:
            self._start(
                *self._grid, stream, self._function, self._metadata, None, None, None, *self._pointers_of(addresses),
                *self._rest,
            )  # fmt: skip


def _observed() -> bool:
    """Whether a profiler listens to launches. A hook of Triton's is None, a function, or a chain that may be empty."""
    hooks = triton.knobs.runtime
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
    return bool(enter is not None and getattr(enter, "calls", True)) or bool(
        leave is not None and getattr(leave, "calls", True)
    )


class PreparedLaunch:
    """A kernel with tensors and constants that never change; integers, the grid and some tensors' addresses may.

    Where the kernel is compiled, a call skips what Triton does per launch (binding, specialisation, the look-up of the
    compiled kernel), which is most of its cost. That is sound only because nothing of it can change: the integers
    must be named in the kernel's `do_not_specialize`, and the tensors that calls give in its
    `do_not_specialize_on_alignment`.

    Args:
        kernel: A Triton kernel. Its parameters: the tensors that calls give, other tensors, integers, constants.
        device: Where the tensors live.
        operands: Tensors (or None) by parameter name; of those that calls give, one of their dtype.
        integers: Names of the integers that each call gives.
        constants: Compile-time constants by parameter name.
        num_warps: Warps per program.
        given: Names of the tensors that each call gives.
    """

    def __init__(
        self,
        kernel: Any,
        device: torch.device,
        operands: Mapping[str, Any],
        integers: tuple[str, ...],
        constants: Mapping[str, Any],
        num_warps: int,
        given: tuple[str, ...] = (),
    ) -> None:
        self._kernel, self._device, self._num_warps = kernel, device, num_warps
        self._operands, self._constants = dict(operands), dict(constants)
        self._integers, self._given = integers, given
        self._compiled: _Compiled | None = None
        if compiled_by_hand(device):
            for which, names, fixed in (
                ("integers", integers, kernel.do_not_specialize),
                ("given", given, kernel.do_not_specialize_on_alignment),
            ):
                missing = [name for name in names if name not in fixed]
                if missing:
                    raise ValueError(f"{which}: expected names that the kernel is not specialised on, given {missing}")
            pointers = kernel.arg_names[: len(operands)]
            expected = [*given, *pointers[len(given) :], *integers, *constants]
            if kernel.arg_names != expected or set(pointers) != set(operands):
                raise ValueError(f"kernel: expected parameters {expected}, given {kernel.arg_names}")
            with torch.cuda.device(device):
                values = {**operands, **dict.fromkeys(integers, 1), **constants}
                self._compiled = _Compiled(Launch(kernel, (1, 1, 1), values, {}, num_warps))
            tensors = [operands[name] for name in pointers[len(given) :]]
            self._addresses = tuple(None if tensor is None else tensor.data_ptr() for tensor in tensors)
            self._rest = tuple(constants.values())

    def __call__(self, programs: int, *integers: int, given: Sequence[Tensor] = ()) -> None:
        """Enqueue `programs` programs on the current stream of the device, whatever device is current.

        Args:
            programs: Size of the one-dimensional grid.
            integers: In the order of their names.
            given: Tensors, in the order of their names. The device must be able to read and write them at data_ptr().
        """
        if self._compiled is None:
            named = dict(zip((*self._given, *self._integers), (*given, *integers), strict=True))
            launch(
                self._kernel, (programs,), self._device, {**self._operands, **named}, self._constants, self._num_warps
            )
            return
        arguments = (*[tensor.data_ptr() for tensor in given], *self._addresses, *integers, *self._rest)
        driver = triton.runtime.driver.active
        index = self._device.index
        if driver.get_current_device() == index:
            self._compiled.start((programs, 1, 1), driver.get_current_stream(index), arguments, _observed())
        else:
            with torch.cuda.device(self._device):
                self._compiled.start((programs, 1, 1), driver.get_current_stream(index), arguments, _observed())
