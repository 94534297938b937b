"""FlashAttention's calls over `splitkv.decode` and `splitkv.append_kv`."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from splitkv import api, checks
from splitkv.api import _form_of
from splitkv.append import _check_new, append_kv
from splitkv.compat.common import bounded_mask, check_flag, refuse
from splitkv.config import DTYPES, MAX_COUNT, QUANTIZED_DTYPES, WorkspaceConfig
from splitkv.kernels.launch import launch
from splitkv.kernels.new_tokens import new_tokens_kernel
from splitkv.kv import ContiguousKV, KVView, PagedKV, _check_cache, _check_pair
from splitkv.workspace import Workspace


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    workspace: Workspace | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """FlashAttention 2's decode call, by `splitkv.decode`. The module's docstring says what is refused.

    >>> q, k, v = torch.randn(2, 1, 4, 64), torch.randn(2, 1, 2, 64), torch.randn(2, 1, 2, 64)
    >>> k_cache, v_cache = torch.zeros(2, 40, 2, 64), torch.zeros(2, 40, 2, 64)
    >>> lens = torch.tensor([17, 3], dtype=torch.int32)
    >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lens, causal=True).shape
    torch.Size([2, 1, 4, 64])

    Without `workspace` each call allocates its scratch, about 20 MB for common shapes, and is prepared anew: it takes
    the host some 400 µs. With one it takes some 40 µs more than `splitkv.decode`, since views are made in each call,
    and k and v some 150 more. Replays of a CUDA graph have none of that. Either way a graph can capture it, once such
    a call has been compiled by a first one outside.

    Args:
        q: [batch, q_len, num_q_heads, head_dim] float16, bfloat16 or float32.
        k_cache, v_cache: [batch_cache, max_len, num_kv_heads, head_dim], or with block_table [num_pages, page_size,
            num_kv_heads, head_dim]; the dtype of q, or 8-bit as for `splitkv.PagedKV`.
        k, v: [batch, new_len, num_kv_heads, head_dim]: written into the caches at cache_seqlens, in place, and
            attended. What finds no room or no page is not written.
        cache_seqlens: [batch] int32, tokens in each request's cache, those of k not counted; an integer for all. None:
            as many as fit (not with k).
        cache_batch_idx: [batch] int32, each request's row of the caches or of block_table.
        cache_leftpad: [batch] int32, where each request's tokens begin.
        block_table: [rows, max_pages] int32.
        softmax_scale: Logit multiplier; head_dim ** -0.5 by default.
        causal: Query token i of q_len sees keys up to its position, all tokens - q_len + i.
        window_size: (left, right): tokens that a query token sees on either side of its position; -1 for all.
        softcap: Cap of the scaled scores; 0: none.
        alibi_slopes: [num_q_heads] float32.
        num_splits: Parts of each request; 0: balanced over the GPU.
        return_softmax_lse: Whether (out, lse) is returned.
        workspace: Scratch of the caller, of q's dtype; use it from one stream at a time. Its own out is not used.
        out: [batch, q_len, num_q_heads, head_dim_v] of q's dtype, or float32; allocated where None.

    Returns:
        out, or (out, lse) with lse [batch, num_q_heads, q_len] float32, natural log.

    Raises:
        TypeError, ValueError: naming the argument, what was expected, and what was given; nothing was launched.
    """
    return _flash_attention(
        q, k_cache, v_cache, k, v,
        rotary=dict(rotary_cos=rotary_cos, rotary_sin=rotary_sin), rotary_interleaved=rotary_interleaved,
        cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
        table_name="block_table", page_table=block_table, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, num_splits=num_splits,
        return_softmax_lse=return_softmax_lse, workspace=workspace, out=out,
    )  # fmt: skip


def flash_attn_3_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    workspace: Workspace | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """FlashAttention 3's decode call, by `splitkv.decode`. The module's docstring says what is refused.

    >>> q = torch.randn(5, 4, 64)  # three query tokens of one request and two of another
    >>> k_cache, v_cache = torch.randn(2, 8, 16, 2, 64)
    >>> lens, indptr = torch.tensor([40, 17], dtype=torch.int32), torch.tensor([0, 3, 5], dtype=torch.int32)
    >>> table = torch.tensor([[5, 2, 7], [1, 0, -1]], dtype=torch.int32)
    >>> flash_attn_3_with_kvcache(q, k_cache, v_cache, cache_seqlens=lens, page_table=table, cu_seqlens_q=indptr,
    ...                           max_seqlen_q=3, causal=True).shape
    torch.Size([5, 4, 64])

    Args:
        q: [batch, q_len, num_q_heads, head_dim], or [total_q, num_q_heads, head_dim] with cu_seqlens_q.
        k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, softmax_scale, causal, window_size, softcap,
            num_splits, return_softmax_lse, workspace, out: As for `flash_attn_with_kvcache`.
        k, v: [batch, new_len, num_kv_heads, head_dim], or [total_new, num_kv_heads, head_dim] with cu_seqlens_k_new.
        page_table: [rows, max_pages] int32.
        cu_seqlens_q: [batch + 1] int32, prefix sums of query tokens, read on the device.
        cu_seqlens_k_new: [batch + 1] int32, prefix sums of new tokens, read on the device.
        max_seqlen_q: Most query tokens of a request; must be given with cu_seqlens_q.
        k_descale, v_descale: [batch, num_kv_heads] float32 with a first stride of 0 (or a batch of 1), read on the
            device: what numbers of 8-bit caches are multiplied by.

    Returns:
        out, or (out, lse) with lse [batch, num_q_heads, q_len], or [num_q_heads, total_q] with cu_seqlens_q; float32,
        natural log.

    Raises:
        TypeError, ValueError: naming the argument, what was expected, and what was given; nothing was launched.
    """
    refuse("qv", qv, "splitkv.LatentKV attends latent caches")
    refuse("q_descale", q_descale, "queries have 16 or 32 bits")
    refuse("scheduler_metadata", scheduler_metadata, "nothing is planned")
    for name, number in (("attention_chunk", attention_chunk), ("sm_margin", sm_margin)):
        checks.require_int(name, number, 0)
        if number:
            raise ValueError(f"{name}: expected 0, given {number}")
    if pack_gqa is not None and pack_gqa is not True:
        raise ValueError(f"pack_gqa: expected None or True (heads are always packed), given {pack_gqa!r}")
    return _flash_attention(
        q, k_cache, v_cache, k, v,
        rotary=dict(rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_seqlens=rotary_seqlens),
        rotary_interleaved=rotary_interleaved,
        cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
        table_name="page_table", page_table=page_table, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, num_splits=num_splits, return_softmax_lse=return_softmax_lse,
        workspace=workspace, out=out, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new,
        max_seqlen_q=max_seqlen_q, k_descale=k_descale, v_descale=v_descale,
    )  # fmt: skip


def _flash_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    *,
    rotary: dict[str, Tensor | None],
    rotary_interleaved: bool,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    table_name: str,
    page_table: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    num_splits: int,
    return_softmax_lse: bool,
    workspace: Workspace | None,
    out: Tensor | None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """What both calls do. `table_name`: what the caller knows page_table by."""
    for name, tensor in rotary.items():
        refuse(name, tensor, "rotate q and k before the call: nothing here would be faster")
    check_flag("rotary_interleaved", rotary_interleaved)
    check_flag("causal", causal)
    check_flag("return_softmax_lse", return_softmax_lse)
    q = checks.check_tensor("q", q)
    checks.check_dtype("q", q, *DTYPES)
    device = q.device
    if cu_seqlens_q is None:
        checks.check_rank("q", q, 4)
        batch, longest = q.shape[0], q.shape[1]
        if max_seqlen_q is not None:
            checks.require_int("max_seqlen_q", max_seqlen_q, longest)
    else:
        checks.check_rank("q", q, 3)
        batch = checks.check_index_vector("cu_seqlens_q", cu_seqlens_q, device, "q", least=1).shape[0] - 1
        if max_seqlen_q is None:
            raise ValueError("max_seqlen_q: expected the most query tokens of a request with cu_seqlens_q, given None")
        checks.require_int("max_seqlen_q", max_seqlen_q, 0)
        longest = max_seqlen_q
        if checks.debugging() and not (q.is_cuda and torch.cuda.is_current_stream_capturing()):
            bounds = cu_seqlens_q.tolist()
            most = max((last - first for first, last in pairwise(bounds)), default=0)
            if most > longest:
                raise ValueError(f"max_seqlen_q: expected at least {most}, as cu_seqlens_q says, given {longest}")
    num_q_heads, head_dim = q.shape[-2:]

    # The cache.
    _check_cache("k_cache", k_cache, 4)
    _check_cache("v_cache", v_cache, 4)
    _check_pair("k_cache", k_cache, "v_cache", v_cache)
    checks.check_device("k_cache", k_cache, device, "q")
    checks.check_dtype("k_cache", k_cache, q.dtype, *QUANTIZED_DTYPES)
    num_kv_heads = k_cache.shape[2]
    if k_cache.shape[3] != head_dim:
        raise ValueError(f"k_cache: expected head_dim {head_dim} (that of q), given {k_cache.shape[3]}")
    if num_q_heads == 0 or num_q_heads % num_kv_heads:
        raise ValueError(f"q: expected heads that are a multiple of k_cache's {num_kv_heads}, given {num_q_heads}")
    if page_table is not None:
        page_table = checks.check_tensor(table_name, page_table)
        checks.check_dtype(table_name, page_table, torch.int32)
        checks.check_rank(table_name, page_table, 2)
        checks.check_last_stride(table_name, page_table)
        checks.check_device(table_name, page_table, device, "q")
    rows, rows_of = (k_cache.shape[0], "k_cache") if page_table is None else (page_table.shape[0], table_name)
    capacity = k_cache.shape[1] if page_table is None else page_table.shape[1] * k_cache.shape[1]
    if cache_batch_idx is not None:
        checks.check_index_vector("cache_batch_idx", cache_batch_idx, device, "q", least=batch)
    elif rows < batch:
        raise ValueError(f"{rows_of}: expected rows for a batch of {batch}, given {rows}")
    if cache_leftpad is not None:
        checks.check_index_vector("cache_leftpad", cache_leftpad, device, "q", least=batch)
    if isinstance(cache_seqlens, Tensor):
        checks.check_index_vector("cache_seqlens", cache_seqlens, device, "q", least=batch)
    elif cache_seqlens is not None:
        checks.require_int("cache_seqlens", cache_seqlens, 0, capacity)
    elif k is not None:
        raise ValueError("cache_seqlens: expected lengths, after which k is appended, given None")
    scales = {
        name: _scale_of_all(f"{name}_descale", scale, cache, batch, num_kv_heads)
        for name, scale, cache in (("k", k_descale, k_cache), ("v", v_descale, v_cache))
    }

    # The rules.
    if softmax_scale is not None:
        checks.check_finite("softmax_scale", softmax_scale)
    checks.check_finite("softcap", softcap)
    checks.require_int("num_splits", num_splits, 0, api.MAX_SPLITS)
    left, right = _window(window_size)
    if alibi_slopes is not None:
        alibi_slopes = _slopes_of_all(alibi_slopes, batch, num_q_heads)
    if not causal:
        causal = right == 0
    bounded = 0 < right < longest - 1 and not causal
    rules: dict[str, Any] = dict(
        qo_indptr=cu_seqlens_q,
        sm_scale=softmax_scale,
        causal=causal or bounded,
        window_left=None if left < 0 else left,
        softcap=None if softcap == 0 else softcap,
        alibi_slopes=alibi_slopes,
        num_splits=num_splits or None,
    )

    appended = None
    if k is not None or v is not None:
        appended = NewTokens(k, v, cu_seqlens_k_new, batch, k_cache, v_cache)
    elif cu_seqlens_k_new is not None:
        raise ValueError("cu_seqlens_k_new: expected None without k and v, given a tensor")

    # What is allocated, and the view.
    if workspace is None:
        workspace = Workspace.allocate(
            _config_of_call(
                batch, q.shape[:-2].numel(), num_q_heads, num_kv_heads, head_dim, v_cache.shape[3], num_splits, q.dtype
            ),
            device,
        )
    elif not isinstance(workspace, Workspace):
        raise TypeError(f"workspace: expected a splitkv.Workspace, given {type(workspace).__name__}")
    if bounded:
        rules["tree_mask"] = bounded_mask(longest, right, batch, device)
    if out is None:
        out = torch.empty(*q.shape[:-1], v_cache.shape[3], dtype=q.dtype, device=device)
    out = checks.check_tensor("out", out)
    lse = None
    if return_softmax_lse:
        *front, tokens = q.shape[:-2]
        lse = torch.empty(*front, num_q_heads, tokens, dtype=torch.float32, device=device)
        rules["lse"] = lse.transpose(-2, -1)
    if not isinstance(cache_seqlens, Tensor):
        full = capacity if cache_seqlens is None else cache_seqlens
        cache_seqlens = torch.full((batch,), full, dtype=torch.int32, device=device)

    def view(seq_lens: Tensor) -> KVView:
        options: dict[str, Any] = dict(
            rows=cache_batch_idx, kv_start=cache_leftpad, k_scale=scales["k"], v_scale=scales["v"]
        )
        if page_table is None:
            return ContiguousKV(k_cache, v_cache, seq_lens, **options)
        return PagedKV(k_cache, v_cache, page_table, seq_lens, **options)

    kv = view(cache_seqlens)
    if appended is not None:
        # Nothing is written for a call that decode would refuse. A workspace remembers which it would not.
        form = (NewTokens, *map(_form_of, (q, kv.k, kv.v, out)), kv.form, return_softmax_lse)
        form += tuple(_form_of(rule) if isinstance(rule, Tensor) else rule for rule in rules.values())
        if workspace.recall(form) is None or checks.needs_grad(q, out) or checks.debugging():
            api.plan_decode(q, kv, workspace, out=out, **rules)
            workspace.remember(form, NewTokens)
        else:
            api.check_outputs_apart(
                kv.tensors, workspace, q, out, rules.get("lse"), cu_seqlens_q, None, rules["alibi_slopes"],
                rules.get("tree_mask"), None, None,
            )  # fmt: skip
        total_lens = torch.empty(batch, dtype=torch.int32, device=device)
        appended.write(kv, cache_seqlens, cache_batch_idx, page_table, total_lens, capacity)
        kv = view(total_lens)
    api.decode(q, kv, workspace, out=out, **rules)
    return out if lse is None else (out, lse)


class NewTokens:
    """k and v of a call that appends, checked."""

    def __init__(
        self, k: object, v: object, indptr: Tensor | None, batch: int, k_cache: Tensor, v_cache: Tensor
    ) -> None:
        for name, new, other in (("k", k, "v"), ("v", v, "k")):
            if new is None:
                raise ValueError(f"{name}: expected new tokens, since {other} was given, given None")
        self.indptr, self.new_len = indptr, 0
        self.k, self.v = self._tokens("k", k, batch, k_cache), self._tokens("v", v, batch, v_cache)
        if self.v.shape[0] != self.k.shape[0]:
            raise ValueError(f"v: expected {self.k.shape[0]} new tokens (those of k), given {self.v.shape[0]}")
        if indptr is not None:
            checks.check_index_vector("cu_seqlens_k_new", indptr, self.k.device, "k", least=batch + 1)

    def _tokens(self, name: str, new: object, batch: int, cache: Tensor) -> Tensor:
        new = checks.check_tensor(name, new)
        heads, width = cache.shape[2:]
        if self.indptr is not None:
            checks.check_shape(name, new, ["total_new", heads, width])
            return new
        checks.check_shape(name, new, [batch, "new_len", heads, width])
        self.new_len = new.shape[1]
        if min(batch, self.new_len) > 1 and new.stride(0) != self.new_len * new.stride(1):
            raise ValueError(
                f"{name}: expected requests and tokens that lie evenly in memory (strides [new_len · s, s, …]), given "
                f"shape {checks.shape_text(new.shape)} with strides {checks.shape_text(new.stride())}"
            )
        return new.flatten(0, 1)

    def write(
        self,
        kv: KVView,
        cache_seqlens: Tensor,
        cache_batch_idx: Tensor | None,
        page_table: Tensor | None,
        total_lens: Tensor,
        capacity: int,
    ) -> None:
        """Append them, and write how many tokens each request has then."""
        k = _check_new("k", self.k, kv, kv.head_dim)
        v = _check_new("v", self.v, kv, kv.head_dim_v, k.dtype)
        total_new, batch = k.shape[0], total_lens.shape[0]
        slots = torch.empty(total_new, dtype=torch.int32, device=k.device)
        launch(
            new_tokens_kernel,
            (batch + 1,),
            k.device,
            operands=dict(
                seq_lens_ptr=cache_seqlens,
                new_indptr_ptr=self.indptr,
                rows_ptr=cache_batch_idx,
                table_ptr=page_table,
                slots_ptr=slots,
                total_lens_ptr=total_lens,
                batch=batch,
                new_len=self.new_len,
                total_new=total_new,
                unit_tokens=kv.k.shape[1],
                capacity=min(capacity, MAX_COUNT),
                stride_table_row=0 if page_table is None else page_table.stride(0),
            ),
            constants=dict(BLOCK_T=128),
            num_warps=4,
        )
        append_kv(k, v, kv, slots)


def _window(window_size: object) -> tuple[int, int]:
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size: expected (left, right), given {window_size!r}")
    for side in window_size:
        checks.require_int("window_size", side, -1)
    return window_size[0], window_size[1]


def _scale_of_all(name: str, scale: object, cache: Tensor, batch: int, num_kv_heads: int) -> Tensor | None:
    """[num_kv_heads] of a scale [batch, num_kv_heads] that all requests share."""
    if scale is None:
        return None
    scale = checks.check_tensor(name, scale)
    if cache.dtype not in QUANTIZED_DTYPES:
        raise ValueError(f"{name}: expected None, since the cache is not quantised ({cache.dtype}), given a tensor")
    checks.check_dtype(name, scale, torch.float32)
    checks.check_shape(name, scale, [batch, num_kv_heads])
    checks.check_device(name, scale, cache.device, "q")
    return _shared_row(name, scale)


def _slopes_of_all(slopes: object, batch: int, num_q_heads: int) -> Tensor:
    """[num_q_heads] of slopes that all requests share."""
    slopes = checks.check_tensor("alibi_slopes", slopes)
    checks.check_rank("alibi_slopes", slopes, 1, 2)
    if slopes.dim() == 1:
        return slopes
    checks.check_shape("alibi_slopes", slopes, [batch, num_q_heads])
    return _shared_row("alibi_slopes", slopes)


def _shared_row(name: str, rows: Tensor) -> Tensor:
    if rows.shape[0] > 1 and rows.stride(0) != 0:
        raise ValueError(
            f"{name}: expected one row for all requests (a first stride of 0, as expand() makes), given strides "
            f"{checks.shape_text(rows.stride())}"
        )
    return rows[0] if rows.shape[0] else rows.new_ones(rows.shape[1])


def _config_of_call(
    batch: int,
    total_q: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int,
    num_splits: int,
    dtype: torch.dtype,
) -> WorkspaceConfig:
    """A workspace in which a call fits that forces every tile into num_splits parts (0: none)."""
    config = WorkspaceConfig(
        max_batch_size=max(batch, 1),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        max_total_q=max(total_q, 1),
        dtype=dtype,
    )
    needed = config.max_q_tiles * num_kv_heads * num_splits
    return dataclasses.replace(config, max_splits=max(config.max_splits, needed)) if num_splits > 1 else config
