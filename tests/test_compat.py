"""FlashAttention's and FlashInfer's calls: what they compute, and that each of their arguments is honoured or refused."""

import inspect
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import splitkv
from splitkv import compat, reference, testing
from splitkv.compat import flash_attn_3_with_kvcache, flash_attn_with_kvcache
from tests.support import ints, masked

HEADS = {"mha": (2, 2), "mqa": (3, 1), "gqa": (4, 2)}
PAGES = (None, 1, 4, 128)
WINDOWS: dict[str, tuple[bool, tuple[int, int]]] = {
    "all": (False, (-1, -1)),
    "causal": (True, (-1, -1)),
    "causal left": (True, (3, 2)),  # the right side gives way to the causal rule, as there
    "left": (False, (5, -1)),
    "local": (False, (4, 1)),
    "local right": (False, (-1, 1)),
    "local self": (False, (6, 0)),
}
DIM, DIM_V = 16, 24


@dataclass
class Caches:
    """Tokens of a few requests, in caches of some form with all that is not theirs poisoned."""

    k: Tensor
    v: Tensor
    table: Tensor | None
    rows: Tensor | None

    def locate(self, dense: Tensor, cache: Tensor, b: int, tokens: range) -> Tensor:
        """[tokens, heads, width] of request b in a cache."""
        row = b if self.rows is None else int(self.rows[b])
        if self.table is None:
            return cache[row, list(tokens)]
        size = cache.shape[1]
        return torch.stack([cache[int(self.table[row, t // size]), t % size] for t in tokens])


def spread(k: Tensor, v: Tensor, lens: list[int], page_size: int | None, rows: list[int] | None) -> Caches:
    """k and v [batch, max_len, heads, width] as caches with room for max_len tokens; NaN from lens on, and elsewhere."""
    device, (batch, max_len) = k.device, k.shape[:2]
    dead = torch.arange(max_len, device=device)[None] >= torch.tensor(lens, device=device)[:, None]
    k, v = (masked(t, dead[:, :, None, None], math.nan) for t in (k, v))
    index = None if rows is None else ints(rows, device)
    count = batch if rows is None else max(rows) + 2
    places = list(range(batch)) if rows is None else rows
    if page_size is None:
        caches = []
        for t in (k, v):
            cache = t.new_full((count, *t.shape[1:]), math.nan)
            cache[places] = t
            caches.append(cache)
        return Caches(*caches, None, index)
    pages = math.ceil(max_len / page_size)
    ids = torch.randperm(batch * pages + 1)[: batch * pages].view(batch, pages)
    table = torch.full((count, pages), -1, dtype=torch.int32)
    table[places] = ids.int()
    caches = []
    for t in (k, v):
        cache = t.new_full((batch * pages + 1, page_size, *t.shape[2:]), math.nan)
        padded = t.new_full((batch, pages * page_size, *t.shape[2:]), math.nan)
        padded[:, :max_len] = t
        cache[ids.flatten().to(device)] = padded.view(batch * pages, page_size, *t.shape[2:])
        caches.append(cache)
    return Caches(*caches, table.to(device), index)


def sees_by(window: tuple[int, int], causal: bool, q_len: int) -> Tensor | None:
    """[q_len, q_len] bool: which of a request's query tokens see each other; None where the right side hides none."""
    right = 0 if causal else window[1]
    i = torch.arange(q_len)
    return None if right < 0 else i[None, :] <= i[:, None] + right


def expected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lens: list[int],
    window: tuple[int, int],
    causal: bool,
    *,
    leftpad: Tensor | None = None,
    qo_indptr: Tensor | None = None,
    longest: int | None = None,
    **rules: Any,
) -> testing.Expected:
    """What attention over dense k and v [batch, max_len, heads, width] is by FlashAttention's definition of windows."""
    kv = splitkv.ContiguousKV(k, v, ints(lens, k.device), kv_start=leftpad)
    sees = sees_by(window, causal, q.shape[1] if longest is None else longest)
    tree = None
    if sees is not None:
        tree = reference.pack_tree_mask(sees[None]).expand(k.shape[0], -1, -1).to(q.device)
    return testing.expect(
        q,
        kv,
        qo_indptr=qo_indptr,
        causal=sees is not None,
        tree_mask=tree,
        window_left=None if window[0] < 0 else window[0],
        **rules,
    )


CASES = list(itertools.product(HEADS, PAGES, WINDOWS))


@pytest.mark.parametrize(("index", "case"), list(enumerate(CASES)), ids=["-".join(map(str, case)) for case in CASES])
def test_flash_attention(index: int, case: tuple[Any, ...], device: torch.device) -> None:
    heads, page_size, window_name = case
    (num_q_heads, num_kv_heads), (causal, window) = HEADS[heads], WINDOWS[window_name]
    # What is not in the product goes round with periods that share no factor with one another.
    q_len = (1, 4, 3)[index % 3]
    num_splits = (0, 1, 3, 0, 2)[index % 5]
    new_len = (None, 1, None, q_len, 0, None, 2)[index % 7]
    leftpad = [0, 3, 9, 0] if index % 2 else None
    rows = [5, 0, 3, 2] if index % 4 in (1, 2) else None
    dtype = torch.float16 if index % 3 else torch.float32
    lens = [20, 11, 9, 0] if page_size != 128 else [150, 129, 60, 0]
    batch, max_len = len(lens), max(lens) + 5
    q = torch.randn(batch, q_len, num_q_heads, DIM).to(device, dtype)
    k = torch.randn(batch, max_len, num_kv_heads, DIM).to(device, dtype)
    v = torch.randn(batch, max_len, num_kv_heads, DIM_V).to(device, dtype)
    caches = spread(k, v, lens, page_size, rows)
    total = [n + (new_len or 0) for n in lens]
    given: dict[str, Any] = {}
    if new_len is not None:
        for name, dense in (("k", k), ("v", v)):
            given[name] = torch.stack([dense[b, n : n + new_len] for b, n in enumerate(lens)])
    pads = None if leftpad is None else ints(leftpad, device)
    # As it ought to be afterwards, which the cache's NaN must not reach.
    want = expected(q, k, v, total, window, causal, leftpad=pads)
    before = caches.k.clone(), caches.v.clone()
    options: dict[str, Any] = dict(
        given,
        cache_seqlens=ints(lens, device),
        cache_batch_idx=caches.rows,
        cache_leftpad=pads,
        causal=causal,
        window_size=window,
        num_splits=num_splits,
        return_softmax_lse=True,
    )
    if index % 2:
        out, lse = flash_attn_with_kvcache(q, caches.k, caches.v, block_table=caches.table, **options)
    else:
        out, lse = flash_attn_3_with_kvcache(q, caches.k, caches.v, page_table=caches.table, **options)
    assert lse.shape == (batch, num_q_heads, q_len) and lse.is_contiguous() and out.dtype == dtype
    want.check(out, lse.transpose(1, 2), case)
    for cache, old, dense in zip((caches.k, caches.v), before, (k, v), strict=True):
        for b, n in enumerate(lens):
            new = range(n, total[b])
            if new:
                assert torch.equal(caches.locate(dense, cache, b, new), dense[b, n : total[b]])
        assert int((~cache.isnan()).sum() - (~old.isnan()).sum()) == sum(total[b] - n for b, n in enumerate(lens)) * (
            cache.shape[-1] * cache.shape[-2]
        )


@pytest.mark.parametrize("window_name", ["causal", "local", "left"])
@pytest.mark.parametrize("page_size", PAGES)
def test_flash_attention_3_with_ragged_tokens(page_size: int | None, window_name: str, device: torch.device) -> None:
    causal, window = WINDOWS[window_name]
    q_lens, new_lens, lens = [3, 0, 5, 1], [2, 4, 0, 1], [17, 6, 9, 0]
    total, batch = [n + new for n, new in zip(lens, new_lens, strict=True)], len(lens)
    indptr = ints([0, *itertools.accumulate(q_lens)], device)
    new_indptr = ints([0, *itertools.accumulate(new_lens)], device)
    q = torch.randn(sum(q_lens) + 2, 4, DIM, device=device)  # two rows that are no request's
    k, v = (torch.randn(batch, 24, 2, width, device=device) for width in (DIM, DIM_V))
    caches = spread(k, v, lens, page_size, [3, 0, 1, 4])
    new = [torch.cat([t[b, n : total[b]] for b, n in enumerate(lens)]) for t in (k, v)]
    surplus = [torch.cat([t, torch.randn_like(t[:1])]) for t in new]  # and a new token that is no request's
    want = expected(q, k, v, total, window, causal, qo_indptr=indptr, longest=max(q_lens))
    out, lse = flash_attn_3_with_kvcache(
        q,
        caches.k,
        caches.v,
        *surplus,
        cache_seqlens=ints(lens, device),
        cache_batch_idx=caches.rows,
        page_table=caches.table,
        cu_seqlens_q=indptr,
        cu_seqlens_k_new=new_indptr,
        max_seqlen_q=5,
        causal=causal,
        window_size=window,
        return_softmax_lse=True,
    )
    assert lse.shape == (4, q.shape[0])
    want.check(out, lse.transpose(0, 1))
    for cache, dense in ((caches.k, k), (caches.v, v)):
        assert int((~cache.isnan()).sum()) == sum(total) * dense.shape[2] * dense.shape[3]
        for b, n in enumerate(total):
            if n:
                assert torch.equal(caches.locate(dense, cache, b, range(n)), dense[b, :n])
