"""One raising helper per invariant. Messages name the argument, what was expected, and what was given."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from splitkv.config import DTYPES, QUANTIZED_DTYPES, require_int

__all__ = [
    "as_device",
    "check_apart",
    "check_cache_dtype",
    "check_choice",
    "check_device",
    "check_dtype",
    "check_finite",
    "check_in_place",
    "check_index_vector",
    "check_last_stride",
    "check_no_grad",
    "check_no_overlap",
    "check_prefix_sums",
    "check_rank",
    "check_scale",
    "check_shape",
    "check_tensor",
    "check_values",
    "debugging",
    "extent",
    "has_memory",
    "is_fake",
    "needs_grad",
    "reach",
    "require_int",
    "touches",
]


def debugging(device: torch.device | None = None) -> bool:
    """Whether SPLITKV_DEBUG=1 asks for checks of values on the device, which read them back and so wait for it.

    With a device: unless its current stream is being captured, when nothing can be read back.
    """
    if os.environ.get("SPLITKV_DEBUG") != "1":
        return False
    if device is None or device.type != "cuda":
        return device is None or device.type != "meta"
    with torch.cuda.device(device):
        return not torch.cuda.is_current_stream_capturing()


def shape_text(shape: Sequence[object]) -> str:
    """[2, batch, 64] style text of a shape."""
    return "[" + ", ".join(map(str, shape)) + "]"


def check_tensor(name: str, value: object) -> Tensor:
    """Raise unless `value` is a tensor of elements with strides, as they lie in memory."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, given {type(value).__name__}")
    if value.is_nested or value.layout != torch.strided:
        layout = "a nested tensor" if value.is_nested else f"a {value.layout} layout"
        raise ValueError(f"{name}: expected a dense tensor of elements with strides, given {layout}")
    # Operators ask it of the tensors that they are run with: a trace could not.
    if not torch.compiler.is_compiling() and value.is_neg():
        raise ValueError(f"{name}: expected numbers as they lie in memory, given a negated view (call resolve_neg())")
    _check_memory(name, value)
    return value


def _check_memory(name: str, tensor: Tensor) -> None:
    """Raise TypeError where a tensor on a device has elements and nothing that a kernel could read."""
    if not has_memory(tensor):
        return
    try:
        present = tensor.data_ptr() != 0 or tensor.numel() == 0
    except RuntimeError:
        present = False
    if not present:
        raise TypeError(
            f"{name}: expected a tensor with memory of its own, given a {type(tensor).__name__} without: one that "
            "wraps another, as a DTensor (to_local() has memory) or torch.vmap does, or whose storage was freed"
        )


def is_fake(tensor: object) -> bool:
    """Whether this is a tensor of PyTorch's `FakeTensorMode`, which has a device but no memory."""
    return type(tensor) is not Tensor and isinstance(tensor, FakeTensor)  # of a plain tensor answered at once


def has_memory(tensor: Tensor) -> bool:
    """Whether addresses mean something: not on the meta device, and not while a call is traced."""
    return not (tensor.is_meta or torch.compiler.is_compiling() or is_fake(tensor))


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd would have to follow what happens to one of these tensors."""
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            return True
    # A level is entered by those alone who derive forwards; a PyTorch that does not say which one it is will be asked
    # for tangents. A trace does not see them.
    if getattr(forward_ad, "_current_level", 0) < 0 or torch.compiler.is_compiling():
        return False
    unpack: Callable[[Tensor], Any] = forward_ad.unpack_dual
    return any(tensor is not None and unpack(tensor).tangent is not None for tensor in tensors)


def check_choice(name: str, value: object, *choices: str) -> None:
    """Raise ValueError unless `value` is one of these words; what compares element by element is none."""
    if not isinstance(value, str) or value not in choices:
        expected = " or ".join(f'"{choice}"' for choice in choices)
        raise ValueError(f"{name}: expected {expected}, given {value!r}")


def check_rank(name: str, tensor: Tensor, *ranks: int) -> None:
    """Raise ValueError unless the tensor has one of these numbers of dimensions."""
    if tensor.dim() not in ranks:
        expected = " or ".join(map(str, ranks))
        raise ValueError(f"{name}: expected {expected} dimensions, given shape {shape_text(tensor.shape)}")


def check_shape(name: str, tensor: Tensor, shape: Sequence[int | str]) -> None:
    """Raise ValueError unless the tensor has this shape; a string stands for any size and names it in the message."""
    given = tensor.shape
    if len(given) != len(shape) or any(not isinstance(s, str) and s != g for s, g in zip(shape, given, strict=False)):
        raise ValueError(f"{name}: expected shape {shape_text(shape)}, given {shape_text(given)}")


def check_dtype(name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    """Raise TypeError unless the tensor has one of these dtypes."""
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: expected {' or '.join(map(str, dtypes))}, given {tensor.dtype}")


def check_cache_dtype(name: str, cache: Tensor) -> None:
    """Raise TypeError unless a cache may have this dtype."""
    dtypes = (*DTYPES, *QUANTIZED_DTYPES)
    if cache.dtype == torch.uint8:
        raise TypeError(
            f"{name}: expected {' or '.join(map(str, dtypes))} (bytes that are 8-bit floats: {name}.view("
            f"torch.float8_e4m3fn) or {name}.view(torch.float8_e5m2), without a copy), given {cache.dtype}"
        )
    check_dtype(name, cache, *dtypes)


def check_scale(name: str, scale: object, cache: Tensor, per_token: Sequence[int], num_heads: int | None) -> None:
    """Raise unless this is a scale of a cache: None, a real number, or a float32 tensor on its device.

    Args:
        name: Of the argument.
        scale: What was given for it.
        cache: What it is a scale of.
        per_token: Shape of a scale per token and head.
        num_heads: Shape of a scale per head; None: there are none.

    Raises:
        TypeError, ValueError: no such scale; one for a cache that is not quantised; none for one of integers.
    """
    if cache.dtype not in QUANTIZED_DTYPES:
        if scale is not None:
            raise ValueError(f"{name}: expected none, since the cache is not quantised ({cache.dtype}), given one")
        return
    if scale is None:
        if not cache.dtype.is_floating_point:
            raise ValueError(f"{name}: expected a scale, since the cache is of {cache.dtype}, given none")
        return
    if not isinstance(scale, Tensor):
        check_finite(name, scale, above=0.0)
        return
    scale = check_tensor(name, scale)
    check_dtype(name, scale, torch.float32)
    check_device(name, scale, cache.device, "the cache")
    shapes = [[], *([] if num_heads is None else [[num_heads]]), list(per_token)]
    if list(scale.shape) not in shapes:
        raise ValueError(
            f"{name}: expected shape {' or '.join(map(shape_text, shapes))}, given {shape_text(scale.shape)}"
        )


def as_device(value: object) -> torch.device:
    """What a `device` argument means.

    Raises:
        TypeError, ValueError: no device, or none that torch has here.
    """
    if not isinstance(value, (str, torch.device)):
        raise TypeError(f"device: expected a torch.device or its name, given {value!r}")
    try:
        device = torch.device(value)
    except RuntimeError:
        raise ValueError(f"device: expected the name of a torch device, given {value!r}") from None
    counts = {"cpu": lambda: 1, "meta": lambda: 1, "cuda": torch.cuda.device_count, "xpu": torch.xpu.device_count}
    if device.type not in counts or (device.index or 0) >= counts[device.type]():
        raise ValueError(f"device: expected one that is here and that kernels can run on, given {device}")
    return device


def check_device(name: str, tensor: Tensor, device: torch.device, of: str) -> None:
    """Raise ValueError unless the tensor lives on `device`, the device of the argument named by `of`."""
    if tensor.device != device:
        raise ValueError(f"{name}: expected device {device} (that of {of}), given {tensor.device}")


def check_last_stride(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless elements of the last dimension lie next to each other."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: expected a last stride of 1, given strides {shape_text(tensor.stride())}")


def check_no_overlap(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless every element of a tensor that will be written has memory of its own.

    Of strides that interleave without meeting, such as (3, 2) for [2, 3], this says no too.
    """
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                raise ValueError(
                    f"{name}: expected memory of its own per row and element, given strides "
                    f"{shape_text(tensor.stride())} for {shape_text(tensor.shape)}"
                )
            reach += (size - 1) * stride


def check_no_grad(name: str, tensor: Tensor) -> None:
    """Raise ValueError where autograd would have to follow what happens to the tensor."""
    if needs_grad(tensor):
        given = "requires grad" if tensor.requires_grad else "has a tangent"
        raise ValueError(f"{name}: expected a tensor outside autograd (there is no backward), given one that {given}")


def check_apart(name: str, tensor: Tensor, others: Iterable[tuple[str, Tensor | None]]) -> None:
    """Raise ValueError where a tensor that will be written shares memory with one that the call reads or writes too.

    They may interleave where a stride of either shows that they do not meet, as columns of one buffer do.

    Args:
        name: Of the argument.
        tensor: Will be written.
        others: With their names. What is no dense tensor is for other checks to refuse.
    """
    if not has_memory(tensor):
        return
    span = extent(tensor)
    for of, other in others:
        if not isinstance(other, Tensor) or other.is_nested or other.layout != torch.strided:
            continue
        if touches(span, [extent(other)]) and not _interleave(tensor, other):
            raise ValueError(
                f"{name}: expected memory apart from {of}, given a tensor of shape {shape_text(tensor.shape)} that "
                "shares memory with it"
            )


def touches(span: tuple[int, int], others: Iterable[tuple[int, int]]) -> bool:
    """Whether a stretch of addresses meets one of others."""
    first, last = span
    for low, high in others:  # any() would take twice as long
        if low < last and first < high:
            return first < last
    return False


def _interleave(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors lie in stretches of their own modulo some stride."""
    distance = b.data_ptr() - a.data_ptr()
    steps = [
        [(size - 1, stride * t.element_size()) for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]
        for t in (a, b)
    ]
    for period in {stride for own in steps for _, stride in own if stride}:
        widths = [
            t.element_size() + sum(count * stride for count, stride in own if stride % period)
            for t, own in zip((a, b), steps, strict=True)
        ]
        if widths[0] <= distance % period and distance % period + widths[1] <= period:
            return True
    return False


def check_in_place(name: str, tensor: Tensor, of: str, parts: Tensor, within: bool) -> None:
    """Raise ValueError unless a tensor that will be written lies apart from `parts` [n, …], which are read.

    With `within` it may also be parts[i], or lie between them like another one, as in a buffer of one part more.
    """
    if not has_memory(tensor) or not touches(extent(tensor), [extent(parts)]) or _interleave(tensor, parts):
        return
    if within and tensor.dtype == parts.dtype:
        rows = list(zip(parts.shape, parts.stride(), strict=True))
        same = all(size <= 1 or stride == own for (size, stride), own in zip(rows[1:], tensor.stride(), strict=True))
        step = parts.stride(0) if parts.shape[0] > 1 else 0
        distance = (tensor.data_ptr() - parts.data_ptr()) // tensor.element_size()
        if same and distance == 0:
            return
        if same and step and distance % step == 0:
            # Parts of one row span less than the distance of rows that lie further apart than parts.
            span = (max(distance // step, parts.shape[0] - 1) - min(distance // step, 0) + 1) * step
            if all(stride <= step or stride >= span for size, stride in rows[1:] if size > 1):
                return
    raise ValueError(
        f"{name}: expected memory apart from {of}"
        + (f", or that of one of {of}" if within else "")
        + f", given a tensor of shape {shape_text(tensor.shape)} that shares memory with it"
    )


def extent(tensor: Tensor) -> tuple[int, int]:
    """The addresses from a tensor's first byte to past its last."""
    first = tensor.data_ptr()
    return first, first + reach(tensor)


def reach(tensor: Tensor) -> int:
    """Bytes from a tensor's first to past its last."""
    if tensor.numel() == 0:
        return 0
    reached = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reached + 1) * tensor.element_size()


def check_index_vector(name: str, tensor: object, device: torch.device, of: str, least: int | None = None) -> Tensor:
    """Raise unless this is a contiguous int32 vector on `device`, of at least `least` elements if given."""
    tensor = check_tensor(name, tensor)
    check_dtype(name, tensor, torch.int32)
    check_rank(name, tensor, 1)
    if least is not None and tensor.shape[0] < least:
        raise ValueError(f"{name}: expected at least {least} elements, given {tensor.shape[0]}")
    if tensor.shape[0] > 1 and tensor.stride(0) != 1:
        raise ValueError(f"{name}: expected a stride of 1, given {tensor.stride(0)}")
    check_device(name, tensor, device, of)
    return tensor


def check_values(name: str, values: Sequence[int], low: int, high: int | None = None) -> None:
    """Raise ValueError, naming the row, unless each of these values read back from the device is in low…high."""
    for row, value in enumerate(values):
        if value < low or (high is not None and value > high):
            bounds = f"≥ {low}" if high is None else f"in {low}…{high}"
            raise ValueError(f"{name}: expected values {bounds}, given {value} in row {row}")


def check_prefix_sums(name: str, values: Sequence[int], high: int) -> None:
    """Raise ValueError, naming the row, unless these values never fall and lie in 0…high."""
    check_values(name, values, 0, high)
    for row, (value, following) in enumerate(pairwise(values)):
        if following < value:
            raise ValueError(
                f"{name}: expected prefix sums that never fall, given {value} and then {following} in row {row}"
            )


def check_finite(name: str, value: object, *, above: float | None = None) -> float:
    """Raise unless this is a real number, finite in float32 (and greater than `above` there); return it as a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a real number, given {value!r}")
    single = torch.finfo(torch.float32)
    least = -single.max if above is None else max(above, single.tiny)
    if not least <= value <= single.max or value == above:
        bound = "finite in float32" if above is None else f"finite and > {above:g} in float32"
        raise ValueError(f"{name}: expected a number that is {bound}, given {value}")
    return float(value)
