"""The work partition: laws of its plain arithmetic, and the kernels held against it."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import H200

import splitkv
from splitkv import reference, schedule
from splitkv.api import plan_decode
from splitkv.config import cdiv
from splitkv.kernels import primitives
from splitkv.kernels.primitives import (
    CONTIGUOUS,
    RAGGED,
    choose_shares,
    even_edge,
    load_kv_range,
    locate,
    part_tokens,
    request_work,
    tile_weight,
)
from splitkv.kernels.split_decode import stretch
from splitkv.schedule import BALANCED, FIXED_PARTS, FIXED_TOKENS, GRAIN, Partition, Request, Stretch
from splitkv.schedule import even_edge as even_edge_plain
from splitkv.schedule import part_tokens as part_tokens_plain
from splitkv.schedule import stretch as stretch_plain

LENGTHS = st.one_of(st.integers(0, 40), st.integers(0, 3000), st.integers(0, 2**20))


@st.composite
def requests(draw: st.DrawFn, q_lens: st.SearchStrategy[int], lengths: st.SearchStrategy[int] = LENGTHS) -> Request:
    seq_len = draw(lengths)
    kv_start = draw(st.one_of(st.just(0), st.integers(0, seq_len)))
    return Request(seq_len, draw(q_lens), kv_start)


BATCHES = st.one_of(
    st.lists(requests(st.just(1)), min_size=1, max_size=12),
    st.lists(requests(st.integers(0, 9)), min_size=1, max_size=6),
)


@st.composite
def partitions(draw: st.DrawFn, batch: list[Request]) -> Partition:
    partition = Partition(
        schedule=draw(st.sampled_from([BALANCED, BALANCED, FIXED_PARTS, FIXED_TOKENS])),
        group_size=draw(st.integers(1, 24)),
        block_m=draw(st.sampled_from([16, 32, 64])),
        num_kv_heads=draw(st.integers(1, 4)),
        shares=draw(st.integers(1, 60)),
        heaviest=draw(st.sampled_from([2**20, 2**20, 3, 1])),
        min_chunk=draw(st.sampled_from([1, 16, 64])),
        segment_cost=draw(st.sampled_from([0, 128, 100_000])),
        tile_cost=draw(st.sampled_from([0, 64])),
        parts=draw(st.integers(1, 9)),
        split_tokens=draw(st.integers(1, 100)),
        window_left=draw(st.one_of(st.none(), st.integers(0, 100))),
        right_bound=draw(st.booleans()),
    )
    if partition.schedule == BALANCED:
        return partition
    # With fixed schedules every part that there may be has a program.
    tiles = sum(partition.request_work(request)[0] for request in batch)
    return replace(partition, shares=tiles * partition.parts)


CASES = BATCHES.flatmap(lambda batch: st.tuples(st.just(batch), partitions(batch)))


def visible_of(partition: Partition, request: Request, token: int) -> tuple[int, int]:
    """The keys that one query token sees by the rules themselves, as low ≤ key < high."""
    position = request.seq_len - request.q_len + token
    low = request.kv_start if partition.window_left is None else max(request.kv_start, position - partition.window_left)
    high = min(request.seq_len, position + 1) if partition.right_bound else request.seq_len
    return low, max(low, high)


def by_tile(stretches: Iterable[Stretch]) -> dict[tuple[int, int], list[Stretch]]:
    """Stretches of each tile in the order in which they lie on it."""
    tiles = defaultdict(list)
    for each in stretches:
        tiles[each.request, each.tile].append(each)
    return {tile: sorted(found, key=lambda each: each.offset) for tile, found in tiles.items()}


@given(CASES)
@example(([Request(2**20)] + 11 * [Request(1)], Partition(BALANCED, 1, 16, 1, shares=13)))
@settings(max_examples=200)
def test_every_visible_key_is_attended_exactly_once(case: tuple[list[Request], Partition]) -> None:
    batch, partition = case
    tiles = by_tile(partition.stretches(batch))
    for b, request in enumerate(batch):
        count, span = partition.request_work(request)
        assert {tile for owner, tile in tiles if owner == b} == set(range(count))
        for tile in range(count):
            attended = [each for each in tiles[b, tile] if each.tokens]
            for before, after in pairwise(attended):
                assert before.high == after.low
            # All that some row of the tile sees lies in it, and it begins and ends with a key that some row sees.
            first = tile * partition.block_m // partition.group_size
            last = min(((tile + 1) * partition.block_m - 1) // partition.group_size, request.q_len - 1)
            seen = [visible_of(partition, request, token) for token in range(first, last + 1)]
            seen = [(low, high) for low, high in seen if low < high]
            if seen:
                assert attended[0].low == min(low for low, _ in seen)
                assert attended[-1].high == max(high for _, high in seen)
                assert attended[-1].high - attended[0].low <= span
            else:
                assert not attended


@given(CASES)
@settings(max_examples=200)
def test_slots_suffice_and_the_merge_finds_them(case: tuple[list[Request], Partition]) -> None:
    batch, partition = case
    stretches = list(partition.stretches(batch))
    slots = [each.slot for each in stretches if each.slot is not None]
    assert len(slots) == len(set(slots))
    # What a workspace has: two per share of a balanced launch of several, one per fixed part.
    capacity = partition.shares if partition.schedule != BALANCED else 2 * partition.shares * (partition.shares > 1)
    assert all(0 <= slot < capacity for slot in slots)
    for (b, tile), found in by_tile(stretches).items():
        merged = partition.merged_slots(b, tile, batch)
        if not merged:
            assert [each.slot for each in found] == [None]
        else:
            assert [each.slot for each in found] == merged


@given(CASES)
@settings(max_examples=200)
def test_balanced_shares_are_about_equally_long(case: tuple[list[Request], Partition]) -> None:
    batch, partition = case
    if partition.schedule != BALANCED:
        return
    partition = replace(partition, heaviest=2**30)
    loads = [0] * partition.shares
    for each in partition.stretches(batch):
        loads[each.share] += each.tokens
    work = [partition.request_work(request) for request in batch]
    weights = [tiles * max(-(-(span + partition.tile_cost) // GRAIN), 1) for tiles, span in work]
    mean = sum(weights) * GRAIN / partition.shares
    assert max(loads) <= max(mean + GRAIN, partition.min_chunk) + partition.segment_cost + 1


def test_programs_of_chunks_attend_about_as_many_keys() -> None:
    """2048 query tokens over 8192: the last tile sees a fifth more than the first, and no program more than others."""
    chunk = Partition(BALANCED, group_size=4, block_m=128, num_kv_heads=8, shares=16, min_chunk=64, tile_cost=128)
    batch = [Request(8192 + 2048, 2048)] * 4
    assert not chunk.choose_shares(batch).by_work
    keys = [0] * 16
    for each in chunk.stretches(batch):
        assert each.slot is None
        keys[each.share] += each.high - each.low
    assert max(keys) == min(keys)


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (40, 1), (3, 70)])
def test_the_axis_of_work_stays_within_32_bits(batch: int, tokens: int, device: torch.device) -> None:
    """Where each request has as many tokens as a length may claim; of a work list too."""
    config = splitkv.WorkspaceConfig(batch, 2, 1, 16, max_total_q=batch * tokens, q_tile_rows=16, dtype=torch.float16)
    page = torch.zeros(1, 1, 1, 16, dtype=torch.float16, device=device).expand(1, 2**20, 1, 16)
    table = torch.zeros(1, 2**10, dtype=torch.int32, device=device).expand(batch, 2**10)
    lens = torch.full((batch,), 2**30, dtype=torch.int32, device=device)
    work_list = splitkv.Schedule.allocate(config, device)
    kv = splitkv.PagedKV(page, page, table, lens, schedule=work_list)
    q = torch.zeros(batch, tokens, 2, 16, dtype=torch.float16, device=device)
    split = plan_decode(q, kv, splitkv.Workspace.allocate(config, device)).launches[0]
    found = Partition.of_launch(split.operands, split.constants)
    assert found.choose_shares([Request(2**30, tokens)] * batch).total <= 2**30
    work_list.update(kv)
    assert 0 < int(work_list.buffer[-1]) * cdiv(2 * tokens, 16) <= 2**30


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (40, 1), (3, 4)])
def test_a_window_is_scheduled_as_so_many_keys_alone(batch: int, tokens: int, device: torch.device) -> None:
    """128 keys of 131,072 are cut, shared and merged as those of a request that has no others."""
    window_left = 127
    own = window_left + tokens
    shares = []
    for length in (own, 131072):
        config = splitkv.WorkspaceConfig(batch, 32, 8, 16, max_total_q=batch * tokens, dtype=torch.float16)
        workspace = splitkv.Workspace.allocate(config, device)
        workspace.target = H200
        page = torch.zeros(1, 16, 8, 16, dtype=torch.float16, device=device)
        table = torch.zeros(batch, 131072 // 16, dtype=torch.int32, device=device)
        kv = splitkv.PagedKV(page, page, table, torch.full((batch,), length, dtype=torch.int32, device=device))
        q = torch.zeros(batch, tokens, 32, 16, dtype=torch.float16, device=device)
        split = plan_decode(q, kv, workspace, window_left=window_left).launches[0]
        found = Partition.of_launch(split.operands, split.constants)
        stretches = found.stretches([Request(length, tokens)] * batch)
        shares.append([(s.share, s.request, s.low - length, s.high - length, s.slot) for s in stretches])
    assert shares[0] == shares[1]
    assert sum(high - low for _, _, low, high, _ in shares[0]) == batch * own


@pytest.mark.parametrize("tiles", [1, 2, 3, 4, 7])
def test_tiles_stand_at_places_of_their_own_early_and_late_ones_in_turn(tiles: int) -> None:
    """In neighbouring places, from the first on, are tiles as far from the first as from the last."""
    order = [schedule.tile_at(place, tiles) for place in range(tiles)]
    assert [schedule.place_of(tile, tiles) for tile in order] == list(range(tiles))
    assert all(order[place] + order[place + 1] == tiles - 1 for place in range(0, tiles - 1, 2))


@given(CASES, st.sampled_from([FIXED_PARTS, FIXED_TOKENS]))
def test_fixed_edges_follow_from_the_request_alone(case: tuple[list[Request], Partition], kind: int) -> None:
    batch, partition = case
    tiles = sum(partition.request_work(request)[0] for request in batch)
    partition = replace(partition, schedule=kind, shares=tiles * partition.parts)
    for (b, tile), found in by_tile(partition.stretches(batch)).items():
        request = batch[b]
        length, low, high = request.seq_len, *partition.tile_range(request, tile)
        if kind == FIXED_PARTS:
            edges = [part * length // partition.parts for part in range(partition.parts + 1)]
        else:
            blocks = max(-(-length // partition.split_tokens), 1)
            distance = partition.split_tokens * -(-blocks // partition.parts)
            edges = [*range(0, max(length, 1), distance), length]
        parts = len(edges) - 1
        assert parts == len(found) <= partition.parts
        for each, first, last in zip(found, edges[:-1], edges[1:], strict=False):
            assert each.tokens == max(min(high, last) - max(low, first), 0)
            assert each.low == max(low, first)


# The kernels against it.


def test_kernels_and_plain_arithmetic_name_the_same_things() -> None:
    for name in ("BALANCED", "FIXED_PARTS", "FIXED_TOKENS", "GRAIN"):
        assert getattr(primitives, name).value == getattr(schedule, name)


@triton.jit
def edges_kernel(tokens_ptr, even_ptr, distance_ptr, SPLIT_TOKENS: tl.constexpr, PARTS: tl.constexpr):
    """Writes even_edge of parts 0 … PARTS for each length, and part_tokens."""
    index = tl.program_id(0)
    tokens = tl.load(tokens_ptr + index)
    for part in range(PARTS + 1):
        tl.store(even_ptr + index * (PARTS + 1) + part, even_edge(part, PARTS, tokens))
    tl.store(distance_ptr + index, part_tokens(tokens, SPLIT_TOKENS, PARTS))


@given(st.integers(1, 64), st.integers(1, 100_000))
@example(parts=4096, split_tokens=1)
@settings(max_examples=10)
def test_kernel_edges_are_the_plain_ones(device: torch.device, parts: int, split_tokens: int) -> None:
    lengths = [2**30] if parts == 4096 else [0, 1, parts - 1, parts, 2**20 + 1, 2**30]
    tokens = torch.tensor(lengths, dtype=torch.int32, device=device)
    even = torch.full((len(lengths), parts + 1), -1, dtype=torch.int32, device=device)
    distance = torch.full((len(lengths),), -1, dtype=torch.int32, device=device)
    edges_kernel[(len(lengths),)](tokens, even, distance, SPLIT_TOKENS=split_tokens, PARTS=parts)
    assert even.tolist() == [[even_edge_plain(p, parts, n) for p in range(parts + 1)] for n in lengths]
    assert distance.tolist() == [part_tokens_plain(n, split_tokens, parts) for n in lengths]


@triton.jit
def shares_kernel(
    chosen_ptr,
    work_ptr,
    found_ptr,
    places_ptr,
    lens_ptr,
    indptr_ptr,
    kv_start_ptr,
    qo_indptr_ptr,
    batch: tl.int32,
    q_len: tl.int32,
    total_q: tl.int32,
    capacity: tl.int32,
    window_left: tl.int32,
    shares: tl.int32,
    heaviest: tl.int32,
    PAGE_SIZE: tl.constexpr,
    KV_KIND: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    RIGHT_BOUND: tl.constexpr,
    SCHEDULE: tl.constexpr,
    PARTS: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    SEGMENT_COST: tl.constexpr,
    TILE_COST: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Calls the device functions of the schedule.

    Grid: (requests or places, whichever are more,).

    Reads:  places [grid] int32, of the axis
    Writes: chosen [4] int32: by_work, each, share, total
            work [requests, 5] int32: tiles, span, weight, and the first and last key of its first weight's second half
            found [grid, 2] int32: request and begin at each place
    """
    index = tl.program_id(0)
    by_work, each, share, total = choose_shares(
        batch, lens_ptr, indptr_ptr, kv_start_ptr, qo_indptr_ptr, capacity, q_len, total_q, window_left, shares,
        heaviest, PAGE_SIZE, KV_KIND, GROUP_SIZE, BLOCK_M, HAS_WINDOW, RIGHT_BOUND, SCHEDULE, PARTS, MIN_CHUNK,
        SEGMENT_COST, TILE_COST, BLOCK_B,
    )  # fmt: skip
    if index == 0:
        tl.store(chosen_ptr, by_work)
        tl.store(chosen_ptr + 1, each)
        tl.store(chosen_ptr + 2, share)
        tl.store(chosen_ptr + 3, total)
    request, begin = locate(
        tl.load(places_ptr + index), batch, by_work, each, lens_ptr, indptr_ptr, kv_start_ptr, qo_indptr_ptr, capacity,
        q_len, total_q, window_left, heaviest, PAGE_SIZE, KV_KIND, GROUP_SIZE, BLOCK_M, HAS_WINDOW, RIGHT_BOUND,
        TILE_COST, BLOCK_B,
    )  # fmt: skip
    tl.store(found_ptr + 2 * index, request)
    tl.store(found_ptr + 2 * index + 1, begin)
    if index < batch:
        tiles, span = request_work(
            index, True, lens_ptr, indptr_ptr, kv_start_ptr, qo_indptr_ptr, capacity, q_len, total_q, window_left,
            PAGE_SIZE, KV_KIND, GROUP_SIZE, BLOCK_M, HAS_WINDOW, RIGHT_BOUND,
        )  # fmt: skip
        start, seq_len, _ = load_kv_range(index, True, lens_ptr, indptr_ptr, kv_start_ptr, capacity, PAGE_SIZE, KV_KIND)
        weight = tile_weight(span, by_work, each, heaviest, TILE_COST)
        offset = weight // 2
        low, high = stretch(start, seq_len, offset, weight - offset, weight, by_work, TILE_COST)
        tl.store(work_ptr + 5 * index, tiles)
        tl.store(work_ptr + 5 * index + 1, span)
        tl.store(work_ptr + 5 * index + 2, weight)
        tl.store(work_ptr + 5 * index + 3, low)
        tl.store(work_ptr + 5 * index + 4, high)


@given(CASES, st.booleans())
@example((8 * [Request(2**27)], Partition(BALANCED, 1, 16, 1, shares=16, heaviest=2**27)), True)
@settings(max_examples=20)
def test_kernels_share_the_work_as_the_plain_arithmetic_does(
    device: torch.device, case: tuple[list[Request], Partition], contiguous: bool
) -> None:
    batch, partition = case
    size = len(batch)
    q_lens = [request.q_len for request in batch]
    uniform = len(set(q_lens)) == 1 and q_lens[0] > 0  # decode takes a batch without query tokens with qo_indptr only

    def vector(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def sums(values: list[int]) -> torch.Tensor:
        return vector(list(accumulate(values, initial=0)))

    sharing = partition.choose_shares(batch)
    # Shares may begin past the axis: kernels ask for none of these.
    places = [min(share * sharing.share, sharing.total) for share in range(min(partition.shares, 40))]
    places.append(sharing.total)
    places += [0] * (size - len(places))
    chosen = torch.full((4,), -1, dtype=torch.int32, device=device)
    work = torch.full((size, 5), -1, dtype=torch.int32, device=device)
    found = torch.full((len(places), 2), -1, dtype=torch.int32, device=device)
    window = partition.window_left
    shares_kernel[(len(places),)](
        chosen,
        work,
        found,
        vector(places),
        vector([request.seq_len for request in batch]) if contiguous else None,
        None if contiguous else sums([request.seq_len for request in batch]),
        vector([request.kv_start for request in batch]),
        None if uniform else sums(q_lens),
        batch=size,
        q_len=q_lens[0] if uniform else 0,
        total_q=sum(q_lens),
        capacity=2**30,
        window_left=0 if window is None else window,
        shares=partition.shares,
        heaviest=partition.heaviest,
        PAGE_SIZE=1,
        KV_KIND=CONTIGUOUS if contiguous else RAGGED,
        GROUP_SIZE=partition.group_size,
        BLOCK_M=partition.block_m,
        HAS_WINDOW=window is not None,
        RIGHT_BOUND=partition.right_bound,
        SCHEDULE=partition.schedule,
        PARTS=partition.parts,
        MIN_CHUNK=partition.min_chunk,
        SEGMENT_COST=partition.segment_cost,
        TILE_COST=partition.tile_cost,
        BLOCK_B=4,  # so that the prefix sum crosses blocks
    )
    assert chosen.tolist() == [int(sharing.by_work), *sharing[1:]]
    assert found.tolist() == [list(partition.locate(place, batch, sharing)) for place in places]
    plain = []
    for request in batch:
        weight = partition.weight(request, sharing)
        offset = weight // 2
        part = (offset, weight - offset, weight, sharing.by_work, partition.tile_cost)
        keys = stretch_plain(request.kv_start, request.seq_len, *part)
        plain.append([*partition.request_work(request), weight, *keys])
    assert work.tolist() == plain


@st.composite
def small_cases(draw: st.DrawFn) -> tuple[list[Request], int | None, dict[str, int]]:
    uniform = draw(st.booleans())
    q_lens = st.just(draw(st.integers(1, 5))) if uniform else st.integers(0, 5)
    batch = draw(st.lists(requests(q_lens, st.integers(0, 300)), min_size=1, max_size=3))
    window = draw(st.one_of(st.none(), st.integers(0, 40)))
    fixed = draw(st.sampled_from([{}, {}, {"num_splits": 3}, {"split_tokens": 48}, {"max_splits": 6}]))
    return batch, window, fixed


@given(small_cases())
@example(([Request(300)], None, {}))
@example(([Request(300), Request(8), Request(0), Request(290)], None, {}))
@example(([Request(300), Request(0), Request(299, q_len=4)], None, {"split_tokens": 48}))
@example(([Request(90, q_len=13), Request(60, q_len=0), Request(70, q_len=16)], None, {"split_tokens": 48}))
@settings(max_examples=12)
def test_decode_leaves_each_part_where_the_schedule_says(
    device: torch.device, case: tuple[list[Request], int | None, dict[str, int]]
) -> None:
    """Keys are 0 and value j is j, so that a partial tells how many keys it saw, and by their mean which."""
    batch, window, fixed = case
    group_size, num_kv_heads, head_dim = 3, 2, 16
    q_lens = [request.q_len for request in batch]
    starts = list(accumulate(q_lens, initial=0))
    if not starts[-1]:
        return
    longest = max(max(request.seq_len for request in batch), 1)
    config = splitkv.WorkspaceConfig(
        len(batch),
        num_kv_heads * group_size,
        num_kv_heads,
        head_dim,
        max_total_q=starts[-1],
        q_tile_rows=16,
        dtype=torch.float32,
        **{name: value for name, value in fixed.items() if name != "num_splits"},
    )
    workspace = splitkv.Workspace.allocate(config, device)
    for buffer in (workspace.partial_out, workspace.partial_lse, workspace.out, workspace.lse):
        buffer.fill_(torch.nan)

    def vector(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    index = torch.arange(longest, dtype=torch.float32, device=device)
    v = index[None, :, None, None].expand(len(batch), -1, num_kv_heads, head_dim).contiguous()
    kv = splitkv.ContiguousKV(
        torch.zeros_like(v),
        v,
        vector([request.seq_len for request in batch]),
        kv_start=vector([request.kv_start for request in batch]),
    )
    plan = plan_decode(
        torch.randn(starts[-1], num_kv_heads * group_size, head_dim, device=device),
        kv,
        workspace,
        want_lse=True,
        qo_indptr=vector(starts),
        window_left=window,
        num_splits=fixed.get("num_splits"),
    )
    split = plan.launches[0]
    split.run(plan.device)
    partition = Partition.of_launch(split.operands, split.constants)
    assert split.grid == (partition.shares * num_kv_heads,)
    assert plan.lse is not None
    rows = partition.block_m
    counts, means = workspace.partial_lse.exp().cpu(), workspace.partial_out[..., 0].cpu()
    direct_counts, direct_means = plan.lse.exp().cpu(), plan.out[..., 0].cpu()
    written = torch.zeros(config.max_splits, dtype=torch.bool, device=device)
    stretches = list(partition.stretches(batch))
    for each in stretches:
        request = batch[each.request]
        for head in range(num_kv_heads):
            slot = 0
            if each.slot is not None:
                slot = each.slot * num_kv_heads + head
                assert not written[slot]
                written[slot] = True
            for row in range(rows):
                token, member = divmod(each.tile * rows + row, group_size)
                if token >= request.q_len:
                    continue
                low, high = visible_of(partition, request, token)
                low, high = max(low, each.low), min(high, each.high)
                if each.slot is not None:
                    count, mean = counts[slot, row], means[slot, row]
                else:
                    place = starts[each.request] + token, head * group_size + member
                    count, mean = direct_counts[place], direct_means[place]
                assert count.item() == pytest.approx(max(high - low, 0), rel=1e-5)
                assert mean.item() == pytest.approx((low + high - 1) / 2 if low < high else 0, rel=1e-5)
    assert bool(workspace.partial_lse[~written].isnan().all())
    assert bool(workspace.partial_out[~written].isnan().all())
    if batch == [Request(300)] and not fixed and window is None:
        assert int(written.sum()) > 2 * num_kv_heads  # something was cut at least twice


MANY_TILES = [Request(60, q_len=0), Request(700, q_len=23), Request(7, q_len=1), Request(90, q_len=14), Request(8, 9)]


@pytest.mark.parametrize(
    ("cut", "rules"),
    [
        ({"max_splits": 24}, {}),
        ({"max_splits": 24}, {"causal": False}),
        ({"split_tokens": 32, "max_parts": 3}, {}),
        ({"split_tokens": 32, "max_parts": 3}, {"window_left": 20}),
        ({"num_splits": 3}, {}),
        ({"num_splits": 2}, {"tree_mask": None}),
    ],
    ids=str,
)
def test_the_merge_folds_each_tile_from_where_its_parts_were_left(
    device: torch.device, cut: dict[str, int], rules: dict[str, Any]
) -> None:
    """Requests of none, three, two, one and two tiles, more keys than query tokens and fewer: no part is exchanged."""
    generator = torch.Generator().manual_seed(3)
    fixed = {name: value for name, value in cut.items() if name != "num_splits"}
    starts = list(accumulate((request.q_len for request in MANY_TILES), initial=0))
    config = splitkv.WorkspaceConfig(
        len(MANY_TILES), 2, 1, 16, max_total_q=starts[-1], q_tile_rows=16, dtype=torch.float32, **fixed
    )
    workspace = splitkv.Workspace.allocate(config, device)
    for buffer in (workspace.partial_out, workspace.partial_lse):
        buffer.fill_(torch.nan)
    q = torch.randn(starts[-1], 2, 16, generator=generator).to(device)
    k, v = torch.randn(2, len(MANY_TILES), 700, 1, 16, generator=generator).to(device)
    lens, sums = (
        torch.tensor(numbers, dtype=torch.int32, device=device)
        for numbers in ([request.seq_len for request in MANY_TILES], starts)
    )
    if "tree_mask" in rules:
        bits = torch.randint(0, 2**31 - 1, (len(MANY_TILES), 23, 1), generator=generator, dtype=torch.int32)
        rules = {"tree_mask": (bits | 1).to(device)}
    kv = splitkv.ContiguousKV(k, v, lens)
    given = dict(rules, qo_indptr=sums, num_splits=cut.get("num_splits"))
    out, lse = splitkv.decode_with_lse(q, kv, workspace, **given)
    want, want_lse = reference.decode_with_lse(q, kv, dtype=torch.float64, **given)
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    # Else the merge had nothing to find.
    assert bool(workspace.partial_lse.isfinite().any())
