"""Whole problems against the reference, and the laws that no reference is needed for.

Hypothesis draws sizes and a seed; the seed decides the rest, so that a failure is replayed by the one line it prints.
Under Triton's interpreter a problem takes about half a second, which bounds the number of examples.
"""

import dataclasses
import math
import os
from itertools import pairwise

import pytest
import torch
from conftest import COMPILED
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import splitkv
from splitkv import reference
from splitkv.api import plan_decode
from splitkv.config import cdiv
from splitkv.schedule import Partition, Request
from splitkv.testing import (
    Expected,
    Guarded,
    PoisonedWorkspace,
    Problem,
    expect,
    expect_merge,
    make_problem,
    map_scales,
    same_bits,
    same_computation,
)

DEVICE = torch.device("cuda" if COMPILED else "cpu")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CACHES = (None, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
SEEDS = st.integers(0, 2**32 - 1)


def examples(count: int) -> settings:
    """So many examples, or as many as the profile allows."""
    count = min(count, settings().max_examples)
    return settings(max_examples=count, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def problems(draw: st.DrawFn, most_tokens: int = 140, **fixed: object) -> Problem:
    """Small problems; what is not fixed and no size follows from the seed."""
    sizes = dict(
        batch=draw(st.integers(1, 3)),
        num_kv_heads=draw(st.integers(1, 2)),
        group_size=draw(st.integers(1, 5)),
        head_dim=draw(st.integers(1, 20) | st.sampled_from([32, 59, 64, 96, 128, 160])),
        max_len=draw(st.integers(1, most_tokens)),
        page_size=draw(st.integers(1, 20) | st.just(64)),
        q_len=draw(st.integers(1, 3)),
    )
    return make_problem(draw(SEEDS), device=DEVICE, **{**sizes, **fixed})


@dataclasses.dataclass
class Result:
    out: torch.Tensor
    lse: torch.Tensor
    scratch: PoisonedWorkspace

    def same_bits(self, other: "Result") -> bool:
        return same_bits(self.out, other.out) and same_bits(self.lse, other.lse)


def attend(problem: Problem, garbage: str = "nan", **changes: object) -> Result:
    scratch = PoisonedWorkspace(problem.config, DEVICE, garbage, problem.seed)
    out, lse = problem.decode(scratch.workspace, **changes)
    scratch.check_guards()
    return Result(out.clone(), lse.clone(), scratch)


def partial_rows(problem: Problem, num_splits: int | None = None) -> int:
    """How many rows of partials a problem with forced parts or fixed split tokens needs, in plain arithmetic."""
    split_tokens, most = problem.config.split_tokens, problem.config.max_parts
    total = 0
    for n, q_len in zip(problem.lens, problem.q_lens, strict=True):
        if num_splits is not None:
            parts = num_splits
        else:
            parts = max(1, cdiv(n, split_tokens * max(1, cdiv(cdiv(n, split_tokens), most))))
        total += q_len * problem.config.num_q_heads * (parts if parts > 1 else 0)
    return total


def written_rows(result: Result) -> int:
    return int(result.scratch.written("partial_lse").sum())


def assert_cut(result: Result, problem: Problem) -> None:
    """With fixed split tokens there is a partial for every part of every tile that has several (and room for more)."""
    needed, written = partial_rows(problem), written_rows(result)
    assert written >= needed and (written > 0) == (needed > 0)


# Against the reference.


@given(problem=problems())
@examples(30)
def test_any_problem_is_within_the_error_budget(problem, record_ratios):
    expected = problem.expected()
    result = attend(problem)
    expected.check(result.out, result.lse, problem)
    record_ratios(problem.q.dtype, expected.error_ratio(result.out), expected.lse_error_ratio(result.lse))


@st.composite
def extends(draw: st.DrawFn) -> Problem:
    """Chunks of query tokens that fill several query tiles, with every rule there is, each on or off."""
    pick = st.sampled_from
    several = draw(st.booleans())
    batch = draw(st.integers(1, 3))
    q_lens = [draw(st.integers(6, 20)), *(draw(st.integers(0, 4)) for _ in range(batch - 1))]
    sizes = dict(
        query="several" if several else "ragged",
        q_len=draw(st.integers(6, 12)),
        q_lens=None if several else draw(st.permutations(q_lens)),
        batch=batch,
        group_size=draw(st.integers(3, 6)),
        num_kv_heads=1,
        head_dim=draw(pick([16, 24])),
        max_len=draw(st.integers(1, 90)),
        q_tile_rows=16,
    )
    rules = dict(
        mask=draw(pick(["causal", "full", "tree"])),
        window_left=draw(pick([None, 0, 3, 30])),
        softcap=draw(pick([None, 2.0])),
        sinks=draw(pick([None, "float32", "same"])),
        alibi=draw(st.booleans()),
        kv_start=draw(st.booleans()),
    )
    cuts = dict(
        num_splits=draw(pick([None, 1, 3])), split_tokens=draw(pick([None, 16])), max_splits=draw(pick([None, 9]))
    )
    return make_problem(draw(SEEDS), device=DEVICE, dtype=draw(pick(DTYPES)), **sizes, **rules, **cuts)


@given(problem=extends())
@examples(15)
def test_any_extend_is_within_the_error_budget(problem, record_ratios):
    tiles = [cdiv(n * problem.config.group_size, 16) for n in problem.q_lens]
    assert max(tiles) > 1
    expected = problem.expected()
    result = attend(problem)
    expected.check(result.out, result.lse, problem)
    record_ratios(problem.q.dtype, expected.error_ratio(result.out), expected.lse_error_ratio(result.lse))


@pytest.mark.parametrize(
    ("rows", "mask", "window_left", "num_splits", "more"),
    [
        (64, "causal", None, None, {}),
        (128, "causal", 50, 1, {}),
        (128, "full", 50, 1, {}),
        (64, "tree", None, None, {}),
        (64, "causal", 50, 1, dict(page_size=3)),
        (64, "causal", None, 1, dict(kv_start=True, kind="csr", page_size=3, head_dim_v=16, sinks="float32")),
        (64, "full", None, 1, dict(kv_start=True, kind="ragged", head_dim_v=16, alibi=True)),
        (64, "tree", 50, 2, dict(kv_start=True, layout="HND", head_dim_v=16, softcap=2.0)),
    ],
)
def test_chunks_in_tall_tiles(rows, mask, window_left, num_splits, more):
    """With blocks that are seen whole, blocks at the edges of what is seen, and draft tokens over several blocks."""
    q_len = 150 if COMPILED else 20
    form = dict(
        dtype=torch.bfloat16, cache=None, kind="paged", layout="NHD", kv_strides="contiguous", page_size=16,
        lens=(2000, 700, q_len) if COMPILED else (150, 70, q_len), query="several", q_len=q_len, num_kv_heads=1,
        group_size=4, head_dim=128 if COMPILED else 32, head_dim_v=None, mask=mask, window_left=window_left,
        q_tile_rows=rows, num_splits=num_splits, split_tokens=None, max_splits=None, kv_start=False,
    )  # fmt: skip
    problem = make_problem(8, device=DEVICE, **{**form, **more})
    result = attend(problem)
    problem.expected().check(result.out, result.lse, problem)


@pytest.mark.parametrize("ragged", [False, True])
def test_tokens_past_the_last_whole_group_of_a_merge_are_merged(ragged):
    """Where most tiles are whole a program of the merge looks at several tokens; here the last one's tile is cut."""
    lens, q_len = (70, 70, 900), 67
    problem = make_problem(
        6, device=DEVICE, dtype=torch.float16, cache=None, kind="paged", page_size=16, layout="NHD", lens=lens,
        kv_strides="contiguous", query="ragged" if ragged else "several", q_len=q_len, q_lens=[q_len] * 3,
        num_kv_heads=88 if COMPILED else 5, group_size=2, head_dim=16, head_dim_v=None, mask="full", window_left=None,
        q_tile_rows=128, num_splits=None, split_tokens=None, max_splits=None, kv_start=False, clamped=False, front=0,
        spare=0,
    )  # fmt: skip
    result = attend(problem)
    problem.expected().check(result.out, result.lse, problem)
    split, merge = plan_decode(problem.q, problem.kv, problem.workspace(), num_splits=None, **problem.rules).launches
    partition = Partition.of_launch(split.operands, split.constants)
    assert merge.constants["TOKENS"] > 1 and 3 * q_len % merge.constants["TOKENS"] == 1
    assert partition.merged_slots(2, 1, [Request(n, q_len) for n in lens])


@pytest.mark.parametrize("q_len", [1, 33])
@pytest.mark.parametrize("sm_scale", [0.4, 0.0, -0.4])
def test_a_scale_may_have_any_sign(q_len, sm_scale):
    """One below 0 turns the order of the scores, and of 0 all keys weigh the same."""
    problem = make_problem(
        2, device=DEVICE, dtype=torch.float16, cache=None, kind="paged", lens=(70, 40), q_len=q_len,
        query="several" if q_len > 1 else "one", mask="causal", window_left=None, num_kv_heads=1, group_size=2,
        head_dim=16, head_dim_v=None, q_tile_rows=64,
    )  # fmt: skip
    out, lse = splitkv.decode_with_lse(problem.q, problem.kv, problem.workspace(), sm_scale=sm_scale)
    expect(problem.q, problem.kv, sm_scale=sm_scale).check(out, lse, problem)


@pytest.mark.parametrize("kind", ["paged", "csr", "contiguous", "ragged"])
def test_decode_rows_and_chunks_in_one_call(kind):
    """Lengths from 0 up mixed in a batch, each request's rows those of a call of its own, bit by bit."""
    problem = make_problem(
        5, device=DEVICE, kind=kind, query="ragged", q_lens=[1, 0, 13, 1, 4], lens=[40, 9, 30, 0, 3], group_size=3,
        num_kv_heads=1, head_dim=16, mask="causal", window_left=9, softcap=None, sinks="float32", alibi=True,
        kv_start=False, clamped=False, num_splits=None, split_tokens=16, max_parts=4, q_tile_rows=16, front=0, spare=2,
    )  # fmt: skip
    result = attend(problem)
    assert_cut(result, problem)
    problem.expected().check(result.out, result.lse, problem)
    rows = rows_of(problem, result.out), rows_of(problem, result.lse)
    assert [len(out) for out in rows[0]] == [1, 0, 13, 1, 4]
    for b in range(5):
        alone = problem.select([b])
        again = attend(alone)
        for whole, own in zip(rows, (again.out, again.lse), strict=True):
            assert same_bits(whole[b], rows_of(alone, own)[0]), b


@pytest.mark.gpu
@pytest.mark.slow
@given(
    seed=SEEDS,
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    batch=st.integers(1, 40),
    max_len=st.integers(1, 20000),
    head_dim=st.sampled_from([64, 128]),
    group_size=st.sampled_from([1, 4, 7]),
)
@settings(examples(25), max_examples=int(os.environ.get("SPLITKV_TEST_EXAMPLES", "25")))
def test_any_large_problem_is_within_the_error_budget(seed, dtype, batch, max_len, head_dim, group_size, record_ratios):
    """Longer and wider than the interpreter can; few widths and groups, so that compiled kernels serve several.

    Each example compiles a kernel or two, for a second each: SPLITKV_TEST_EXAMPLES=300 is for long runs.
    """
    sizes = dict(dtype=dtype, batch=batch, max_len=max_len, head_dim=head_dim, group_size=group_size, head_dim_v=None)
    problem = make_problem(seed, device=DEVICE, **sizes)
    expected = problem.expected()
    result = attend(problem)
    expected.check(result.out, result.lse, problem)
    record_ratios(problem.q.dtype, expected.error_ratio(result.out), expected.lse_error_ratio(result.lse))


# What is written, and what is not (K1, K6).


@given(problem=problems(), given_outputs=st.booleans())
@examples(12)
def test_every_row_of_the_call_is_written_and_nothing_else(problem, given_outputs):
    scratch = PoisonedWorkspace(problem.config, DEVICE)
    shape = (*problem.q.shape[:-1], problem.kv.head_dim_v)
    before = {name: tensor.clone() for name, tensor in problem.inputs().items()}
    rows, width = math.prod(shape[:-1]), shape[-1]
    if given_outputs:
        out = Guarded(shape, problem.q.dtype, DEVICE, padding=problem.seed % 9, shift=problem.seed % 2)
        lse = Guarded(shape[:-1], torch.float32, DEVICE, padding=problem.seed % 3, step=1 + problem.seed % 2)
        unwritten = out.tensor.clone(), lse.tensor.clone()
        returned = problem.decode(scratch.workspace, out=out.tensor, lse=lse.tensor)
        assert returned[0] is out.tensor and returned[1] is lse.tensor
        out.check_guards()
        lse.check_guards()
        for tensor, poison in zip(returned, unwritten, strict=True):
            integers = torch.int16 if tensor.element_size() == 2 else torch.int32
            assert bool((tensor.contiguous().view(integers) != poison.contiguous().view(integers)).all())
        assert not scratch.written("out").any() and not scratch.written("lse").any()
    else:
        returned = problem.decode(scratch.workspace)
        for name, count in (("out", rows * width), ("lse", rows)):
            written = scratch.written(name).flatten()
            assert bool(written[:count].all()) and not bool(written[count:].any())
    scratch.check_guards()
    for name, tensor in problem.inputs().items():
        assert same_bits(tensor, before[name]), f"{name} was written"
    problem.expected().check(*returned, problem)


@given(problem=problems(query="ragged", front=2, max_len=20))
@examples(5)
def test_rows_of_no_request_are_zero(problem):
    first, *_, last = problem.rules["qo_indptr"].tolist()
    result = attend(problem)
    for nobodys in (slice(0, first), slice(last, None)):
        assert bool((result.out[nobodys] == 0).all()) and bool((result.lse[nobodys] == -math.inf).all())


@given(problem=problems(max_len=40))
@examples(4)
def test_without_asking_for_it_no_lse_is_written(problem):
    scratch = PoisonedWorkspace(problem.config, DEVICE)
    out = splitkv.decode(problem.q, problem.kv, scratch.workspace, **problem.rules)
    assert same_bits(out, attend(problem).out)
    assert not scratch.written("lse").any()


# Splitting.


@given(problem=problems(num_splits=16, split_tokens=None, max_len=100), counts=st.sets(st.integers(2, 16), max_size=2))
@examples(6)
def test_any_number_of_splits_agrees(problem, counts):
    expected = problem.expected()
    for count in (1, *sorted(counts), 3, None):
        result = attend(problem, num_splits=count)
        if count is not None:
            # Every tile is in so many parts, empty ones included.
            assert written_rows(result) == partial_rows(problem, count)
        expected.check(result.out, result.lse, f"num_splits={count} {problem}")


@given(problem=problems(num_splits=None), split_tokens=st.integers(1, 40), max_parts=st.integers(2, 9))
@examples(6)
def test_fixed_split_tokens_agree(problem, split_tokens, max_parts):
    config = dataclasses.replace(problem.config, split_tokens=split_tokens, max_parts=max_parts, max_splits=None)
    problem = dataclasses.replace(problem, config=config)
    result = attend(problem)
    assert_cut(result, problem)
    problem.expected().check(result.out, result.lse, problem)


def test_the_default_schedule_cuts_a_long_sequence_and_leaves_short_ones_whole():
    choices = dict(num_splits=None, split_tokens=None, max_splits=None, query="one", window_left=None, kv_start=False)
    problem = make_problem(
        0,
        device=DEVICE,
        lens=(3000 if COMPILED else 600, 40, 0),
        num_kv_heads=2,
        group_size=2,
        mask="causal",
        head_dim=64,
        **choices,
    )
    result = attend(problem)
    rows_of_one_part = problem.config.group_size * problem.config.num_kv_heads
    assert written_rows(result) % rows_of_one_part == 0
    assert written_rows(result) // rows_of_one_part >= 3
    problem.expected().check(result.out, result.lse, problem)


@given(seed=SEEDS, dtype=st.sampled_from(DTYPES), cache=st.sampled_from(CACHES), edge=st.integers(0, 60))
@examples(8)
def test_merged_halves_are_the_whole(seed, dtype, cache, edge):
    """Attention to two stretches of keys, merged, is attention to both."""
    heads = dict(num_kv_heads=2, group_size=2, head_dim=32, head_dim_v=None, softcap=None, sinks=None, alibi=False)
    problem = make_problem(
        seed, device=DEVICE, dtype=dtype, kind="contiguous", lens=(60, 60), query="one", mask="full", window_left=None,
        kv_start=False, clamped=False, rows=False, alias_v=False, split_tokens=None, num_splits=2, cache=cache, **heads,
    )  # fmt: skip
    halves = [slice(0, edge), slice(edge, 60)]

    def half(stretch: slice, kv: splitkv.kv.KVView) -> splitkv.ContiguousKV:
        # At least one token lies in the cache, also where none counts.
        first = min(stretch.start, 59)
        here = slice(first, max(stretch.stop, first + 1))
        lens = torch.full((2,), stretch.stop - stretch.start, dtype=torch.int32, device=DEVICE)
        scales = dict(map_scales(kv, lambda scale: scale[:, here]))
        return splitkv.ContiguousKV(kv.k[:, here], kv.v[:, here], lens, **scales)

    results = [attend(dataclasses.replace(problem, kv=half(stretch, problem.kv))) for stretch in halves]
    outs, lses = torch.stack([result.out for result in results]), torch.stack([result.lse for result in results])
    # The same computation in PyTorch rounds as often, each partial once and what they are merged to; in several orders.
    same = []
    for order in range(16):
        parts = [same_computation(problem.q, half(stretch, problem.kv), order, **problem.rules) for stretch in halves]
        same.append(reference.merge(*(torch.stack(each) for each in zip(*parts, strict=True)))[0])
    whole = problem.expected()
    expected = Expected.of(whole.out, whole.lse, same, whole.lse_absolute, whole.lse_relative)
    expected.check(*splitkv.merge(outs, lses), problem)


# Merging.


def partials(seed: int, n: int, rows: int, heads: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Partial results with log-sum-exps of any size, some of them of no key at all; what these hold is NaN."""
    generator = torch.Generator().manual_seed(seed)
    outs = torch.randn(n, rows, heads, width, generator=generator).to(dtype)
    lses = torch.randn(n, rows, heads, generator=generator) * 10.0 ** (seed % 4 - 1)
    dead = torch.rand(n, rows, heads, generator=generator) < 0.2
    outs[dead] = math.nan
    lses[dead] = -math.inf
    return outs.to(DEVICE), lses.to(DEVICE)


SIZES = dict(seed=SEEDS, rows=st.integers(1, 3), heads=st.integers(1, 3), width=st.integers(1, 150))


@given(n=st.integers(1, 40), dtype=st.sampled_from(DTYPES), sinks=st.booleans(), **SIZES)
@examples(15)
def test_merge_is_within_the_error_budget(n, dtype, sinks, seed, rows, heads, width, record_ratios):
    outs, lses = partials(seed, n, rows, heads, width, dtype)
    rules = {"sinks": lses[0, 0].nan_to_num(neginf=0.0).clone()} if sinks else {}
    expected = expect_merge(outs, lses, **rules)
    out, lse = splitkv.merge(outs, lses, **rules)
    expected.check(out, lse)
    record_ratios(dtype, expected.error_ratio(out), expected.lse_error_ratio(lse))


@given(n=st.integers(2, 9), **SIZES)
@examples(8)
def test_merge_is_associative_and_commutative(n, seed, rows, heads, width):
    outs, lses = partials(seed, n, rows, heads, width, torch.float32)
    expected = expect_merge(outs, lses)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    expected.check(*splitkv.merge(outs[order], lses[order]), what="another order")
    out, lse = outs[0].nan_to_num(0.0), lses[0]
    for i in range(1, n):
        out, lse = splitkv.merge(torch.stack([out, outs[i]]), torch.stack([lse, lses[i]]))
    expected.check(out, lse, "from the left")
    half = n // 2
    pair = [splitkv.merge(outs[:half], lses[:half]), splitkv.merge(outs[half:], lses[half:])]
    expected.check(*splitkv.merge(torch.stack([pair[0][0], pair[1][0]]), torch.stack([pair[0][1], pair[1][1]])))


@given(dtype=st.sampled_from(DTYPES), place=st.integers(0, 3), **SIZES)
@examples(10)
def test_merging_with_nothing_changes_no_bit(dtype, place, seed, rows, heads, width):
    outs, lses = partials(seed, 1, rows, heads, width, dtype)
    alone = outs[0].masked_fill(lses[0, ..., None] == -math.inf, 0.0)
    none, nothing = (
        torch.zeros_like(outs).expand(3, *outs.shape[1:]),
        torch.full_like(lses, -math.inf).expand(3, rows, -1),
    )
    out, lse = splitkv.merge(
        torch.cat([none[:place], outs, none[place:]]), torch.cat([nothing[:place], lses, nothing[place:]])
    )
    assert same_bits(out, alone) and same_bits(lse, lses[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_rounded_to_nearest(dtype):
    """Two partials of one weight: their mean is exact in float32, so that the bits of the result are known."""
    outs = torch.randn(2, 4, 3, 64, generator=torch.Generator().manual_seed(5)).to(dtype).to(DEVICE)
    out, _ = splitkv.merge(outs, torch.zeros(2, 4, 3, device=DEVICE))
    assert same_bits(out, (outs.float().sum(dim=0) / 2).to(dtype))


# Laws of attention.


@given(problem=problems(alias_v=False, sinks=None, max_len=60, cache=None))
@examples(8)
def test_constant_values_are_returned(problem):
    v = problem.kv.v
    generator = torch.Generator().manual_seed(problem.seed)
    constant = torch.randn(problem.kv.num_kv_heads, v.shape[-1], generator=generator).to(v.dtype).to(DEVICE)
    # [heads, width] beside the tokens of the layout; slots that nothing sees keep their NaN.
    spread = constant[:, None] if getattr(problem.kv, "layout", "NHD") == "HND" else constant
    v.copy_(torch.where(v.isfinite(), spread.expand_as(v), v))
    expected = problem.expected()
    by_head = constant.repeat_interleave(problem.config.group_size, dim=0).double()
    returned = by_head.expand_as(expected.out).masked_fill((expected.lse == -math.inf)[..., None], 0.0)
    result = attend(problem)
    dataclasses.replace(expected, out=returned).check(result.out, result.lse, problem)


@given(problem=problems(max_len=60), kind=st.sampled_from(["paged", "csr", "latent"]), seed=SEEDS)
@examples(6)
def test_pages_elsewhere_change_no_bit(problem, kind, seed):
    problem = make_problem(problem.seed, device=DEVICE, **{**problem.given, "kind": kind})
    assert attend(problem.relabelled(seed)).same_bits(attend(problem))


@given(problem=problems(max_len=40, q_len=2), poison=st.sampled_from(["nan", "inf"]))
@examples(5)
def test_garbage_changes_no_bit(problem, poison):
    """Neither what slots hold that nothing sees, nor what the workspace held, nor a call before."""
    first = attend(problem)
    assert attend(problem, garbage="garbage").same_bits(first)
    dirty = make_problem(problem.seed, device=DEVICE, **{**problem.given, "poison": poison})
    clean = make_problem(problem.seed, device=DEVICE, **{**problem.given, "poison": "zero"})
    assert attend(dirty).same_bits(attend(clean))
    again, lse = problem.decode(first.scratch.workspace)
    assert same_bits(again, first.out) and same_bits(lse, first.lse)


def rows_of(problem: Problem, tensor: torch.Tensor) -> list[torch.Tensor]:
    """A result's rows by request."""
    if "qo_indptr" not in problem.rules:
        return list(tensor)
    return [tensor[first:last] for first, last in pairwise(problem.rules["qo_indptr"].tolist())]


@given(
    problem=problems(num_splits=None, split_tokens=16, max_parts=3, spare=4, batch=3),
    order=st.lists(st.integers(0, 2), min_size=1, max_size=4),
)
@examples(8)
def test_with_split_tokens_the_rest_of_the_batch_changes_no_bit(problem, order):
    """K8: alone, among others, elsewhere in the batch, several times: a request's rows keep their bits."""
    if sum(problem.q_lens[b] for b in order) > problem.config.max_total_q:
        order = order[:1]
    alone = attend(problem)
    moved = problem.select(order)
    result = attend(moved)
    assert_cut(result, moved)
    for name in ("out", "lse"):
        before, after = rows_of(problem, getattr(alone, name)), rows_of(moved, getattr(result, name))
        for place, b in enumerate(order):
            assert same_bits(after[place], before[b]), f"{name} of request {b} at {place} of {order}: {problem}"


@given(problem=problems(num_splits=None, split_tokens=16, max_parts=3, clamped=False, max_len=100))
@examples(6)
def test_with_split_tokens_the_capacity_and_hints_change_no_bit(problem):
    """K8: a larger cache and a wider table, other memory for them, and another guess of the length."""
    kv, first = problem.kv, attend(problem)
    hint = {"kv_start": kv.kv_start, "len_hint": 100_000}
    dim = 1 if isinstance(kv, splitkv.ContiguousKV) else 0
    hint |= map_scales(kv, lambda scale: wider(scale, dim))
    if isinstance(kv, splitkv.RaggedKV):
        grown = splitkv.RaggedKV(wider(kv.k, 0), wider(kv.v, 0), kv.kv_indptr, **hint)
    elif isinstance(kv, splitkv.ContiguousKV):
        grown = splitkv.ContiguousKV(wider(kv.k, 1), wider(kv.v, 1), kv.seq_lens, rows=kv.rows, **hint)
    elif hasattr(kv, "page_indptr"):
        more = torch.cat([kv.page_indices, kv.page_indices.new_full((9,), -1)])
        grown = splitkv.PagedKV.from_csr(
            wider(kv.k, 0), wider(kv.v, 0), kv.page_indptr, more, kv.last_page_len, layout=kv.layout, **hint
        )
    else:
        more = torch.cat([kv.page_table, kv.page_table.new_full((kv.page_table.shape[0], 9), -1)], dim=1)
        if isinstance(kv, splitkv.LatentKV):
            grown = splitkv.LatentKV(
                wider(kv.cache, 0), more, kv.seq_lens, head_dim_v=kv.head_dim_v, rows=kv.rows, **hint
            )
        else:
            grown = splitkv.PagedKV(
                wider(kv.k, 0), wider(kv.v, 0), more, kv.seq_lens, rows=kv.rows, layout=kv.layout, **hint
            )
    assert attend(dataclasses.replace(problem, kv=grown)).same_bits(first)


def wider(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The tensor with 50 more entries along a dimension, every bit of them set: NaN."""
    shape = list(tensor.shape)
    shape[dim] = 50
    more = torch.full((*shape[:-1], shape[-1] * tensor.element_size()), 0xFF, dtype=torch.uint8, device=tensor.device)
    return torch.cat([tensor, more.view(tensor.dtype)], dim=dim)


def test_a_problem_is_replayed_by_what_it_prints():
    problem = make_problem(11, dtype=torch.float16, lens=(3, 90))
    text = repr(problem)
    assert "\n" not in text
    again = eval(text, {"make_problem": make_problem, "torch": torch})
    for name, tensor in problem.inputs().items():
        assert same_bits(tensor, again.inputs()[name])
    assert again.config == problem.config and repr(again) == text


def test_a_problem_knows_its_choices_only():
    with pytest.raises(TypeError, match="choices: expected names of CHOICES, given window"):
        make_problem(1, window=3)
