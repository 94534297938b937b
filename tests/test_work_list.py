"""The optional work list: the same answers as without it, fresh or stale, and its errors."""

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import splitkv
from splitkv import reference
from splitkv.config import WorkspaceConfig
from splitkv.work_list import HEADER

HEADS, KV_HEADS, DIM, LONGEST, BATCH = 4, 2, 16, 300, 6


def lengths(rnd: random.Random) -> list[int]:
    return [rnd.choice((0, 1, 17, 64, rnd.randrange(LONGEST + 1), LONGEST)) for _ in range(BATCH)]


def view(kind: str, lens: torch.Tensor, schedule: splitkv.Schedule | None) -> splitkv.kv.KVView:
    generator = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, BATCH, LONGEST + 4, KV_HEADS, DIM, generator=generator).to(lens.device)
    if kind == "contiguous":
        return splitkv.ContiguousKV(k, v, lens, schedule=schedule)
    pages = [cache.reshape(-1, 16, KV_HEADS, DIM) for cache in (k, v)]
    table = torch.arange(pages[0].shape[0], dtype=torch.int32, device=lens.device).view(BATCH, -1)
    return splitkv.PagedKV(*pages, table, lens, schedule=schedule)


@given(seed=st.integers(0, 2**31), kind=st.sampled_from(("contiguous", "paged")), q_len=st.sampled_from((1, 1, 5)))
@settings(max_examples=10)
def test_a_stale_list_changes_no_answer(device: torch.device, seed: int, kind: str, q_len: int) -> None:
    """Lengths, batch and query length change after the list was made."""
    rnd = random.Random(seed)
    config = WorkspaceConfig(BATCH, HEADS, KV_HEADS, DIM, max_total_q=BATCH * 5, dtype=torch.float32)
    workspace = splitkv.Workspace.allocate(config, device)
    schedule = splitkv.Schedule.allocate(config, device)
    lens = torch.tensor(lengths(rnd), dtype=torch.int32, device=device)
    kv = view(kind, lens, schedule)
    if rnd.random() < 0.8:  # else: never made
        schedule.update(kv, rnd.choice((None, 0, 2, BATCH)))
    for _ in range(2):
        batch = rnd.randint(1, BATCH)
        q = torch.randn(batch, q_len, HEADS, DIM, device=device)
        for buffer in (workspace.partial_out, workspace.partial_lse, workspace.out, workspace.lse):
            buffer.fill_(torch.nan)
        out, lse = splitkv.decode_with_lse(q, kv, workspace)
        want, want_lse = reference.decode_with_lse(q, kv, dtype=torch.float64)
        torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
        lens.copy_(torch.tensor(lengths(rnd), dtype=torch.int32))


def test_the_merge_finds_the_tiles_of_a_chunk_by_a_list_too(device: torch.device) -> None:
    """Three tiles per head, some cut, by a list that fits the lengths and by one of other lengths."""
    config = WorkspaceConfig(3, HEADS, KV_HEADS, DIM, max_total_q=3 * 21, q_tile_rows=16, dtype=torch.float32)
    workspace = splitkv.Workspace.allocate(config, device)
    schedule = splitkv.Schedule.allocate(config, device)
    lens = torch.tensor([LONGEST, 21, 40], dtype=torch.int32, device=device)
    kv = view("contiguous", lens, schedule)
    q = torch.randn(3, 21, HEADS, DIM, device=device)
    schedule.buffer[:HEADER] = torch.tensor((1, 1, 20), dtype=torch.int32)
    for weights in ((38, 3, 5), (3, 38, 5)):
        begins = torch.tensor((0, *weights), dtype=torch.int32).cumsum(0)
        schedule.buffer[HEADER:] = begins.to(torch.int32)
        workspace.partial_lse.fill_(torch.nan)
        out, lse = splitkv.decode_with_lse(q, kv, workspace)
        want, want_lse = reference.decode_with_lse(q, kv, dtype=torch.float64)
        torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
        assert bool(workspace.partial_lse.isfinite().any())


def test_the_list_is_what_decode_reads(device: torch.device) -> None:
    """Other weights put the partials elsewhere: a list that was not read could not."""
    config = WorkspaceConfig(BATCH, HEADS, KV_HEADS, DIM, dtype=torch.float32)
    workspace = splitkv.Workspace.allocate(config, device)
    schedule = splitkv.Schedule.allocate(config, device)
    lens = torch.full((BATCH,), LONGEST, dtype=torch.int32, device=device)
    kv = view("paged", lens, schedule)
    written = []
    for weights in ((1, 1, 1, 1, 1, 1), (1, 40, 1, 1, 1, 1)):
        begins = torch.tensor((0, *weights), dtype=torch.int32).cumsum(0)
        schedule.buffer[:HEADER] = torch.tensor((1, 1, 1), dtype=torch.int32)
        schedule.buffer[HEADER:] = begins.to(torch.int32)
        workspace.partial_lse.fill_(torch.nan)
        splitkv.decode(torch.ones(BATCH, HEADS, DIM, device=device), kv, workspace)
        written.append(int((~workspace.partial_lse.isnan()).any(dim=1).sum()))
    assert written[0] == 0 < written[1]


def test_update_holds_a_fresh_list_to_the_scan(device: torch.device) -> None:
    """After update the weights are those that the scan inside the kernel would use."""
    config = WorkspaceConfig(BATCH, HEADS, KV_HEADS, DIM, dtype=torch.float32)
    schedule = splitkv.Schedule.allocate(config, device)
    lens = torch.tensor([8, 16, 0, 300, 24, 8], dtype=torch.int32, device=device)
    schedule.update(view("contiguous", lens, None))
    by_work, each, share, *begins = schedule.buffer.tolist()
    weights = [after - before for before, after in pairwise(begins)]
    assert begins[0] == 0 and share >= 1
    assert weights == ([1, 2, 1, 38, 3, 1] if by_work else [each] * BATCH)


def test_refusals(device: torch.device) -> None:
    config = WorkspaceConfig(2, HEADS, KV_HEADS, DIM, dtype=torch.float32)
    schedule = splitkv.Schedule.allocate(config, device)
    lens = torch.ones(BATCH, dtype=torch.int32, device=device)
    with pytest.raises(TypeError, match=r"config: expected a WorkspaceConfig, given int"):
        splitkv.Schedule.allocate(3, device)
    with pytest.raises(TypeError, match=r"schedule: expected a splitkv.Schedule, given str"):
        view("paged", lens, "always")
    with pytest.raises(TypeError, match="kv: expected"):
        schedule.update(lens)
    kv = view("paged", lens, schedule)
    with pytest.raises(ValueError, match=r"batch: expected an integer in 0…2, given 3"):
        schedule.update(kv, 3)
    large = WorkspaceConfig(BATCH, HEADS, KV_HEADS, DIM, dtype=torch.float32)
    q = torch.ones(3, HEADS, DIM, device=device)
    with pytest.raises(ValueError, match=r"schedule: expected a batch of at most 2 \(its capacity\), given 3"):
        splitkv.decode(q, kv, splitkv.Workspace.allocate(large, device))
