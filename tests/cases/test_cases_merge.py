"""Merging and empty work: what a part, a row or a request without keys does to the rest."""

import dataclasses
import math

import pytest
import torch
from support import (
    DEFAULT,
    GARBAGE,
    WHOLE,
    Cut,
    assert_cut,
    assert_rows,
    assert_values,
    attend,
    each_way,
    index_probe,
    ints,
    view_of,
)

import splitkv
from splitkv import tiles as tile_sizes
from splitkv.testing import same_bits

INF = math.inf


@pytest.mark.parametrize("dead", [0.0, math.nan])
def test_minus_infinity_minus_minus_infinity(device, dead):
    """Case 1: (0, -inf) merged with itself is itself, and with another is the other, whatever a dead one holds."""
    outs = torch.full((2, 1, 2), dead, device=device)
    lses = torch.full((2, 1), -INF, device=device)
    out, lse = splitkv.merge(outs, lses, out=torch.full((1, 2), math.nan, device=device))
    assert torch.equal(out, torch.zeros_like(out)) and (lse == -INF).all()
    outs[1, 0], lses[1, 0] = torch.tensor([1.0, 2.0]), 0.5
    for order in ([0, 1], [1, 0]):
        out, lse = splitkv.merge(outs[order], lses[order])
        assert out.tolist() == [[1.0, 2.0]] and lse.tolist() == [0.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_minus_infinity_is_the_exact_identity(device, dtype):
    """Case 1: the merge identity keeps the other partial's bits, of outputs and of any lse."""
    outs = torch.randn(3, 16, 2, 16, device=device).to(dtype)
    lses = 30 * torch.randn(3, 16, 2, device=device)
    lses[0], lses[2] = -INF, -INF
    out, lse = splitkv.merge(outs, lses)
    assert same_bits(out, outs[1]) and same_bits(lse, lses[1])


@each_way(tokens=1)
@pytest.mark.parametrize("given", [False, True], ids=["workspace", "given"])
def test_empty_rows(device, cut, layout, given):
    """Case 2: a request without keys, its page ids all -1, gives exactly 0 and -inf and leaves its neighbours alone."""
    lens = [3, 0, 5]
    kv = view_of(layout, *index_probe(device, 3, 5), lens)
    if layout in ("paged", "hnd"):
        assert (kv.page_table[1] == -1).all()
    result = attend(torch.randn(3, 2, 16, device=device), kv, cut, given=given)
    assert_cut(result, cut, *lens)
    assert_rows(result, [[1.0], [0.0], [2.0]], [[math.log(3)], [-INF], [math.log(5)]])


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_splits_without_work(device, layout):
    """Case 3: parts left of a window, or more parts than keys, weigh nothing, whatever the workspace held."""
    q = torch.randn(1, 1, 16, device=device)
    kv = view_of(layout, *index_probe(device, 1, 64), [64])
    for cut in (Cut(num_splits=8), Cut(split_tokens=8), WHOLE):
        first = None
        for garbage in GARBAGE:
            result = attend(q, kv, cut, window_left=3, garbage=garbage)
            assert result.written == (0 if cut == WHOLE else 8)
            assert_rows(result, 61.5, math.log(4))
            first = first or result
            assert same_bits(result.out, first.out) and same_bits(result.lse, first.lse)
    kv = view_of(layout, *index_probe(device, 1, 3), [3])
    result = attend(q, kv, Cut(num_splits=8))
    assert (result.parts, result.written) == (3, 8)
    assert_rows(result, 1.0, math.log(3))


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
@pytest.mark.parametrize("cut", [WHOLE, Cut(num_splits=2), Cut(split_tokens=64)], ids=str)
def test_one_token_past_a_tile(device, layout, cut, monkeypatch):
    """Case 3: the last block of keys, and the last part, holds a single one."""
    choose = tile_sizes.choose
    monkeypatch.setattr(
        tile_sizes, "choose", lambda *args, **how: dataclasses.replace(choose(*args, **how), block_n=64, num_stages=1)
    )
    kv = view_of(layout, *index_probe(device, 1, 65), [65])
    result = attend(torch.randn(1, 1, 16, device=device), kv, cut)
    assert_cut(result, cut, 65)
    assert_rows(result, 32.0, math.log(65))


@each_way(tokens=1)
def test_more_queries_than_keys(device, cut, layout):
    """Case 4: query tokens that stand before the first key see nothing."""
    kv = view_of(layout, *(t + 1 for t in index_probe(device, 1, 2)), [2])
    result = attend(torch.zeros(1, 4, 1, 16, device=device), kv, cut)
    assert_cut(result, cut, 2)
    assert_rows(result, [[[0.0], [0.0], [1.0], [1.5]]], [[[-INF], [-INF], [0.0], [math.log(2)]]])


@each_way(tokens=1, splits=2)
def test_lse_base(device, cut, layout):
    """Case 5: the lse is natural, from any launch, so that results of several calls can be merged."""
    q = torch.randn(1, 1, 16, device=device)
    ones = torch.ones(1, 3, 1, 16, device=device)
    three = attend(q, view_of(layout, 0 * ones, ones, [3]), cut)
    one = attend(q, view_of(layout, 0 * ones, 0 * ones, [1]), cut)
    assert_cut(three, cut, 3)
    assert_rows(three, 1.0, math.log(3))
    assert_rows(one, 0.0, 0.0)
    out, lse = splitkv.merge(torch.stack([three.out, one.out]), torch.stack([three.lse, one.lse]))
    assert_values(out, 0.75)
    assert_values(lse, math.log(4))


@pytest.mark.parametrize("counts", [(1, 2, 3, 4, 5, 6, 7, 8), (9, 16, 17, 31), (32, 33), (64,)], ids=str)
def test_split_count(device, counts):
    """Case 6: any number of splits gives the same, paged and contiguous in turn.

    Edges of other counts than these, past every power of two, are held to plain arithmetic in test_schedule.py.
    """
    q = torch.randn(1, 2, 16, device=device)
    probe = index_probe(device, 1, 300)
    views = [view_of("paged", *probe, [300], page_size=16), view_of("contiguous", *probe, [300])]
    for n in counts:
        result = attend(q, views[n % 2], Cut(num_splits=n))
        assert result.parts == (n if n > 1 else 0)
        assert_rows(result, 149.5, math.log(300))


@pytest.mark.parametrize("layout", ["paged", "contiguous", "ragged", "csr", "hnd"])
def test_split_count_by_default(device, layout):
    """Case 6: the default schedule cuts a long sequence, and gives the same."""
    kv = view_of(layout, *index_probe(device, 1, 300), [300], page_size=16)
    result = attend(torch.randn(1, 2, 16, device=device), kv, DEFAULT)
    assert result.parts >= 3
    assert_rows(result, 149.5, math.log(300))


@pytest.mark.parametrize(("cut", "layout"), [(WHOLE, "paged"), (WHOLE, "contiguous"), (Cut(num_splits=3), "paged"),
                                             (Cut(split_tokens=1), "contiguous")], ids=str)  # fmt: skip
@pytest.mark.parametrize("shared_as", ["rows", "queries"])
def test_shared_prefix(device, cut, layout, shared_as):
    """Case 7: two requests share a prefix: pass over it, pass over the suffixes, merge, in either order."""
    q = torch.randn(2, 1, 16, device=device)
    k, v = index_probe(device, 1, 11)

    def over_shared(first: int, last: int):
        # The shared keys are one row of the cache for both requests, or both are query tokens of one request.
        tokens = k[:, first:last], v[:, first:last]
        if shared_as == "queries":
            result = attend(q[None, :, 0, None], view_of(layout, *tokens, [last - first]), cut, causal=False)
            return result.out[0], result.lse[0], result
        kv = view_of(layout, *tokens, [last - first])
        rows = ints([0, 0], device)
        lens = ints([last - first] * 2, device)
        if layout == "paged":
            kv = splitkv.PagedKV(kv.k, kv.v, kv.page_table, lens, rows=rows)
        else:
            kv = splitkv.ContiguousKV(kv.k, kv.v, lens, rows=rows)
        result = attend(q, kv, cut)
        return result.out, result.lse, result

    suffix = attend(q, view_of(layout, *(t[:, 8:].expand(2, -1, -1, -1) for t in (k, v)), [0, 3]), cut)
    assert_rows(suffix, [[0.0], [9.0]], [[-INF], [math.log(3)]])
    want_out = torch.tensor([3.5, 5.0])[:, None, None]
    want_lse = torch.tensor([math.log(8), math.log(11)], dtype=torch.float64)[:, None]
    for levels in ([(0, 8)], [(0, 5), (5, 8)]):
        partials = [over_shared(*level) for level in levels]
        for (first, last), (_, _, result) in zip(levels, partials, strict=True):
            assert_cut(result, cut, last - first)
        partials.append((suffix.out, suffix.lse, suffix))
        for order in (partials, partials[::-1]):
            out, lse = splitkv.merge(torch.stack([p[0] for p in order]), torch.stack([p[1] for p in order]))
            assert_values(out, want_out)
            assert_values(lse, want_lse)
        # And one after another: the result of a merge is a partial like any other.
        out, lse = partials[-1][:2]
        for level_out, level_lse, _ in partials[:-1]:
            out, lse = splitkv.merge(torch.stack([out, level_out]), torch.stack([lse, level_lse]))
        assert_values(out, want_out)
        assert_values(lse, want_lse)


@each_way(tokens=8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_lse_asked_for(device, cut, layout, dtype):
    """Case 8: asking for the lse changes no bit of the output, and the lse is float32 whatever the queries are."""
    lens = [37, 5]
    k, v = index_probe(device, 2, 37, dtype=dtype)
    kv = view_of(layout, k, v + torch.rand_like(v), lens)
    q = torch.randn(2, 3, 16, device=device).to(dtype)
    asked = attend(q, kv, cut)
    assert_cut(asked, cut, *lens)
    assert_values(asked.lse, [[math.log(37)], [math.log(5)]])
    workspace = asked.scratch.workspace
    workspace.out.fill_(math.nan)
    workspace.lse.fill_(-1.0)
    out = splitkv.decode(q, kv, workspace, sm_scale=1.0, num_splits=cut.num_splits)
    assert same_bits(out, asked.out)
    assert (workspace.lse == -1.0).all(), "written although not asked for"
