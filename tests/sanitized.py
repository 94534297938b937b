"""Every kernel once or a few times in small sizes, over memory that nobody has initialised: a program for sanitizers.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/sanitized.py

Caches, workspaces and outputs are `torch.empty`; only live tokens are ever written, by append_kv. So memcheck sees each
allocation's own ends, and initcheck complains of a kernel that reads a dead slot, a partial that nobody wrote, or a row
past the call's. Answers are judged by other tests; here they must be finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import splitkv  # isort: skip # before anything imports triton: without a GPU it chooses the interpreter

import torch
from torch import Tensor

from splitkv import masks
from splitkv.compat.flash_attention import flash_attn_with_kvcache
from splitkv.kernels.read import read_all

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LENS = (37, 0, 9)
PAGE = 4
PAGES = ((7, 2, 11, 5, 0, 9, 3, 8, 12, 1), (), (4, 10, 6))  # of each request; there are 14
DEAD = -1


def ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def slots_of(layout: str) -> Tensor:
    """Where the tokens of all requests go, one request after another."""
    slots: list[int] = []
    for b, n in enumerate(LENS):
        for t in range(n):
            if layout == "contiguous":
                slots.append(b * 40 + t)
            elif layout == "ragged":
                slots.append(sum(LENS[:b]) + t)
            else:
                slots.append(PAGES[b][t // PAGE] * PAGE + t % PAGE)
    return ints(slots)


def view(
    layout: str, heads: int, widths: tuple[int, int], cache: torch.dtype, scales: str | None, **options: Any
) -> splitkv.kv.KVView:
    """A view of uninitialised caches. `scales`: None, "number" or "token" (uninitialised too)."""
    shape = {"contiguous": (3, 40, heads), "ragged": (sum(LENS) + 5, heads), "latent": (14, PAGE)}
    rows = shape.get(layout, (14, PAGE, heads))
    k, v = (torch.empty(*rows, width, dtype=cache, device=DEVICE) for width in widths)
    table = torch.full((3, 12), DEAD, dtype=torch.int32)
    for b, ids in enumerate(PAGES):
        table[b, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    table, lens = table.to(DEVICE), ints(LENS)
    if scales is not None:
        names = ("scale",) if layout == "latent" else ("k_scale", "v_scale")
        options |= {name: 0.02 if scales == "number" else torch.empty(rows, device=DEVICE) for name in names}
    if layout == "latent":
        return splitkv.LatentKV(k, table, lens, head_dim_v=widths[1], **options)
    if layout == "contiguous":
        return splitkv.ContiguousKV(k, v, lens, **options)
    if layout == "ragged":
        return splitkv.RaggedKV(k, v, ints([0, 37, 37, 46]), **options)
    if layout == "csr":
        return splitkv.PagedKV.from_csr(k, v, ints([0, 10, 10, 13]), ints(sum(PAGES, ())), ints([1, 0, 1]), **options)
    return splitkv.PagedKV(k, v, table, lens, **options)


def attend(
    layout: str,
    dtype: torch.dtype,
    *,
    heads: int = 2,
    group: int = 2,
    widths: tuple[int, int] = (64, 64),
    cache: torch.dtype | None = None,
    scales: str | None = None,
    q_lens: Sequence[int] | None = None,
    q_len: int = 1,
    listed: bool = False,
    shared: bool = False,
    options: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    **rules: Any,
) -> None:
    """Append all tokens and decode."""
    heads = 1 if layout == "latent" else heads
    kv = view(layout, heads, widths, cache or dtype, scales, **(options or {}))
    total = sum(LENS)
    k_new, v_new = (torch.randn(total, heads, width, device=DEVICE).to(dtype) for width in widths)
    splitkv.append_kv(k_new, None if layout == "latent" else v_new, kv, slots_of(layout))
    shape: tuple[int, ...] = (3,) if q_len == 1 else (3, q_len)
    if q_lens is not None:
        rules["qo_indptr"] = ints([sum(q_lens[:b]) for b in range(4)])
        shape = (sum(q_lens) + 1,)
    rows = math.prod(shape)
    q = torch.randn(*shape, heads * group, widths[0], device=DEVICE).to(dtype)
    sizes = splitkv.WorkspaceConfig(
        3, heads * group, heads, *widths, dtype=dtype, **{"max_total_q": rows, "max_splits": 24, **(config or {})}
    )
    workspace = splitkv.Workspace.allocate(sizes, DEVICE)
    if listed:
        schedule = splitkv.Schedule.allocate(sizes, DEVICE)
        kv = view_with(kv, schedule)
        schedule.update(kv)
    lse = torch.empty(q.shape[:-1], device=DEVICE)
    if shared:
        out = splitkv.decode_shared_prefix(
            q, kv, workspace, ints([0, -1, 0]), ints([8, 0, 8]), out=None, lse=lse, **rules
        )
    else:
        out = splitkv.decode(q, kv, workspace, lse=lse, **rules)
    assert bool(out.isfinite().all()) and not bool(lse.isnan().any()), layout


def view_with(kv: splitkv.kv.KVView, schedule: splitkv.Schedule) -> splitkv.kv.KVView:
    assert isinstance(kv, splitkv.PagedKV)
    return splitkv.PagedKV(kv.k, kv.v, kv.page_table, kv.seq_lens, schedule=schedule)


def decodes() -> None:
    """Each layout, schedule, rule and format; tiles of 16 and 64 rows; aligned rows and others."""
    half, brain, single = torch.float16, torch.bfloat16, torch.float32
    slopes = torch.rand(4, device=DEVICE)
    attend("paged", brain, widths=(128, 128), listed=True)
    attend("csr", half, num_splits=3, sinks=torch.randn(4, device=DEVICE), window_left=5)
    attend("contiguous", single, widths=(59, 24), config=dict(split_tokens=16, max_parts=4, max_splits=None),
           softcap=20.0, alibi_slopes=slopes, options=dict(kv_start=ints([2, 0, 3])))  # fmt: skip
    attend("ragged", brain, q_lens=(20, 0, 3), group=4, config=dict(q_tile_rows=64))
    words = torch.empty(3, 3, 1, dtype=torch.int32, device=DEVICE)
    masks.tree_mask_from_parents(ints([[-1, 0, 1]] * 3), words)
    attend("paged", half, q_len=3, tree_mask=words, options=dict(rows=ints([0, 1, 2])))
    attend("paged", brain, cache=torch.float8_e4m3fn, scales="token", causal=False, q_len=2)
    attend("latent", half, group=16, widths=(96, 64), cache=torch.int8, scales="number", sm_scale=0.1)
    attend("latent", brain, group=4, widths=(80, 64), sm_scale=0.1)


def shared_prefixes() -> None:
    """Requests 0 and 2 have their first two pages in common."""
    global PAGES
    own = PAGES
    PAGES = (own[0], (), (*own[0][:2], own[2][2]))
    try:
        attend("paged", torch.bfloat16, shared=True, config=dict(max_splits=300), window_left=30)
    finally:
        PAGES = own


def appending_decodes() -> None:
    """Calls of another library's form, which append and attend: to a stretch of the cache, and to pages."""
    q, k, v = (torch.randn(3, 2, heads, 64, device=DEVICE).half() for heads in (4, 2, 2))
    for table in (None, ints([[3], [0], [1]])):
        k_cache, v_cache = (torch.empty(4, 16, 2, 64, dtype=torch.float16, device=DEVICE) for _ in range(2))
        out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=ints([0] * 3), block_table=table)
        assert isinstance(out, Tensor) and bool(out.isfinite().all())


def merges() -> None:
    """Of a given number of partials, of other numbers per row, in both layouts and bases of the log-sum-exp."""
    outs, lses = torch.randn(5, 3, 2, 59, device=DEVICE), torch.randn(5, 3, 2, device=DEVICE)
    out, lse = torch.empty(3, 2, 59, device=DEVICE), torch.empty(3, 2, device=DEVICE)
    splitkv.merge(outs, lses, sinks=torch.randn(2, device=DEVICE), out=out, lse=lse)
    splitkv.merge(outs.flatten(0, 1).half(), lses.flatten(0, 1), indptr=ints([0, 4, 4, 15]), lse_base=2)
    splitkv.merge(outs[:, None], lses.transpose(1, 2).contiguous()[:, None], lse_layout="HN")


def moves() -> None:
    """Tokens within a cache, those of a quantised one with their scales."""
    for cache, scales in ((torch.float16, None), (torch.int8, "token")):
        kv = view("paged", 2, (64, 24), cache, scales)
        new = (torch.randn(sum(LENS), 2, width, device=DEVICE).half() for width in (64, 24))
        splitkv.append_kv(*new, kv, slots_of("paged"))
        taken = slots_of("paged")
        free = ints([PAGES[0][9] * PAGE + 1, -1, 13 * PAGE])
        splitkv.move_kv(kv, taken[:3].contiguous(), free)


def every_mask() -> None:
    """Into tensors of exactly the size that each takes."""
    lens, batch, q_len, longest = ints(LENS), 3, 2, 41

    def cells(shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=torch.bool, device=DEVICE)

    masks.validity_mask(cells(masks.validity_mask_shape(batch, longest)), lens, kv_start=ints([1, 0, 4]))
    masks.attention_mask(cells(masks.attention_mask_shape(batch, q_len, longest)), lens, window_left=3)
    masks.ragged_mask(cells(masks.ragged_mask_shape(4, longest)), ints([0, 2, 2, 4]), lens)
    masks.position_mask(cells(masks.position_mask_shape(batch, longest)), torch.tensor([36, 0, 8], device=DEVICE))
    tree = torch.rand(batch, 35, 35, device=DEVICE) < 0.5
    masks.pack_tree_mask(tree, torch.empty(masks.tree_mask_shape(batch, 35), dtype=torch.int32, device=DEVICE))


def steps() -> None:
    """Prompts, a decode step, the next ones without the host, and one whose page is missing."""
    table = torch.full((4, 6), DEAD, dtype=torch.int32, device=DEVICE)
    state = splitkv.StepState.allocate(splitkv.StepConfig(4, max_total_q=70, max_mask_len=9), table, PAGE, DEVICE)
    updates = [(0, 0, 3), (0, 1, 5), (2, 0, 1)]
    state.bind([0, 2], [7, 3], q_lens=[7, 3], tokens=list(range(10)), page_updates=updates)
    state.bind([0, 2], [8, 4], tokens=[1, 2], page_updates=[(2, 1, 9)], pad_to=4)
    state.advance()
    state.advance(ints([1, 0, 0, 0]))
    state.fill_input_ids([3, 4])
    state.fill_input_ids_from_device(torch.tensor([5, 6], device=DEVICE))
    state.decode_mask(state.position_ids[:4], 9)
    assert state.needs_page.item() == 1


def reads() -> None:
    """What the benchmark compares with."""
    words = torch.ones(5000, dtype=torch.int32, device=DEVICE)
    sums = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    read_all(words, sums, block=1024, programs=3, num_stages=2, num_warps=4)
    assert int(sums.sum()) == 5000


def main() -> None:
    torch.manual_seed(0)
    for part in (decodes, shared_prefixes, appending_decodes, merges, moves, every_mask, steps, reads):
        part()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    main()
