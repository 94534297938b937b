"""Writing tokens into a cache: `append_kv` for new ones, `move_kv` for accepted draft tokens."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from splitkv import _interpreter, checks
from splitkv.api import _vector
from splitkv.config import cdiv, next_power_of_2
from splitkv.kernels.append import append_kernel, move_kernel
from splitkv.kernels.launch import launch
from splitkv.kv import CONTIGUOUS, RAGGED, KVView

MOVE_BLOCK = 256
"""Tokens that `move_kv` moves as if at once."""


class Slots(NamedTuple):
    """How slots of a cache are addressed, in elements: unit_tokens slots lie in each page (or row, or are one
    token)."""

    unit_tokens: int
    total: int
    stride_k: tuple[int, int, int]
    stride_v: tuple[int, int, int]


def _slots_of(kv: KVView) -> Slots:
    if not isinstance(kv, KVView):
        raise TypeError(f"kv: expected a PagedKV, ContiguousKV, RaggedKV or LatentKV, given {type(kv).__name__}")
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


def _check_new(name: str, new: object, kv: KVView, width: int) -> Tensor:
    new = checks.check_tensor(name, new)
    checks.check_dtype(name, new, kv.dtype)
    checks.check_shape(name, new, ["tokens", kv.num_kv_heads, width])
    checks.check_device(name, new, kv.device, "kv")
    checks.check_last_stride(name, new)
    return new


def _check_slots_in_debug(name: str, slots: Tensor, count: int) -> None:
    if checks.debugging() and slots.numel() and int(slots.max()) >= count:
        row = int((slots >= count).nonzero()[0])
        raise ValueError(f"{name}: expected slots < {count} (the cache's), given {int(slots[row])} at index {row}")


def append_kv(k_new: Tensor, v_new: Tensor, kv: KVView, slots: Tensor) -> None:
    """Write new tokens into a cache, each at its slot.

    >>> import torch, splitkv
    >>> k, v = torch.zeros(2, 4, 16, 2, 64)  # four pages of 16 tokens
    >>> kv = splitkv.PagedKV(k, v, torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([18], dtype=torch.int32))
    >>> new = torch.ones(2, 2, 64)
    >>> splitkv.append_kv(new, new, kv, torch.tensor([0 * 16 + 1, -1], dtype=torch.int32))
    >>> k[0, 1].sum(), k.sum()
    (tensor(128.), tensor(128.))

    One launch on the current stream, which reads no device value on the host and allocates nothing. Nothing but the
    tokens at the slots is written. Where two tokens have the same slot, either may win.

    Args:
        k_new: [tokens, num_kv_heads, head_dim] of the cache's dtype, any strides with the last 1, such as a slice of a
            fused projection.
        v_new: [tokens, num_kv_heads, head_dim_v], likewise.
        kv: The cache. Its lengths and page table are not read: slots say all.
        slots: [≥ tokens] int32, such as `StepState.out_cache_loc`; those past the tokens are ignored. A slot is
            page · page_size + offset (PagedKV), row · max_len + offset (ContiguousKV) or a token's index (RaggedKV).
            Tokens with a negative slot are skipped, and so are those with a slot past the cache's end (with
            `SPLITKV_DEBUG=1` that raises).

    Raises:
        TypeError, ValueError: naming the argument, what was expected, and what was given; nothing was launched.
    """
    where = _slots_of(kv)
    k_new = _check_new("k_new", k_new, kv, kv.head_dim)
    v_new = _check_new("v_new", v_new, kv, kv.head_dim_v)
    tokens = k_new.shape[0]
    if v_new.shape[0] != tokens:
        raise ValueError(f"v_new: expected {tokens} tokens (those of k_new), given {v_new.shape[0]}")
    checks.check_index_vector("slots", slots, kv.device, "kv", least=tokens)
    refusal = _interpreter.why_not(kv.device.type)
    if refusal is not None:
        raise ValueError(f"kv: {refusal}")
    _check_slots_in_debug("slots", slots[:tokens], where.total)
    block_d = min(128, next_power_of_2(kv.head_dim))
    block_dv = min(128, next_power_of_2(kv.head_dim_v))
    # About four 16-byte copies per thread; under the interpreter, which pays per program, many rows at once.
    block_r = max(1, 2048 // max(block_d, block_dv)) if kv.device.type != "cpu" else 256
    rows = tokens * kv.num_kv_heads
    launch(
        append_kernel,
        (cdiv(rows, block_r),),
        kv.device,
        operands=dict(
            k_new_ptr=k_new,
            v_new_ptr=v_new,
            k_ptr=kv.k,
            v_ptr=kv.v,
            slots_ptr=slots,
            rows=rows,
            num_slots=where.total,
            unit_tokens=where.unit_tokens,
            stride_k_new_token=k_new.stride(0),
            stride_k_new_head=k_new.stride(1),
            stride_v_new_token=v_new.stride(0),
            stride_v_new_head=v_new.stride(1),
            stride_k_unit=where.stride_k[0],
            stride_k_token=where.stride_k[1],
            stride_k_head=where.stride_k[2],
            stride_v_unit=where.stride_v[0],
            stride_v_token=where.stride_v[1],
            stride_v_head=where.stride_v[2],
        ),
        constants=dict(
            NUM_KV_HEADS=kv.num_kv_heads,
            HEAD_DIM=kv.head_dim,
            HEAD_DIM_V=kv.head_dim_v,
            NEW_VECTOR=_vector(16, k_new, v_new),
            KV_VECTOR=_vector(16, kv.k, kv.v),
            BLOCK_R=block_r,
            BLOCK_D=block_d,
            BLOCK_DV=block_dv,
        ),
        num_warps=4,
    )


def move_kv(kv: KVView, src_slots: Tensor, dst_slots: Tensor) -> None:
    """Move tokens within a cache from slots to slots, such as accepted draft tokens to the front of the draft.

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
    where = _slots_of(kv)
    checks.check_index_vector("src_slots", src_slots, kv.device, "kv")
    checks.check_index_vector("dst_slots", dst_slots, kv.device, "kv")
    checks.check_shape("dst_slots", dst_slots, src_slots.shape)
    refusal = _interpreter.why_not(kv.device.type)
    if refusal is not None:
        raise ValueError(f"kv: {refusal}")
    _check_slots_in_debug("src_slots", src_slots, where.total)
    _check_slots_in_debug("dst_slots", dst_slots, where.total)
    moves = src_slots.shape[0]
    block_d = 32
    launch(
        move_kernel,
        (kv.num_kv_heads if moves else 0, cdiv(max(kv.head_dim, kv.head_dim_v), block_d)),
        kv.device,
        operands=dict(
            k_ptr=kv.k,
            v_ptr=kv.v,
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
