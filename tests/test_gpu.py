"""What only a GPU can show: graphs, streams, allocations, launches and real lengths."""

import ctypes
from typing import Any

import pytest
import torch
from conftest import COMPILED
from support import no_synchronisation

import splitkv
from splitkv.testing import Guarded, PoisonedWorkspace, Problem, make_problem, same_bits

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0) if COMPILED else torch.device("cpu")
PLAIN = dict(
    dtype=torch.bfloat16, layout="NHD", kv_strides="contiguous", q_strides="contiguous", alias_v=False, num_kv_heads=2,
    group_size=4, head_dim=128, head_dim_v=None, page_size=16, clamped=False, rows=False, shared_pages=False,
    kv_start=False, query="one", mask="causal", window_left=None, softcap=None, sinks=None, alibi=False, sm_scale=None,
    spread=1.0, num_splits=None, split_tokens=None, max_splits=None, q_tile_rows=None, spare=0, poison="zero",
)  # fmt: skip
KINDS = ("paged", "csr", "contiguous", "ragged")
TOKENS, PARTS = dict(split_tokens=64, max_parts=8), dict(num_splits=5)
WAYS = [("paged", {}), ("paged", TOKENS), ("paged", PARTS), ("csr", {}), ("contiguous", TOKENS), ("ragged", PARTS)]
"""Every layout and every schedule; each other pair compiles two more kernels, and is the interpreter's to show."""


def plain(seed: int = 0, **choices: Any) -> Problem:
    """A problem of a usual shape; several share their compiled kernels."""
    return make_problem(seed, device=DEVICE, **{**PLAIN, **choices})


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


# Graphs.


def overwrite(problem: Problem, lens: list[int], q_lens: list[int], generator: torch.Generator) -> None:
    """Write other tokens, lengths and pages into the tensors of a problem whose requests filled its cache."""
    kv = problem.kv
    for tensor in (problem.q, kv.k, kv.v):
        tensor.copy_(torch.randn(tensor.shape, generator=generator).to(tensor))
    if "qo_indptr" in problem.rules:
        problem.rules["qo_indptr"].copy_(ints([0, *q_lens]).cumsum(0).int())
    if isinstance(kv, splitkv.RaggedKV):
        kv.kv_indptr[: len(lens) + 1].copy_(ints([0, *lens]).cumsum(0).int())
        return
    if isinstance(kv, splitkv.ContiguousKV):
        kv.seq_lens[: len(lens)].copy_(ints(lens))
        return
    size, count = kv.page_size, kv.k.shape[0]
    pages = torch.randperm(count, generator=generator).int().to(DEVICE)
    needed = [-(-n // size) for n in lens]
    if hasattr(kv, "page_indptr"):
        kv.page_indices[: sum(needed)].copy_(pages[: sum(needed)])
        kv.page_indices[sum(needed) :].fill_(-1)
        kv.page_indptr.copy_(ints([0, *needed]).cumsum(0).int())
        kv.last_page_len[: len(lens)].copy_(
            ints([n - (p - 1) * size if p else 0 for n, p in zip(lens, needed, strict=True)])
        )
        return
    kv.page_table.fill_(-1)
    first = 0
    for b, pages_of_b in enumerate(needed):
        kv.page_table[b, :pages_of_b] = pages[first : first + pages_of_b]
        first += pages_of_b
    kv.seq_lens[: len(lens)].copy_(ints(lens))


def captured(problem: Problem, workspace: splitkv.Workspace) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]:
    problem.decode(workspace)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = problem.decode(workspace)
    return graph, out, lse


MOST = 1000
LENS = [
    [0, 0, 0, 0, 0, 0],
    [MOST] * 6,
    [1] * 6,
    [0, MOST, 0, 0, 1, 0],
    [MOST, 17, 16, 15, 1, 0],
    [999, 3, 640, 128, 1, 31],
]


@pytest.mark.parametrize(("kind", "schedule"), WAYS, ids=str)
def test_a_graph_is_right_after_lengths_pages_and_tokens_have_changed(kind, schedule):
    problem = plain(kind=kind, lens=(MOST,) * 6, **schedule)
    scratch = PoisonedWorkspace(problem.config, DEVICE)
    graph, out, lse = captured(problem, scratch.workspace)
    generator = torch.Generator().manual_seed(1)
    for lens in LENS:
        overwrite(problem, lens, [1] * 6, generator)
        scratch.workspace.partial_out.fill_(torch.nan)
        scratch.workspace.partial_lse.fill_(torch.nan)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        problem.expected().check(out, lse, f"{kind} {schedule} {lens}")
        scratch.check_guards()
        replayed = out.clone(), lse.clone()
        eager = problem.decode(PoisonedWorkspace(problem.config, DEVICE).workspace)
        assert same_bits(eager[0], replayed[0]) and same_bits(eager[1], replayed[1])


@pytest.mark.parametrize("rules", [{}, dict(window_left=100, sinks="float32", softcap=30.0)], ids=["plain", "rules"])
def test_a_graph_is_right_after_query_lengths_have_changed(rules):
    problem = plain(kind="paged", lens=(MOST,) * 6, query="ragged", q_lens=(4,) * 6, q_len=4, **rules)
    scratch = PoisonedWorkspace(problem.config, DEVICE)
    graph, out, lse = captured(problem, scratch.workspace)
    generator = torch.Generator().manual_seed(2)
    spread = [[1] * 6, [4] * 6, [0, 24, 0, 0, 0, 0], [0] * 6, [9, 0, 1, 1, 0, 13], [3, 2, 1, 0, 5, 0]]
    for lens, q_lens in zip(LENS, spread, strict=True):
        overwrite(problem, lens, q_lens, generator)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        problem.expected().check(out, lse, f"{lens} {q_lens}")
        scratch.check_guards()


def test_a_graph_of_a_full_cache_serves_a_length_that_claims_more():
    problem = plain(kind="contiguous", lens=(MOST,) * 6)
    graph, out, lse = captured(problem, PoisonedWorkspace(problem.config, DEVICE).workspace)
    graph.replay()
    full = out.clone(), lse.clone()
    problem.kv.seq_lens.fill_(2**31 - 1)
    graph.replay()
    assert same_bits(out, full[0]) and same_bits(lse, full[1])
    problem.kv.seq_lens.fill_(-(2**31))
    graph.replay()
    assert not out.any() and bool((lse == -torch.inf).all())


# What a call costs.


@pytest.mark.parametrize(("kind", "schedule"), WAYS, ids=str)
def test_no_allocation_and_no_synchronisation(kind, schedule):
    problem = plain(kind=kind, lens=(MOST, 0, 17), **schedule)
    workspace = PoisonedWorkspace(problem.config, DEVICE).workspace
    shape = (*problem.q.shape[:-1], problem.kv.head_dim_v)
    out = torch.empty(shape, dtype=problem.q.dtype, device=DEVICE)
    lse = torch.empty(shape[:-1], device=DEVICE)
    problem.decode(workspace)
    problem.decode(workspace, out=out, lse=lse)
    before = torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"]
    with no_synchronisation():
        problem.decode(workspace)
        splitkv.decode(problem.q, problem.kv, workspace, **problem.rules)
        problem.decode(workspace, out=out, lse=lse)
    assert torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"] == before
    problem.expected().check(out, lse, problem)


@pytest.mark.parametrize(
    "choices", [{}, dict(split_tokens=256), dict(num_splits=3), dict(query="ragged", q_len=3)], ids=str
)
def test_at_most_two_launches_and_nothing_else(choices):
    """All that a capture holds: no fill, no copy, no third kernel."""
    driver = ctypes.CDLL("libcuda.so.1") if torch.version.cuda else pytest.skip("counts the nodes of a CUDA graph")
    for length in (0, 1, 128, 100_000):
        problem = plain(kind="paged", lens=(length,), page_size=64, num_kv_heads=1, group_size=1, **choices)
        workspace = PoisonedWorkspace(problem.config, DEVICE).workspace
        problem.decode(workspace)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            problem.decode(workspace)
        nodes = ctypes.c_size_t()
        assert driver.cuGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(nodes)) == 0
        assert 1 <= nodes.value <= 2, f"length {length}"


# Devices and streams.


def test_the_current_device_and_stream_stay():
    problem = plain(kind="paged", lens=(300, 5))
    workspace = PoisonedWorkspace(problem.config, DEVICE).workspace
    expected = problem.expected()
    device, default = torch.cuda.current_device(), torch.cuda.current_stream()
    expected.check(*problem.decode(workspace))
    assert (torch.cuda.current_device(), torch.cuda.current_stream()) == (device, default)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        problem.decode(workspace)
        assert torch.cuda.current_stream() == side
    assert torch.cuda.current_stream() == default


def test_kernels_run_on_the_current_stream():
    """On a stream that is kept busy, the call waits for what was enqueued there before it."""
    problem = plain(kind="contiguous", lens=(300, 5))
    scratch = PoisonedWorkspace(problem.config, DEVICE)
    problem.decode(scratch.workspace)
    late = torch.randn(problem.q.shape, generator=torch.Generator().manual_seed(3)).to(problem.q)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        problem.q.copy_(late)
        out, lse = problem.decode(scratch.workspace)
        # The default stream is idle meanwhile: a kernel that went there would have read the old queries.
        kept = out.clone(), lse.clone()
    side.synchronize()
    problem.expected().check(*kept)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_default_devices_and_dtypes_change_nothing(dtype, device):
    problem = plain(kind="paged", lens=(300, 5))
    expected = problem.expected()
    workspace = splitkv.Workspace.allocate(problem.config, DEVICE)
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        out, lse = problem.decode(workspace)
        inside = splitkv.Workspace.allocate(problem.config, DEVICE)
        merged = splitkv.merge(out[None], lse[None])
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    expected.check(out, lse)
    assert inside.lse.dtype == torch.float32 and inside.device == DEVICE
    assert same_bits(merged[0], out) and same_bits(merged[1], lse)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one():
    """Case 34."""
    here, there = torch.device("cuda", 0), torch.device("cuda", 1)
    problem = make_problem(0, device=there, **{**PLAIN, "kind": "paged", "lens": (300, 5)})
    workspace = PoisonedWorkspace(problem.config, there).workspace
    with torch.cuda.device(here):
        problem.expected().check(*problem.decode(workspace))
        outs, lses = torch.randn(2, 3, 2, 8, device=there), torch.randn(2, 3, 2, device=there)
        assert splitkv.merge(outs, lses)[0].device == there
        assert torch.cuda.current_device() == 0
    with pytest.raises(ValueError, match=r"q: expected device cuda:1 \(that of the workspace\), given cuda:0"):
        splitkv.decode(problem.q.to(here), problem.kv, workspace)


def test_calls_that_follow_each_other_at_once_wait_for_each_other():
    """A call may start while the one before it ends, and yet must see what that wrote: queries, lengths, partials."""
    problem = plain(kind="contiguous", lens=(900, 40, 300, 7))
    first, second = (PoisonedWorkspace(problem.config, DEVICE).workspace for _ in range(2))
    lens = [ints([900 - 13 * i, 40 + i, 300 + 7 * i, i]) for i in range(40)]

    def chain(wait: bool) -> list[torch.Tensor]:
        q, results = problem.q, []
        for i in range(40):
            problem.kv.seq_lens[:4].copy_(lens[i])
            q = splitkv.decode(q, problem.kv, first)
            q = splitkv.decode(q, problem.kv, second)
            if wait:
                torch.cuda.synchronize()
            results.append(q.clone())
        torch.cuda.synchronize()
        return results

    patient = chain(True)
    for _ in range(5):
        assert all(same_bits(a, b) for a, b in zip(chain(False), patient, strict=True))


# Sizes.


DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        (1, torch.float32),
        (24, torch.float16),
        *((64, dtype) for dtype in DTYPES),
        (96, torch.bfloat16),
        *((128, dtype) for dtype in DTYPES),
        (192, torch.float32),
        (256, torch.float16),
        *((576, dtype) for dtype in DTYPES),
    ],
    ids=str,
)
def test_head_dims_and_dtypes(head_dim, dtype, record_ratios):
    problem = plain(head_dim, kind="paged", lens=(700, 0, 33), head_dim=head_dim, dtype=dtype, poison="nan", spread=3.0)
    check(problem, record_ratios)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [(59, None), (80, None), (112, None), (160, None), (320, 256), (192, 128), (576, 512), (24, 576)],
)
def test_odd_widths_and_values_of_another_width(head_dim, head_dim_v, record_ratios):
    sizes = dict(head_dim=head_dim, head_dim_v=head_dim_v)
    check(plain(3, kind="paged", lens=(700, 0, 33), poison="nan", kv_strides="odd", **sizes), record_ratios)


@pytest.mark.parametrize("group_size", [1, 3, 16, 33, 128])
def test_group_sizes(group_size, record_ratios):
    check(plain(4, kind="paged", lens=(700, 0, 33), num_kv_heads=1, group_size=group_size, head_dim=64), record_ratios)


def check(problem: Problem, record_ratios: Any) -> None:
    scratch = PoisonedWorkspace(problem.config, DEVICE)
    shape = (*problem.q.shape[:-1], problem.kv.head_dim_v)
    out = Guarded(shape, problem.q.dtype, DEVICE, padding=5)
    lse = Guarded(shape[:-1], torch.float32, DEVICE, padding=1)
    problem.decode(scratch.workspace, out=out.tensor, lse=lse.tensor)
    for guarded in (scratch, out, lse):
        guarded.check_guards()
    expected = problem.expected()
    expected.check(out.tensor, lse.tensor, problem)
    record_ratios(problem.q.dtype, expected.error_ratio(out.tensor), expected.lse_error_ratio(lse.tensor))


def test_a_million_tokens_beside_short_requests(record_ratios):
    """The long request is cut into many parts, the short ones into few or none."""
    problem = plain(
        5, kind="paged", lens=(1_000_000, 1, 0, 5000), num_kv_heads=1, group_size=4, head_dim=64, page_size=64
    )
    check(problem, record_ratios)
    scratch = PoisonedWorkspace(problem.config, DEVICE)
    problem.decode(scratch.workspace)
    assert int(scratch.written("partial_lse").sum()) >= 3 * problem.config.num_q_heads


@pytest.mark.parametrize("kind", KINDS)
def test_uneven_batches(kind, record_ratios):
    lens = [(7919 * i) % 257 for i in range(70)]
    lens[11], lens[50] = 60_000, 9_000
    check(plain(6, kind=kind, lens=tuple(lens), num_kv_heads=2, group_size=4, head_dim=64), record_ratios)


def test_more_requests_than_one_scan_takes(record_ratios):
    lens = [(7919 * i) % 97 for i in range(700)]
    lens[3] = lens[650] = 20_000
    check(plain(7, kind="paged", lens=tuple(lens), head_dim=64), record_ratios)
    ragged = plain(8, kind="paged", lens=tuple(lens), head_dim=64, query="ragged", q_lens=[i % 4 for i in range(700)])
    check(ragged, record_ratios)


# Batch invariance (K8).


@pytest.mark.parametrize("kind", ["csr", "ragged"])  # the others are a test of cases/
def test_with_split_tokens_a_request_has_the_same_bits_in_every_batch(kind):
    """Case 33: request 0 in batches of 1 to 33, at any place, beside long, short and empty ones."""
    lens = [300, *[(977 * i) % 500 for i in range(31)], 30_000]
    lens[5] = 0
    problem = plain(9, kind=kind, lens=tuple(lens), dtype=torch.float16, split_tokens=64, max_parts=32)
    workspace = PoisonedWorkspace(problem.config, DEVICE, "garbage").workspace
    alone = [tensor.clone() for tensor in problem.select([0]).decode(workspace)]
    generator = torch.Generator().manual_seed(4)
    for batch in range(1, 34):
        others = (torch.randperm(32, generator=generator)[: batch - 1] + 1).tolist()
        place = int(torch.randint(0, batch, (), generator=generator))
        order = [*others[:place], 0, *others[place:]]
        moved = problem.select(order)
        if kind == "csr":
            moved = moved.relabelled(batch)
        out, lse = moved.decode(workspace)
        assert same_bits(out[place], alone[0][0]) and same_bits(lse[place], alone[1][0]), f"at {place} of {batch}"
    for _ in range(10):
        out, lse = problem.decode(workspace)
        assert same_bits(out[0], alone[0][0]) and same_bits(lse[0], alone[1][0])
