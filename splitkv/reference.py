"""The oracle: what decode, merge and append compute, in plain PyTorch and einops, one request at a time.

Imports nothing of the package and calls no kernel. Everything else is measured against it. `dtype=torch.float64`
computes in float64 and returns that; without it everything is computed in float32 and the output rounded to the dtype
of q.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from einops import einsum, rearrange
from torch import Tensor

Attend: TypeAlias = Callable[..., tuple[Tensor, Tensor]]


def request_range(kv: Any, b: int) -> tuple[int, int]:
    """(first visible token, number of tokens) of request b, clamped to what the view can hold."""
    if hasattr(kv, "kv_indptr"):
        first, last = _pool_range(kv.kv_indptr, b, kv.k.shape[0])
        seq_len = last - first
    elif hasattr(kv, "page_indptr"):
        first, last = _pool_range(kv.page_indptr, b, kv.page_indices.shape[0])
        tail = min(max(int(kv.last_page_len[b]), 0), kv.page_size)
        seq_len = (last - first - 1) * kv.page_size + tail if last > first else 0
    else:
        capacity = kv.page_table.shape[1] * kv.page_size if hasattr(kv, "page_table") else kv.k.shape[1]
        seq_len = min(max(int(kv.seq_lens[b]), 0), capacity)
    start = 0 if kv.kv_start is None else min(max(int(kv.kv_start[b]), 0), seq_len)
    return start, seq_len


def _pool_range(indptr: Tensor, b: int, capacity: int) -> tuple[int, int]:
    first = min(max(int(indptr[b]), 0), capacity)
    return first, min(max(int(indptr[b + 1]), first), capacity)


def token_positions(kv: Any, b: int, seq_len: int, device: torch.device) -> tuple[int, Tensor]:
    """(length of request b's whole sequence, where each of the view's seq_len tokens stands in it)."""
    tokens = torch.arange(seq_len, device=device)
    stand = getattr(kv, "positions", None)
    if stand is None:
        return seq_len, tokens
    start = stand.first if stand.starts is None else min(max(int(stand.starts[b]), 0), 2**30)
    return min(max(int(stand.seq_lens[b]), 0), 2**30), start + tokens * stand.step


def gather(kv: Any, b: int, tokens: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """K [tokens, num_kv_heads, head_dim] and V [tokens, num_kv_heads, head_dim_v] of request b at these token indices.

    In `dtype`, those of a quantised cache times their scales. Only these tokens are touched, so that nothing invisible
    can enter a result.
    """
    row = b if kv.rows is None else int(kv.rows[b])

    def pick(cache: Tensor) -> Tensor:
        """[tokens, num_kv_heads, ...] of a cache, or of what is indexed as it."""
        if hasattr(kv, "kv_indptr"):
            first, _ = _pool_range(kv.kv_indptr, b, kv.k.shape[0])
            return cache[first + tokens]
        if not hasattr(kv, "page_size"):
            return cache[row, tokens]
        if hasattr(kv, "page_indptr"):
            first, _ = _pool_range(kv.page_indptr, b, kv.page_indices.shape[0])
            pages = kv.page_indices[first + tokens // kv.page_size].long()
        else:
            pages = kv.page_table[row, tokens // kv.page_size].long()
        offsets = tokens % kv.page_size
        return cache[pages, :, offsets] if getattr(kv, "layout", "NHD") == "HND" else cache[pages, offsets]

    def numbers(cache: Tensor, scale: Tensor | float | None) -> Tensor:
        found = pick(_bytes(cache)).view(cache.dtype).to(dtype)
        if scale is None:
            return found
        if not isinstance(scale, Tensor):
            return found * scale
        if scale.dim() > 1:
            scale = pick(scale.view(*scale.shape, 1) if hasattr(kv, "cache") else scale)
        return found * scale.to(dtype)[..., None]

    return numbers(kv.k, kv.k_scale), numbers(kv.v, kv.v_scale)


def visible(
    q_len: int,
    start: int,
    seq_len: int,
    *,
    causal: bool = True,
    window_left: int | None = None,
    tree_mask: Tensor | None = None,
    total: int | None = None,
    stands: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """[q_len, seq_len] bool: which keys each query token sees.

    Args:
        q_len, seq_len: Query tokens and keys; query token i stands at position seq_len - q_len + i.
        total, stands: Of a shard: the length of the whole sequence, which then takes the place of seq_len there, and
            [seq_len] where each key stands in it.
        start: Keys before it are invisible.
        causal, window_left: As for `splitkv.decode`.
        tree_mask: [max_q_len, words] int32 of this request, as for `splitkv.decode`; bits that it lacks are 0.
        device: Of the result.
    """
    total = seq_len if total is None else total
    position = (total - q_len + torch.arange(q_len, device=device))[:, None]
    own = torch.arange(seq_len, device=device)
    key = (own if stands is None else stands)[None, :]
    sees = (own >= start).expand(q_len, seq_len).clone()
    if tree_mask is not None and q_len:
        known = min(q_len, tree_mask.shape[0])
        column = torch.arange(known, device=device)
        drafts = torch.zeros(q_len, q_len, dtype=torch.bool, device=device)
        drafts[:known, :known] = (tree_mask[:known].long()[:, column // 32] >> (column % 32)) & 1
        draft = (key - (total - q_len))[0]
        sees &= (draft < 0)[None, :] | drafts[:, draft.clamp(min=0, max=max(q_len - 1, 0))]
    elif causal:
        sees &= key <= position
    if window_left is not None:
        sees &= key >= position - window_left
    return sees


def products(q: Tensor, k: Tensor) -> Tensor:
    """Of q [q_len, num_q_heads, width] and k [tokens, num_kv_heads, width]: [q_len, num_kv_heads, group, tokens]."""
    grouped = rearrange(q, "q (h g) d -> q h g d", h=k.shape[1])
    return einsum(grouped, k, "q h g d, n h d -> q h g n")


def attention_scores(
    scores: Tensor,
    sees: Tensor,
    *,
    sm_scale: float,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    positions: Tensor | None = None,
    keys: Tensor | None = None,
) -> Tensor:
    """Scores of one request from the products of its queries and keys, -inf where not seen.

    Order of the rules: sm_scale, softcap, ALiBi, mask.

    Args:
        scores: [q_len, num_kv_heads, group_size, tokens] products.
        sees: [q_len, tokens] bool.
        sm_scale, softcap, alibi_slopes: As for `splitkv.decode`.
        positions, keys: [q_len] and [tokens] token indices, for ALiBi.
    """
    scores = scores * sm_scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        assert positions is not None and keys is not None
        distance = (positions[:, None] - keys[None, :]).abs().to(scores.dtype)
        slopes = rearrange(alibi_slopes.to(scores.dtype), "(h g) -> h g", h=scores.shape[1])
        scores = scores - einsum(slopes, distance, "h g, q n -> q h g n")
    return scores.masked_fill(~rearrange(sees, "q n -> q 1 1 n"), -math.inf)


def attend(
    q: Tensor, k: Tensor, v: Tensor, sees: Tensor, *, sinks: Tensor | None = None, **rules: Any
) -> tuple[Tensor, Tensor]:
    """Attention of one request in the dtype of its inputs.

    Args:
        q: [q_len, num_q_heads, head_dim].
        k: [tokens, num_kv_heads, head_dim].
        sees, **rules: As for `attention_scores`.
        v: [tokens, num_kv_heads, head_dim_v].
        sinks: As for `splitkv.decode`; they join the softmax denominator last.

    Returns:
        out [q_len, num_q_heads, head_dim_v], lse [q_len, num_q_heads] (natural log, without the sink); 0 and -inf where
        nothing is seen.
    """
    scores = attention_scores(products(q, k), sees, **rules)
    lse = torch.logsumexp(scores, dim=-1)
    top = torch.where(lse == -math.inf, torch.zeros_like(lse), lse)
    weights = torch.exp(scores - top[..., None])
    if sinks is not None:
        sink = rearrange(sinks.to(scores.dtype), "(h g) -> h g", h=k.shape[1])
        weights = weights / (1 + torch.exp(sink - top))[..., None]
    return weigh(weights, v), rearrange(lse, "q h g -> q (h g)")


def weigh(weights: Tensor, v: Tensor) -> Tensor:
    """[q_len, num_q_heads, head_dim_v] sum of values [tokens, num_kv_heads, head_dim_v] with the weights given.

    Args:
        weights: [q_len, num_kv_heads, group_size, tokens].
        v: [tokens, num_kv_heads, head_dim_v], of the same dtype.
    """
    return rearrange(einsum(weights, v, "q h g n, n h d -> q h g d"), "q h g d -> q (h g) d")


def decode_with_lse(
    q: Tensor,
    kv: Any,
    workspace: Any = None,
    *,
    qo_indptr: Tensor | None = None,
    sm_scale: float | None = None,
    causal: bool = True,
    window_left: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    tree_mask: Tensor | None = None,
    num_splits: int | None = None,
    dtype: torch.dtype | None = None,
    attend: Attend = attend,
) -> tuple[Tensor, Tensor]:
    """`splitkv.decode_with_lse` in plain PyTorch: the same arguments, and no limits.

    workspace and num_splits, which never change what is computed, are taken so that calls can be exchanged.

    >>> import splitkv
    >>> k, v = torch.zeros(1, 5, 2, 16), torch.arange(5.0).repeat_interleave(32).view(1, 5, 2, 16)
    >>> kv = splitkv.ContiguousKV(k, v, torch.tensor([5], dtype=torch.int32))
    >>> out, lse = decode_with_lse(torch.zeros(1, 4, 16), kv, dtype=torch.float64)
    >>> round(out[0, 0, 0].item(), 6), round(lse[0, 0].exp().item())  # scores of 0: the mean, and the number of keys
    (2.0, 5)

    Args:
        dtype: Compute in this dtype and return out and lse in it; None: compute in float32, return out like q, lse
            float32.
        attend: What computes one request, called as the function of that name here.
    """
    compute = dtype or torch.float32
    if qo_indptr is not None:
        bounds = [min(max(int(i), 0), q.shape[0]) for i in qo_indptr]
        ranges = [(first, max(first, last)) for first, last in pairwise(bounds)]
        flat = q
    else:
        q_len = 1 if q.dim() == 3 else q.shape[1]
        ranges = [(b * q_len, (b + 1) * q_len) for b in range(q.shape[0])]
        flat = q.reshape(-1, *q.shape[-2:])
    if sm_scale is None:
        if hasattr(kv, "cache"):
            raise ValueError(
                "sm_scale: expected a number with a LatentKV (that of the model, not 1/√width), given None"
            )
        sm_scale = q.shape[-1] ** -0.5
    out = torch.zeros(*flat.shape[:2], kv.v.shape[-1], dtype=compute, device=q.device)
    lse = torch.full(flat.shape[:2], -math.inf, dtype=compute, device=q.device)
    for b, (first, last) in enumerate(ranges):
        if last == first:
            continue
        start, seq_len = request_range(kv, b)
        total, stands = token_positions(kv, b, seq_len, q.device)
        sees = visible(
            last - first,
            start,
            seq_len,
            causal=causal,
            window_left=window_left,
            tree_mask=None if tree_mask is None else tree_mask[b],
            total=total,
            stands=stands,
            device=q.device,
        )
        # Only keys that some row sees are read at all.
        keys = sees.any(dim=0).nonzero()[:, 0]
        if keys.numel() == 0:
            continue
        k, v = gather(kv, b, keys, compute)
        out[first:last], lse[first:last] = attend(
            flat[first:last].to(compute),
            k,
            v,
            sees[:, keys],
            sm_scale=sm_scale,
            softcap=softcap,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            positions=total - (last - first) + torch.arange(last - first, device=q.device),
            keys=stands[keys],
        )
    out = out.reshape(*q.shape[:-1], out.shape[-1])
    lse = lse.reshape(q.shape[:-1])
    return (out, lse) if dtype is not None else (out.to(q.dtype), lse)


def decode(q: Tensor, kv: Any, workspace: Any = None, **rules: Any) -> Tensor:
    """`splitkv.decode` in plain PyTorch. Arguments as for `decode_with_lse`."""
    return decode_with_lse(q, kv, workspace, **rules)[0]


def decode_shared_prefix(
    q: Tensor, kv: Any, workspace: Any, group_ids: Tensor, prefix_lens: Tensor, **rules: Any
) -> Tensor:
    """`splitkv.decode_shared_prefix` in plain PyTorch: what requests share changes nothing that is computed."""
    return decode(q, kv, workspace, **rules)


def merge(
    outs: Tensor,
    lses: Tensor,
    *,
    indptr: Tensor | None = None,
    sinks: Tensor | None = None,
    lse_base: float = math.e,
    lse_layout: str = "NH",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """`splitkv.merge` in plain PyTorch. Arguments as for that.

    >>> outs, lses = torch.tensor([[[2.0]], [[4.0]]]), torch.zeros(2, 1)
    >>> merge(outs, lses)
    (tensor([[3.]]), tensor([0.6931]))

    Args:
        dtype: Compute in this dtype and return it; None: compute in float32, return out like outs, lse float32.
    """
    compute = dtype or torch.float32
    weights = lses.to(compute)
    if lse_layout == "HN":
        weights = weights.transpose(-2, -1)
    weights = weights.masked_fill(weights == math.inf, -math.inf) * math.log(lse_base)
    partial = outs.to(compute)
    if indptr is None:
        out, lse = _merge(partial, weights, sinks)
    else:
        bounds = [min(max(int(i), 0), outs.shape[0]) for i in indptr]
        out = partial.new_zeros(len(bounds) - 1, *outs.shape[1:])
        lse = weights.new_full((len(bounds) - 1, *weights.shape[1:]), -math.inf)
        for row, (first, last) in enumerate(pairwise(bounds)):
            if last > first:
                out[row], lse[row] = _merge(partial[first:last], weights[first:last], sinks)
    lse = lse / math.log(lse_base)
    if lse_layout == "HN":
        lse = lse.transpose(-2, -1)
    return (out, lse) if dtype is not None else (out.to(outs.dtype), lse)


def _merge(partial: Tensor, weights: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Merge partials [n, …, head_dim_v] with natural log-sum-exps [n, …] of the same dtype."""
    lse = torch.logsumexp(weights, dim=0)
    top = torch.where(lse == -math.inf, torch.zeros_like(lse), lse)
    weight = torch.exp(weights - top)
    partial = torch.where((weight > 0)[..., None], partial, torch.zeros_like(partial))
    out = einsum(weight, partial, "n ..., n ... d -> ... d")
    if sinks is not None:
        out = out / (1 + torch.exp(sinks.to(out.dtype) - top))[..., None]
        out = torch.where((lse == -math.inf)[..., None], torch.zeros_like(out), out)
    return out, lse


def append_kv(k_new: Tensor, v_new: Tensor | None, kv: Any, slots: Tensor) -> None:
    """`splitkv.append_kv` in plain PyTorch, token by token: of several with one slot the last wins."""
    for token, slot in enumerate(slots[: k_new.shape[0]].tolist()):
        for new, cache, scale in ((k_new, kv.k, kv.k_scale), (v_new, kv.v, kv.v_scale)):
            place = _token_at(cache, kv, slot)
            if new is None or place is None:
                continue
            if new.dtype == cache.dtype:
                _bytes(place).copy_(_bytes(new[token]))
                continue
            numbers = new[token].float()
            if isinstance(scale, Tensor) and scale.dim() > 1:
                own = _token_at(scale.unsqueeze(-1) if hasattr(kv, "cache") else scale, kv, slot)
                assert own is not None
                own.copy_(token_scale(numbers, cache.dtype))
                scale = own
            divisor = torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float32, device=new.device)
            _bytes(place).copy_(_bytes(quantize(numbers / divisor[..., None], cache.dtype)))


def token_scale(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """[heads] float32: the scale with which a token's numbers [heads, width] float32 fill a quantised dtype."""
    size = numbers.abs()
    top = torch.where(size < math.inf, size, torch.zeros_like(size)).amax(dim=-1)
    most = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
    # By a tensor: on a GPU PyTorch divides by a number as it multiplies by the rounded inverse.
    scale = torch.where(top > 0, top / torch.full_like(top, most), torch.ones_like(top))
    return scale if dtype.is_floating_point else scale.masked_fill(numbers.isnan().any(dim=-1), math.nan)


def quantize(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 numbers in a quantised dtype: to nearest, ties to even; beyond its largest finite number that number."""
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return numbers.nan_to_num(0.0).clamp(info.min, info.max).round().to(dtype)
    most = torch.finfo(dtype).max
    return numbers.clamp(-most, most).to(dtype)


def move_kv(kv: Any, src_slots: Tensor, dst_slots: Tensor) -> None:
    """`splitkv.move_kv` in plain PyTorch: all sources are read before anything is written."""
    moved = [kv.k, kv.v]
    for scale in (kv.k_scale, kv.v_scale):
        if isinstance(scale, Tensor) and scale.dim() > 1:
            moved.append(scale.unsqueeze(-1) if hasattr(kv, "cache") else scale)
    before = [_bytes(tensor).clone() for tensor in moved]
    for cache, old in zip(moved, before, strict=True):
        for source, target in zip(src_slots.tolist(), dst_slots.tolist(), strict=True):
            from_token, to_token = _token_at(old, kv, source), _token_at(_bytes(cache), kv, target)
            if from_token is not None and to_token is not None:
                to_token.copy_(from_token)


def _bytes(tensor: Tensor) -> Tensor:
    """A tensor of one-byte elements as integers, which all of PyTorch's operations take; others as they are."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def pack_tree_mask(mask: Tensor) -> Tensor:
    """`splitkv.masks.pack_tree_mask` in plain PyTorch: [batch, q, q] bool to [batch, q, ceil(q / 32)] int32."""
    batch, q_len, _ = mask.shape
    words = -(-q_len // 32)
    cells = torch.zeros(batch, q_len, words * 32, dtype=torch.int64, device=mask.device)
    cells[:, :, :q_len] = mask
    weights = 2 ** torch.arange(32, device=mask.device)
    packed = (rearrange(cells, "b q (w n) -> b q w n", n=32) * weights).sum(dim=-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def tree_mask_from_parents(parents: Tensor) -> Tensor:
    """`splitkv.masks.tree_mask_from_parents` in plain PyTorch: [batch, q] to [batch, q, ceil(q / 32)] int32."""
    batch, q_len = parents.shape
    sees = torch.zeros(batch, q_len, q_len, dtype=torch.bool, device=parents.device)
    for b, row in enumerate(parents.tolist()):
        for node, parent in enumerate(row):
            # A parent that does not lie before its child is none.
            if 0 <= parent < node:
                sees[b, node] = sees[b, parent]
            sees[b, node, node] = True
    return pack_tree_mask(sees)


def _token_at(cache: Tensor, kv: Any, slot: int) -> Tensor | None:
    """The [num_kv_heads, …] view of a slot's token, or None where the cache has no such slot."""
    if hasattr(kv, "kv_indptr"):
        unit_tokens = 1
    else:
        unit_tokens = kv.page_size if hasattr(kv, "page_size") else cache.shape[1]
    if not 0 <= slot < cache.shape[0] * unit_tokens:
        return None
    unit, offset = divmod(slot, unit_tokens)
    if hasattr(kv, "kv_indptr"):
        return cache[unit]
    return cache[unit, :, offset] if getattr(kv, "layout", "NHD") == "HND" else cache[unit, offset]
