"""FlashAttention's and FlashInfer's calls: what they compute, and that no argument of theirs is ignored."""

import inspect
import itertools
import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import COMPILED
from support import ints, masked, no_synchronisation, view_of
from torch import Tensor

import splitkv
from splitkv import compat, reference, testing
from splitkv.compat import flash_attn_3_with_kvcache, flash_attn_with_kvcache

HEADS = {"mha": (2, 2), "mqa": (2, 1), "gqa": (4, 2)}
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
    """k and v [batch, max_len, heads, width] in caches with room for max_len tokens; NaN from lens on and elsewhere."""
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


# Every page size with every window, and both with all heads.
CASES = [
    (tuple(HEADS)[index % 3], page_size, window)
    for index, (page_size, window) in enumerate(itertools.product(PAGES, WINDOWS))
]


@pytest.mark.parametrize(("index", "case"), list(enumerate(CASES)), ids=["-".join(map(str, case)) for case in CASES])
def test_flash_attention(index: int, case: tuple[Any, ...], device: torch.device) -> None:
    heads, page_size, window_name = case
    (num_q_heads, num_kv_heads), (causal, window) = HEADS[heads], WINDOWS[window_name]
    draw = random.Random(index)
    q_len = draw.choice((1, 1, 2, 3)) if window_name in ("all", "left", "causal left") else draw.choice((1, 2, 3))
    num_splits = draw.choice((0, 1, 1, 3))
    new_len = draw.choice((None, None, 0, 1, q_len))
    leftpad = draw.choice((None, [3, 9, 0]))
    rows = draw.choice((None, [4, 0, 2]))
    dtype = draw.choice((torch.float16, torch.float32))
    lens = [20, 9, 0] if page_size != 128 else [140, 30, 0]
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


@pytest.mark.parametrize(
    ("page_size", "window_name"), [(None, "local"), (1, "causal"), (4, "local right"), (128, "left")]
)
def test_flash_attention_3_with_ragged_tokens(page_size: int | None, window_name: str, device: torch.device) -> None:
    causal, window = WINDOWS[window_name]
    q_lens, new_lens, lens = [1, 0, 4], [2, 3, 0], [17, 6, 9]
    total, batch = [n + new for n, new in zip(lens, new_lens, strict=True)], len(lens)
    indptr = ints([0, *itertools.accumulate(q_lens)], device)
    new_indptr = ints([0, *itertools.accumulate(new_lens)], device)
    q = torch.randn(sum(q_lens) + 2, 4, DIM, device=device)  # two rows that are no request's
    k, v = (torch.randn(batch, 24, 2, width, device=device) for width in (DIM, DIM_V))
    caches = spread(k, v, lens, page_size, [3, 0, 1])
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
        max_seqlen_q=4,
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


def small(device: torch.device, **changes: Any) -> dict[str, Any]:
    """Arguments of a small call of FlashAttention's, some of them replaced."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    call = dict(
        q=draw(2, 3, 4, DIM),
        k_cache=draw(3, 12, 2, DIM),
        v_cache=draw(3, 12, 2, DIM_V),
        cache_seqlens=ints([9, 4], device),
        return_softmax_lse=True,
    )
    return call | {name: change(draw) if callable(change) else change for name, change in changes.items()}


def test_lengths_may_be_a_number_or_those_of_full_caches(device: torch.device) -> None:
    for given, meant in ((7, [7, 7]), (None, [12, 12])):
        call = small(device, cache_seqlens=given)
        out, lse = flash_attn_with_kvcache(**call)
        kv = splitkv.ContiguousKV(call["k_cache"], call["v_cache"], ints(meant, device))
        testing.expect(call["q"], kv, causal=False).check(out, lse.transpose(1, 2))


def test_a_workspace_and_an_output_of_the_caller_are_used(device: torch.device) -> None:
    call = small(device)
    expected_out, expected_lse = flash_attn_with_kvcache(**call, num_splits=3)
    config = splitkv.WorkspaceConfig(2, 4, 2, DIM, DIM_V, max_total_q=6, dtype=torch.float32, max_splits=64)
    for num_splits in (1, 3):
        poisoned = testing.PoisonedWorkspace(config, device)
        wide = torch.full((2, 3, 4, DIM_V + 8), math.nan, device=device)
        out, lse = flash_attn_with_kvcache(
            **call, num_splits=num_splits, workspace=poisoned.workspace, out=wide[..., :DIM_V]
        )
        assert out.data_ptr() == wide.data_ptr() and wide[..., DIM_V:].isnan().all()
        assert poisoned.written("partial_out").any() == (num_splits > 1)
        assert not poisoned.written("out").any() and not poisoned.written("lse").any()
        poisoned.check_guards()
        torch.testing.assert_close((out, lse), (expected_out, expected_lse))
    # Without one, results are the caller's own.
    first, second = (flash_attn_with_kvcache(**call)[0] for _ in range(2))
    assert first.data_ptr() != second.data_ptr() and first.untyped_storage().nbytes() == first.numel() * 4


def test_eight_bit_caches_are_multiplied_by_their_scales(device: torch.device) -> None:
    call = small(device)
    k, v = (call[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache"))
    k_scale, v_scale = ints([2, 3], device).float() / 4, ints([5, 1], device).float() / 2
    call |= dict(k_cache=k, v_cache=v, k_descale=k_scale.expand(2, 2), v_descale=v_scale.expand(2, 2))
    out, lse = flash_attn_3_with_kvcache(**call)
    kv = splitkv.ContiguousKV(k, v, call["cache_seqlens"], k_scale=k_scale, v_scale=v_scale)
    testing.expect(call["q"], kv, causal=False).check(out, lse.transpose(1, 2))


def test_score_rules_of_flash_attention(device: torch.device) -> None:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device)
    call = small(device, softmax_scale=0.7, softcap=2.0)
    kv = splitkv.ContiguousKV(call["k_cache"], call["v_cache"], call["cache_seqlens"])
    want = testing.expect(call["q"], kv, causal=False, sm_scale=0.7, softcap=2.0, alibi_slopes=slopes)
    for given in (slopes, slopes.expand(2, 4)):
        out, lse = flash_attn_with_kvcache(**call, alibi_slopes=given)
        want.check(out, lse.transpose(1, 2))


def test_what_finds_no_room_or_no_page_is_not_written(device: torch.device) -> None:
    call = small(device, k=lambda draw: draw(2, 5, 2, DIM), v=lambda draw: draw(2, 5, 2, DIM_V))
    cache = call["k_cache"] = torch.full((2, 12, 2, DIM), math.nan, device=device)
    call |= dict(v_cache=torch.zeros(2, 12, 2, DIM_V, device=device), cache_seqlens=ints([9, 4], device))
    flash_attn_with_kvcache(**call)
    assert torch.equal(cache[0, 9:], call["k"][0, :3]) and torch.equal(cache[1, 4:9], call["k"][1])
    assert int((~cache.isnan()).sum()) == 8 * 2 * DIM
    # Pages of 4: the second request has none for tokens 8 and on.
    cache = call["k_cache"] = torch.full((5, 4, 2, DIM), math.nan, device=device)
    call |= dict(v_cache=torch.zeros(5, 4, 2, DIM_V, device=device), block_table=ints([[3, 1, 2], [4, 0, -1]], device))
    flash_attn_with_kvcache(**call)
    assert torch.equal(cache[2, 1:], call["k"][0, :3]) and torch.equal(cache[0], call["k"][1, :4])
    assert int((~cache.isnan()).sum()) == 7 * 2 * DIM


# FlashInfer.


@dataclass
class Pages:
    """Requests in FlashInfer's form."""

    kv: splitkv.PagedKV
    k: Tensor
    v: Tensor
    layout: str

    @property
    def plan(self) -> dict[str, Any]:
        heads, size = self.kv.num_kv_heads, self.kv.page_size
        return dict(
            indptr=self.kv.page_indptr, indices=self.kv.page_indices, last_page_len=self.kv.last_page_len,
            num_kv_heads=heads, head_dim=DIM, page_size=size,
        )  # fmt: skip

    @property
    def cache(self) -> tuple[Tensor, Tensor]:
        return (
            (self.k, self.v)
            if self.layout == "NHD"
            else tuple(t.transpose(1, 2).contiguous() for t in (self.k, self.v))
        )


def pages_of(
    device: torch.device, lens: list[int], heads: int, page_size: int, layout: str, dtype: torch.dtype
) -> Pages:
    k, v = (torch.randn(len(lens), max(lens), heads, DIM).to(device, dtype) for _ in range(2))
    kv = view_of("csr", k, v, lens, page_size=page_size)
    assert isinstance(kv, splitkv.PagedKV)
    return Pages(kv, kv.k, kv.v, layout)


def buffer(device: torch.device, nbytes: int = 2**24) -> Tensor:
    return torch.full((nbytes,), 0xFF, dtype=torch.uint8, device=device)


PLANS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # What plan and run are given, and what decode is.
    "plain": ({}, {}, {}),
    "window": (dict(window_left=5), dict(window_left=5), dict(window_left=5)),
    "softcap": (dict(logits_soft_cap=1.5, sm_scale=0.6), {}, dict(softcap=1.5, sm_scale=0.6)),
    "scales": (dict(sm_scale=0.6), dict(q_scale=0.5, k_scale=1.5), dict(sm_scale=0.6 * 0.75)),
    "default scale": ({}, dict(q_scale=0.5), dict(sm_scale=0.5 * DIM**-0.5)),
    "whole": (dict(disable_split_kv=True), {}, {}),
    "pages": (dict(fixed_split_size=2), {}, {}),
    "tokens": (dict(q_len_per_req=3), dict(q_len_per_req=3), {}),
    "all tokens": (dict(q_len_per_req=3, window_right=-1), {}, dict(causal=False)),
    "tokens right": (dict(q_len_per_req=3, window_right=1), {}, dict(right=1)),
    "tokens right and left": (dict(q_len_per_req=3, window_left=4, window_right=2), {},
                              dict(causal=False, window_left=4)),
}  # fmt: skip


@pytest.mark.parametrize("index", range(len(PLANS)), ids=list(PLANS))
def test_flashinfer(index: int, device: torch.device) -> None:
    planned, given, rules = list(PLANS.values())[index]
    num_q_heads, num_kv_heads = list(HEADS.values())[index % 3]
    page_size, layout = (1, 4, 128)[index // 2 % 3], ("NHD", "HND")[index % 2]
    dtype = (torch.float16, torch.float32)[index % 2]
    lens = [20, 0, 9] if page_size != 128 else [140, 0, 30]
    pages = pages_of(device, lens, num_kv_heads, page_size, layout, dtype)
    q_len = planned.get("q_len_per_req", 1)
    q = torch.randn(3 * q_len, num_q_heads, DIM).to(device, dtype)
    rules = dict(rules)
    if "right" in rules:
        sees = sees_by((-1, rules.pop("right")), False, q_len)
        assert sees is not None
        rules["tree_mask"] = reference.pack_tree_mask(sees[None]).expand(3, -1, -1).to(device)
    want = testing.expect(q.view(3, q_len, *q.shape[1:]), pages.kv, **rules)
    wrapper = compat.BatchDecodeWithPagedKVCacheWrapper(buffer(device), layout)
    wrapper.plan(**pages.plan, num_qo_heads=num_q_heads, q_data_type=dtype, **planned)
    one = index % 2 == 0  # tensor for both caches
    cache = torch.stack(pages.cache, 1) if one else pages.cache
    out, lse = wrapper.run(q, cache, return_lse=True, **given)
    assert out.shape == q.shape and out.dtype == dtype and lse.shape == q.shape[:2] and lse.dtype == torch.float32
    want.check(out.view_as(want.out), lse.view_as(want.lse) / math.log2(math.e), list(PLANS)[index])


def test_flashinfer_with_eight_bit_caches_scales_and_sinks(device: torch.device) -> None:
    pages = pages_of(device, [20, 9], 2, 4, "NHD", torch.float32)
    k, v = (t.nan_to_num(448.0).to(torch.float8_e4m3fn) for t in (pages.k, pages.v))
    q, sinks = torch.randn(2, 4, DIM, device=device), torch.randn(4, device=device)
    kv = splitkv.PagedKV.from_csr(
        k, v, pages.kv.page_indptr, pages.kv.page_indices, pages.kv.last_page_len, k_scale=0.5, v_scale=3.0
    )
    wrapper = compat.BatchDecodeWithPagedKVCacheWrapper(buffer(device))
    wrapper.plan(**pages.plan, num_qo_heads=4, q_data_type="float32", kv_data_type="float8_e4m3fn")
    out = torch.full((2, 4, DIM), math.nan, device=device)
    lse = torch.full((2, 4), math.nan, device=device)
    assert wrapper.run(q, (k, v), k_scale=0.5, v_scale=3.0, sinks=sinks, out=out, lse=lse) is out
    testing.expect(q, kv, sinks=sinks).check(out, lse / math.log2(math.e))
    # A scale of values that are not 8-bit multiplies the output.
    wrapper.plan(**pages.plan, num_qo_heads=4, data_type=torch.float32)
    plain = wrapper.run(q, pages.cache)
    assert torch.equal(wrapper.run(q, pages.cache, v_scale=0.5), plain * 0.5)


def test_outputs_may_be_float32(device: torch.device) -> None:
    pages = pages_of(device, [20], 2, 4, "NHD", torch.float16)
    q = torch.randn(1, 4, DIM).to(device, torch.float16)
    wrapper = compat.BatchDecodeWithPagedKVCacheWrapper(buffer(device))
    wrapper.plan(**pages.plan, num_qo_heads=4, o_data_type=torch.float32)
    out = wrapper.run(q, pages.cache)
    assert out.dtype == torch.float32
    testing.expect(q, pages.kv).check(out)
    assert not torch.equal(out, out.half().float())


def test_plan_copies_nothing_and_reads_nothing_that_is_on_the_device(device: torch.device) -> None:
    pages = pages_of(device, [20, 9], 2, 4, "NHD", torch.float32)
    q = torch.randn(2, 4, DIM, device=device)
    wrapper = compat.BatchDecodeWithPagedKVCacheWrapper(buffer(device))
    wrapper.plan(**pages.plan, num_qo_heads=4, q_data_type=torch.float32)
    testing.expect(q, pages.kv).check(wrapper.run(q, pages.cache))
    pages.kv.last_page_len.copy_(ints([2, 3], device))
    pages.kv.page_indptr.copy_(ints([0, 4, 5], device))
    testing.expect(q, pages.kv).check(wrapper.run(q, pages.cache))


def test_buffers_for_graphs_stay_and_hold_the_last_plan(device: torch.device) -> None:
    buffers = [torch.full((n,), -7, dtype=torch.int32, device=device) for n in (3, 40, 2)]
    wrapper = compat.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(buffer(device), *buffers)
    assert wrapper.is_cuda_graph_enabled
    for lens in ([20, 9], [3, 33]):
        pages = pages_of(device, lens, 2, 4, "NHD", torch.float32)
        q = torch.randn(2, 4, DIM, device=device)
        on_host = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in pages.plan.items()}
        wrapper.plan(**on_host, num_qo_heads=4, q_data_type=torch.float32)
        assert torch.equal(buffers[0], pages.kv.page_indptr) and torch.equal(buffers[2], pages.kv.last_page_len)
        assert torch.equal(buffers[1][: pages.kv.page_indices.shape[0]], pages.kv.page_indices)
        testing.expect(q, pages.kv).check(wrapper.run(q, pages.cache))
    other = pages_of(device, [20, 9, 4], 2, 4, "NHD", torch.float32)
    with pytest.raises(ValueError, match=r"last_page_len: expected shape \[2\], given \[3\]"):
        wrapper.plan(**other.plan, num_qo_heads=4, q_data_type=torch.float32)
    many = pages_of(device, [160, 9], 2, 4, "NHD", torch.float32)
    with pytest.raises(ValueError, match=r"indices: expected at most 40 pages .* given 43"):
        wrapper.plan(**many.plan, num_qo_heads=4, q_data_type=torch.float32)
    with pytest.raises(ValueError, match=r"q_len_per_req: expected 1 .* given 2"):
        wrapper.plan(**pages.plan, num_qo_heads=4, q_data_type=torch.float32, q_len_per_req=2)
    testing.expect(q, pages.kv).check(wrapper.run(q, pages.cache))


def test_a_workspace_buffer_may_be_small_but_not_too_small(device: torch.device) -> None:
    pages = pages_of(device, [40, 9], 2, 4, "NHD", torch.float32)
    q = torch.randn(2, 4, DIM, device=device)
    sizes = dict(num_qo_heads=4, q_data_type=torch.float32)
    wanted, none = compat.BatchDecodeWithPagedKVCacheWrapper(buffer(device)).workspace_size(**pages.plan, **sizes)
    assert none == 0
    tile = 16 * (DIM + 1) * 4
    for given, splits in ((wanted, 2048), (wanted - 2000 * tile, 48), (8 * tile, None)):
        wrapper = compat.BatchDecodeWithPagedKVCacheWrapper(buffer(device, given + 1)[1:].view(torch.int8))
        wrapper.plan(**pages.plan, **sizes)
        assert wrapper._workspace is not None
        count = wrapper._workspace.config.max_splits
        assert count == splits if given == wanted else 1 <= count <= (splits or 8)
        testing.expect(q, pages.kv).check(wrapper.run(q, pages.cache))
    wrapper = compat.BatchDecodeWithPagedKVCacheWrapper(buffer(device, 1000))
    with pytest.raises(ValueError, match=r"float_workspace_buffer: expected at least \d+ bytes .* given 1000"):
        wrapper.plan(**pages.plan, **sizes)
    with pytest.raises(ValueError, match="run: expected a call of plan before"):
        wrapper.run(q, pages.cache)
    wrapper.reset_workspace_buffer(buffer(device), None)
    wrapper.plan(**pages.plan, **sizes)
    held = wrapper._workspace
    testing.expect(q, pages.kv).check(wrapper.run(q, pages.cache))
    wrapper.plan(**pages.plan, **sizes, window_left=3)
    assert wrapper._workspace is held, "what is prepared for calls is kept from plan to plan"


def test_forward_takes_rules_in_the_place_of_those_planned(device: torch.device) -> None:
    pages = pages_of(device, [20, 9], 2, 4, "NHD", torch.float32)
    q = torch.randn(2, 4, DIM, device=device)
    wrapper = compat.BatchDecodeWithPagedKVCacheWrapper(buffer(device))
    wrapper.begin_forward(**pages.plan, num_qo_heads=4, q_data_type=torch.float32)
    rules = dict(window_left=4, logits_soft_cap=1.5, sm_scale=0.6)
    want = testing.expect(q, pages.kv, window_left=4, softcap=1.5, sm_scale=0.6 * 0.5)
    want.check(wrapper.forward(q, pages.cache, q_scale=0.5, **rules))
    out, lse = wrapper.forward_return_lse(q, pages.cache, k_scale=0.5, v_scale=2.0, **rules)
    want.check(out / 2, lse / math.log2(math.e))
    out, lse = wrapper.run_return_lse(q, pages.cache)
    testing.expect(q, pages.kv).check(out, lse / math.log2(math.e))
    wrapper.end_forward()


def test_equal_bits_whatever_the_batch_with_a_fixed_split_size(device: torch.device) -> None:
    pages = pages_of(device, [40, 23, 9], 2, 4, "NHD", torch.float16)
    q = torch.randn(3, 4, DIM).to(device, torch.float16)
    wrapper = compat.BatchDecodeWithPagedKVCacheWrapper(buffer(device))
    plan = dict(pages.plan, num_qo_heads=4, fixed_split_size=3)
    wrapper.plan(**plan)
    assert wrapper._workspace is not None and wrapper._workspace.config.split_tokens == 3 * 4
    whole = wrapper.run(q, pages.cache)
    first = plan["indptr"][:2].clone()
    wrapper.plan(**plan | dict(indptr=first, last_page_len=plan["last_page_len"][:1]))
    assert testing.same_bits(wrapper.run(q[:1], pages.cache), whole[:1])


# No argument is ignored.

FA2 = (
    "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table softmax_scale "
    "causal window_size softcap rotary_interleaved alibi_slopes num_splits return_softmax_lse"
).split()
FA3 = (
    "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad page_table "
    "cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale v_descale softmax_scale causal "
    "window_size attention_chunk softcap rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin "
    "return_softmax_lse"
).split()
SIZES = "indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size"
RULES = (
    "pos_encoding_mode window_left logits_soft_cap q_data_type kv_data_type o_data_type data_type sm_scale rope_scale "
    "rope_theta"
)
FORWARD = (
    "q paged_kv_cache pos_encoding_mode q_scale k_scale v_scale window_left logits_soft_cap sm_scale rope_scale "
    "rope_theta"
)
WRAPPER = compat.BatchDecodeWithPagedKVCacheWrapper
THEIRS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "2": (flash_attn_with_kvcache, FA2),
    "3": (flash_attn_3_with_kvcache, FA3),
    "init": (
        WRAPPER.__init__,
        "self float_workspace_buffer kv_layout use_cuda_graph use_tensor_cores paged_kv_indptr_buffer "
        "paged_kv_indices_buffer paged_kv_last_page_len_buffer backend jit_args".split(),
    ),
    "reset": (WRAPPER.reset_workspace_buffer, "self float_workspace_buffer int_workspace_buffer".split()),
    "plan": (
        WRAPPER.plan,
        f"self {SIZES} {RULES} non_blocking block_tables seq_lens fixed_split_size disable_split_kv q_len_per_req "
        "window_right".split(),
    ),
    "run": (
        WRAPPER.run,
        "self q paged_kv_cache args q_scale k_scale v_scale out lse return_lse enable_pdl window_left sinks "
        "q_len_per_req skip_softmax_threshold_scale_factor kv_cache_sf".split(),
    ),
    "forward": (WRAPPER.forward, f"self {FORWARD}".split()),
}
"""What their functions take, in order: flash_attn 2.8's flash_attn_interface.py, hopper/flash_attn_interface.py, and
flashinfer's decode.py, all as of 2026."""


def test_arguments_are_theirs_in_their_order() -> None:
    for of, (function, names) in THEIRS.items():
        ours = ["workspace", "out"] if of in ("2", "3") else []
        assert list(inspect.signature(function).parameters) == names + ours, of
    same = [
        (WRAPPER.begin_forward, THEIRS["plan"][1]),
        (WRAPPER.forward_return_lse, THEIRS["forward"][1]),
        (WRAPPER.workspace_size, f"self {SIZES} {RULES} block_tables seq_lens fixed_split_size disable_split_kv "
                                 "q_len_per_req".split()),
        (compat.CUDAGraphBatchDecodeWithPagedKVCacheWrapper.__init__,
         "self workspace_buffer indptr_buffer indices_buffer last_page_len_buffer kv_layout use_tensor_cores".split()),
    ]  # fmt: skip
    for function, names in same:
        assert list(inspect.signature(function).parameters) == names


def documented() -> dict[tuple[str, str], str]:
    """What the module's tables say of (function, argument)."""
    assert compat.__doc__
    said: dict[tuple[str, str], str] = {}
    for line in re.findall(r"^\| (.*) \|$", compat.__doc__, re.MULTILINE):
        arguments, of, here = line.split(" | ")
        if of != "of":
            for key in itertools.product(of.split(", "), arguments.split(", ")):
                assert key not in said
                said[key] = here
    return said


def tensors_of(value: Any) -> Any:
    """A value that can be compared: tensors by what they hold."""
    if isinstance(value, Tensor):
        numbers = value.view(torch.uint8) if value.element_size() == 1 else value
        return str(value.shape), str(value.dtype), str(numbers.tolist())
    return value


def given_to_decode(monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """What call(*args, **options) hands to decode, which does not run."""
    seen: list[Any] = []

    def decode(q: Tensor, kv: Any, workspace: Any, *, out: Tensor, lse: Tensor | None = None, **rules: Any) -> Tensor:
        seen.append(
            [tensors_of(q), kv.form, [tensors_of(t) for t in kv.tensors], workspace.config,
             workspace.partial_out.data_ptr(), out.dtype, lse is None,
             {name: tensors_of(value) for name, value in sorted(rules.items())}]
        )  # fmt: skip
        return out.zero_()

    with monkeypatch.context() as patch:
        patch.setattr(splitkv.api, "decode", decode)
        call(*args, **options)
    assert len(seen) == 1
    return seen[0]


CPU = torch.device("cpu")
needs_no_gpu = pytest.mark.skipif(COMPILED, reason="calls with CPU tensors: run it with TRITON_INTERPRET=1")
WORKSPACE, OTHER = (
    splitkv.Workspace.allocate(
        splitkv.WorkspaceConfig(2, 4, 2, DIM, DIM_V, max_total_q=total_q, dtype=torch.float32), CPU
    )
    for total_q in (6, 7)
)
ROTARY = torch.ones(12, DIM // 2)
NEW = dict(k=lambda draw: draw(2, 2, 2, DIM), v=lambda draw: draw(2, 2, 2, DIM_V))
PAGED = dict(k_cache=lambda draw: draw(8, 4, 2, DIM), v_cache=lambda draw: draw(8, 4, 2, DIM_V))
TABLE = torch.tensor([[3, 1, 2], [4, 0, 5]], dtype=torch.int32)
RAGGED = dict(q=lambda draw: draw(4, 4, DIM), cu_seqlens_q=torch.tensor([0, 3, 4], dtype=torch.int32), max_seqlen_q=3)
EIGHT = dict(
    k_cache=lambda draw: draw(3, 12, 2, DIM).to(torch.float8_e4m3fn),
    v_cache=lambda draw: draw(3, 12, 2, DIM_V).to(torch.float8_e4m3fn),
)
SCALE = torch.tensor([0.5, 2.0]).expand(2, 2)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Caches of this shape."""
    return dict(k_cache=torch.ones(*shape, DIM, dtype=dtype), v_cache=torch.ones(*shape, DIM_V, dtype=dtype))


INDICES = torch.tensor([2, 0], dtype=torch.int32)

FA_HONOURED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # A call, and what of it another one has otherwise.
    "q": ({}, dict(q=lambda draw: draw(2, 2, 4, DIM))),
    "k_cache": ({}, dict(k_cache=lambda draw: draw(3, 12, 2, DIM) + 1)),
    "v_cache": ({}, dict(v_cache=lambda draw: draw(3, 12, 2, DIM_V) + 1)),
    "k": (NEW, dict(k=lambda draw: draw(2, 2, 2, DIM) + 1)),
    "v": (NEW, dict(v=lambda draw: draw(2, 2, 2, DIM_V) + 1)),
    "cache_seqlens": ({}, dict(cache_seqlens=torch.tensor([9, 5], dtype=torch.int32))),
    "cache_batch_idx": ({}, dict(cache_batch_idx=INDICES)),
    "cache_leftpad": ({}, dict(cache_leftpad=INDICES)),
    "block_table": (PAGED | dict(block_table=TABLE), dict(block_table=TABLE.flip(1))),
    "page_table": (PAGED | dict(page_table=TABLE), dict(page_table=TABLE.flip(1))),
    "cu_seqlens_q": (RAGGED, dict(cu_seqlens_q=torch.tensor([0, 1, 4], dtype=torch.int32))),
    "cu_seqlens_k_new": (
        dict(k=torch.ones(3, 2, DIM), v=torch.ones(3, 2, DIM_V), cu_seqlens_k_new=torch.tensor([0, 1, 3]).int()),
        dict(cu_seqlens_k_new=torch.tensor([0, 2, 3]).int()),
    ),
    "max_seqlen_q": (RAGGED | dict(window_size=(-1, 1)), dict(max_seqlen_q=2)),
    "k_descale": (EIGHT, dict(k_descale=SCALE)),
    "v_descale": (EIGHT, dict(v_descale=SCALE)),
    "softmax_scale": ({}, dict(softmax_scale=0.7)),
    "causal": ({}, dict(causal=True)),
    "window_size": ({}, dict(window_size=(2, -1))),
    "softcap": ({}, dict(softcap=3.0)),
    "alibi_slopes": ({}, dict(alibi_slopes=torch.ones(4))),
    "num_splits": ({}, dict(num_splits=2)),
    "return_softmax_lse": ({}, dict(return_softmax_lse=False)),
    "workspace": ({}, dict(workspace=OTHER)),
    "out": ({}, dict(out=torch.empty(2, 3, 4, DIM_V).half())),
}
FA_VOID = {"rotary_interleaved": False}
FA_REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "qv": [(dict(qv=ROTARY), "expected None .*LatentKV.*, given Tensor")],
    "rotary_cos": [(dict(rotary_cos=ROTARY), "expected None .*rotate q and k")],
    "rotary_sin": [(dict(rotary_sin=ROTARY), "expected None .*rotate q and k")],
    "rotary_seqlens": [(dict(rotary_seqlens=INDICES), "expected None .*rotate q and k")],
    "q_descale": [(dict(q_descale=SCALE), "expected None")],
    "attention_chunk": [(dict(attention_chunk=64), "expected 0, given 64")],
    "scheduler_metadata": [(dict(scheduler_metadata=INDICES), "expected None .*nothing is planned")],
    "pack_gqa": [(dict(pack_gqa=False), "expected None or True .*given False")],
    "sm_margin": [(dict(sm_margin=8), "expected 0, given 8")],
    # Of those that are honoured, what they cannot be.
    "q": [
        (dict(q=torch.ones(2, 4, DIM)), "expected 4 dimensions"),
        (dict(q=torch.ones(2, 3, 3, DIM)), "expected heads that are a multiple of k_cache's 2, given 3"),
        (dict(q=torch.ones(2, 3, 4, DIM).to(torch.float8_e4m3fn)), "expected torch.float16"),
        (RAGGED | dict(q=torch.ones(2, 3, 4, DIM)), "expected 3 dimensions"),
    ],
    "k_cache": [
        (ones(1, 12, 2), "expected rows for a batch of 2"),
        (dict(k_cache=torch.ones(3, 12, 2, 24)), "expected head_dim 16"),
        (ones(3, 12, 2, dtype=torch.float16), "given torch.float16"),
        (dict(k_cache=torch.ones(3, 2, 12, DIM)[..., ::2]), "expected a last stride of 1"),
    ],
    "v_cache": [(dict(v_cache=torch.ones(3, 11, 2, DIM_V)), r"expected shape \[3, 12, 2, head_dim_v\]")],
    "k": [
        (dict(v=torch.ones(2, 1, 2, DIM_V)), "expected new tokens, since v was given"),
        (NEW | dict(k=torch.ones(2, 2, 4, DIM)), r"expected shape \[2, new_len, 2, 16\]"),
        (NEW | dict(k=torch.ones(2, 2, 2, DIM).half()), "expected torch.float32"),
        (NEW | dict(k=torch.ones(2, 2, 2, DIM).transpose(0, 1)), "lie evenly in memory"),
    ],
    "v": [
        (dict(k=torch.ones(2, 1, 2, DIM)), "expected new tokens, since k was given"),
        (NEW | dict(v=torch.ones(2, 3, 2, DIM_V)), "expected 4 new tokens .* given 6"),
    ],
    "cache_seqlens": [
        (dict(cache_seqlens=torch.tensor([9, 4])), "expected torch.int32, given torch.int64"),
        (dict(cache_seqlens=13), "expected an integer in 0…12, given 13"),
        (NEW | dict(cache_seqlens=None), "expected lengths, after which k is appended, given None"),
    ],
    "cache_batch_idx": [(dict(cache_batch_idx=INDICES[:1]), "expected at least 2 elements, given 1")],
    "cache_leftpad": [(dict(cache_leftpad=INDICES.long()), "expected torch.int32")],
    "block_table": [(PAGED | dict(block_table=TABLE[:1]), "expected rows for a batch of 2, given 1")],
    "page_table": [(PAGED | dict(page_table=TABLE.long()), "expected torch.int32")],
    "cu_seqlens_q": [(RAGGED | dict(cu_seqlens_q=INDICES.long()), "expected torch.int32")],
    "cu_seqlens_k_new": [
        (dict(cu_seqlens_k_new=INDICES), "expected None without k and v"),
        (dict(k=torch.ones(3, 2, DIM), v=torch.ones(3, 2, DIM_V), cu_seqlens_k_new=INDICES), "expected at least 3"),
    ],
    "max_seqlen_q": [
        (RAGGED | dict(max_seqlen_q=None), "expected the most query tokens of a request with cu_seqlens_q"),
        (dict(max_seqlen_q=2), "expected an integer ≥ 3, given 2"),
    ],
    "k_descale": [
        (dict(k_descale=SCALE), "expected None, since the cache is not quantised"),
        (EIGHT | dict(k_descale=torch.ones(2, 2)), "expected one row for all requests"),
    ],
    "v_descale": [(EIGHT | dict(v_descale=torch.ones(2)), r"expected shape \[2, 2\]")],
    "softmax_scale": [(dict(softmax_scale=math.inf), "finite")],
    "causal": [(dict(causal=1), "expected True or False")],
    "window_size": [
        (dict(window_size=(-2, 0)), "expected an integer ≥ -1, given -2"),
        (dict(window_size=7), r"expected \(left, right\), given 7"),
    ],
    "softcap": [(dict(softcap=-1.0), "> 0"), (dict(softcap=None), "expected a real number")],
    "rotary_interleaved": [(dict(rotary_interleaved=None), "expected True or False")],
    "alibi_slopes": [(dict(alibi_slopes=torch.ones(2, 4)), "expected one row for all requests")],
    "num_splits": [(dict(num_splits=-1), "expected an integer in 0…4096, given -1")],
    "return_softmax_lse": [(dict(return_softmax_lse=1), "expected True or False")],
    "workspace": [(dict(workspace=torch.empty(8)), "expected a splitkv.Workspace, given Tensor")],
    "out": [(dict(out=torch.empty(2, 3, 4, DIM)), r"expected shape \[2, 3, 4, 24\]")],
}  # fmt: skip


def fa_calls(name: str) -> list[Callable[..., Any]]:
    """Those of FlashAttention's calls that have an argument."""
    return [THEIRS[of][0] for of in ("2", "3") if name in inspect.signature(THEIRS[of][0]).parameters]


@needs_no_gpu
@pytest.mark.parametrize("name", FA_HONOURED)
def test_decode_is_told_what_flash_attention_is_given(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base, change = FA_HONOURED[name]
    for function in fa_calls(name):
        before, again, after = (
            given_to_decode(monkeypatch, function, **small(CPU, **{"workspace": WORKSPACE} | base | changes))
            for changes in ({}, {}, change)
        )
        assert before == again
        assert before != after


@needs_no_gpu
def test_rotary_interleaved_means_nothing_without_rotary_cos(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in fa_calls("rotary_interleaved"):
        call = small(CPU, workspace=WORKSPACE)
        plain = given_to_decode(monkeypatch, function, **call)
        assert plain == given_to_decode(monkeypatch, function, **call, **FA_VOID)


@needs_no_gpu
@pytest.mark.parametrize("name", FA_REFUSED)
def test_what_flash_attention_may_not_be_given(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for changes, message in FA_REFUSED[name]:
        for function in fa_calls(name):
            names = inspect.signature(function).parameters
            if changes.keys() - names.keys():
                continue  # an argument of the other one
            call = small(CPU, **changes)
            before = call["k_cache"].clone()
            with pytest.raises((TypeError, ValueError), match=f"^{name}: .*{message}"):
                function(**call)
            assert torch.equal(call["k_cache"].float(), before.float())


@needs_no_gpu
def test_nothing_is_appended_for_a_call_that_is_refused() -> None:
    base = small(CPU, **NEW, workspace=WORKSPACE)
    flash_attn_with_kvcache(**base)  # the workspace remembers that such a call is fine
    unfit, fit = torch.empty(2, 3, 4, 2 * DIM_V)[..., ::2], torch.empty(2, 3, 4, DIM_V)
    over_keys = base["k_cache"].flatten()[-fit.numel() :].view(fit.shape)
    for change, message in (
        (dict(out=torch.empty(1)), "^out: expected shape"),
        (dict(out=unfit), "^out: expected a last stride of 1"),
        (dict(out=over_keys), "^out: expected memory apart from kv"),
        (dict(out=torch._neg_view(fit)), "^out: expected numbers as they lie in memory"),
        (dict(out=fit.requires_grad_()), "^out: expected a tensor outside autograd"),
        (dict(out=[fit]), "^out: expected a torch.Tensor, given list"),
        (dict(q=torch._neg_view(base["q"])), "^q: expected numbers as they lie in memory"),
        (dict(num_splits=4096), "^num_splits: expected at most"),
        (dict(alibi_slopes=torch.ones(3)), "^alibi_slopes: expected shape"),
        (dict(q=base["q"].clone().requires_grad_()), "^q: expected a tensor outside autograd"),
    ):
        call = base | change
        before = call["k_cache"].clone()
        with pytest.raises((TypeError, ValueError), match=message):
            flash_attn_with_kvcache(**call)
        assert torch.equal(call["k_cache"], before)
        call["k"].add_(1)  # would be seen


@dataclass
class Use:
    """How a wrapper is made, planned and run; `changed` replaces some arguments."""

    init: dict[str, Any]
    plan: dict[str, Any]
    run: dict[str, Any]
    forward: dict[str, Any] | None = None

    def changed(self, of: str, changes: dict[str, Any]) -> "Use":
        forward = self.forward if of != "forward" else {} if self.forward is None else self.forward
        parts = dict(init=self.init, plan=self.plan, run=self.run, forward=forward)
        for key, value in changes.items():
            where, name = key.split("__") if "__" in key else (of, key)
            parts[where] = (parts[where] or {}) | {name: value}
        return Use(**parts)

    def __call__(self) -> Any:
        init = dict(self.init)
        given = init.pop("reset", None)
        wrapper = compat.BatchDecodeWithPagedKVCacheWrapper(**init)
        if given is not None:
            wrapper.reset_workspace_buffer(*given)
        wrapper.plan(**self.plan)
        if self.forward is not None:
            return wrapper.forward(self.run["q"], **{"paged_kv_cache": self.run["paged_kv_cache"]} | self.forward)
        args = self.run.get("args", ())
        options = {name: value for name, value in self.run.items() if name not in ("q", "paged_kv_cache", "args")}
        return wrapper.run(self.run["q"], self.run["paged_kv_cache"], *args, **options)


def ints_of(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


SCRATCH, SCRATCH_2 = buffer(CPU, 2**22), buffer(CPU, 2**22)
FLASHINFER = Use(
    init=dict(float_workspace_buffer=SCRATCH),
    plan=dict(
        indptr=ints_of(0, 2, 3), indices=ints_of(3, 1, 2), last_page_len=ints_of(3, 4), num_qo_heads=4, num_kv_heads=2,
        head_dim=DIM, page_size=4, q_data_type=torch.float32,
    ),
    run=dict(q=torch.ones(2, 4, DIM), paged_kv_cache=(torch.ones(6, 4, 2, DIM), torch.ones(6, 4, 2, DIM))),
)  # fmt: skip
BUFFERS = dict(
    use_cuda_graph=True, paged_kv_indptr_buffer=ints_of(7, 7, 7), paged_kv_indices_buffer=ints_of(*range(9)),
    paged_kv_last_page_len_buffer=ints_of(7, 7),
)  # fmt: skip
F8 = torch.float8_e4m3fn
FI_HONOURED: dict[tuple[str, str], dict[str, Any]] = {
    ("init", "float_workspace_buffer"): dict(float_workspace_buffer=SCRATCH_2),
    ("reset", "float_workspace_buffer"): dict(init__reset=(SCRATCH_2, None)),
    ("init", "kv_layout"): dict(kv_layout="HND", run__paged_kv_cache=torch.ones(6, 2, 2, 4, DIM)),
    ("init", "use_cuda_graph"): BUFFERS,
    ("init", "paged_kv_indptr_buffer"): BUFFERS,
    ("init", "paged_kv_indices_buffer"): BUFFERS,
    ("init", "paged_kv_last_page_len_buffer"): BUFFERS,
    ("plan", "indptr"): dict(indptr=ints_of(0, 1, 3)),
    ("plan", "indices"): dict(indices=ints_of(3, 1, 4)),
    ("plan", "last_page_len"): dict(last_page_len=ints_of(3, 2)),
    ("plan", "num_qo_heads"): dict(num_qo_heads=2, run__q=torch.ones(2, 2, DIM)),
    ("plan", "num_kv_heads"): dict(num_kv_heads=4, run__paged_kv_cache=torch.ones(6, 2, 4, 4, DIM)),
    ("plan", "head_dim"): dict(head_dim=8, run__q=torch.ones(2, 4, 8), run__paged_kv_cache=torch.ones(6, 2, 4, 2, 8)),
    ("plan", "page_size"): dict(page_size=3, run__paged_kv_cache=torch.ones(6, 2, 3, 2, DIM)),
    ("plan", "window_left"): dict(window_left=2),
    ("plan", "window_right"): dict(window_right=-1),
    ("plan", "logits_soft_cap"): dict(logits_soft_cap=2.0),
    ("plan", "q_data_type"): dict(
        q_data_type=torch.bfloat16, run__q=torch.ones(2, 4, DIM).bfloat16(),
        run__paged_kv_cache=torch.ones(6, 2, 4, 2, DIM).bfloat16(),
    ),
    ("plan", "kv_data_type"): dict(kv_data_type=F8, run__paged_kv_cache=torch.ones(6, 2, 4, 2, DIM).to(F8)),
    ("plan", "data_type"): dict(
        q_data_type=None, data_type=torch.bfloat16, run__q=torch.ones(2, 4, DIM).bfloat16(),
        run__paged_kv_cache=torch.ones(6, 2, 4, 2, DIM).bfloat16(),
    ),
    ("plan", "sm_scale"): dict(sm_scale=0.7),
    ("plan", "fixed_split_size"): dict(fixed_split_size=2),
    ("plan", "disable_split_kv"): dict(disable_split_kv=True),
    ("plan", "q_len_per_req"): dict(q_len_per_req=2, run__q=torch.ones(4, 4, DIM)),
    ("run", "q"): dict(q=torch.zeros(2, 4, DIM)),
    ("run", "paged_kv_cache"): dict(paged_kv_cache=torch.zeros(6, 2, 4, 2, DIM)),
    ("run", "q_scale"): dict(q_scale=0.5),
    ("run", "k_scale"): dict(k_scale=0.5),
    ("run", "return_lse"): dict(return_lse=True),
    ("run", "lse"): dict(lse=torch.ones(2, 4)),
    ("run", "sinks"): dict(sinks=torch.ones(4)),
    ("forward", "q"): dict(run__q=torch.zeros(2, 4, DIM)),
    ("forward", "paged_kv_cache"): dict(paged_kv_cache=torch.zeros(6, 2, 4, 2, DIM)),
    ("forward", "window_left"): dict(window_left=2),
    ("forward", "logits_soft_cap"): dict(logits_soft_cap=2.0),
    ("forward", "sm_scale"): dict(sm_scale=0.7),
    ("forward", "q_scale"): dict(q_scale=0.5),
    ("forward", "k_scale"): dict(k_scale=0.5),
}  # fmt: skip
FI_VOID = {
    ("init", "use_tensor_cores"): dict(use_tensor_cores=True),
    ("reset", "int_workspace_buffer"): dict(init__reset=(SCRATCH, torch.empty(8))),
}
FI_REFUSED: dict[tuple[str, str], list[tuple[dict[str, Any], str]]] = {
    ("init", "backend"): [(dict(backend="fa2"), 'expected "auto" .*given \'fa2\'')],
    ("init", "jit_args"): [(dict(jit_args=[]), "expected None")],
    ("plan", "pos_encoding_mode"): [
        (dict(pos_encoding_mode=mode), f"expected \"NONE\" .*given '{mode}'") for mode in ("ROPE_LLAMA", "ALIBI")
    ],
    ("forward", "pos_encoding_mode"): [(dict(pos_encoding_mode="ALIBI"), 'expected "NONE"')],
    ("plan", "rope_scale"): [(dict(rope_scale=1.0), "expected None .*given 1.0")],
    ("plan", "rope_theta"): [(dict(rope_theta=1e4), "expected None .*given 10000.0")],
    ("forward", "rope_scale"): [(dict(rope_scale=1.0), "expected None")],
    ("forward", "rope_theta"): [(dict(rope_theta=1e4), "expected None")],
    ("plan", "block_tables"): [(dict(block_tables=TABLE), "expected None .*given Tensor")],
    ("plan", "seq_lens"): [(dict(seq_lens=INDICES), "expected None .*given Tensor")],
    ("run", "args"): [(dict(args=(1,)), "expected none .*given 1")],
    ("run", "enable_pdl"): [(dict(enable_pdl=True), "expected None .*given True")],
    ("run", "skip_softmax_threshold_scale_factor"): [(dict(skip_softmax_threshold_scale_factor=1.0), "expected None")],
    ("run", "kv_cache_sf"): [(dict(kv_cache_sf=torch.ones(2)), "expected None")],
    # Of those that are honoured, what they cannot be.
    ("init", "float_workspace_buffer"): [
        (dict(float_workspace_buffer=SCRATCH[::2]), "expected a contiguous tensor"),
        (dict(float_workspace_buffer=64), "expected a torch.Tensor, given int"),
    ],
    ("init", "kv_layout"): [(dict(kv_layout="NDH"), 'expected "NHD" or "HND", given \'NDH\'')],
    ("init", "use_cuda_graph"): [(dict(use_cuda_graph=1), "expected True or False, given 1")],
    ("init", "use_tensor_cores"): [(dict(use_tensor_cores=None), "expected True or False, given None")],
    ("init", "paged_kv_indptr_buffer"): [
        (dict(paged_kv_indptr_buffer=INDICES), "expected None .*without use_cuda_graph"),
        (BUFFERS | dict(paged_kv_indptr_buffer=INDICES), r"expected shape \[3\], given \[2\]"),
    ],
    ("init", "paged_kv_indices_buffer"): [
        (dict(paged_kv_indices_buffer=INDICES), "expected None .*without use_cuda_graph"),
        (BUFFERS | dict(paged_kv_indices_buffer=None), "expected a torch.Tensor"),
    ],
    ("init", "paged_kv_last_page_len_buffer"): [
        (dict(paged_kv_last_page_len_buffer=INDICES), "expected None .*without use_cuda_graph"),
        (BUFFERS | dict(paged_kv_last_page_len_buffer=INDICES.long()), "expected torch.int32"),
    ],
    ("plan", "indptr"): [(dict(indptr=INDICES), r"expected shape \[3\], given \[2\]")],
    ("plan", "indices"): [(dict(indices=INDICES.long()), "expected torch.int32")],
    ("plan", "last_page_len"): [(dict(last_page_len=TABLE), "expected 1 dimensions")],
    ("plan", "num_qo_heads"): [(dict(num_qo_heads=3), "expected a multiple of num_kv_heads = 2, given 3")],
    ("plan", "num_kv_heads"): [(dict(num_kv_heads=0), "expected an integer ≥ 1, given 0")],
    ("plan", "head_dim"): [(dict(head_dim=16.0), "expected an integer ≥ 1, given 16.0")],
    ("plan", "page_size"): [(dict(page_size=0), "expected an integer ≥ 1, given 0")],
    ("plan", "window_left"): [(dict(window_left=-2), "expected an integer ≥ -1, given -2")],
    ("plan", "window_right"): [(dict(window_right=None), "expected an integer ≥ -1, given None")],
    ("plan", "logits_soft_cap"): [(dict(logits_soft_cap=-1.0), "≥ 0, given -1.0")],
    ("plan", "q_data_type"): [
        (dict(q_data_type=F8), "expected torch.float16 or torch.bfloat16 or torch.float32, given torch.float8_e4m3fn"),
        (dict(q_data_type=None), "expected a dtype"),
        (dict(q_data_type="float61"), "given 'float61'"),
    ],
    ("plan", "kv_data_type"): [
        (dict(kv_data_type=torch.float16), "expected torch.float32 .*given torch.float16"),
        (dict(kv_data_type=""), "expected torch.float32 .*given ''"),
        (dict(kv_data_type=torch.ones(2)), "expected torch.float32 .*given tensor"),
    ],
    ("plan", "o_data_type"): [
        (dict(o_data_type="bfloat16"), "expected torch.float32, given 'bfloat16'"),
        (dict(o_data_type=False), "expected torch.float32, given False"),
    ],
    ("plan", "sm_scale"): [(dict(sm_scale=math.nan), "finite")],
    ("plan", "non_blocking"): [(dict(non_blocking=None), "expected True or False")],
    ("plan", "fixed_split_size"): [(dict(fixed_split_size=0), "expected an integer ≥ 1, given 0")],
    ("plan", "disable_split_kv"): [
        (dict(disable_split_kv=0), "expected True or False"),
        (dict(disable_split_kv=True, fixed_split_size=2), "expected False with fixed_split_size"),
    ],
    ("plan", "q_len_per_req"): [(dict(q_len_per_req=0), "expected an integer ≥ 1, given 0")],
    ("run", "q"): [
        (dict(q=torch.ones(3, 4, DIM)), r"expected shape \[2, 4, 16\], given \[3, 4, 16\]"),
        (dict(q=torch.ones(2, 4, DIM).half()), "expected torch.float32, given torch.float16"),
    ],
    ("run", "paged_kv_cache"): [
        (dict(paged_kv_cache=torch.ones(6, 3, 4, 2, DIM)), r"expected shape \[num_pages, 2, …\]"),
        (dict(paged_kv_cache=torch.ones(6, 2, 8, 2, DIM)), r"expected shape \[num_pages, 4, 2, 16\]"),
        (dict(paged_kv_cache=[1, 2]), "expected a tensor or"),
        (dict(paged_kv_cache=torch.ones(6, 2, 4, 2, DIM).half()), "expected torch.float32"),
    ],
    ("run", "q_scale"): [(dict(q_scale=torch.ones(())), "expected a real number")],
    ("run", "k_scale"): [(dict(k_scale=math.inf), "finite")],
    ("run", "v_scale"): [(dict(v_scale="1"), "expected a real number")],
    ("run", "out"): [
        (dict(out=torch.ones(2, 4, 8)), r"expected shape \[2, 4, 16\]"),
        (dict(out=torch.ones(2, 4, DIM).half()), "expected torch.float32, given torch.float16"),
    ],
    ("run", "lse"): [(dict(lse=torch.ones(4, 2)), r"expected shape \[2, 4\]")],
    ("run", "return_lse"): [(dict(return_lse=None), "expected True or False")],
    ("run", "window_left"): [(dict(window_left=4), "expected None or -1, as planned, given 4")],
    ("run", "sinks"): [(dict(sinks=torch.ones(2)), r"expected shape \[4\]")],
    ("run", "q_len_per_req"): [(dict(q_len_per_req=2), "expected None or 1, as planned, given 2")],
    ("forward", "window_left"): [(dict(window_left=2.5), "expected an integer")],
}  # fmt: skip
ELSEWHERE = {
    ("plan", "o_data_type"): "test_outputs_may_be_float32",
    ("plan", "non_blocking"): "test_the_host_waits_for_copies_if_asked",
    ("run", "v_scale"): "test_flashinfer_with_eight_bit_caches_scales_and_sinks",
    ("run", "out"): "test_flashinfer_with_eight_bit_caches_scales_and_sinks",
    ("run", "window_left"): "test_flashinfer",
    ("run", "q_len_per_req"): "test_flashinfer",
    ("forward", "v_scale"): "test_forward_takes_rules_in_the_place_of_those_planned",
}


def test_each_argument_is_documented_and_tested() -> None:
    said = documented()
    arguments = {(of, name) for of, (_, names) in THEIRS.items() for name in names if name != "self"}
    ours = {("ours", "workspace"), ("ours", "out")}
    assert said.keys() == arguments | ours
    assert {name for of, name in said if of in ("2", "3", "ours")} == FA_HONOURED.keys() | FA_VOID.keys() | {
        name for (of, name), here in said.items() if of in ("2", "3") and here.startswith("refused")
    }
    for (of, name), here in said.items():
        fa = of in ("2", "3", "ours")
        honoured = name in FA_HONOURED if fa else (of, name) in FI_HONOURED or ELSEWHERE.get((of, name)) in globals()
        void = name in FA_VOID if fa else (of, name) in FI_VOID
        refused = name in FA_REFUSED if fa else (of, name) in FI_REFUSED
        status = here.split()[0].rstrip(";:,")
        expected_by = {"refused": (False, False, True), "void": (False, True, refused)}
        assert (honoured, void, refused) == expected_by.get(status, (True, False, refused)), (of, name)


@needs_no_gpu
@pytest.mark.parametrize("key", FI_HONOURED, ids=".".join)
def test_decode_is_told_what_flashinfer_is_given(key: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    of, _ = key
    base = FLASHINFER
    if key == ("plan", "window_right"):
        base = base.changed("plan", dict(q_len_per_req=2, run__q=torch.ones(4, 4, DIM)))
    if of == "forward":
        base = base.changed("forward", {})
    before, again, after = (
        given_to_decode(monkeypatch, use) for use in (base, base, base.changed(of, FI_HONOURED[key]))
    )
    assert before == again
    assert before != after


@needs_no_gpu
@pytest.mark.parametrize("key", FI_VOID, ids=".".join)
def test_what_means_nothing_to_flashinfers_calls(key: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = given_to_decode(monkeypatch, FLASHINFER)
    assert plain == given_to_decode(monkeypatch, FLASHINFER.changed(key[0], FI_VOID[key]))


@needs_no_gpu
@pytest.mark.parametrize("key", FI_REFUSED, ids=".".join)
def test_what_flashinfers_calls_may_not_be_given(key: tuple[str, str]) -> None:
    of, name = key
    for changes, message in FI_REFUSED[key]:
        with pytest.raises((TypeError, ValueError), match=rf"^{name}(\[\d\])?: .*{message}"):
            FLASHINFER.changed(of, changes)()


@pytest.mark.parametrize("non_blocking", [True, False])
def test_the_host_waits_for_copies_if_asked(non_blocking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    copy = Tensor.copy_

    def noted(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        told.append(non_blocking)
        return copy(self, source, non_blocking)

    monkeypatch.setattr(Tensor, "copy_", noted)
    wrapper = compat.BatchDecodeWithPagedKVCacheWrapper(SCRATCH, **BUFFERS)
    wrapper.plan(**FLASHINFER.plan, non_blocking=non_blocking)
    assert told == [non_blocking] * 3


@needs_no_gpu
def test_values_are_checked_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITKV_DEBUG", "1")
    call = small(CPU, **NEW)
    out, lse = flash_attn_with_kvcache(**call)
    kv = splitkv.ContiguousKV(call["k_cache"], call["v_cache"], ints_of(11, 6))
    testing.expect(call["q"], kv, causal=False).check(out, lse.transpose(1, 2))
    before = call["k_cache"].clone()
    with pytest.raises(ValueError, match=r"^seq_lens: .*given 13 in row 1"):
        flash_attn_with_kvcache(**call | dict(cache_seqlens=ints_of(9, 13)))
    assert torch.equal(call["k_cache"], before)
    with pytest.raises(ValueError, match=r"^max_seqlen_q: expected at least 3, as cu_seqlens_q says, given 2"):
        flash_attn_3_with_kvcache(**small(CPU, **RAGGED | dict(max_seqlen_q=2)))


def test_no_request_and_no_query_token(device: torch.device) -> None:
    caches = [torch.zeros(2, 8, 2, DIM, device=device) for _ in range(2)]
    new = [torch.empty(0, 1, 2, DIM, device=device) for _ in range(2)]
    none = torch.empty(0, dtype=torch.int32, device=device)
    q = torch.empty(0, 3, 4, DIM, device=device)
    options: dict[str, Any] = dict(window_size=(-1, 1), return_softmax_lse=True)
    out, lse = flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=none, **options)
    assert out.shape == (0, 3, 4, DIM) and lse.shape == (0, 4, 3)
    out, lse = flash_attn_3_with_kvcache(
        q.flatten(0, 1), *caches, cache_seqlens=3, cu_seqlens_q=ints([0, 0, 0], device), max_seqlen_q=0, **options
    )
    assert out.shape == (0, 4, DIM) and lse.shape == (4, 0)
    wrapper = compat.BatchDecodeWithPagedKVCacheWrapper(buffer(device))
    wrapper.plan(ints([0], device), none, none, 4, 2, DIM, 8, q_data_type=torch.float32)
    out, lse = wrapper.run(q[:, 0], tuple(caches), return_lse=True)
    assert out.shape == (0, 4, DIM) and lse.shape == (0, 4)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pages_of_one_token_need_no_dimension_for_it(layout: str, device: torch.device) -> None:
    cache, q = torch.randn(3, 2, 2, DIM, device=device), torch.randn(1, 4, DIM, device=device)
    wrapper = compat.BatchDecodeWithPagedKVCacheWrapper(buffer(device), layout)
    tables = ints([0, 3], device), ints([2, 0, 1], device), ints([1], device)
    wrapper.plan(*tables, 4, 2, DIM, 1, q_data_type=torch.float32)
    want = testing.expect(q, splitkv.PagedKV.from_csr(cache[:, 0, None], cache[:, 1, None], *tables))
    want.check(wrapper.run(q, cache))
    want.check(wrapper.run(q, (cache[:, 0], cache[:, 1])))


# What only a GPU can show.


@pytest.mark.gpu
@pytest.mark.parametrize("with_workspace", [True, False])
def test_a_graph_that_appends_and_attends_is_right_for_other_lengths(
    with_workspace: bool, device: torch.device
) -> None:
    batch, heads, page_size, columns = 3, (8, 2), 16, 40
    table = torch.randperm(batch * columns).int().view(batch, columns).to(device)
    k_cache, v_cache = torch.randn(2, batch * columns, page_size, heads[1], 64, device=device).bfloat16()
    q = torch.randn(batch, 2, heads[0], 64, device=device).bfloat16()
    new = torch.randn(2, batch, 2, heads[1], 64, device=device).bfloat16()
    lens = ints([5, 600, 0], device)
    config = splitkv.WorkspaceConfig(batch, *heads, 64, max_total_q=2 * batch)
    workspace = splitkv.Workspace.allocate(config, device) if with_workspace else None

    def call() -> Any:
        return flash_attn_with_kvcache(
            q, k_cache, v_cache, *new, cache_seqlens=lens, block_table=table, causal=True, return_softmax_lse=True,
            workspace=workspace,
        )  # fmt: skip

    call()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call()
    for now in ([5, 600, 0], [0, 0, 0], [638, 17, 15], [40, 1, 300]):
        lens.copy_(ints(now, device))
        q.normal_()
        new.normal_()
        graph.replay()
        kv = splitkv.PagedKV(k_cache, v_cache, table, ints([n + 2 for n in now], device))
        testing.expect(q, kv).check(out, lse.transpose(1, 2), now)
        for b, n in enumerate(now):
            for cache, tokens in ((k_cache, new[0]), (v_cache, new[1])):
                for t in range(2):
                    place = int(table[b, (n + t) // page_size]), (n + t) % page_size
                    assert torch.equal(cache[place], tokens[b, t])


@pytest.mark.gpu
def test_a_graph_of_run_is_right_after_the_next_plan(device: torch.device) -> None:
    heads, page_size, pages = (8, 2), 16, 120
    cache = torch.randn(pages, 2, page_size, heads[1], 64, device=device).bfloat16()
    q = torch.randn(3, heads[0], 64, device=device).bfloat16()
    buffers = [torch.zeros(n, dtype=torch.int32, device=device) for n in (4, pages, 3)]
    wrapper = compat.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(buffer(device, 2**25), *buffers)

    def plan(lens: list[int]) -> splitkv.PagedKV:
        counts = [-(-n // page_size) for n in lens]
        indptr = ints_of(0, *itertools.accumulate(counts))
        indices = torch.randperm(pages)[: sum(counts)].int()
        tails = ints_of(*(n - (count - 1) * page_size if count else 1 for n, count in zip(lens, counts, strict=True)))
        wrapper.plan(indptr, indices, tails, *heads, 64, page_size, q_data_type=torch.bfloat16)
        torch.cuda.synchronize()
        return splitkv.PagedKV.from_csr(
            cache[:, 0], cache[:, 1], *(tensor.to(device) for tensor in (indptr, indices, tails))
        )

    plan([7, 900, 16])
    wrapper.run(q, cache, return_lse=True)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = wrapper.run(q, cache, return_lse=True)
    for lens in ([7, 900, 16], [0, 0, 0], [1800, 3, 0], [17, 33, 1000]):
        kv = plan(lens)
        q.normal_()
        graph.replay()
        testing.expect(q, kv).check(out, lse / math.log2(math.e), lens)


@pytest.mark.gpu
def test_neither_call_waits_for_the_gpu(device: torch.device) -> None:
    cache = torch.randn(2, 64, 16, 2, 64, device=device).half()
    q, table, lens = torch.randn(4, 1, 8, 64, device=device).half(), torch.arange(64).int().view(4, 16).to(device), 100
    new = torch.randn(2, 4, 1, 2, 64, device=device).half()
    wrapper = compat.BatchDecodeWithPagedKVCacheWrapper(buffer(device, 2**25))
    plan = ints([0, 4, 8, 12, 16], device), table.flatten(), ints([3, 16, 1, 9], device)

    def calls() -> None:
        options: dict[str, Any] = dict(cache_seqlens=lens, cache_leftpad=plan[2], return_softmax_lse=True)
        flash_attn_with_kvcache(q, *cache, *new, block_table=table, causal=True, **options)
        flash_attn_3_with_kvcache(q.expand(-1, 4, -1, -1), *cache, page_table=table, window_size=(9, 1), **options)
        wrapper.plan(*plan, 8, 2, 64, 16)
        wrapper.run(q[:, 0], tuple(cache), return_lse=True)

    calls()  # compiles
    with no_synchronisation():
        calls()
