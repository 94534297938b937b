"""Values on the device that are nonsense: none leads a kernel outside of its tensors, and debug mode names each.

SECURITY.md says which are clamped and which are the caller's duty: page ids and row indices are followed as they are.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from conftest import COMPILED
from support import CheckedMemory, Cut, config_for, index_probe, ints, view_of
from torch import Tensor

import splitkv
from splitkv import masks
from splitkv.api import plan_decode
from splitkv.kernels.merge import merge_splits_kernel
from splitkv.kv import KVView
from splitkv.testing import Guarded, PoisonedWorkspace

interpreted = pytest.mark.skipif(COMPILED, reason="watches Triton's interpreter; on a GPU compute-sanitizer does that")
BATCH, TOKENS = 5, 24
EXTREMES = (-(2**31), -7, -1, 0, 1, 2, 5, TOKENS - 1, TOKENS, TOKENS + 1, 1000, 2**30, 2**31 - 1)
CLAMPED = ("seq_lens", "last_page_len", "kv_indptr", "page_indptr", "kv_start")
CUTS = (Cut(), Cut(num_splits=3), Cut(split_tokens=8, max_parts=2))


@pytest.fixture
def checked_memory(monkeypatch: pytest.MonkeyPatch) -> CheckedMemory:
    return CheckedMemory(monkeypatch)


def wild_(tensor: Tensor, rng: random.Random) -> Tensor:
    """The tensor full of values that are no lengths, indices or prefix sums of anything."""
    values = [rng.choice(EXTREMES) for _ in range(tensor.numel())]
    return tensor.copy_(torch.tensor(values, dtype=tensor.dtype).view(tensor.shape))


def view_for(layout: str, device: torch.device, rng: random.Random) -> KVView:
    """A view with every tensor that it may have, whose pages and rows are right and whose lengths are not."""
    k, v = index_probe(device, BATCH, TOKENS)
    lens = [TOKENS, 9, 0, 17, 1]
    if layout == "latent":
        paged = view_of("paged", k, v, lens)
        kv: KVView = splitkv.LatentKV(paged.k[:, :, 0], paged.page_table, paged.seq_lens, head_dim_v=16)
    elif layout == "shard":
        kv = view_of("paged", k, v, lens).shard(ints(lens, device), starts=ints([0] * BATCH, device))
        assert kv.positions is not None and kv.positions.starts is not None
        wild_(kv.positions.seq_lens, rng)
        wild_(kv.positions.starts, rng)
    else:
        kv = view_of(layout, k, v, lens, kv_start=ints([0] * BATCH, device))
    for name in ("page_table", "page_indices"):
        table = getattr(kv, name, None)
        if table is not None:
            table.clamp_(min=0)  # what nobody should follow is a page here, so that whoever does is seen by lengths
    for name in CLAMPED:
        tensor = getattr(kv, name, None)
        if tensor is not None:
            wild_(tensor, rng)
    return kv


@triton.jit
def copy_kernel(source_ptr, target_ptr, first, count, BLOCK: tl.constexpr):
    """target[i] = source[first + i] for the first `count` of BLOCK lanes."""
    lanes = tl.arange(0, BLOCK)
    tl.store(target_ptr + lanes, tl.load(source_ptr + first + lanes, mask=lanes < count), mask=lanes < count)


@interpreted
@pytest.mark.parametrize(
    ("first", "count", "what"), [(0, 9, "load"), (-1, 1, "load"), (0, 8, "store"), (2, 6, "store")]
)
def test_an_access_outside_is_noticed(checked_memory: CheckedMemory, first: int, count: int, what: str) -> None:
    source, target = torch.arange(10)[1:9], torch.zeros(10, dtype=torch.int64)[:5]
    copy_kernel[(1,)](source_ptr=source, target_ptr=target, first=3, count=5, BLOCK=16)
    assert target.tolist() == [4, 5, 6, 7, 8]
    with pytest.raises(Exception, match=f"{what} outside of the operands"):
        copy_kernel[(1,)](source_ptr=source, target_ptr=target, first=first, count=count, BLOCK=16)


KINDS = ("paged", "csr", "contiguous", "ragged", "latent", "shard")
QUERIES = ("one", "several", "ragged")
# Each kind of view with each form of query, and both with each cut.
WAYS = [(kind, query, CUTS[(i + j) % 3]) for i, kind in enumerate(KINDS) for j, query in enumerate(QUERIES)]


@interpreted
@pytest.mark.parametrize(("layout", "query", "cut"), WAYS, ids=str)
def test_decode_stays_within_its_tensors(
    device: torch.device, checked_memory: CheckedMemory, layout: str, query: str, cut: Cut
) -> None:
    rng = random.Random(f"{layout} {query} {cut}")
    kv = view_for(layout, device, rng)
    q = torch.ones(*{"one": (BATCH,), "several": (BATCH, 3), "ragged": (7,)}[query], 2, 16, device=device)
    rules: dict[str, Any] = dict(sm_scale=1.0, window_left=rng.choice([None, 3]), num_splits=cut.num_splits)
    if query == "ragged":
        rules["qo_indptr"] = wild_(ints([0] * (BATCH + 1), device), rng)
    if query != "one" and rng.random() < 0.5:
        rules["tree_mask"] = wild_(ints([[[0]] * 3] * BATCH, device), rng)
    scratch = PoisonedWorkspace(config_for(q, kv, cut, BATCH), device)
    out = Guarded((*q.shape[:-1], kv.head_dim_v), q.dtype, device)
    lse = Guarded(q.shape[:-1], q.dtype, device)
    splitkv.decode(q, kv, scratch.workspace, out=out.tensor, lse=lse.tensor, **rules)
    assert checked_memory.accesses
    for guarded in (scratch, out, lse):
        guarded.check_guards()


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("width", [59, 72])
def test_widths_that_fill_no_block_stay_within_their_rows(
    device: torch.device, checked_memory: CheckedMemory, width: int, dtype: torch.dtype
) -> None:
    """Past the last row of a query or a cache, where a block or its tail has columns left, nothing is read."""
    q, k, v = (torch.ones(shape, dtype=dtype, device=device) for shape in ((1, 2, width), *[(1, 5, 1, width)] * 2))
    kv = splitkv.ContiguousKV(k, v, ints([5], device))
    out = Guarded(q.shape, dtype, device)
    for splits in (1, 2):
        scratch = PoisonedWorkspace(config_for(q, kv, Cut(num_splits=2)), device)
        splitkv.decode(q, kv, scratch.workspace, out=out.tensor, num_splits=splits)
        assert checked_memory.accesses and (out.tensor == 1).all()
        for guarded in (scratch, out):
            guarded.check_guards()


@interpreted
@pytest.mark.parametrize(("claims", "cut"), [(4, CUTS[0]), (4, CUTS[1]), (4, CUTS[2]), (1, CUTS[0])], ids=str)
def test_prefix_sums_that_fall_claim_no_more_partials_than_there_are(
    device: torch.device, checked_memory: CheckedMemory, claims: int, cut: Cut
) -> None:
    # Four requests claim all tokens, in 3 tiles each. Rows are taken for those of the fourth, whose tiles end at 12; of
    # ten requests that share 36 tokens there are at most 11. Where one claims all, rows are taken for those of a
    # request that has none.
    batch, tokens = 10, 36
    indptr = ints(([0, tokens] * claims + [0] * batch)[: batch + 1], device)
    kv = view_of("paged", *index_probe(device, batch, TOKENS), [TOKENS] * batch)
    q = torch.ones(tokens, 1, 16, device=device)
    config = splitkv.WorkspaceConfig(
        batch, 1, 1, 16, max_total_q=tokens, q_tile_rows=16, dtype=torch.float32, split_tokens=cut.split_tokens,
        max_parts=cut.max_parts, max_splits=None if cut.split_tokens else 33,
    )  # fmt: skip
    assert config.max_q_tiles == 11
    scratch = PoisonedWorkspace(config, device)
    out, lse = Guarded((tokens, 1, 16), q.dtype, device), Guarded((tokens, 1), q.dtype, device)
    splitkv.decode(
        q, kv, scratch.workspace, qo_indptr=indptr, num_splits=cut.num_splits, out=out.tensor, lse=lse.tensor
    )
    assert not out.tensor.isnan().any() and not lse.tensor.isnan().any()
    for guarded in (scratch, out, lse):
        guarded.check_guards()


@interpreted
@pytest.mark.parametrize("claimed", [2**31 - 512, 2**31], ids=["to the end of 32 bits", "past 32 bits"])
def test_prefix_sums_that_claim_more_than_32_bits_count_have_no_partials(
    device: torch.device, checked_memory: CheckedMemory, claimed: int
) -> None:
    # Every other request claims tokens 0 to count - 1, each a tile of `parts` parts, and those between claim none. As
    # many of either kind end at or before token 0, which is taken for the last claim's: its parts begin at `claimed`.
    tokens, parts, claims = 1024, 512, 4096
    assert tokens * parts * claims == 2**31
    counts = [claimed // parts - tokens * (claims - 1), *[tokens] * claims]
    indptr = ints([*(edge for count in counts for edge in (0, count)), *[0] * claims], device)
    batch = len(indptr) - 1
    k, v = torch.zeros(2, 1, 1, 1, 16, device=device).expand(2, batch, TOKENS, 1, 16)
    kv = splitkv.ContiguousKV(k, v[..., :1], ints([TOKENS] * batch, device))
    config = splitkv.WorkspaceConfig(
        batch, 16, 1, 16, head_dim_v=1, max_total_q=tokens, q_tile_rows=16, max_splits=tokens * parts,
        dtype=torch.float32,
    )  # fmt: skip
    workspace = splitkv.Workspace.allocate(config, device)
    q = torch.zeros(1, 1, 16, device=device).expand(tokens, 16, 16)
    merge = plan_decode(q, kv, workspace, qo_indptr=indptr, num_splits=parts, want_lse=True).launches[-1]
    assert merge.kernel is merge_splits_kernel and merge.grid[0] == tokens
    for tensor in (workspace.out, workspace.lse):
        tensor.fill_(torch.nan)
    dataclasses.replace(merge, grid=(1, 1, 1)).run(device)
    assert merge.operands["out_ptr"][0, 0] == 0 and merge.operands["lse_ptr"][0, 0] == -torch.inf


@interpreted
@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("layout", ["paged", "csr"])
def test_shared_prefixes_stay_within_their_tensors(
    device: torch.device, checked_memory: CheckedMemory, layout: str, query: str
) -> None:
    rng = random.Random(f"{layout} {query}")
    kv = view_for(layout, device, rng)
    q = torch.ones(*{"one": (BATCH,), "several": (BATCH, 2), "ragged": (7,)}[query], 2, 16, device=device)
    rules = {"qo_indptr": wild_(ints([0] * (BATCH + 1), device), rng)} if query == "ragged" else {}
    scratch = PoisonedWorkspace(splitkv.WorkspaceConfig(BATCH, 2, 1, 16, max_total_q=10, dtype=torch.float32), device)
    groups = ints([rng.choice([0, 0, 1, -5, 4, 5, 2**31 - 1]) for _ in range(BATCH)], device)
    lens = wild_(ints([0] * BATCH, device), rng)
    splitkv.decode_shared_prefix(q, kv, scratch.workspace, groups, lens, **rules)
    assert checked_memory.accesses
    scratch.check_guards()


@interpreted
@pytest.mark.parametrize("layout", KINDS)
def test_slots_stay_within_their_cache(device: torch.device, checked_memory: CheckedMemory, layout: str) -> None:
    rng = random.Random(layout)
    kv = view_for(layout, device, rng)
    memory = [Guarded(t.shape, t.dtype, device) for t in (kv.k, kv.v)]
    if layout == "contiguous":
        kv = splitkv.ContiguousKV(memory[0].tensor, memory[1].tensor, kv.tensors[2])
    elif layout == "ragged":
        kv = splitkv.RaggedKV(memory[0].tensor, memory[1].tensor, kv.tensors[3])
    elif layout == "csr":
        kv = splitkv.PagedKV.from_csr(memory[0].tensor, memory[1].tensor, kv.tensors[3], kv.tensors[4], kv.tensors[2])
    elif layout == "latent":
        kv = splitkv.LatentKV(memory[0].tensor[:, :, 0], kv.tensors[4], kv.tensors[2], head_dim_v=16)
    else:
        kv = splitkv.PagedKV(memory[0].tensor, memory[1].tensor, kv.tensors[4], kv.tensors[2])
    count = kv.k.shape[0] * (1 if layout == "ragged" else kv.k.shape[1])

    def slots() -> Tensor:
        edge = [-1, 0, count - 1, count, count + 1]
        return ints([rng.choice([*EXTREMES, *edge]) for _ in range(40)], device)

    new = torch.ones(40, 1, 16, device=device)
    splitkv.append_kv(new, None if layout == "latent" else new, kv, slots())
    splitkv.move_kv(kv, slots(), slots())
    assert checked_memory.accesses
    for guarded in memory:
        guarded.check_guards()


@interpreted
def test_merges_and_masks_stay_within_their_tensors(device: torch.device, checked_memory: CheckedMemory) -> None:
    rng, written = random.Random(0), []

    def guarded(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        written.append(Guarded(shape, dtype, device))
        return written[-1].tensor

    for _ in range(3):
        lens, starts, indptr = (wild_(ints([0] * n, device), rng) for n in (BATCH, BATCH, BATCH + 1))
        partials = torch.ones(6, 2, 16, device=device), torch.ones(6, 2, device=device)
        out, lse = guarded(BATCH, 2, 16, dtype=torch.float32), guarded(BATCH, 2, dtype=torch.float32)
        splitkv.merge(*partials, indptr=indptr, out=out, lse=lse)
        masks.validity_mask(guarded(BATCH, 9).view(torch.bool), lens, kv_start=starts)
        masks.attention_mask(guarded(BATCH, 2, 9).view(torch.bool), lens, kv_start=starts, window_left=2)
        masks.ragged_mask(guarded(7, 9).view(torch.bool), indptr, lens, kv_start=starts)
        masks.position_mask(guarded(BATCH, 1, 9).view(torch.bool), wild_(starts, rng))
        parents = wild_(torch.empty(BATCH, 7, dtype=torch.int32, device=device), rng)
        masks.tree_mask_from_parents(parents, guarded(BATCH, 7, 1, dtype=torch.int32))
    assert checked_memory.accesses
    for each in written:
        each.check_guards()


@interpreted
def test_steps_and_schedules_stay_within_their_tensors(device: torch.device, checked_memory: CheckedMemory) -> None:
    rng = random.Random(0)
    table = ints([[0, 1, -1], [-1, 2, 3], [5, -7, 6]], device)
    step = splitkv.StepState.allocate(splitkv.StepConfig(3, max_total_q=6), table, 4, device)
    step.bind([0, 1, 2], [4, 9, 12], q_lens=[2, 1, 3])
    for _ in range(4):
        step.advance(wild_(ints([0] * 3, device), rng))
        assert bool((step.out_cache_loc < 7 * 4).all()) and bool((step.seq_lens <= 12).all())
    wild_(table, rng)  # a missing page is any negative entry; others are followed by nobody here
    step.advance()
    config = splitkv.WorkspaceConfig(BATCH, 2, 1, 16, dtype=torch.float32)
    schedule = splitkv.Schedule.allocate(config, device)
    k, v = index_probe(device, BATCH, TOKENS)
    kv = splitkv.ContiguousKV(k, v, wild_(ints([0] * BATCH, device), rng), schedule=schedule)
    schedule.update(kv)
    scratch = PoisonedWorkspace(config, device)
    for _ in range(2):  # with the list of these lengths, and of others
        splitkv.decode(torch.ones(BATCH, 2, 16, device=device), kv, scratch.workspace)
        wild_(kv.seq_lens, rng)
    assert checked_memory.accesses
    scratch.check_guards()


# Debug mode.


@pytest.mark.gpu
def test_debug_mode_keeps_out_of_captures(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITKV_DEBUG", "1")
    table = ints([[0, 1], [2, 3]], device)
    step = splitkv.StepState.allocate(splitkv.StepConfig(2), table, 16, device)
    step.bind([0, 1], [3, 20])
    config = splitkv.WorkspaceConfig(2, 2, 1, 16, dtype=torch.float32)
    workspace, schedule = splitkv.Workspace.allocate(config, device), splitkv.Schedule.allocate(config, device)
    k, v = torch.zeros(2, 4, 16, 1, 16, device=device)
    kv = splitkv.PagedKV(k, v, table, step.seq_lens, rows=step.req_pool_indices, schedule=schedule)
    new, q, counts = torch.ones(2, 1, 16, device=device), torch.ones(2, 2, 16, device=device), ints([1, 1], device)
    seen, tree = torch.zeros(2, 40, dtype=torch.bool, device=device), ints([[[0]] * 2] * 2, device)
    parents = ints([[-1, 0]] * 2, device)

    def run() -> Tensor:
        splitkv.append_kv(new, new, kv, step.out_cache_loc)
        splitkv.move_kv(kv, step.out_cache_loc, step.out_cache_loc)
        schedule.update(kv)
        out, lse = splitkv.decode_with_lse(q, kv, workspace)
        splitkv.merge(out[None], lse[None], indptr=None)
        splitkv.merge(out, lse, indptr=step.qo_indptr)
        masks.validity_mask(seen, step.seq_lens)
        masks.tree_mask_from_parents(parents, tree)
        step.advance(counts)
        return out

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    graph.replay()
    assert bool(out.isfinite().all()) and bool((out > 0).all())
    assert step.seq_lens.tolist() == [5, 22]


def debug_cases() -> Iterator[tuple[str, str, Callable[[Tensor], Any], int, str]]:
    """Kind of view, its tensor, what spoils that, the row that is named, and the text."""
    yield "paged", "seq_lens", lambda t: t[1].fill_(-1), 1, "-1"
    yield "paged", "seq_lens", lambda t: t[3].fill_(1000), 3, "1000"
    yield "paged", "page_table", lambda t: t[3, 2].fill_(-1), 3, "-1 for its page 2"
    yield "paged", "page_table", lambda t: t[0, 0].fill_(500), 0, "500 for its page 0"
    yield "paged", "kv_start", lambda t: t[4].fill_(-2), 4, "-2"
    yield "paged", "rows", lambda t: t[2].fill_(-1), 2, "-1"
    yield "paged", "rows", lambda t: t[2].fill_(9), 2, "9"
    yield "hnd", "seq_lens", lambda t: t[0].fill_(1000), 0, "1000"
    yield "hnd", "page_table", lambda t: t[1, 1].fill_(77), 1, "77 for its page 1"
    yield "csr", "page_indptr", lambda t: t[2].fill_(0), 1, "6"
    yield "csr", "page_indptr", lambda t: t[5].fill_(99), 5, "99"
    yield "csr", "page_indptr", lambda t: t[0].fill_(-1), 0, "-1"
    yield "csr", "page_indices", lambda t: t[6].fill_(-1), 1, "-1 for its page 0"
    yield "csr", "last_page_len", lambda t: t[3].fill_(0), 3, "0"
    yield "csr", "last_page_len", lambda t: t[0].fill_(5), 0, "5"
    yield "csr", "kv_start", lambda t: t[0].fill_(-1), 0, "-1"
    yield "contiguous", "seq_lens", lambda t: t[1].fill_(TOKENS + 1), 1, str(TOKENS + 1)
    yield "contiguous", "rows", lambda t: t[4].fill_(BATCH), 4, str(BATCH)
    yield "contiguous", "kv_start", lambda t: t[1].fill_(-9), 1, "-9"
    yield "ragged", "kv_indptr", lambda t: t[3].fill_(1), 2, "33"
    yield "ragged", "kv_indptr", lambda t: t[5].fill_(10**6), 5, str(10**6)
    yield "ragged", "kv_start", lambda t: t[3].fill_(-9), 3, "-9"
    yield "latent", "seq_lens", lambda t: t[1].fill_(-1), 1, "-1"
    yield "latent", "page_table", lambda t: t[3, 2].fill_(-1), 3, "-1 for its page 2"
    yield "latent", "rows", lambda t: t[2].fill_(9), 2, "9"
    yield "latent", "kv_start", lambda t: t[2].fill_(-1), 2, "-1"


def sound_view(kind: str, device: torch.device) -> KVView:
    k, v = index_probe(device, BATCH, TOKENS)
    lens, start = [TOKENS, 9, 0, 17, 1], ints([0] * BATCH, device)
    if kind == "latent":
        paged = sound_view("paged", device)
        return splitkv.LatentKV(paged.k[:, :, 0], paged.tensors[4], paged.tensors[2], head_dim_v=16, rows=paged.rows,
                                kv_start=start)  # fmt: skip
    rows = {} if kind in ("csr", "ragged") else dict(rows=ints(range(BATCH), device))
    return view_of(kind, k, v, lens, kv_start=start, **rows)


@pytest.mark.parametrize(
    ("kind", "name", "spoil", "row", "text"), list(debug_cases()), ids=lambda v: v if isinstance(v, str) else ""
)
def test_debug_mode_names_the_row(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, kind: str, name: str, spoil: Callable[[Tensor], Any],
    row: int, text: str,
) -> None:  # fmt: skip
    kv = sound_view(kind, device)
    scratch = PoisonedWorkspace(splitkv.WorkspaceConfig(BATCH, 2, 1, 16, dtype=torch.float32), device)
    q = torch.ones(BATCH, 2, 16, device=device)
    monkeypatch.setenv("SPLITKV_DEBUG", "1")
    assert splitkv.supports(q, kv, scratch.workspace, sm_scale=1.0) is None
    spoil(getattr(kv, name))
    place = rf"given {text} (and then \d+ )?in row {row}|row {row}, given {text}"
    with pytest.raises(ValueError, match=rf"^{name}: expected .*({place})"):
        splitkv.decode(q, kv, scratch.workspace, sm_scale=1.0)
    assert not scratch.written("out").any() and not scratch.written("partial_out").any()


def test_debug_mode_names_what_else_is_wrong(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITKV_DEBUG", "1")
    kv, q = sound_view("paged", device), torch.ones(7, 2, 16, device=device)
    workspace = splitkv.Workspace.allocate(
        splitkv.WorkspaceConfig(BATCH, 2, 1, 16, max_total_q=7, dtype=torch.float32), device
    )
    indptr = [0, 1, 3, 3, 5, 7]

    def refused(message: str, call: Callable[[], Any]) -> None:
        with pytest.raises(ValueError, match=f"^{message}"):
            call()

    for place, value, message in ((2, 0, "given 1 and then 0 in row 1"), (5, 8, "given 8 in row 5")):
        wrong = ints([*indptr[:place], value, *indptr[place + 1 :]], device)
        refused(
            f"qo_indptr: expected .*{message}", lambda wrong=wrong: splitkv.decode(q, kv, workspace, qo_indptr=wrong)
        )
    tree = ints([[[1]]] * BATCH, device)
    refused(
        r"tree_mask: expected max_q_len ≥ 2 \(query tokens of row 1\), given 1",
        lambda: splitkv.decode(q, kv, workspace, qo_indptr=ints(indptr, device), tree_mask=tree),
    )
    new, count = torch.ones(2, 1, 16, device=device), kv.k.shape[0] * kv.k.shape[1]
    refused(
        f"slots: expected slots < {count} .*, given {count} at index 1",
        lambda: splitkv.append_kv(new, new, kv, ints([0, count], device)),
    )
    for name, slots in (("src_slots", ([count, 0], [0, 1])), ("dst_slots", ([0, 1], [0, count]))):
        refused(
            f"{name}: expected slots < {count} .*, given {count} at index {slots[0][0] != count:d}",
            lambda slots=slots: splitkv.move_kv(kv, *(ints(each, device) for each in slots)),
        )
    for name, changes in (
        ("seq_lens", dict(seq_lens=[3, 10])), ("seq_lens", dict(seq_lens=[3, -1])),
        ("kv_start", dict(kv_start=[0, -1])),
        ("qo_indptr", dict(qo_indptr=[0, 4, 6])), ("qo_indptr", dict(qo_indptr=[0, 4, 3])),
    ):  # fmt: skip
        given = dict(qo_indptr=[0, 2, 5], seq_lens=[3, 9], kv_start=[0, 1])
        masks.ragged_mask(torch.ones(5, 9, device=device).bool(), **{n: ints(v, device) for n, v in given.items()})
        refused(
            f"{name}: expected .* in row",
            lambda changes=given | changes: masks.ragged_mask(
                torch.ones(5, 9, device=device).bool(), **{n: ints(v, device) for n, v in changes.items()}
            ),
        )
    schedule = splitkv.Schedule.allocate(workspace.config, device)
    schedule.update(kv)
    step = splitkv.StepState.allocate(splitkv.StepConfig(2), ints([[0, 1], [2, 3]], device), 4, device)
    step.bind([0, 1], [3, 2])
    refused("num_new: expected values in 0…1, given 2 in row 1", lambda: step.advance(ints([1, 2], device)))
    refused("num_new: expected values in 0…1, given -1 in row 0", lambda: step.advance(ints([-1, 1], device)))
    step.advance(ints([0, 1], device))
    kv.seq_lens[1] = -1
    refused("seq_lens: expected values in .*, given -1 in row 1", lambda: schedule.update(kv))
