"""Boolean masks, written by kernels into tensors that the caller supplies.

decode needs none of these: it knows lengths, causality, windows and left padding by itself. They are for attention that
does take a mask. Each writer has a function `…_shape` that says, in plain integers, what shape its `out` has; another
shape raises before anything is launched. A writer is one launch on the current stream, reads no device value on the
host and allocates nothing. Lengths on the device that are longer than the mask are cut off by its width; with
`SPLITKV_DEBUG=1` they raise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from splitkv import _interpreter, checks
from splitkv.config import cdiv, require_int
from splitkv.kernels.launch import launch
from splitkv.kernels.masks import attention_mask_kernel, position_mask_kernel

__all__ = [
    "attention_mask",
    "attention_mask_shape",
    "position_mask",
    "position_mask_shape",
    "ragged_mask",
    "ragged_mask_shape",
    "validity_mask",
    "validity_mask_shape",
]

BLOCK_R, BLOCK_N = 16, 128
MAX_SPAN = 2**31 - 1  # a window this wide is none: lengths are 32-bit


def _check_sizes(**sizes: int) -> tuple[int, ...]:
    for name, size in sizes.items():
        require_int(name, size, 0)
    return tuple(sizes.values())


def _check_out(out: object, shape: tuple[int | str, ...]) -> Tensor:
    out = checks.check_tensor("out", out)
    checks.check_dtype("out", out, torch.bool)
    checks.check_shape("out", out, shape)
    checks.check_last_stride("out", out)
    checks.check_no_overlap("out", out)
    refusal = _interpreter.why_not(out.device.type)
    if refusal is not None:
        raise ValueError(f"out: {refusal}")
    return out


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
    if not isinstance(causal, bool):
        raise TypeError(f"causal: expected True or False, given {causal!r}")
    if window_left is not None:
        require_int("window_left", window_left, 0)
    max_len = out.shape[-1]
    if checks.debugging() and batch and int(seq_lens[:batch].max()) > max_len:
        row = int((seq_lens[:batch] > max_len).nonzero()[0])
        raise ValueError(f"seq_lens: expected lengths up to {max_len} (out's), given {int(seq_lens[row])} in row {row}")
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
    position_ids = checks.check_tensor("position_ids", position_ids)
    checks.check_rank("position_ids", position_ids, 1, 2)
    checks.check_dtype("position_ids", position_ids, torch.int64, torch.int32)
    if position_ids.dim() == 2:
        checks.check_shape("position_ids", position_ids, ["batch", 1])
    out = _check_out(out, (position_ids.shape[0], 1, "total_len"))
    checks.check_device("position_ids", position_ids, out.device, "out")
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
