"""Merging partials that are not decode's own: other bases and layouts, differing counts, results in place."""

import math
from typing import Any

import pytest
import torch
from conftest import COMPILED
from hypothesis import given
from hypothesis import strategies as st
from support import ints
from test_properties import DTYPES, SEEDS, examples, partials

import splitkv
from splitkv import reference
from splitkv.testing import Expected, expect_merge, same_bits

DEVICE = torch.device("cuda" if COMPILED else "cpu")
BASES = (math.e, 2)


def swapped(lses: torch.Tensor) -> torch.Tensor:
    """The same numbers, heads last but one, in memory of that order."""
    return lses.transpose(-2, -1).contiguous()


@given(
    n=st.integers(1, 20), seed=SEEDS, dtype=st.sampled_from(DTYPES), sinks=st.booleans(), width=st.integers(1, 150),
    base=st.sampled_from(BASES), layout=st.sampled_from(("NH", "HN")),
)  # fmt: skip
@examples(15)
def test_bases_and_layouts_are_within_the_error_budget(n, seed, dtype, sinks, width, base, layout, record_ratios):
    outs, lses = partials(seed, n, 5, 3, width, dtype)
    rules: dict[str, Any] = {"sinks": torch.randn(3, device=DEVICE)} if sinks else {}
    expected = expect_merge(outs, lses, lse_base=base, **rules)
    given_lses = lses if layout == "NH" else swapped(lses)
    out, lse = splitkv.merge(outs, given_lses, lse_base=base, lse_layout=layout, **rules)
    assert lse.shape == given_lses.shape[1:]
    expected.check(out, lse if layout == "NH" else lse.transpose(-2, -1))
    record_ratios(dtype, expected.error_ratio(out))
    want = reference.merge(outs, given_lses, lse_base=base, lse_layout=layout, dtype=torch.float64, **rules)
    torch.testing.assert_close((out.double(), lse.double()), want, rtol=2e-2, atol=2e-2)


def test_a_base_is_what_weights_and_results_are_in(device):
    """Three keys of value 1 and one of value 0; mixed-up bases would give 0.829906."""
    outs = torch.tensor([[[1.0]], [[0.0]]], device=device)
    for base in BASES:
        lses = torch.tensor([[math.log(3, base)], [0.0]], device=device)
        out, lse = splitkv.merge(outs, lses, lse_base=base)
        assert out.item() == pytest.approx(0.75, rel=1e-6) and lse.item() == pytest.approx(math.log(4, base), rel=1e-6)
        sinks = torch.tensor([math.log(4)], device=device)  # natural whatever the base is
        halved, kept = splitkv.merge(outs[:, None], lses[:, None], lse_base=base, sinks=sinks)
        assert halved.item() == pytest.approx(0.375, rel=1e-6) and same_bits(kept, lse[None])


def test_heads_first_with_two_dimensions_of_rows(device):
    """As FlashAttention's [batch, heads, q_len], whose rows do not lie evenly once heads are last."""
    outs, lses = torch.randn(3, 2, 5, 4, 8, device=device), torch.randn(3, 2, 5, 4, device=device)
    want = splitkv.merge(outs, lses)
    lse = torch.full((2, 4, 5), math.nan, device=device)
    out, returned = splitkv.merge(outs, swapped(lses), lse_layout="HN", lse=lse)
    assert returned is lse
    assert same_bits(out, want[0]) and same_bits(swapped(lse), want[1])


# Differing numbers of partials.


@given(
    counts=st.lists(st.integers(0, 20), min_size=0, max_size=5), seed=SEEDS, dtype=st.sampled_from(DTYPES),
    base=st.sampled_from(BASES), layout=st.sampled_from(("NH", "HN")), sinks=st.booleans(), spare=st.integers(0, 2),
)  # fmt: skip
@examples(15)
def test_rows_of_differing_counts_are_merged_each_on_its_own(counts, seed, dtype, base, layout, sinks, spare):
    outs, lses = partials(seed, sum(counts) + spare, 1, 2, 24, dtype)
    outs, lses = outs[:, 0], lses[:, 0]
    rules: dict[str, Any] = {"lse_base": base}
    if sinks:
        rules["sinks"] = torch.randn(2, device=DEVICE)
    edges = [sum(counts[:row]) for row in range(len(counts) + 1)]
    out, lse = splitkv.merge(
        outs, lses if layout == "NH" else swapped(lses), indptr=ints(edges, DEVICE), lse_layout=layout, **rules
    )
    lse = lse if layout == "NH" else lse.transpose(0, 1)
    assert out.shape == (len(counts), 2, 24) and lse.shape == (len(counts), 2)
    for row, (first, count) in enumerate(zip(edges, counts, strict=False)):
        if count == 0:
            assert same_bits(out[row], torch.zeros_like(out[row])) and bool((lse[row] == -math.inf).all())
            continue
        alone = splitkv.merge(outs[first : first + count, None], lses[first : first + count, None], **rules)
        assert same_bits(out[row], alone[0][0]) and same_bits(lse[row], alone[1][0])
    want = reference.merge(outs, lses, indptr=ints(edges, DEVICE), dtype=torch.float64, **rules)
    torch.testing.assert_close((out.double(), lse.double()), want, rtol=2e-2, atol=2e-2)


def test_prefix_sums_that_claim_too_much_are_clamped(device):
    outs, lses = torch.randn(6, 2, 8, device=device), torch.randn(6, 2, device=device)
    wild = splitkv.merge(outs, lses, indptr=ints([-5, 2, 2**31 - 1, 7, 3], device))
    tame = splitkv.merge(outs, lses, indptr=ints([0, 2, 6, 6, 6], device))
    assert same_bits(wild[0], tame[0]) and same_bits(wild[1], tame[1])
    assert wild[0][2:].eq(0).all() and bool((wild[1][2:] == -math.inf).all())


def test_debug_mode_reads_prefix_sums_back(device, monkeypatch):
    monkeypatch.setenv("SPLITKV_DEBUG", "1")
    outs, lses = torch.randn(6, 2, 8, device=device), torch.randn(6, 2, device=device)
    splitkv.merge(outs, lses, indptr=ints([0, 2, 6], device))
    with pytest.raises(ValueError, match=r"^indptr: expected values in 0…6, given 7 in row 2"):
        splitkv.merge(outs, lses, indptr=ints([0, 2, 7], device))
    with pytest.raises(ValueError, match=r"^indptr: expected prefix sums that never fall, given 3 and then 2"):
        splitkv.merge(outs, lses, indptr=ints([0, 3, 2], device))


# Rows without keys, and numbers that are none.


@pytest.mark.parametrize("base", BASES, ids=str)
@pytest.mark.parametrize("mark", [-math.inf, math.inf])
@pytest.mark.parametrize("held", [0.0, math.nan, math.inf])
def test_a_partial_without_keys_changes_no_bit_however_it_is_marked(device, base, mark, held):
    outs, lses = torch.randn(1, 4, 2, 16, device=device), 50 * torch.randn(1, 4, 2, device=device)
    none, marks = torch.full_like(outs, held), torch.full_like(lses, mark)
    for order in ([outs, none], [none, outs], [none, none, outs, none]):
        parts = [lses if part is outs else marks for part in order]
        out, lse = splitkv.merge(torch.cat(order), torch.cat(parts), lse_base=base)
        assert same_bits(out, outs[0]) and same_bits(lse, lses[0])
    out, lse = splitkv.merge(torch.cat([none, none]), torch.cat([marks, marks]), lse_base=base)
    assert same_bits(out, torch.zeros_like(out)) and bool((lse == -math.inf).all())


@pytest.mark.parametrize("where", ["out", "lse"])
def test_a_number_that_is_none_in_a_partial_with_keys_shows(device, where):
    outs, lses = torch.ones(2, 1, 1, 16, device=device), torch.zeros(2, 1, 1, device=device)
    (outs if where == "out" else lses)[1] = math.nan
    out, lse = splitkv.merge(outs, lses)
    assert out.isnan().all()
    assert bool(lse.isnan().all()) == (where == "lse")


# In place.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [16, 100, 130, 576])
@pytest.mark.parametrize("place", [0, 2])
def test_a_result_may_take_the_place_of_a_partial(device, dtype, width, place):
    outs, lses = partials(5, 3, 4, 2, width, dtype)
    want = splitkv.merge(outs, lses)
    others = [i for i in range(3) if i != place]
    kept = outs[others].clone(), lses[others].clone()
    out, lse = splitkv.merge(outs, lses, out=outs[place], lse=lses[place])
    assert out.data_ptr() == outs[place].data_ptr() and lse.data_ptr() == lses[place].data_ptr()
    assert same_bits(out, want[0]) and same_bits(lse, want[1])
    assert same_bits(outs[others], kept[0]) and same_bits(lses[others], kept[1])


def test_a_result_may_lie_between_partials(device):
    """Partials of a row next to each other, and a place for the result among them."""
    rows = torch.randn(4, 3, 2, 16, device=device)
    lses = torch.randn(4, 2, 3, device=device)
    outs, row_lses = rows[:, 1:].transpose(0, 1), lses[:, :, :2].permute(2, 0, 1)
    want = splitkv.merge(outs.clone(), row_lses.clone())
    out, lse = splitkv.merge(outs, row_lses, out=rows[:, 0], lse=lses[:, :, 2])
    assert same_bits(out.contiguous(), want[0]) and same_bits(lse.contiguous(), want[1])


@pytest.mark.parametrize("what", ["next row", "another part's row", "other strides", "half a row on"])
def test_a_result_that_would_overwrite_what_another_row_reads_is_refused(device, what):
    memory = torch.randn(4000, device=device)
    outs, lses = memory[:384].view(3, 4, 2, 16), torch.randn(3, 4, 2, device=device)
    out = {
        "next row": memory[32:160].view(4, 2, 16),
        "another part's row": memory[160:288].view(4, 2, 16),
        "other strides": memory[:256].view(4, 4, 16)[:, :2],
        "half a row on": memory[8:136].view(4, 2, 16),
    }[what]
    before = memory.clone()
    with pytest.raises(ValueError, match=r"^out: expected memory apart from outs, or that of one of outs, given a"):
        splitkv.merge(outs, lses, out=out)
    assert same_bits(memory, before)


def test_results_that_no_partial_can_make_room_for_are_refused(device):
    outs, lses = torch.randn(6, 2, 8, device=device), torch.randn(6, 2, device=device)
    edges = ints([0, 2, 2, 6], device)
    with pytest.raises(ValueError, match=r"^out: expected memory apart from outs, given"):
        splitkv.merge(outs, lses, indptr=edges, out=outs[:3])
    with pytest.raises(ValueError, match=r"^lse: expected memory apart from lses, given"):
        splitkv.merge(outs, lses, indptr=edges, lse=lses[3:])
    # So wide that programs share a row.
    wide = torch.randn(2, 3, 1, 1100, device=device)
    with pytest.raises(ValueError, match=r"^out: expected memory apart from outs, given"):
        splitkv.merge(wide, torch.randn(2, 3, 1, device=device), out=wide[1])
    apart = torch.randn(2, 3, 1, device=device)
    expect_merge(wide, apart).check(*splitkv.merge(wide, apart, out=torch.full_like(wide[0], math.nan)))


# Laws.


@pytest.mark.parametrize("base", BASES, ids=str)
def test_float32_partials_make_a_result_that_is_rounded_once(device, base):
    outs, lses = partials(3, 4, 5, 2, 40, torch.float32)
    for dtype in (torch.float16, torch.bfloat16):
        out = torch.full(outs.shape[1:], math.nan, dtype=dtype, device=device)
        splitkv.merge(outs, lses, lse_base=base, out=out)
        assert same_bits(out, splitkv.merge(outs, lses, lse_base=base)[0].to(dtype))


@given(counts=st.lists(st.integers(1, 4), min_size=1, max_size=5), seed=SEEDS, base=st.sampled_from(BASES))
@examples(8)
def test_any_grouping_and_order_of_merges_agrees(counts, seed, base):
    """Merged in groups, then the groups' results, by one ragged call each: associative; shuffled: commutative."""
    n = sum(counts)
    outs, lses = partials(seed, n, 1, 2, 16, torch.float32)
    expected: Expected = expect_merge(outs, lses, lse_base=base)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    edges = [sum(counts[:group]) for group in range(len(counts) + 1)]
    flat_outs, flat_lses = outs[order, 0], lses[order, 0]
    grouped = splitkv.merge(flat_outs, flat_lses, indptr=ints(edges, DEVICE), lse_base=base)
    whole = splitkv.merge(*grouped, indptr=ints([0, len(counts)], DEVICE), lse_base=base)
    expected.check(*whole)
