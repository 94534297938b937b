"""What repeats bit by bit: every call, always; and with split_tokens a request's rows, whatever is around them (K8).

Properties of any problem are in test_properties.py; here is one problem that shows each part of the contract by itself,
and that its bits do change where the README says that they may.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import COMPILED
from support import H200

import splitkv
from splitkv.api import plan_decode
from splitkv.testing import Guarded, PoisonedWorkspace, Problem, make_problem, same_bits

DEVICE = torch.device("cuda" if COMPILED else "cpu")
LENS = (40, 0, 33)
PROBLEM: dict[str, Any] = dict(
    dtype=torch.float16, cache=None, layout="NHD", kv_strides="contiguous", q_strides="contiguous", alias_v=False,
    num_kv_heads=1, group_size=2, head_dim=32, head_dim_v=None, page_size=16, lens=LENS, clamped=False, rows=False,
    shared_pages=False, kv_start=False, query="one", mask="causal", window_left=None, softcap=None, sinks=None,
    alibi=False, sm_scale=None, spread=3.0, num_splits=None, split_tokens=16, max_parts=3, max_splits=None,
    q_tile_rows=None, spare=3,
)  # fmt: skip
Bits = tuple[torch.Tensor, torch.Tensor]


def problem(kind: str = "paged", **changes: Any) -> Problem:
    return make_problem(12, device=DEVICE, **{**PROBLEM, "kind": kind, **changes})


def bits(problem: Problem, garbage: str = "nan", **rules: Any) -> Bits:
    """(out, lse) of a workspace of its own."""
    scratch = PoisonedWorkspace(problem.config, DEVICE, garbage, seed=3)
    out, lse = problem.decode(scratch.workspace, **rules)
    return out.clone(), lse.clone()


@functools.cache
def plain() -> Bits:
    """Those of the problem itself."""
    return bits(problem())


def same(one: Bits, other: Bits) -> bool:
    return all(map(same_bits, one, other))


# Every call repeats.


def shared(problem: Problem, workspace: splitkv.Workspace) -> Bits:
    lse = torch.empty(problem.q.shape[:-1], device=DEVICE)
    ids = torch.tensor([0, -1, 0], dtype=torch.int32, device=DEVICE)
    prefix = torch.tensor([32, 0, 32], dtype=torch.int32, device=DEVICE)
    return splitkv.decode_shared_prefix(problem.q, problem.kv, workspace, ids, prefix, lse=lse), lse


def merged(problem: Problem, workspace: splitkv.Workspace) -> Bits:
    generator = torch.Generator().manual_seed(1)
    outs = torch.randn(9, 2, 2, 32, generator=generator).to(DEVICE)
    return splitkv.merge(outs, torch.randn(9, 2, 2, generator=generator).to(DEVICE))


CALLS: dict[str, tuple[dict[str, Any], Callable[[Problem, splitkv.Workspace], Bits]]] = {
    "balanced": (dict(split_tokens=None, max_splits=9), Problem.decode),
    "parts": (dict(split_tokens=None, num_splits=3), Problem.decode),
    "tokens": (dict(query="several", q_len=2, window_left=40, sinks="same"), Problem.decode),
    "tree": (dict(query="several", q_len=2, mask="tree", cache=torch.float8_e4m3fn), Problem.decode),
    "shared prefix": (dict(shared_pages=True, q_tile_rows=64), shared),
    "merge": ({}, merged),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_repeats_its_bits_whatever_memory_held(name):
    changes, call = CALLS[name]
    one = problem(**changes)
    if call is shared:  # room for both passes
        one = dataclasses.replace(one, config=dataclasses.replace(one.config, max_splits=300))
    first = None
    scratch = PoisonedWorkspace(one.config, DEVICE)
    workspaces = [scratch.workspace, scratch.workspace, PoisonedWorkspace(one.config, DEVICE, "garbage").workspace]
    for workspace in workspaces if COMPILED else workspaces[1:]:
        out, lse = call(one, workspace)
        found = out.clone(), lse.clone()
        first = first or found
        assert same(found, first)


# K8: with split_tokens a request's rows depend on nothing but their own inputs.


def larger_capacity(p: Problem) -> Problem:
    kv = p.kv
    assert isinstance(kv, splitkv.PagedKV)
    k, v = (torch.cat([cache, torch.full_like(cache[:5], torch.nan)]) for cache in (kv.k, kv.v))
    table = torch.cat([kv.page_table, torch.full_like(kv.page_table, -1)], dim=1)
    return dataclasses.replace(p, kv=splitkv.PagedKV(k, v, table, kv.seq_lens))


def with_hints(p: Problem) -> Problem:
    kv = p.kv
    assert isinstance(kv, splitkv.PagedKV)
    schedule = splitkv.Schedule.allocate(p.config, DEVICE)
    hinted = splitkv.PagedKV(kv.k, kv.v, kv.page_table, kv.seq_lens, len_hint=10**6, schedule=schedule)
    schedule.update(hinted)
    return dataclasses.replace(p, kv=hinted)


def other_strides(p: Problem) -> Problem:
    return problem(kv_strides="padded", q_strides="transposed")


def heads_outermost(p: Problem) -> Problem:
    return problem(layout="HND")


def table_rows_by_index(p: Problem) -> Problem:
    kv = p.kv
    assert isinstance(kv, splitkv.PagedKV)
    rows = torch.arange(len(LENS), dtype=torch.int32, device=DEVICE)
    return dataclasses.replace(p, kv=splitkv.PagedKV(kv.k, kv.v, kv.page_table, kv.seq_lens, rows=rows))


def pages_elsewhere(p: Problem) -> Problem:
    return p.relabelled(8)


ALONE = {
    "other pages": pages_elsewhere,
    "a larger cache": larger_capacity,
    "hints": with_hints,
    "other strides": other_strides,
    "HND": heads_outermost,
    "rows": table_rows_by_index,
}


@pytest.mark.parametrize("name", ALONE)
def test_with_split_tokens_where_things_lie_changes_no_bit(name):
    p = problem()
    changed = ALONE[name](p)
    assert changed.kv is not p.kv
    assert same(bits(changed), plain())


@pytest.mark.parametrize("order", [[0], [2, 0], [1, 2, 0, 0, 2]], ids=str)
def test_with_split_tokens_the_batch_changes_no_bit(order):
    p = problem()
    every, moved = plain(), bits(p.select(order))
    for place, b in enumerate(order):
        assert same_bits(moved[0][place], every[0][b]) and same_bits(moved[1][place], every[1][b])


def test_with_split_tokens_the_batch_changes_no_bit_of_a_chunk():
    """Three tiles per head, which programs take in an order of their own."""
    p = problem(query="several", q_len=23, q_tile_rows=16)
    every, alone = bits(p), bits(p.select([2]))
    assert same_bits(alone[0][0], every[0][2]) and same_bits(alone[1][0], every[1][2])


def test_with_split_tokens_outputs_of_the_caller_have_the_same_bits():
    p = problem()
    out = Guarded(p.q.shape, p.q.dtype, DEVICE, padding=5, shift=1)
    lse = Guarded(p.q.shape[:-1], torch.float32, DEVICE, padding=1, step=2)
    assert same(bits(p, out=out.tensor, lse=lse.tensor), plain())
    workspace = PoisonedWorkspace(p.config, DEVICE).workspace
    assert same_bits(splitkv.decode(p.q, p.kv, workspace, **p.rules), plain()[0])


def test_with_split_tokens_tiles_follow_neither_the_batch_nor_hints():
    """Of an H200, wherever this runs: by which tiles a row is summed."""
    page = torch.zeros(1, 16, 8, 128, dtype=torch.bfloat16, device=DEVICE)

    def tiles(batch: int, len_hint: int | None, split_tokens: int | None) -> list[Any]:
        config = splitkv.WorkspaceConfig(64, 32, 8, 128, split_tokens=split_tokens, max_parts=4)
        workspace = splitkv.Workspace.allocate(config, DEVICE)
        workspace.target = H200
        table, lens = torch.zeros(2, 64, 1, dtype=torch.int32, device=DEVICE)
        kv = splitkv.PagedKV(page, page, table, lens[:, 0], len_hint=len_hint)
        q = torch.zeros(batch, 32, 128, dtype=torch.bfloat16, device=DEVICE)
        # Requests that are looked at together are no part of a sum.
        return [
            ({name: value for name, value in launch.constants.items() if name != "BLOCK_B"}, launch.num_warps)
            for launch in plan_decode(q, kv, workspace).launches
        ]

    calls = [(batch, hint) for batch in (1, 8, 64) for hint in (None, 100, 8192)]
    fixed, balanced = ([tiles(*call, tokens) for call in calls] for tokens in (256, None))
    assert all(found == fixed[0] for found in fixed)
    assert any(found != balanced[0] for found in balanced), "else the line before shows nothing"


@pytest.mark.gpu
def test_with_split_tokens_a_graph_has_the_bits_of_the_eager_call():
    p = problem()
    eager = plain()
    workspace = PoisonedWorkspace(p.config, DEVICE, "garbage").workspace
    p.decode(workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = p.decode(workspace)
    for _ in range(3):
        graph.replay()
        assert same(found, eager)


# What may change bits, as the README says: where it does not, a promise could be made.


@pytest.mark.parametrize("change", [dict(split_tokens=32), dict(split_tokens=None, num_splits=2), dict(max_parts=1)])
def test_other_parts_have_other_bits(change):
    """Else the tests above would show nothing: sums in another order differ in their last bits."""
    p, other = problem(), problem(**change)
    assert same_bits(p.q, other.q) and same_bits(p.kv.k, other.kv.k)
    assert not same(plain(), bits(other))


# Workspaces of their own are all that calls at the same time need.


def take_turns(rounds: int, problems: list[Problem], streams: list[Any]) -> list[torch.Tensor]:
    """How many of so many results of each problem differ from its first one, each problem on its stream."""
    workspaces = [PoisonedWorkspace(p.config, DEVICE).workspace for p in problems]
    firsts = [bits(p) for p in problems]
    wrong = [torch.zeros((), dtype=torch.int64, device=DEVICE) for _ in problems]
    synchronise()
    for turn in range(rounds):
        for p, stream, workspace, first, count in zip(problems, streams, workspaces, firsts, wrong, strict=True):
            with torch.cuda.stream(stream):
                if turn % 7 == 0:
                    workspace.partial_lse.fill_(torch.nan)
                out, lse = p.decode(workspace)
                count += (out != first[0]).any() | (lse != first[1]).any()
    synchronise()
    return wrong


def synchronise() -> None:
    if COMPILED:
        torch.cuda.synchronize()


def busy(seed: int, **changes: Any) -> Problem:
    lens = (3000, 17, 900, 1) if COMPILED else (50, 1)
    return make_problem(
        seed, device=DEVICE, **{**PROBLEM, "kind": "paged", "lens": lens, "split_tokens": None, **changes}
    )


def test_two_workspaces_in_turns_do_not_disturb_each_other():
    problems = [busy(1, max_splits=9), busy(2, num_splits=2)]
    streams = [torch.cuda.Stream() for _ in problems] if COMPILED else [None, None]
    wrong = take_turns(1000 if COMPILED else 2, problems, streams)
    assert [int(count) for count in wrong] == [0, 0]


@pytest.mark.gpu
def test_two_threads_with_a_stream_and_a_workspace_each():
    problems = [busy(1), busy(2, num_splits=4)]
    found: list[int] = []

    def serve(p: Problem) -> None:
        [wrong] = take_turns(1000, [p], [torch.cuda.Stream()])
        found.append(int(wrong))

    for p in problems:
        bits(p)  # compiles
    threads = [threading.Thread(target=serve, args=(p,)) for p in problems]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [0, 0]
