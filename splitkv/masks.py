"""Masks, written by kernels into tensors that the caller supplies.

`pack_tree_mask` and `tree_mask_from_parents` write what decode takes as `tree_mask`: which draft tokens see which, in
words of 32 bits. The others write boolean masks. decode needs none of those: it knows lengths, causality, windows and
left padding by itself. They are for attention that does take a mask.

Each writer has a function `…_shape` that says, in plain integers, what shape its `out` has; another shape raises before
anything is launched. A writer is one launch on the current stream, reads no device value on the host and allocates
nothing. Lengths on the device that are longer than the mask are cut off by its width; with `SPLITKV_DEBUG=1` they
raise, and so do negative ones and prefix sums that fall.
"""

from __future__ import annotations

import torch
from torch import Tensor

from splitkv import _interpreter, checks, operators
from splitkv.config import cdiv, require_int
from splitkv.kernels.launch import launch
from splitkv.kernels.masks import (
    attention_mask_kernel,
    pack_tree_mask_kernel,
    position_mask_kernel,
    tree_mask_from_parents_kernel,
)

__all__ = [
    "attention_mask",
    "attention_mask_shape",
    "pack_tree_mask",
    "position_mask",
    "position_mask_shape",
    "ragged_mask",
    "ragged_mask_shape",
    "tree_mask_from_parents",
    "tree_mask_shape",
    "validity_mask",
    "validity_mask_shape",
]

BLOCK_R, BLOCK_N = 16, 128
BLOCK_W = 8  # words of a tree mask at a time: those of 256 nodes
MAX_SPAN = 2**31 - 1  # a window this wide is none: lengths are 32-bit


def _check_sizes(**sizes: int) -> tuple[int, ...]:
    for name, size in sizes.items():
        require_int(name, size, 0)
    return tuple(sizes.values())


def _check_out(out: object, shape: tuple[int | str, ...], dtype: torch.dtype = torch.bool) -> Tensor:
    out = checks.check_tensor("out", out)
    checks.check_dtype("out", out, dtype)
    checks.check_shape("out", out, shape)
    checks.check_last_stride("out", out)
    checks.check_no_overlap("out", out)
    refusal = _interpreter.why_not(out.device.type)
    if refusal is not None:
        raise ValueError(f"out: {refusal}")
    checks.check_no_grad("out", out)
    return out


def _check_rules(causal: object, window_left: object) -> None:
    if not isinstance(causal, bool):
        raise TypeError(f"causal: expected True or False, given {causal!r}")
    if window_left is not None:
        require_int("window_left", window_left, 0)


def _traced_rules(causal: bool, window_left: int | None) -> tuple[bool, int | None, str | None]:
    """The rules for a schema, and what is wrong with those given."""
    refusal = operators.refused(_check_rules, causal, window_left)
    return (causal, window_left, None) if refusal is None else (True, None, refusal)


def validity_mask_shape(batch: int, max_len: int) -> tuple[int, int]:
    """Shape of a `validity_mask`: [batch, max_len].

    >>> validity_mask_shape(2, 9)
    (2, 9)
    """
    _check_sizes(batch=batch, max_len=max_len)
    return batch, max_len


def validity_mask(out: Tensor, seq_lens: Tensor, *, kv_start: Tensor | None = None) -> Tensor:
    """Write which keys each request has: kv_start ≤ key < seq_len.

    >>> out = torch.empty(validity_mask_shape(2, 4), dtype=torch.bool)
    >>> validity_mask(out, torch.tensor([3, 1], dtype=torch.int32)).int()
    tensor([[1, 1, 1, 0],
            [1, 0, 0, 0]], dtype=torch.int32)

    Args:
        out: [batch, max_len] bool, any strides with the last 1. Written in full.
        seq_lens: [≥ batch] int32.
        kv_start: [≥ batch] int32, keys before it are no keys.

    Returns:
        out.

    Raises:
        TypeError, ValueError: naming the argument, what was expected, and what was given; nothing was launched.
    """
    if operators.tracing(out) and not operators.shapes_only(out):
        torch.ops.splitkv.validity_mask(out, seq_lens, kv_start)
        return out
    out = _check_out(out, ("batch", "max_len"))
    _attention_mask(out, seq_lens, kv_start, None, out.shape[0], 1, False, None, (out.stride(0), 0))
    return out


def attention_mask_shape(batch: int, q_len: int, max_len: int) -> tuple[int, int, int]:
    """Shape of an `attention_mask`: [batch, q_len, max_len]. For n draft tokens after a context, max_len is context +
    n.

    >>> attention_mask_shape(2, 4, 5 + 4)
    (2, 4, 9)
    """
    _check_sizes(batch=batch, q_len=q_len, max_len=max_len)
    return batch, q_len, max_len


def attention_mask(
    out: Tensor,
    seq_lens: Tensor,
    *,
    causal: bool = True,
    window_left: int | None = None,
    kv_start: Tensor | None = None,
) -> Tensor:
    """Write which keys each query token sees, where every request has q_len of them.

    Query token i stands at position seq_len - q_len + i, as in `splitkv.decode`.

    >>> out = torch.empty(attention_mask_shape(1, 2, 4), dtype=torch.bool)
    >>> attention_mask(out, torch.tensor([3], dtype=torch.int32)).int()
    tensor([[[1, 1, 0, 0],
             [1, 1, 1, 0]]], dtype=torch.int32)

    Args:
        out: [batch, q_len, max_len] bool, any strides with the last 1. Written in full.
        seq_lens: [≥ batch] int32, keys of each request, those of the query tokens included.
        causal: Query tokens see keys up to their own position; False: all of their request's.
        window_left: Keys left of a query token's position that it sees besides its own, ≥ 0; None: all.
        kv_start: [≥ batch] int32, keys before it are invisible.

    Returns:
        out.

    Raises:
        TypeError, ValueError: naming the argument, what was expected, and what was given; nothing was launched.
    """
    if operators.tracing(out) and not operators.shapes_only(out):
        causal, window_left, refusal = _traced_rules(causal, window_left)
        torch.ops.splitkv.attention_mask(out, seq_lens, causal, window_left, kv_start, refusal)
        return out
    out = _check_out(out, ("batch", "q_len", "max_len"))
    batch, q_len, _ = out.shape
    strides = (out.stride(0), out.stride(1))
    _attention_mask(out, seq_lens, kv_start, None, batch, q_len, causal, window_left, strides)
    return out


def ragged_mask_shape(total_q: int, max_len: int) -> tuple[int, int]:
    """Shape of a `ragged_mask`: [total_q, max_len].

    >>> ragged_mask_shape(210, 4096)
    (210, 4096)
    """
    _check_sizes(total_q=total_q, max_len=max_len)
    return total_q, max_len


def ragged_mask(
    out: Tensor,
    qo_indptr: Tensor,
    seq_lens: Tensor,
    *,
    causal: bool = True,
    window_left: int | None = None,
    kv_start: Tensor | None = None,
) -> Tensor:
    """Write which keys of its request each query token sees, where requests differ in their number of query tokens.

    >>> out = torch.empty(ragged_mask_shape(4, 3), dtype=torch.bool)
    >>> indptr, lens = torch.tensor([0, 2, 3], dtype=torch.int32), torch.tensor([3, 1], dtype=torch.int32)
    >>> ragged_mask(out, indptr, lens).int()
    tensor([[1, 1, 0],
            [1, 1, 1],
            [1, 0, 0],
            [0, 0, 0]], dtype=torch.int32)

    Args:
        out: [total_q, max_len] bool, any strides with the last 1. Written in full: rows past qo_indptr[-1] see nothing.
        qo_indptr: [batch + 1] int32, prefix sums of query tokens per request.
        seq_lens: [≥ batch] int32, keys of each request, those of the query tokens included.
        causal, window_left, kv_start: As for `attention_mask`.

    Returns:
        out.

    Raises:
        TypeError, ValueError: naming the argument, what was expected, and what was given; nothing was launched.
    """
    if operators.tracing(out) and not operators.shapes_only(out):
        causal, window_left, refusal = _traced_rules(causal, window_left)
        torch.ops.splitkv.ragged_mask(out, qo_indptr, seq_lens, causal, window_left, kv_start, refusal)
        return out
    out = _check_out(out, ("total_q", "max_len"))
    checks.check_index_vector("qo_indptr", qo_indptr, out.device, "out", least=1)
    batch = qo_indptr.shape[0] - 1
    _attention_mask(out, seq_lens, kv_start, qo_indptr, batch, 0, causal, window_left, (0, out.stride(0)))
    return out


def _attention_mask(
    out: Tensor,
    seq_lens: Tensor,
    kv_start: Tensor | None,
    qo_indptr: Tensor | None,
    batch: int,
    q_len: int,
    causal: bool,
    window_left: int | None,
    strides: tuple[int, int],
) -> None:
    checks.check_index_vector("seq_lens", seq_lens, out.device, "out", least=batch)
    if kv_start is not None:
        checks.check_index_vector("kv_start", kv_start, out.device, "out", least=batch)
    _check_rules(causal, window_left)
    checks.check_apart("out", out, [("seq_lens", seq_lens), ("kv_start", kv_start), ("qo_indptr", qo_indptr)])
    max_len = out.shape[-1]
    if checks.debugging(out.device) and batch:
        if int(seq_lens[:batch].max()) > max_len:
            row = int((seq_lens[:batch] > max_len).nonzero()[0])
            raise ValueError(
                f"seq_lens: expected lengths up to {max_len} (out's), given {int(seq_lens[row])} in row {row}"
            )
        checks.check_values("seq_lens", seq_lens[:batch].tolist(), 0)
        checks.check_values("kv_start", [] if kv_start is None else kv_start[:batch].tolist(), 0)
        checks.check_prefix_sums("qo_indptr", [] if qo_indptr is None else qo_indptr.tolist(), out.shape[0])
    rows = out.numel() // max_len if max_len else 0
    launch(
        attention_mask_kernel,
        (cdiv(rows, BLOCK_R), cdiv(max_len, BLOCK_N)),
        out.device,
        operands=dict(
            out_ptr=out.view(torch.uint8),
            seq_lens_ptr=seq_lens,
            kv_start_ptr=kv_start,
            qo_indptr_ptr=qo_indptr,
            batch=batch,
            q_len=q_len,
            rows=rows,
            max_len=max_len,
            window_left=min(window_left, MAX_SPAN) if window_left is not None else 0,
            steps=batch.bit_length(),
            stride_out_batch=strides[0],
            stride_out_token=strides[1],
        ),
        constants=dict(CAUSAL=causal, HAS_WINDOW=window_left is not None, BLOCK_R=BLOCK_R, BLOCK_N=BLOCK_N),
        num_warps=4,
    )


def position_mask_shape(batch: int, total_len: int) -> tuple[int, int, int]:
    """Shape of a `position_mask`: [batch, 1, total_len].

    >>> position_mask_shape(8, 128)
    (8, 1, 128)
    """
    _check_sizes(batch=batch, total_len=total_len)
    return batch, 1, total_len


def position_mask(out: Tensor, position_ids: Tensor) -> Tensor:
    """Write which indices are at or before each request's position.

    >>> out = torch.empty(position_mask_shape(2, 4), dtype=torch.bool)
    >>> position_mask(out, torch.tensor([2, 0])).int()
    tensor([[[1, 1, 1, 0]],
    <BLANKLINE>
            [[1, 0, 0, 0]]], dtype=torch.int32)

    Args:
        out: [batch, 1, total_len] bool, any strides with the last 1. Written in full.
        position_ids: [batch] or [batch, 1] int64 or int32.

    Returns:
        out.

    Raises:
        TypeError, ValueError: naming the argument, what was expected, and what was given; nothing was launched.
    """
    if operators.tracing(out) and not operators.shapes_only(out):
        torch.ops.splitkv.position_mask(out, position_ids)
        return out
    position_ids = checks.check_tensor("position_ids", position_ids)
    checks.check_rank("position_ids", position_ids, 1, 2)
    checks.check_dtype("position_ids", position_ids, torch.int64, torch.int32)
    if position_ids.dim() == 2:
        checks.check_shape("position_ids", position_ids, ["batch", 1])
    out = _check_out(out, (position_ids.shape[0], 1, "total_len"))
    checks.check_device("position_ids", position_ids, out.device, "out")
    checks.check_apart("out", out, [("position_ids", position_ids)])
    batch, _, total_len = out.shape
    launch(
        position_mask_kernel,
        (cdiv(batch, BLOCK_R), cdiv(total_len, BLOCK_N)),
        out.device,
        operands=dict(
            out_ptr=out.view(torch.uint8),
            position_ids_ptr=position_ids,
            batch=batch,
            total_len=total_len,
            stride_position=position_ids.stride(0),
            stride_out_batch=out.stride(0),
        ),
        constants=dict(BLOCK_R=BLOCK_R, BLOCK_N=BLOCK_N),
        num_warps=4,
    )
    return out


def tree_mask_shape(batch: int, max_q_len: int) -> tuple[int, int, int]:
    """Shape of a tree mask: [batch, max_q_len, ceil(max_q_len / 32)] words of 32 bits.

    >>> tree_mask_shape(2, 4), tree_mask_shape(2, 33)
    ((2, 4, 1), (2, 33, 2))
    """
    _check_sizes(batch=batch, max_q_len=max_q_len)
    return batch, max_q_len, cdiv(max_q_len, 32)


def pack_tree_mask(mask: Tensor, out: Tensor) -> Tensor:
    """Write a boolean mask among draft tokens as the tree mask that `splitkv.decode` takes.

    >>> mask = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]]).bool()  # 1 and 2 are children of 0
    >>> pack_tree_mask(mask, torch.empty(tree_mask_shape(1, 3), dtype=torch.int32))[0, :, 0]
    tensor([1, 3, 5], dtype=torch.int32)

    Args:
        mask: [batch, max_q_len, max_q_len] bool, any strides: whether draft token i sees draft token j. A request with
            fewer draft tokens uses the first rows and columns; what others hold means nothing to decode.
        out: [batch, max_q_len, ceil(max_q_len / 32)] int32, any strides with the last 1. Written in full; bits past
            max_q_len are 0.

    Returns:
        out.

    Raises:
        TypeError, ValueError: naming the argument, what was expected, and what was given; nothing was launched.
    """
    if operators.tracing(out) and not operators.shapes_only(out):
        torch.ops.splitkv.pack_tree_mask(mask, out)
        return out
    mask = checks.check_tensor("mask", mask)
    checks.check_dtype("mask", mask, torch.bool)
    checks.check_rank("mask", mask, 3)
    batch, q_len, _ = mask.shape
    checks.check_shape("mask", mask, ["batch", q_len, q_len])
    out = _check_out(out, tree_mask_shape(batch, q_len), torch.int32)
    checks.check_device("mask", mask, out.device, "out")
    checks.check_apart("out", out, [("mask", mask)])
    launch(
        pack_tree_mask_kernel,
        (cdiv(batch * q_len, BLOCK_R), out.shape[2]),
        out.device,
        operands=dict(
            out_ptr=out,
            mask_ptr=mask.view(torch.uint8),
            rows=batch * q_len,
            q_len=q_len,
            stride_mask_batch=mask.stride(0),
            stride_mask_row=mask.stride(1),
            stride_mask_column=mask.stride(2),
            stride_out_batch=out.stride(0),
            stride_out_row=out.stride(1),
        ),
        constants=dict(BLOCK_R=BLOCK_R),
        num_warps=4,
    )
    return out


def tree_mask_from_parents(parents: Tensor, out: Tensor) -> Tensor:
    """Write the tree mask in which every draft token sees itself and its ancestors.

    >>> parents = torch.tensor([[-1, 0, 0, 2]], dtype=torch.int32)  # 1 and 2 are children of 0, 3 of 2
    >>> tree_mask_from_parents(parents, torch.empty(tree_mask_shape(1, 4), dtype=torch.int32))[0, :, 0]
    tensor([ 1,  3,  5, 13], dtype=torch.int32)

    Args:
        parents: [batch, max_q_len] int32 or int64, any strides: the index of each node's parent, which lies before it,
            or -1 for a root. Any other value counts as -1; with SPLITKV_DEBUG=1 it raises. Rows of requests with fewer
            draft tokens are padded with -1: those nodes see themselves, and no other sees them.
        out: [batch, max_q_len, ceil(max_q_len / 32)] int32, any strides with the last 1. Written in full; bits past
            max_q_len are 0.

    Returns:
        out.

    Raises:
        TypeError, ValueError: naming the argument, what was expected, and what was given; nothing was launched.
    """
    if operators.tracing(out) and not operators.shapes_only(out):
        torch.ops.splitkv.tree_mask_from_parents(parents, out)
        return out
    parents = checks.check_tensor("parents", parents)
    checks.check_dtype("parents", parents, torch.int32, torch.int64)
    checks.check_rank("parents", parents, 2)
    batch, q_len = parents.shape
    out = _check_out(out, tree_mask_shape(batch, q_len), torch.int32)
    checks.check_device("parents", parents, out.device, "out")
    checks.check_apart("out", out, [("parents", parents)])
    if checks.debugging(parents.device):
        node = torch.arange(q_len, device=parents.device)
        wrong = ((parents < -1) | (parents >= node)).nonzero().tolist()
        if wrong:
            b, i = wrong[0]
            raise ValueError(
                f"parents: expected values in -1…{i - 1} for node {i} (a parent lies before its child), given "
                f"{int(parents[b, i])} in row {b}"
            )
    words = out.shape[2]
    launch(
        tree_mask_from_parents_kernel,
        (cdiv(batch * q_len, BLOCK_R), cdiv(words, BLOCK_W)),
        out.device,
        operands=dict(
            out_ptr=out,
            parents_ptr=parents,
            rows=batch * q_len,
            q_len=q_len,
            words=words,
            stride_parents_batch=parents.stride(0),
            stride_parents_node=parents.stride(1),
            stride_out_batch=out.stride(0),
            stride_out_row=out.stride(1),
        ),
        constants=dict(BLOCK_R=BLOCK_R, BLOCK_W=BLOCK_W),
        num_warps=4,
    )
    return out


@operators.operator("validity_mask(Tensor(a!) out, Tensor seq_lens, Tensor? kv_start)")
def _validity_mask_operator(out: Tensor, seq_lens: Tensor, kv_start: Tensor | None) -> None:
    validity_mask(out, seq_lens, kv_start=kv_start)


@operators.operator(
    "attention_mask(Tensor(a!) out, Tensor seq_lens, bool causal, SymInt? window_left, Tensor? kv_start, str? refusal)"
)
def _attention_mask_operator(
    out: Tensor,
    seq_lens: Tensor,
    causal: bool,
    window_left: int | None,
    kv_start: Tensor | None,
    refusal: str | None,
) -> None:
    operators.refuse(refusal)
    attention_mask(out, seq_lens, causal=causal, window_left=window_left, kv_start=kv_start)


@operators.operator(
    "ragged_mask(Tensor(a!) out, Tensor qo_indptr, Tensor seq_lens, bool causal, SymInt? window_left, "
    "Tensor? kv_start, str? refusal)"
)
def _ragged_mask_operator(
    out: Tensor,
    qo_indptr: Tensor,
    seq_lens: Tensor,
    causal: bool,
    window_left: int | None,
    kv_start: Tensor | None,
    refusal: str | None,
) -> None:
    operators.refuse(refusal)
    ragged_mask(out, qo_indptr, seq_lens, causal=causal, window_left=window_left, kv_start=kv_start)


@operators.operator("position_mask(Tensor(a!) out, Tensor position_ids)")
def _position_mask_operator(out: Tensor, position_ids: Tensor) -> None:
    position_mask(out, position_ids)


@operators.operator("pack_tree_mask(Tensor mask, Tensor(a!) out)")
def _pack_tree_mask_operator(mask: Tensor, out: Tensor) -> None:
    pack_tree_mask(mask, out)


@operators.operator("tree_mask_from_parents(Tensor parents, Tensor(a!) out)")
def _tree_mask_from_parents_operator(parents: Tensor, out: Tensor) -> None:
    tree_mask_from_parents(parents, out)
