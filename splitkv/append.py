"""Writing tokens into a cache: `append_kv` for new ones, `move_kv` for accepted draft tokens."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from splitkv import _interpreter, checks, operators
from splitkv import tiles as tile_sizes
from splitkv.api import _form_of, _vector
from splitkv.config import DTYPES, QUANTIZED_DTYPES, cdiv, next_power_of_2
from splitkv.kernels.append import append_kernel, move_kernel
from splitkv.kernels.prepared import Launch, PreparedCalls, PreparedLaunches
from splitkv.kv import CONTIGUOUS, RAGGED, KVView, check_view
from splitkv.variants import ALIGNED_BYTES

MOVE_BLOCK = 256
"""Tokens that `move_kv` moves as if at once."""


APPEND_NAMES = "k_new_ptr", "v_new_ptr", "slots_ptr", "k_ptr", "v_ptr", "k_scale_ptr", "v_scale_ptr"
MOVE_NAMES = "source_ptr", "target_ptr", "k_ptr", "v_ptr", "k_scale_ptr", "v_scale_ptr"
ARGUMENTS = {APPEND_NAMES: ("k_new", "v_new", "slots"), MOVE_NAMES: ("src_slots", "dst_slots")}
_calls = PreparedCalls[PreparedLaunches]()


class Slots(NamedTuple):
    """How slots of a cache are addressed, in elements: unit_tokens slots lie in each page (or row, or are one
    token)."""

    unit_tokens: int
    total: int
    stride_k: tuple[int, int, int]
    stride_v: tuple[int, int, int]


def _slots_of(kv: KVView) -> Slots:
    check_view(kv)
    for name, cache in (("k", kv.k), ("v", kv.v)):
        checks.check_no_overlap(f"kv.{name}", cache)
    where = kv.addressing
    if where.kind == RAGGED:
        k_token, k_head, _ = kv.k.stride()
        v_token, v_head, _ = kv.v.stride()
        return Slots(1, kv.k.shape[0], (k_token, 0, k_head), (v_token, 0, v_head))
    unit_tokens = kv.k.shape[1] if where.kind == CONTIGUOUS else where.page_size
    k_unit, k_token, k_head = where.stride_k
    v_unit, v_token, v_head = where.stride_v
    return Slots(
        unit_tokens, kv.k.shape[0] * unit_tokens, (k_unit, k_token, k_head), (v_unit, v_token, v_head)
    )  # fmt: skip


def _check_new(name: str, new: object, kv: KVView, width: int, dtype: torch.dtype | None = None) -> Tensor:
    new = checks.check_tensor(name, new)
    if dtype is not None:
        checks.check_dtype(name, new, dtype)
    checks.check_dtype(name, new, kv.dtype, *(DTYPES if kv.quantized else ()))
    checks.check_shape(name, new, ["tokens", kv.num_kv_heads, width])
    checks.check_device(name, new, kv.device, "kv")
    checks.check_last_stride(name, new)
    checks.check_no_grad(name, new)
    return new


def _check_apart(kv: KVView, read: Iterable[tuple[str, Tensor | None]], scales: bool) -> None:
    """Raise ValueError unless a cache that will be written lies apart from these, and its values from its keys; with
    `scales` those that tokens have of their own as well."""
    if not _same_memory(kv):
        checks.check_apart("kv.v", kv.v, [("kv.k", kv.k)])
    written = [("the cache that is written", cache) for cache in (kv.k, kv.v)]
    if scales:
        own = [(f"kv.{name}", scale) for name, scale in _own_scales(kv)]
        for i, (name, scale) in enumerate(own):
            checks.check_apart(name, scale, [*own[:i], *written])
        written += [("the scales that are written", scale) for _, scale in own]
    for name, tensor in read:
        if tensor is not None:
            checks.check_apart(name, tensor, written)


def _own_scales(kv: KVView) -> list[tuple[str, Tensor]]:
    """The scales that tokens have of their own, by name; of a LatentKV there is one for keys and values."""
    named = zip(("scale",) if kv.latent else ("k_scale", "v_scale"), kv.scales, strict=False)
    return [(name, scale.tensor) for name, scale in named if scale.per_token and scale.tensor is not None]


def _check_written_scales(kv: KVView) -> None:
    """Raise ValueError unless every token and head has a scale of its own in memory."""
    own = _own_scales(kv)
    for name, scale in own:
        checks.check_no_overlap(f"kv.{name}", scale)
    if own and _same_memory(kv) and not kv.latent:
        raise ValueError(
            "kv.v: expected memory apart from kv.k where tokens have scales of their own (a LatentKV has one for "
            "both), given the same"
        )


def _writes_scales(names: tuple[str, ...], given: tuple[Tensor | None, ...], kv_dtype: torch.dtype) -> bool:
    """Whether a call writes the scales that tokens have of their own: not where numbers come quantised already."""
    return names is MOVE_NAMES or (given[0] is not None and given[0].dtype != kv_dtype)


def _check_slots_in_debug(name: str, slots: Tensor, count: int) -> None:
    if checks.debugging(slots.device) and slots.numel() and int(slots.max()) >= count:
        row = int((slots >= count).nonzero()[0])
        raise ValueError(f"{name}: expected slots < {count} (the cache's), given {int(slots[row])} at index {row}")


def _same_memory(kv: KVView) -> bool:
    """Whether the values are the first columns of the keys."""
    return kv.latent or (
        checks.has_memory(kv.k)
        and kv.v.data_ptr() == kv.k.data_ptr()
        and kv.v.stride() == kv.k.stride()
        and kv.head_dim_v <= kv.head_dim
    )


def _scale_operands(kv: KVView, per_token_only: bool) -> dict[str, Tensor | int | None]:
    """The scales of a view for the kernels here: tensors and their strides."""
    operands: dict[str, Tensor | int | None] = {}
    for name, scale, absent in zip(("k_scale", "v_scale"), kv.scales, (False, kv.latent), strict=True):
        left_out = absent or (per_token_only and not scale.per_token)
        operands[f"{name}_ptr"] = None if left_out else scale.tensor
        unit, token, head = scale.strides
        if kv.addressing.kind == RAGGED:
            unit, token = token, 0  # a token is a unit of its own
        operands |= {f"stride_{name}_unit": unit, f"stride_{name}_token": token, f"stride_{name}_head": head}
    return operands


def append_kv(k_new: Tensor, v_new: Tensor | None, kv: KVView, slots: Tensor) -> None:
    """Write new tokens into a cache, each at its slot.

    >>> import torch, splitkv
    >>> k, v = torch.zeros(2, 4, 16, 2, 64)  # four pages of 16 tokens
    >>> kv = splitkv.PagedKV(k, v, torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([18], dtype=torch.int32))
    >>> new = torch.ones(2, 2, 64)
    >>> splitkv.append_kv(new, new, kv, torch.tensor([0 * 16 + 1, -1], dtype=torch.int32))
    >>> k[0, 1].sum(), k.sum()
    (tensor(128.), tensor(128.))

    One launch on the current stream, which reads no device value on the host and allocates nothing. Nothing but the
    tokens at the slots is written. Where two tokens have the same slot, either may win
    (and one's numbers may get the other's computed scale).

    A quantised cache takes float16, bfloat16 or float32 and stores number / scale, rounded to nearest, ties to even.
    Scales that every token has its own of are computed and written: the largest finite magnitude of the token's head
    over the largest finite number of the format (127 for int8), 1 where all are 0. Beyond the largest finite number
    (int8: -128…127) that number is stored, for infinities too. NaN is stored as NaN; int8 has none: there the scale
    becomes NaN if it is computed, else 0 is stored.

    Args:
        k_new: [tokens, num_kv_heads, head_dim] of the cache's dtype (then copied as it is, and no scale is written), or
            of a quantised cache float16, bfloat16 or float32; any strides with the last 1, such as a slice of a fused
            projection.
        v_new: [tokens, num_kv_heads, head_dim_v], of the dtype of k_new. None for a LatentKV: its values are in k_new.
            Where a view's values are the first columns of its keys, v_new must be those of k_new.
        kv: The cache. Its lengths and page table are not read: slots say all. Scales that are written have memory of
            their own: one tensor for keys and values, or one scale for all heads of a token, is refused.
        slots: [≥ tokens] int32, such as `StepState.out_cache_loc`; those past the tokens are ignored. A slot is
            page · page_size + offset (PagedKV, LatentKV), row · max_len + offset (ContiguousKV) or a token's index
            (RaggedKV). Tokens with a negative slot are skipped, and so are those with a slot past the cache's end (with
            `SPLITKV_DEBUG=1` that raises).

    Raises:
        TypeError, ValueError: naming the argument, what was expected, and what was given; nothing was launched.
    """
    if operators.tracing(k_new):
        if operators.shapes_only(k_new):
            _plan_append(k_new, v_new, kv, slots)
        check_view(kv)
        refusal = operators.followed(("k_new", k_new), ("v_new", v_new))
        torch.ops.splitkv.append_kv(k_new, v_new, slots, refusal, *operators.take_apart(kv, scheduled=False))
        return
    _run(APPEND_NAMES, (k_new, v_new, slots), kv, lambda: _plan_append(k_new, v_new, kv, slots))


def _run(names: tuple[str, ...], given: tuple[Tensor | None, ...], kv: KVView, plan: Callable[[], Launch]) -> None:
    """Launch what `plan` says after its checks, or what it said for other tensors of the same form.

    Args:
        names: The kernel's, of `given` and of the view's tensors.
    """
    form: Hashable = None
    call: PreparedLaunches | None = None
    try:
        form = names, *[None if tensor is None else _form_of(tensor) for tensor in given], _cache_form(kv)
        call = _calls.recall(form)
    except (AttributeError, TypeError, RuntimeError):
        form = None  # some argument is no such thing at all: the checks say which
    if call is None or checks.needs_grad(*given) or checks.debugging():
        step = plan()
        if form is None:
            step.run(kv.device)
            return
        if call is None:
            call = PreparedLaunches([step], names, kv.device)
            _calls.remember(form, call)
    call(
        (*_as_taken(given, kv.dtype), *_cache_tensors(kv)),
        lambda: _check_apart(kv, zip(ARGUMENTS[names], given, strict=True), _writes_scales(names, given, kv.dtype)),
    )


def _as_taken(given: tuple[Tensor | None, ...], dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    """As the kernels take them: numbers that are quantised already are bytes to copy."""
    if dtype not in QUANTIZED_DTYPES:
        return given
    return tuple(t.view(torch.uint8) if t is not None and t.dtype == dtype else t for t in given)


def _cache_form(kv: KVView) -> tuple[Hashable, ...]:
    """All that checks and launches here depend on of a view."""
    k, v, k_scale, v_scale = _cache_tensors(kv)
    first = k.data_ptr()
    last = first if v is None else v.data_ptr()
    return (
        kv.form, first % ALIGNED_BYTES, last % ALIGNED_BYTES, first == last, kv.k.stride(), kv.v.stride(),
        None if k_scale is None else k_scale.data_ptr() % ALIGNED_BYTES,
        None if v_scale is None else v_scale.data_ptr() % ALIGNED_BYTES,
    )  # fmt: skip


def _cache_tensors(kv: KVView) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """K, V and the scales of a view as the kernels take them."""
    k, v, _, _, _, _, _, _, k_scale, v_scale, _, _ = kv.tensors
    assert k is not None
    return k, v, k_scale, v_scale


def _plan_append(k_new: Tensor, v_new: Tensor | None, kv: KVView, slots: Tensor) -> Launch:
    """Check a call of `append_kv` and say what it launches."""
    where = _slots_of(kv)
    k_new = _check_new("k_new", k_new, kv, kv.head_dim)
    tokens, copied = k_new.shape[0], k_new.dtype == kv.dtype
    if not copied:
        _check_written_scales(kv)
    if kv.latent:
        if v_new is not None:
            raise TypeError(f"v_new: expected None with a LatentKV, given {type(v_new).__name__}")
    else:
        v_new = _check_new("v_new", v_new, kv, kv.head_dim_v, k_new.dtype)
        if v_new.shape[0] != tokens:
            raise ValueError(f"v_new: expected {tokens} tokens (those of k_new), given {v_new.shape[0]}")
    tile_sizes.check_cache_dtype(tile_sizes.Target.of(kv.device), kv.dtype)
    checks.check_index_vector("slots", slots, kv.device, "kv", least=tokens)
    _check_apart(kv, [("k_new", k_new), ("v_new", v_new), ("slots", slots)], not copied)
    refusal = None if kv.k.is_meta else _interpreter.why_not(kv.device.type)
    if refusal is not None:
        raise ValueError(f"kv: {refusal}")
    _check_slots_in_debug("slots", slots[:tokens], where.total)
    new = [tensor for tensor in (k_new, v_new) if tensor is not None]
    if copied and kv.quantized:
        new = [tensor.view(torch.uint8) for tensor in new]
    block_d = min(128, next_power_of_2(kv.head_dim))
    block_dv = min(128, next_power_of_2(kv.head_dim_v))
    # About four 16-byte copies per thread; under the interpreter, which pays per program, many rows at once.
    block_r = max(1, 2048 // max(block_d, block_dv)) if kv.device.type != "cpu" else 256
    rows = tokens * kv.num_kv_heads
    return Launch(
        append_kernel,
        (cdiv(rows, block_r),),
        operands=dict(
            k_new_ptr=new[0],
            v_new_ptr=None if kv.latent else new[1],
            k_ptr=kv.tensors[0],
            v_ptr=kv.tensors[1],
            slots_ptr=slots,
            rows=rows,
            num_slots=where.total,
            unit_tokens=where.unit_tokens,
            k_scale=kv.scales[0].number,
            v_scale=kv.scales[1].number,
            stride_k_new_token=new[0].stride(0),
            stride_k_new_head=new[0].stride(1),
            stride_v_new_token=new[-1].stride(0),
            stride_v_new_head=new[-1].stride(1),
            stride_k_unit=where.stride_k[0],
            stride_k_token=where.stride_k[1],
            stride_k_head=where.stride_k[2],
            stride_v_unit=where.stride_v[0],
            stride_v_token=where.stride_v[1],
            stride_v_head=where.stride_v[2],
            **_scale_operands(kv, per_token_only=False),
        ),
        constants=dict(
            NUM_KV_HEADS=kv.num_kv_heads,
            HEAD_DIM=kv.head_dim,
            HEAD_DIM_V=kv.head_dim_v,
            NEW_VECTOR=_vector(16, *new),
            KV_VECTOR=_vector(16, kv.k, kv.v),
            FORMAT=0 if copied else kv.format,
            K_SCALE_PER_TOKEN=kv.scales[0].per_token,
            V_SCALE_PER_TOKEN=kv.scales[1].per_token,
            BLOCK_R=block_r,
            BLOCK_D=block_d,
            BLOCK_DV=block_dv,
        ),
        num_warps=4,
    )


def move_kv(kv: KVView, src_slots: Tensor, dst_slots: Tensor) -> None:
    """Move tokens within a cache from slots to slots, such as accepted draft tokens to the front of the draft.

    Scales that tokens have of their own move with them.

    >>> import torch, splitkv
    >>> k = torch.arange(4.0).reshape(4, 1, 1).expand(4, 1, 16).contiguous(); v = k.clone()
    >>> kv = splitkv.RaggedKV(k, v, torch.tensor([0, 4], dtype=torch.int32))
    >>> splitkv.move_kv(kv, torch.tensor([2, 3], dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32))
    >>> k[:, 0, 0]
    tensor([0., 2., 3., 3.])

    One launch on the current stream, which reads no device value on the host and allocates nothing. Tokens are moved
    256 at a time, in their order, and within such a block all sources are read before anything is written. So up to
    256 moves may overlap in any way. More may overlap as long as no target is the source of a move in a later block:
    true of every move towards the front in which sources and targets both ascend, request by request. Where two moves
    have the same target, either may win.

    Args:
        kv: The cache.
        src_slots: [moves] int32, slots as for `append_kv`.
        dst_slots: [moves] int32. A move is skipped where either slot is negative or past the cache's end (with
            `SPLITKV_DEBUG=1` the latter raises).

    Raises:
        TypeError, ValueError: naming the argument, what was expected, and what was given; nothing was launched.
    """
    if operators.tracing(src_slots):
        if operators.shapes_only(src_slots):
            _plan_move(kv, src_slots, dst_slots)
        check_view(kv)
        torch.ops.splitkv.move_kv(src_slots, dst_slots, *operators.take_apart(kv, scheduled=False))
        return
    _run(MOVE_NAMES, (src_slots, dst_slots), kv, lambda: _plan_move(kv, src_slots, dst_slots))


def _plan_move(kv: KVView, src_slots: Tensor, dst_slots: Tensor) -> Launch:
    """Check a call of `move_kv` and say what it launches."""
    where = _slots_of(kv)
    checks.check_index_vector("src_slots", src_slots, kv.device, "kv")
    checks.check_index_vector("dst_slots", dst_slots, kv.device, "kv")
    _check_written_scales(kv)
    _check_apart(kv, [("src_slots", src_slots), ("dst_slots", dst_slots)], True)
    checks.check_shape("dst_slots", dst_slots, src_slots.shape)
    refusal = None if kv.k.is_meta else _interpreter.why_not(kv.device.type)
    if refusal is not None:
        raise ValueError(f"kv: {refusal}")
    _check_slots_in_debug("src_slots", src_slots, where.total)
    _check_slots_in_debug("dst_slots", dst_slots, where.total)
    moves = src_slots.shape[0]
    block_d = 32
    return Launch(
        move_kernel,
        (kv.num_kv_heads if moves else 0, cdiv(max(kv.head_dim, kv.head_dim_v), block_d)),
        operands=dict(
            k_ptr=kv.tensors[0],
            v_ptr=None if _same_memory(kv) else kv.tensors[1],
            source_ptr=src_slots,
            target_ptr=dst_slots,
            moves=moves,
            num_slots=where.total,
            unit_tokens=where.unit_tokens,
            stride_k_unit=where.stride_k[0],
            stride_k_token=where.stride_k[1],
            stride_k_head=where.stride_k[2],
            stride_v_unit=where.stride_v[0],
            stride_v_token=where.stride_v[1],
            stride_v_head=where.stride_v[2],
            **_scale_operands(kv, per_token_only=True),
        ),
        constants=dict(
            HEAD_DIM=kv.head_dim,
            HEAD_DIM_V=kv.head_dim_v,
            KV_VECTOR=_vector(16, kv.k, kv.v),
            BLOCK_T=MOVE_BLOCK,
            BLOCK_D=block_d,
        ),
        num_warps=8,
    )


@operators.operator(f"append_kv(Tensor k_new, Tensor? v_new, Tensor slots, str? refusal, {operators.WRITTEN_VIEW})")
def _append_kv_operator(k_new: Tensor, v_new: Tensor | None, slots: Tensor, refusal: str | None, *view: Any) -> None:
    operators.refuse(refusal)
    _run_parts(APPEND_NAMES, (k_new, v_new, slots), view, lambda kv: _plan_append(k_new, v_new, kv, slots))


@operators.operator(f"move_kv(Tensor src_slots, Tensor dst_slots, {operators.WRITTEN_VIEW})")
def _move_kv_operator(src_slots: Tensor, dst_slots: Tensor, *view: Any) -> None:
    _run_parts(MOVE_NAMES, (src_slots, dst_slots), view, lambda kv: _plan_move(kv, src_slots, dst_slots))


def _run_parts(
    names: tuple[str, ...], given: tuple[Tensor | None, ...], view: tuple[Any, ...], plan: Callable[[KVView], Launch]
) -> None:
    """`_run` for a view in parts: it is put together only where its checks are due."""
    k, v = view[:2]
    form = (
        names, view[operators.VIEW_TENSORS :], v is not None and k.data_ptr() == v.data_ptr(),
        *[None if tensor is None else _form_of(tensor) for tensor in (*given, *view[:4])],
    )  # fmt: skip
    call = _calls.recall(form)
    if call is None or checks.debugging():
        step = plan(operators.put_together(*view))
        if call is None:
            call = PreparedLaunches([step], names, k.device)
            _calls.remember(form, call)
    k, v, _, _, _, _, _, _, k_scale, v_scale, _, _ = operators.operands(*view)
    call(
        (*_as_taken(given, view[0].dtype), k, v, k_scale, v_scale),
        lambda: _check_apart(
            operators.put_together(*view),
            zip(ARGUMENTS[names], given, strict=True),
            _writes_scales(names, given, view[0].dtype),
        ),
    )
