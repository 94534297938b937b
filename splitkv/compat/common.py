"""What the calls of both libraries need."""

from __future__ import annotations

import torch
from torch import Tensor

from splitkv import masks


def refuse(name: str, value: object, why: str, expected: str = "None") -> None:
    """Raise ValueError unless `value` is None."""
    if value is not None:
        given = type(value).__name__ if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{name}: expected {expected} ({why}), given {given}")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, given {value!r}")


def bounded_mask(q_len: int, right: int, batch: int, device: torch.device) -> Tensor:
    """[batch, q_len, words] tree mask of one row: query token i sees those up to i + right."""
    token = torch.arange(q_len, dtype=torch.int32, device=device)
    sees = token[None, None, :] <= token[None, :, None] + right
    packed = torch.empty(masks.tree_mask_shape(1, q_len), dtype=torch.int32, device=device)
    return masks.pack_tree_mask(sees, packed).expand(batch, -1, -1)
