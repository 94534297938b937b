"""decode_shared_prefix: the answers of decode, with what requests share read once, whatever is shared by then."""

import dataclasses
import math
import random
import re
from typing import Any

import pytest
import torch
from conftest import COMPILED
from hypothesis import example, given
from hypothesis import strategies as st
from support import assert_values, index_probe, ints, view_of
from test_properties import DTYPES, SEEDS, examples

import splitkv
from splitkv import reference
from splitkv.config import WorkspaceConfig
from splitkv.kernels.split_decode import split_decode_kernel
from splitkv.testing import Guarded, PoisonedWorkspace, Problem, expect, make_problem, same_bits

DEVICE = torch.device("cuda" if COMPILED else "cpu")
INF = math.inf


def shared_problem(seed: int, **choices: Any) -> Problem:
    """A problem whose requests begin with the same pages, in a workspace with room for both passes."""
    fixed: dict[str, Any] = dict(
        kind="paged" if seed % 3 else "csr", shared_pages=True, batch=2 + seed % 3, max_len=70, max_parts=3,
        max_splits=None, num_kv_heads=1 + seed % 2, page_size=(1, 3, 16)[seed // 4 % 3],
        q_tile_rows=(16, 64)[seed % 2],
    )  # fmt: skip
    problem = make_problem(seed, device=DEVICE, **{**fixed, **choices})
    return dataclasses.replace(problem, config=dataclasses.replace(problem.config, max_splits=1500))


def draw_groups(problem: Problem, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(group_ids, prefix_lens): some requests in some groups, over no more than the pages that they share."""
    rnd = random.Random(f"{seed} groups")
    batch, size = len(problem.lens), problem.choices["page_size"]
    most = [min(problem.lens[0] // size, n // size) * size for n in problem.lens]
    ids = [rnd.choice((0, 0, 0, batch - 1, -1, batch)) for _ in range(batch)]
    # Tokens past a request's own are cut off; pages that it does not have are not shared.
    prefix = [rnd.choice((n, n, n, rnd.randint(0, n), 0)) for n in most]
    spare = [0] * rnd.choice((0, 3))
    return ints([*ids, *spare], DEVICE), ints([*prefix, *spare], DEVICE)


def attend(problem: Problem, group_ids: torch.Tensor, prefix_lens: torch.Tensor, workspace: splitkv.Workspace):
    """(out, lse) of decode_shared_prefix, both full of NaN before."""
    lse = torch.full(problem.q.shape[:-1], math.nan, device=DEVICE)
    workspace.out.fill_(math.nan)
    out = splitkv.decode_shared_prefix(
        problem.q, problem.kv, workspace, group_ids, prefix_lens, lse=lse, **problem.rules
    )
    return out, lse


@given(seed=SEEDS, poison=st.sampled_from(("nan", "garbage")))
@example(seed=2, poison="nan")  # groups without query tokens
@examples(12)
def test_any_problem_is_within_the_error_budget(seed, poison, record_ratios):
    problem = shared_problem(seed)
    scratch = PoisonedWorkspace(problem.config, DEVICE, poison, seed=seed)
    groups = draw_groups(problem, seed)
    expected = problem.expected()
    out, lse = attend(problem, *groups, scratch.workspace)
    expected.check(out, lse, f"{problem} {groups}")
    scratch.check_guards()
    record_ratios(problem.q.dtype, expected.error_ratio(out), expected.lse_error_ratio(lse))


@given(seed=SEEDS)
@examples(3)
def test_one_call_serves_whatever_is_shared_by_then(seed):
    """Groups, prefixes and lengths are overwritten, as they are between replays of a graph."""
    problem = shared_problem(
        seed, kind="paged", clamped=False, rows=False, window_left=None, kv_start=False, query="one", mask="causal",
        poison="zero", num_splits=None,
    )  # fmt: skip
    workspace = PoisonedWorkspace(problem.config, DEVICE).workspace
    group_ids, prefix_lens = draw_groups(problem, seed)
    rnd = random.Random(seed)
    for turn in range(3):
        problem.expected().check(*attend(problem, group_ids, prefix_lens, workspace), f"{turn} {problem}")
        again = draw_groups(problem, seed + turn + 1)
        group_ids.copy_(again[0][: len(group_ids)] if len(again[0]) >= len(group_ids) else group_ids)
        prefix_lens.copy_(again[1][: len(prefix_lens)] if len(again[1]) >= len(prefix_lens) else prefix_lens)
        problem.kv.seq_lens[: len(problem.lens)].copy_(ints([rnd.randint(0, n) for n in problem.lens], DEVICE))


# Requests whose pages are laid out by hand.

PAGE, HEADS, KV_HEADS, WIDTH = 4, 4, 2, 16


def laid_out(
    prefixes: list[int], requests: list[tuple[int, int]], dtype: torch.dtype = torch.float32, kv_heads: int = KV_HEADS
) -> tuple[splitkv.PagedKV, torch.Tensor, torch.Tensor]:
    """(view, group_ids, prefix_lens) of requests (prefix's number or -1, own tokens) over prefixes of these lengths.

    Prefixes end where pages end, but for requests without tokens of their own, which end where their prefix does.
    """
    generator = torch.Generator().manual_seed(0)
    shared = [math.ceil(n / PAGE) for n in prefixes]
    own = [math.ceil(n / PAGE) for _, n in requests]
    pages = torch.randperm(sum(shared) + sum(own), generator=generator).tolist()  # and one more, of nobody's
    tables = [[pages.pop() for _ in range(count)] for count in shared]
    rows = [(tables[number] if number >= 0 else []) + [pages.pop() for _ in range(n)]
            for (number, _), n in zip(requests, own, strict=True)]  # fmt: skip
    lens = [(prefixes[number] if number >= 0 else 0) + n for number, n in requests]
    table = torch.full((len(rows), max(map(len, rows)) + 1), -1, dtype=torch.int32)
    for row, ids in enumerate(rows):
        table[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    k, v = torch.randn(2, sum(shared) + sum(own) + 1, PAGE, kv_heads, WIDTH, generator=generator).to(dtype)
    kv = splitkv.PagedKV(k.to(DEVICE), v.to(DEVICE), table.to(DEVICE), ints(lens, DEVICE))
    prefix_lens = [prefixes[number] if number >= 0 else 0 for number, _ in requests]
    return kv, ints([number for number, _ in requests], DEVICE), ints(prefix_lens, DEVICE)


def as_csr(kv: splitkv.PagedKV) -> splitkv.PagedKV:
    """The same requests in FlashInfer's form."""
    lens = kv.seq_lens.tolist()
    counts = [math.ceil(n / PAGE) for n in lens]
    flat = [page for row, count in enumerate(counts) for page in kv.page_table[row, :count].tolist()]
    tails = [n - max(count - 1, 0) * PAGE for n, count in zip(lens, counts, strict=True)]
    edges = [sum(counts[:b]) for b in range(len(lens) + 1)]
    return splitkv.PagedKV.from_csr(kv.k, kv.v, ints(edges, DEVICE), ints(flat, DEVICE), ints(tails, DEVICE))


def room(batch: int, dtype: torch.dtype = torch.float32, **changes: Any) -> splitkv.Workspace:
    config = WorkspaceConfig(
        batch, HEADS, KV_HEADS, WIDTH, **{"max_total_q": 4 * batch, "q_tile_rows": 64, **changes}, dtype=dtype
    )
    return PoisonedWorkspace(config, DEVICE).workspace


MIXED = [(0, 5), (1, 0), (-1, 9), (0, 1), (1, 7), (0, 0), (-1, 0), (2, 3), (1, 2)]
"""Two groups, in no order, one request alone with its prefix, two without any; some have no tokens of their own."""


@pytest.mark.parametrize(("q_len", "num_splits"), [(1, None), (1, 1), (3, 3)])
def test_what_is_shared_is_read_from_one_table_row(q_len, num_splits):
    """The page ids that all but one of a group have for their prefix lead to NaN: nobody follows them."""
    kv, group_ids, prefix_lens = laid_out([12, 20, 8], MIXED)
    q = torch.randn(len(MIXED), q_len, HEADS, WIDTH, device=DEVICE)
    expected = expect(q, kv)
    # Where query tokens reach into the prefix, its last page is theirs too; a whole page before is not.
    kv.k[-1], kv.v[-1] = math.nan, math.nan
    ends = (kv.seq_lens.clone() - q_len + 1).tolist()
    seen = set()
    for b, (number, _) in enumerate(MIXED):
        if number in (0, 1):
            members = [c for c, (other, _) in enumerate(MIXED) if other == number]
            common = min([int(prefix_lens[b])] + [ends[c] for c in members])
            if number in seen:
                kv.page_table[b, : common // PAGE] = kv.k.shape[0] - 1
            seen.add(number)
    assert reference.decode(q, kv).isnan().any(), "the poisoned pages are on the way of decode"
    lse = torch.full(q.shape[:-1], math.nan, device=DEVICE)
    out = splitkv.decode_shared_prefix(q, kv, room(len(MIXED)), group_ids, prefix_lens, num_splits=num_splits, lse=lse)
    expected.check(out, lse)


@pytest.mark.parametrize("num_splits", [None, 2])
def test_groups_find_their_pages_in_csr_form(num_splits):
    """Several groups, none of which begins with the first page of all."""
    requests = [(-1, 9), *MIXED]
    kv, group_ids, prefix_lens = laid_out([12, 20, 8], requests)
    kv = as_csr(kv)
    q = torch.randn(len(requests), HEADS, WIDTH, device=DEVICE)
    workspace = room(len(requests))
    expect(q, kv).check(splitkv.decode_shared_prefix(q, kv, workspace, group_ids, prefix_lens, num_splits=num_splits))


def test_rows_of_many_requests_stand_in_one_tall_tile():
    """16 requests of 4 heads on 2 KV heads fill half a tile of 64 rows per KV head, in one part one program's."""
    requests = [(0, n) for n in range(16)]
    kv, group_ids, prefix_lens = laid_out([20], requests)
    q = torch.randn(16, HEADS, WIDTH, device=DEVICE)
    plan = splitkv.api.plan_decode(q, kv, room(16), group_ids=group_ids, prefix_lens=prefix_lens, num_splits=1)
    tall, own = (step for step in plan.launches if step.kernel is split_decode_kernel)
    assert tall.constants["BLOCK_M"] == 64 and own.constants["BLOCK_M"] == 16
    assert tall.grid == (8 * KV_HEADS,)  # as many tiles as groups of two could have
    assert own.grid == (16 * KV_HEADS,)
    plan.run()
    gathered = tall.operands["qo_indptr_ptr"][:17].tolist()
    assert gathered == [0] + [16] * 16
    assert sorted(tall.operands["members_ptr"][:16].tolist()) == list(range(16))
    assert tall.operands["lens_ptr"][0].item() == 20 and not tall.operands["lens_ptr"][1:16].any()
    assert own.operands["kv_start_ptr"][:16].tolist() == [20] * 16
    expect(q, kv).check(plan.out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_more_rows_than_one_tile_holds(dtype):
    """Eleven requests of eight heads on one KV head: 88 rows."""
    kv, group_ids, prefix_lens = laid_out([36], [(0, n % 3) for n in range(11)], dtype, kv_heads=1)
    q = torch.randn(11, 8, WIDTH, device=DEVICE).to(dtype)
    config = WorkspaceConfig(11, 8, 1, WIDTH, q_tile_rows=64, dtype=dtype)
    workspace = PoisonedWorkspace(config, DEVICE).workspace
    expect(q, kv).check(splitkv.decode_shared_prefix(q, kv, workspace, group_ids, prefix_lens))


@pytest.mark.parametrize(("window_left", "q_len"), [(0, 1), (13, 1), (6, 2)])
def test_windows_reach_into_the_prefix_by_each_row_s_own_position(window_left, q_len):
    kv, group_ids, prefix_lens = laid_out([12, 20, 8], MIXED)
    q = torch.randn(len(MIXED), q_len, HEADS, WIDTH, device=DEVICE)
    rules: dict[str, Any] = dict(window_left=window_left, alibi_slopes=torch.rand(HEADS, device=DEVICE))
    lse = torch.full(q.shape[:-1], math.nan, device=DEVICE)
    out = splitkv.decode_shared_prefix(q, kv, room(len(MIXED)), group_ids, prefix_lens, lse=lse, **rules)
    expect(q, kv, **rules).check(out, lse)


def test_pages_left_of_every_window_are_not_followed():
    """The member whose window reaches furthest left lends its table row; others have dead entries there."""
    requests = [(0, 9), (0, 1), (0, 6)]
    kv, group_ids, prefix_lens = laid_out([20], requests)
    q = torch.randn(3, HEADS, WIDTH, device=DEVICE)
    expected = expect(q, kv, window_left=7)
    for b, (_, n) in enumerate(requests):
        first = 20 + n - 1 - 7
        kv.page_table[b, : first // PAGE] = (-1, 2**31 - 1, -(2**31))[b]
    out = splitkv.decode_shared_prefix(q, kv, room(3), group_ids, prefix_lens, window_left=7)
    expected.check(out)


@pytest.mark.parametrize("ids", [[0, 0, 0], [-1, -1, -1], [0, 1, 2], [3, 2**31 - 1, -(2**31)]], ids=str)
def test_without_anything_shared_it_is_decode(ids):
    """One group over no tokens, none at all, groups of one, and numbers that are no group's."""
    kv, _, _ = laid_out([8], [(0, 5), (0, 0), (0, 9)])
    prefix_lens = ints([0, 0, 0] if ids == [0, 0, 0] else [8, 8, 8], DEVICE)
    q = torch.randn(3, HEADS, WIDTH, device=DEVICE)
    workspace = room(3)
    plan = splitkv.api.plan_decode(q, kv, workspace, group_ids=ints(ids, DEVICE), prefix_lens=prefix_lens)
    tall, own = (step for step in plan.launches if step.kernel is split_decode_kernel)
    plan.run()
    assert not tall.operands["lens_ptr"][:3].any() and not own.operands["kv_start_ptr"][:3].any()
    expect(q, kv).check(plan.out)


@pytest.mark.parametrize("batch", [0, 1])
def test_few_requests_share_nothing(batch):
    kv, group_ids, prefix_lens = laid_out([8], [(0, 5)])
    q = torch.randn(batch, HEADS, WIDTH, device=DEVICE)
    out = splitkv.decode_shared_prefix(q, kv, room(1), group_ids, prefix_lens)
    assert same_bits(out.clone(), splitkv.decode(q, kv, room(1)))


def test_more_requests_than_one_block_of_the_search():
    """Groups and members beyond the first 64 requests, and sinks that join once."""
    requests = [(n % 3 - 1, n % 2) for n in range(70)]
    kv, group_ids, prefix_lens = laid_out([8, 4], requests, kv_heads=1)
    group_ids[group_ids == 1] = 69
    q = torch.randn(70, 1, WIDTH, device=DEVICE)
    sinks = torch.randn(1, device=DEVICE)
    workspace = PoisonedWorkspace(WorkspaceConfig(70, 1, 1, WIDTH, dtype=torch.float32), DEVICE).workspace
    out = splitkv.decode_shared_prefix(q, kv, workspace, group_ids, prefix_lens, sinks=sinks)
    expect(q, kv, sinks=sinks).check(out)


def test_prefix_sums_that_go_back_write_nothing_outside():
    """Garbage in qo_indptr may claim more query tokens than there are: members' lists stay within their bounds."""
    kv, group_ids, prefix_lens = laid_out([8], [(0, 5), (0, 0), (0, 9)])
    config = WorkspaceConfig(3, HEADS, KV_HEADS, WIDTH, max_total_q=3, q_tile_rows=64, dtype=torch.float32)
    scratch = PoisonedWorkspace(config, DEVICE)
    q = torch.randn(3, HEADS, WIDTH, device=DEVICE)
    out = Guarded(q.shape, torch.float32, DEVICE)
    for edges in ([0, 3, 0, 3], [3, 0, 2**31 - 1, -5], [0, 2**31 - 1, 0, 2**31 - 1]):
        splitkv.decode_shared_prefix(
            q, kv, scratch.workspace, group_ids, prefix_lens, qo_indptr=ints(edges, DEVICE), out=out.tensor
        )
        out.check_guards()
        scratch.check_guards()


def test_with_split_tokens_other_requests_change_no_bit():
    """A row's bits depend on its own inputs and on how much its group shares, not on how many share it."""
    requests = [(0, 6), (0, 1), (1, 3), (1, 8), (-1, 5), (0, 4)]
    kv, group_ids, prefix_lens = laid_out([36, 20], requests, torch.float16)
    q = torch.randn(6, HEADS, WIDTH, device=DEVICE).half()
    shape: dict[str, Any] = dict(split_tokens=8, max_parts=4, q_tile_rows=16, max_splits=600)
    whole = splitkv.decode_shared_prefix(q, kv, room(6, torch.float16, **shape), group_ids, prefix_lens).clone()
    expect(q, kv).check(whole)
    for order in ([5, 0], [1, 4, 5], [3, 2, 0, 1]):
        index = torch.tensor(order, device=DEVICE)
        some = splitkv.PagedKV(kv.k, kv.v, kv.page_table, kv.seq_lens[index], rows=index.int())
        out = splitkv.decode_shared_prefix(
            q[index], some, room(len(order), torch.float16, **shape), group_ids[index], prefix_lens[index]
        )
        assert same_bits(out, whole[index]), order


# Case 7.


@pytest.mark.parametrize("num_splits", [None, 1, 3])
def test_two_requests_share_a_prefix(device, num_splits):
    """Case 7 in one call: a prefix of 8 keys (v 0…7), suffixes of 0 and 3 keys (v 8, 9, 10)."""
    kv = view_of("paged", *index_probe(device, 1, 11), [11])
    table = kv.page_table.repeat(2, 1)
    lens, group_ids, prefix_lens = ints([8, 11], device), ints([1, 1], device), ints([8, 8], device)
    kv = splitkv.PagedKV(kv.k, kv.v, table, lens)
    config = WorkspaceConfig(2, 1, 1, 16, dtype=torch.float32)
    lse = torch.full((2, 1), math.nan, device=device)
    out = splitkv.decode_shared_prefix(
        torch.randn(2, 1, 16, device=device), kv, PoisonedWorkspace(config, device).workspace, group_ids, prefix_lens,
        sm_scale=1.0, num_splits=num_splits, lse=lse,
    )  # fmt: skip
    assert_values(out, torch.tensor([3.5, 5.0])[:, None, None])
    assert_values(lse, torch.tensor([math.log(8), math.log(11)], dtype=torch.float64)[:, None])


# What is refused.


def test_refusals_name_the_argument():
    kv, group_ids, prefix_lens = laid_out([8], [(0, 5), (0, 0)])
    q, workspace = torch.randn(2, HEADS, WIDTH, device=DEVICE), room(2)
    before = workspace.partial_lse.clone()

    def refused(error: type[Exception], message: str, **changes: Any) -> None:
        given = dict(q=q, kv=kv, workspace=workspace, group_ids=group_ids, prefix_lens=prefix_lens) | changes
        with pytest.raises(error, match=message):
            splitkv.decode_shared_prefix(**given)
        if None not in (given["group_ids"], given["prefix_lens"]):
            reason = splitkv.supports(**given)
            assert reason is not None and reason.startswith(message.lstrip("^").split(":")[0])

    for name in ("group_ids", "prefix_lens"):
        refused(TypeError, f"^{name}: expected a torch.Tensor, given list", **{name: [0, 0]})
        refused(TypeError, f"^{name}: expected a torch.Tensor, given NoneType", **{name: None})
        refused(TypeError, f"^{name}: expected torch.int32, given torch.int64", **{name: group_ids.long()})
        refused(ValueError, f"^{name}: expected at least 2 elements, given 1", **{name: group_ids[:1]})
        refused(ValueError, f"^{name}: expected 1 dimensions", **{name: group_ids[None]})
        refused(ValueError, f"^{name}: expected device {DEVICE}", **{name: group_ids.to("meta")})
    k = torch.randn(2, 8, KV_HEADS, WIDTH, device=DEVICE)
    contiguous = splitkv.ContiguousKV(k, k, kv.seq_lens)
    refused(
        TypeError,
        "^kv: expected a PagedKV or LatentKV, whose requests can share pages, given ContiguousKV",
        kv=contiguous,
    )
    refused(ValueError, "^kv: expected a view of whole sequences, given a shard",
            kv=kv.shard(kv.seq_lens, rank=0, size=2))  # fmt: skip
    small = room(2, q_tile_rows=16, max_splits=1)
    refused(ValueError, "^workspace: expected partials of at least 16 rows of width 16 for 2 query tokens",
            workspace=small)  # fmt: skip
    refused(ValueError, "^num_splits: expected a workspace for 19216 rows of partials over .*, of 64 rows each",
            workspace=room(2, max_splits=8), num_splits=100)  # fmt: skip
    assert same_bits(workspace.partial_lse, before)
    assert splitkv.supports(q, kv, workspace, group_ids=group_ids, prefix_lens=prefix_lens) is None
    assert splitkv.supports(q, kv, workspace, group_ids=group_ids).startswith("prefix_lens: expected a torch.Tensor")


def test_a_refusal_says_how_many_partials_make_room():
    """With split_tokens the default is what `decode` can need; the message says what both passes do."""
    kv, group_ids, prefix_lens = laid_out([36], [(0, 5), (0, 0), (-1, 9)])
    q = torch.randn(3, HEADS, WIDTH, device=DEVICE)
    config = WorkspaceConfig(3, HEADS, KV_HEADS, WIDTH, split_tokens=8, max_parts=6, dtype=torch.float32)

    def why(max_splits: int | None) -> str | None:
        scratch = splitkv.Workspace.allocate(dataclasses.replace(config, max_splits=max_splits), DEVICE)
        return splitkv.supports(q, kv, scratch, group_ids=group_ids, prefix_lens=prefix_lens)

    message = why(None)
    assert message is not None and message.startswith("split_tokens: expected a workspace for ")
    (needed,) = map(int, re.findall(r"max_splits=(\d+) or more", message))
    assert needed > config.max_splits and why(needed) is None
    less = why(needed - 1)
    assert less is not None and f"max_splits={needed} or more" in less


@pytest.mark.parametrize("max_splits", [2, 3, 5, 9, 40])
def test_scarce_room_costs_programs_and_nothing_else(max_splits):
    requests = [(0, n) for n in range(6)]
    kv, group_ids, prefix_lens = laid_out([40], requests)
    q = torch.randn(6, HEADS, WIDTH, device=DEVICE)
    config = WorkspaceConfig(6, HEADS, KV_HEADS, WIDTH, q_tile_rows=64, max_splits=max_splits, dtype=torch.float32)
    scratch = PoisonedWorkspace(config, DEVICE)
    out = splitkv.decode_shared_prefix(q, kv, scratch.workspace, group_ids, prefix_lens)
    expect(q, kv).check(out)
    scratch.check_guards()


@pytest.mark.parametrize("kind", ["paged", "csr"])
def test_debug_mode_finds_pages_that_are_not_shared(kind, monkeypatch):
    monkeypatch.setenv("SPLITKV_DEBUG", "1")
    kv, group_ids, prefix_lens = laid_out([8], [(0, 5), (-1, 3), (0, 2)])
    q, workspace = torch.randn(3, HEADS, WIDTH, device=DEVICE), room(3)
    name = "page_table"
    if kind == "csr":
        kv, name = as_csr(kv), "page_indices"
    splitkv.decode_shared_prefix(q, kv, workspace, group_ids, prefix_lens)
    pages = kv.page_indices[kv.page_indptr[2] :] if kind == "csr" else kv.page_table[2]
    pages[1] = pages[2]
    with pytest.raises(ValueError, match=rf"^{name}: expected the pages of row 0 .* row 2, of the same group 0"):
        splitkv.decode_shared_prefix(q, kv, workspace, group_ids, prefix_lens)
    with pytest.raises(ValueError, match=r"^group_ids: expected values in .*, given 3 in row 1"):
        splitkv.decode_shared_prefix(q, kv, workspace, ints([0, 3, -1], DEVICE), prefix_lens)
    with pytest.raises(ValueError, match=r"^prefix_lens: expected values ≥ 0, given -1 in row 2"):
        splitkv.decode_shared_prefix(q, kv, workspace, group_ids, ints([8, 0, -1], DEVICE))


def test_the_reference_takes_the_same_call():
    kv, group_ids, prefix_lens = laid_out([8], [(0, 5), (0, 0)])
    q = torch.randn(2, HEADS, WIDTH, device=DEVICE)
    assert same_bits(reference.decode_shared_prefix(q, kv, None, group_ids, prefix_lens), reference.decode(q, kv))


# On a GPU, where both passes run at a time.


@pytest.mark.gpu
@pytest.mark.parametrize("rules", [{}, {"window_left": 1700}], ids=["plain", "window"])
def test_graphs_replay_after_groups_and_lengths_were_overwritten(rules):
    """Tall tiles and those of single requests side by side: the same bits in 10 replays of each, and the right ones.

    The second call of a replay has other queries at the same addresses, written by the kernel right before it.
    """
    batch, prefix, heads, kv_heads, width = 24, 2048, 32, 8, 128
    shared, own = prefix // 16, 24
    generator = torch.Generator(DEVICE).manual_seed(0)
    count = shared + batch * own
    k, v = torch.randn(2, count, 16, kv_heads, width, device=DEVICE, dtype=torch.bfloat16, generator=generator)
    order = torch.randperm(count, device=DEVICE, generator=generator).int()
    table = torch.cat([order[:shared].expand(batch, -1), order[shared:].view(batch, own)], dim=1)
    q = torch.randn(batch, heads, width, device=DEVICE, dtype=torch.bfloat16, generator=generator)
    config = WorkspaceConfig(batch, heads, kv_heads, width, q_tile_rows=128)
    lens, group_ids, prefix_lens = (ints([0] * batch, DEVICE) for _ in range(3))
    kv = splitkv.PagedKV(k, v, table, lens)
    workspace = PoisonedWorkspace(config, DEVICE).workspace
    out, lse = torch.empty(2, *q.shape, device=DEVICE, dtype=q.dtype), torch.empty(2, batch, heads, device=DEVICE)

    def calls() -> None:
        for i in range(2):
            splitkv.decode_shared_prefix(q, kv, workspace, group_ids, prefix_lens, out=out[i], lse=lse[i], **rules)
            q.neg_()

    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    rnd = random.Random(0)
    for turn in range(4):
        lens.copy_(ints([prefix + rnd.randint(0, 16 * own) for _ in range(batch)], DEVICE))
        group_ids.copy_(ints([0] * batch if turn == 0 else [rnd.randint(-1, turn) for _ in range(batch)], DEVICE))
        prefix_lens.copy_(ints([prefix if turn < 2 else 16 * rnd.randint(0, shared) for _ in range(batch)], DEVICE))
        first = None
        for _ in range(10):
            out.fill_(math.nan)
            graph.replay()
            torch.cuda.synchronize()
            first = first or (out.clone(), lse.clone())
            assert same_bits(out, first[0]) and same_bits(lse, first[1]), turn
        expect(q, kv, **rules).check(out[0], lse[0], turn)
        expect(-q, kv, **rules).check(out[1], lse[1], turn)


@pytest.mark.gpu
@pytest.mark.parametrize("rules", [{}, {"window_left": 500}, {"sm_scale": -0.05}, {"softcap": 20.0}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_chunks_in_tiles_of_128_rows(head_dim, rules):
    """Whole blocks without masks, then those at the edge of what each query token sees."""
    config = WorkspaceConfig(3, 16, 4, head_dim, max_total_q=600)
    generator = torch.Generator(DEVICE).manual_seed(1)
    k, v = torch.randn(2, 240, 16, 4, head_dim, device=DEVICE, dtype=torch.bfloat16, generator=generator)
    table = torch.randperm(240, device=DEVICE, generator=generator).int().view(3, 80)
    kv = splitkv.PagedKV(k, v, table, ints([1280, 1063, 203], DEVICE))
    q = torch.randn(3, 200, 16, head_dim, device=DEVICE, dtype=torch.bfloat16, generator=generator)
    workspace = PoisonedWorkspace(config, DEVICE).workspace
    plan = splitkv.api.plan_decode(q, kv, workspace, **rules)
    assert plan.launches[0].constants["BLOCK_M"] == 128
    expect(q, kv, **rules).check(*splitkv.decode_with_lse(q, kv, workspace, **rules))
