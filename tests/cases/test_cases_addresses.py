"""Addresses, pages and lengths: where the tokens lie, and what must never be read."""

import dataclasses
import math

import pytest
import torch
from conftest import COMPILED
from support import (
    STEP,
    WHOLE,
    Cut,
    assert_cut,
    assert_rows,
    assert_values,
    attend,
    each_way,
    index_probe,
    ints,
    spacious,
    view_of,
)

import splitkv

INF = math.inf


@pytest.mark.parametrize("cut", [WHOLE, Cut(num_splits=2), Cut(split_tokens=2)], ids=str)
@pytest.mark.parametrize(
    ("pages", "page_size", "heads", "width"), [(7769, 270, 8, 128), (2**20 + 2, 16, 1, 128)], ids=["7768", "2**20+1"]
)
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "odd"])
def test_page_past_32_bits(device, cut, pages, page_size, heads, width, shift):
    """Case 9: the last page of a cache of more than 2³¹ elements: 7768 · 276480, (2²⁰ + 1) · 2048.

    Rows that are aligned are counted in steps of 16 bytes, others in elements, which outgrow 32 bits sooner.
    """
    pool = spacious(pages * page_size * heads * width + shift, torch.float16, device)
    cache = pool[shift:].view(pages, page_size, heads, width)
    assert (pages - 1) * cache.stride(0) > 2**31 >= (pages - 2) * cache.stride(0)
    cache[0, :5], cache[-1, :5] = -1.0, 3.0
    kv = splitkv.PagedKV(cache, cache, ints([[pages - 1]], device), ints([5], device))
    result = attend(torch.zeros(1, heads, width, dtype=torch.float16, device=device), kv, cut)
    assert_cut(result, cut, 5)
    assert_rows(result, 3.0, math.log(5))


@pytest.mark.parametrize("apart", [STEP, 2**24], ids=["far", "near"])
def test_pages_of_chunks_past_32_bits(device, apart):
    """Case 9: a page more than 2³¹ elements from its cache's start, seen by tiles of many rows.

    Their kernels count in bytes where pages are less than 2 GiB apart, and otherwise must not.
    """
    last = 2 * STEP // apart
    pool = spacious(last * apart + 4 * 64, torch.float16, device)
    cache = pool.as_strided((last + 1, 4, 1, 64), (apart, 64, 64, 1))
    cache[last], cache[last // 2], cache[0] = 3.0, 2.0, -1.0
    q = torch.zeros(1, 8, 32, 64, dtype=torch.float16, device=device)
    kv = splitkv.PagedKV(cache, cache, ints([[last // 2, last]], device), ints([8], device))
    workspace = splitkv.Workspace.allocate(splitkv.WorkspaceConfig(1, 32, 1, 64, max_total_q=8, dtype=q.dtype), device)
    out, lse = splitkv.decode_with_lse(q, kv, workspace)
    seen = torch.arange(1, 9)
    # The first four keys are twos, those after them threes; all scores are 0.
    assert_values(out, ((2 * seen.clamp(max=4) + 3 * (seen - 4).clamp(min=0)) / seen)[None, :, None, None])
    assert_values(lse, seen.log()[None, :, None])


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "odd"])
@pytest.mark.parametrize("what", ["row", "token", "head"])
def test_cache_stride_past_32_bits(device, what, shift):
    """Case 9: rows, tokens and heads of a cache that lie more than 2³¹ elements from its start."""
    pool = spacious(2 * STEP + 65, torch.float16, device)[shift:]
    for place in range(3):
        pool[place * STEP : place * STEP + 64] = 1.0 + place
    q = torch.zeros(1, 1, 16, dtype=torch.float16, device=device)
    if what == "row":
        cache = pool.as_strided((3, 4, 1, 16), (STEP, 16, 16, 1), shift)
        kv = splitkv.ContiguousKV(cache, cache, ints([4], device), rows=ints([2], device))
        want, count = [[3.0]], 4
    elif what == "token":
        cache = pool.as_strided((3, 1, 16), (STEP, 16, 1), shift)
        kv = splitkv.RaggedKV(cache, cache, ints([0, 3], device))
        want, count = [[2.0]], 3
    else:
        cache = pool.as_strided((1, 4, 3, 16), (64, 16, STEP, 1), shift)
        kv = splitkv.ContiguousKV(cache, cache, ints([4], device))
        q, want, count = q.expand(1, 3, 16), [[1.0, 2.0, 3.0]], 4
    for cut in (WHOLE, Cut(num_splits=2)):
        assert_rows(attend(q, kv, cut), want, math.log(count))


@pytest.mark.parametrize("cut", [WHOLE, Cut(num_splits=2)], ids=str)
@pytest.mark.parametrize("form", ["batch", "token", "head", "packed"])
def test_query_and_output_past_32_bits(device, cut, form):
    """Case 9: rows of q, out and lse that lie more than 2³¹ elements from their start."""
    shape, strides = {
        "batch": ((3, 1, 16), (STEP, 16, 1)),
        "token": ((1, 3, 1, 16), (3 * STEP, STEP, 16, 1)),
        "head": ((1, 3, 16), (3 * STEP, STEP, 1)),
        "packed": ((3, 1, 16), (STEP, 16, 1)),
    }[form]
    q, out = (spacious(2 * STEP + 16, torch.float16, device).as_strided(shape, strides) for _ in range(2))
    lse = spacious(2 * STEP + 16, torch.float32, device).as_strided(shape[:-1], strides[:-1])
    q.copy_(torch.arange(3.0).view([n if n == 3 else 1 for n in shape]))
    out.fill_(math.nan)
    lse.fill_(math.nan)
    # Two keys with values 0 and 1, and scores 0 and s, where s is what the query row holds.
    k = torch.zeros(3, 2, 1, 16, dtype=torch.float16, device=device)
    k[:, 1, :, 0] = 1.0
    v = k[..., :1].expand(3, 2, 1, 16).contiguous()
    kv = splitkv.ContiguousKV(k, v, ints([2, 2, 2], device))
    ragged = {"qo_indptr": ints([0, 1, 2, 3], device)} if form == "packed" else {}
    config = splitkv.WorkspaceConfig(3, shape[-2], 1, 16, dtype=torch.float16, max_splits=8)
    workspace = splitkv.Workspace.allocate(config, device)
    splitkv.decode(q, kv, workspace, out=out, lse=lse, sm_scale=1.0, causal=False, num_splits=cut.num_splits, **ragged)
    scores = torch.arange(3, dtype=torch.float64)
    assert_values(out.reshape(3, 16), torch.sigmoid(scores)[:, None])
    assert_values(lse.reshape(3), torch.log1p(scores.exp()))


@pytest.mark.parametrize("what", ["part", "row", "head"])
def test_partials_past_32_bits(device, what):
    """Case 9: partials to be merged that lie more than 2³¹ elements from their start."""
    strides = {"part": (STEP, 32, 16, 1), "row": (32, STEP, 16, 1), "head": (16, 32, STEP, 1)}[what]
    size = tuple(3 if stride == STEP else 2 for stride in strides[:-1])
    outs = spacious(2 * STEP + 256, torch.float32, device).as_strided((*size, 16), strides)
    lses = spacious(2 * STEP + 256, torch.float32, device).as_strided(size, strides[:-1])
    numbers = torch.arange(1.0, 13.0, device=device).view(size)
    outs.copy_(numbers[..., None])
    lses.copy_(numbers.log())
    out, lse = splitkv.merge(outs, lses)
    want_out, want_lse = splitkv.reference.merge(outs.cpu().clone(), lses.cpu().clone(), dtype=torch.float64)
    assert_values(out, want_out)
    assert_values(lse, want_lse, zero=1e-5)


@pytest.mark.gpu
def test_workspace_past_32_bits(device):
    """Case 9: partials of decode itself past 2³¹ elements of partial_out."""
    batch, heads, parts, width, rows = 16, 64, 4096, 576, 64
    assert (batch * parts - 1) * rows * width > 2**31
    config = splitkv.WorkspaceConfig(
        batch, heads, 1, 16, head_dim_v=width, q_tile_rows=rows, max_splits=batch * parts, dtype=torch.float16
    )
    if torch.cuda.mem_get_info(device)[0] < config.nbytes + 2**30:
        pytest.skip(f"needs {config.nbytes / 2**30:.1f} GiB of free GPU memory")
    workspace = splitkv.Workspace.allocate(config, device)
    workspace.partial_lse.fill_(math.nan)
    k = torch.zeros(batch, parts, 1, 16, dtype=torch.float16, device=device)
    v = (
        torch.arange(batch, device=device, dtype=torch.float16)[:, None, None, None]
        .expand(batch, parts, 1, width)
        .contiguous()
    )
    kv = splitkv.ContiguousKV(k, v, ints([parts] * batch, device))
    out, lse = splitkv.decode_with_lse(
        torch.zeros(batch, heads, 16, dtype=torch.float16, device=device), kv, workspace, num_splits=parts
    )
    assert not workspace.partial_lse.isnan().any()
    assert_values(out, torch.arange(batch)[:, None, None])
    assert_values(lse, math.log(parts))


def as_ones(tensor):
    """The same single-row tensor with every stride 1: a dimension of 1 may have any."""
    return tensor.as_strided(tensor.shape, (1,) * tensor.dim())


@pytest.mark.parametrize(
    ("layout", "width"),
    [("paged", 16), ("contiguous", 16), ("csr", 16), ("ragged", 16), ("hnd", 16), ("paged", 1), ("contiguous", 1)],
)
def test_arguments_of_one(device, layout, width):
    """Case 10: batch, heads, length, page size, splits, pages and strides of 1."""
    q = as_ones(torch.randn(1, 1, width, device=device))
    k, v = (as_ones(torch.randn(1, 1, 1, width, device=device)) for _ in range(2))
    table, one, indptr = as_ones(ints([[0]], device)), ints([1], device), ints([0, 1], device)
    kv = {
        "paged": lambda: splitkv.PagedKV(k, v, table, one),
        "hnd": lambda: splitkv.PagedKV(
            k, v, table, one, layout="HND", rows=ints([0], device), kv_start=ints([0], device)
        ),
        "contiguous": lambda: splitkv.ContiguousKV(k, v, one),
        "csr": lambda: splitkv.PagedKV.from_csr(k, v, indptr, table[0], one),
        "ragged": lambda: splitkv.RaggedKV(as_ones(k[0]), as_ones(v[0]), indptr),
    }[layout]()
    score = 0.5 * (q.double().flatten() @ k.double().flatten()).item()
    config = splitkv.WorkspaceConfig(1, 1, 1, width, max_splits=1, split_tokens=1, max_parts=1, dtype=torch.float32)
    fixed = splitkv.Workspace.allocate(config, device)
    balanced = splitkv.Workspace.allocate(dataclasses.replace(config, split_tokens=None), device)
    for workspace, rules in (
        (fixed, {}),
        (fixed, {"num_splits": 1}),
        (fixed, {"window_left": 1}),
        (fixed, {"qo_indptr": indptr}),
        (fixed, {"tree_mask": as_ones(ints([[[1]]], device))}),
        (balanced, {}),
        (balanced, {"qo_indptr": indptr}),
    ):
        lse = as_ones(torch.full((1, 1), math.nan, device=device))
        out = splitkv.decode(q, kv, workspace, sm_scale=0.5, lse=lse, **rules)
        assert_values(out, v.cpu().view(1, 1, width))
        assert abs(lse.item() - score) <= 1e-5 * max(abs(score), 1)
    out, lse = splitkv.decode_with_lse(q[:, None], kv, fixed, sm_scale=0.5)
    assert_values(out, v.cpu())
    assert abs(lse.item() - score) <= 1e-5 * max(abs(score), 1)


def wider(tensor):
    """The same values as a slice of a buffer with wider rows and wider tokens, NaN all around, at an odd offset."""
    *lead, tokens, heads, width = tensor.shape
    buffer = tensor.new_full((*lead, tokens, heads + 1, width + 3), math.nan)
    buffer[..., :heads, 1 : width + 1] = tensor
    return buffer[..., :heads, 1 : width + 1]


def transposed(tensor):
    """The same values in a buffer whose dimensions before the last lie in reverse order."""
    order = [*reversed(range(tensor.dim() - 1)), tensor.dim() - 1]
    return tensor.permute(order).contiguous().permute(order)


def odd(tensor):
    """The same values, contiguous, one element past an aligned start."""
    pool = tensor.new_empty(tensor.numel() + 1)
    return pool[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
@pytest.mark.parametrize(
    "order",
    [("plain", "wider", "transposed", "odd", "plain"), ("odd", "transposed", "wider", "plain", "odd")]
    if COMPILED
    else [("plain", "wider", "transposed", "odd")],
    ids=lambda order: f"{order[0]}-first",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_layout_seen_second(device, layout, order, dtype):
    """Case 11: what was compiled for one set of strides and alignments is right for the next, in either order."""
    # A geometry of its own per parameter set, so that none finds a kernel that another has compiled.
    heads, width = 2, 32 + 16 * (order[0] == "odd") + 8 * (layout == "paged")
    ways = {"plain": lambda t: t, "wider": wider, "transposed": transposed, "odd": odd}
    q = torch.randn(2, 2 * heads, width, device=device).to(dtype)
    k, v = (torch.randn(2, 40, heads, width, device=device).to(dtype) for _ in range(2))
    if dtype == torch.float16:
        # One key outweighs all others by e³⁰ and more: the output is its value, to the bit.
        k = k.clamp(-1, 1)
        k[:, 17] = 16 * torch.sign(q[:, ::2])
        q = torch.sign(q[:, ::2]).repeat_interleave(2, dim=1)
    for way in order:
        lay = ways[way]
        if layout == "contiguous":
            kv = splitkv.ContiguousKV(lay(k), lay(v), ints([40, 40], device))
        else:
            pages = [lay(t.view(10, 8, heads, width)) for t in (k, v)]
            kv = splitkv.PagedKV(*pages, ints([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]], device), ints([40, 40], device))
        strided_q = lay(q[:, None])[:, 0]
        for cut in (WHOLE, Cut(num_splits=3)):
            result = attend(strided_q, kv, cut, given=way == "wider", sm_scale=width**-0.5)
            assert_cut(result, cut, 40, 40)
            if dtype == torch.float16:
                assert torch.equal(result.out, v[:, 17].repeat_interleave(2, dim=1))
            else:
                dense = splitkv.ContiguousKV(k, v, ints([40, 40], device))
                out, lse = splitkv.reference.decode_with_lse(q, dense, dtype=torch.float64)
                assert (result.out - out).abs().max() <= 1e-5 * out.abs().max()
                assert_values(result.lse, lse.cpu(), zero=1e-5)


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_layouts_served_by_one_workspace(device, layout):
    """Case 11: what a workspace remembers of a call is not taken for one in which q, K or V alone lies otherwise."""
    q = torch.randn(2, 2, 32, device=device)
    k, v = torch.randn(2, 2, 20, 2, 32, device=device)
    lens, table = ints([20, 20], device), ints([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]], device)
    out = splitkv.reference.decode(q, splitkv.ContiguousKV(k, v, lens), dtype=torch.float64)
    workspace = splitkv.Workspace.allocate(splitkv.WorkspaceConfig(2, 2, 2, 32, dtype=torch.float32), device)
    for lay in (lambda t: t, wider, transposed, odd):
        for moved in ("q", "k", "v"):
            caches = [t if layout == "contiguous" else t.view(10, 4, 2, 32) for t in (k, v)]
            caches = [lay(t) if name == moved else t for name, t in zip(("k", "v"), caches, strict=True)]
            if layout == "contiguous":
                kv = splitkv.ContiguousKV(*caches, lens)
            else:
                kv = splitkv.PagedKV(*caches, table, lens)
            got = splitkv.decode(lay(q[:, None])[:, 0] if moved == "q" else q, kv, workspace, num_splits=1)
            assert (got - out).abs().max() <= 1e-5 * out.abs().max(), moved


def test_layouts_of_other_kinds(device):
    """Case 11: expanded caches are right; a last stride other than 1 is refused by name."""
    lens = ints([7, 7], device)
    k, v = (torch.randn(1, 7, 1, 16, device=device) for _ in range(2))
    q = torch.randn(2, 2, 16, device=device)
    want, _ = splitkv.reference.decode_with_lse(
        q, splitkv.ContiguousKV(*(t.repeat(2, 1, 2, 1) for t in (k, v)), lens), sm_scale=1.0, dtype=torch.float64
    )
    kv = splitkv.ContiguousKV(k.expand(2, 7, 2, 16), v.expand(2, 7, 2, 16), lens)
    for cut in (WHOLE, Cut(num_splits=3)):
        assert (attend(q, kv, cut).out - want).abs().max() <= 1e-5 * want.abs().max()
        assert (attend(q[:1].expand(2, 2, 16), kv, cut).out[1] - want[0]).abs().max() <= 1e-5 * want.abs().max()
    workspace = splitkv.Workspace.allocate(splitkv.WorkspaceConfig(2, 2, 2, 16, dtype=torch.float32), device)
    strided = torch.zeros(2, 2, 32, device=device)[..., ::2]
    with pytest.raises(ValueError, match=r"^q: expected a last stride of 1"):
        splitkv.decode(strided, kv, workspace)
    with pytest.raises(ValueError, match=r"^out: expected a last stride of 1"):
        splitkv.decode(q, kv, workspace, out=strided)
    with pytest.raises(ValueError, match=r"^out: expected memory of its own"):
        splitkv.decode(q, kv, workspace, out=q[:1].expand(2, 2, 16))
    with pytest.raises(ValueError, match=r"^k: expected a last stride of 1"):
        splitkv.ContiguousKV(torch.zeros(2, 7, 2, 32, device=device)[..., ::2], v.expand(2, 7, 2, 16), lens)
    with pytest.raises(ValueError, match=r"^v_cache: expected a last stride of 1"):
        splitkv.PagedKV(
            k, v.transpose(1, 3).transpose(1, 3).as_strided((1, 7, 1, 16), (112, 1, 1, 7)), lens[None], lens
        )


@each_way(tokens=4)
@pytest.mark.parametrize("poison", [math.nan, INF], ids=["nan", "inf"])
def test_poison_in_unused_slots(device, cut, layout, poison):
    """Case 12: what lies past the length, or left of every row's window, never enters arithmetic."""
    k, v = index_probe(device, 1, 64)
    result = attend(torch.randn(1, 1, 16, device=device), view_of(layout, k, v, [13], poison=poison), cut)
    assert_cut(result, cut, 13)
    assert_rows(result, 6.0, math.log(13))
    k[:, :9], v[:, :9] = poison, poison
    kv = view_of(layout, k, v, [13], poison=poison)
    assert_rows(attend(torch.randn(1, 1, 16, device=device), kv, cut, window_left=3), 10.5, math.log(4))
    kv = view_of(layout, k, v, [13], poison=poison, kv_start=ints([9], device))
    assert_rows(attend(torch.randn(1, 1, 16, device=device), kv, cut), 10.5, math.log(4))


PAGE_SIZES = [1, 2, 3, 4, 5, 7, 12, 16, 19, 48, 64, 100, 128, 256, 512, 528, 1056]


@pytest.mark.parametrize(("number", "page_size"), list(enumerate(PAGE_SIZES)), ids=[f"page{n}" for n in PAGE_SIZES])
def test_any_page_size(device, number, page_size):
    """Case 13: any page size, pages shuffled; forms of the table and cuts in turn."""
    probe = index_probe(device, 1, 37)
    q = torch.randn(1, 1, 16, device=device)
    cuts = [Cut(num_splits=3), Cut(split_tokens=8)]
    for cut, layout in (
        (WHOLE, ("csr", "paged", "hnd")[number % 3]),
        (cuts[number % 2], ("paged", "hnd", "csr")[number % 3]),
    ):
        result = attend(q, view_of(layout, *probe, [37], page_size=page_size), cut)
        assert_cut(result, cut, 37)
        assert_rows(result, 18.0, math.log(37))


OUT_OF_RANGE = [
    ("csr", "last_page_len", [0, 1], 0),
    ("csr", "last_page_len", [3, 5], 1),
    ("csr", "page_indptr", [0, 3, 1], 1),
    ("csr", "page_indptr", [0, 1, 4], 2),
    ("csr", "page_indices", [0, 4, 3], 1),
    ("paged", "seq_lens", [3, 9], 1),
    ("paged", "seq_lens", [-1, 5], 0),
    ("paged", "page_table", [[0, -1], [2, 4]], 1),
    ("paged", "page_table", [[-1, -1], [2, 3]], 0),
    ("paged", "rows", [0, 2], 1),
    ("paged", "kv_start", [-1, 0], 0),
    ("paged", "qo_indptr", [0, 2, 1], 1),
    ("paged", "qo_indptr", [0, 1, 3], 2),
    ("contiguous", "seq_lens", [9, 5], 0),
    ("contiguous", "rows", [-1, 1], 0),
    ("ragged", "kv_indptr", [0, 5, 3], 1),
    ("ragged", "kv_indptr", [0, 3, 9], 2),
]


@pytest.mark.parametrize(("layout", "name", "values", "row"), OUT_OF_RANGE, ids=[f"{c[1]}{c[2]}" for c in OUT_OF_RANGE])
def test_values_on_the_device(device, layout, name, values, row, monkeypatch):
    """Case 13: in debug mode a length, row or page id that is out of range raises, and the message names the row."""
    workspace = splitkv.Workspace.allocate(splitkv.WorkspaceConfig(2, 1, 1, 16, dtype=torch.float32), device)
    workspace.out.fill_(math.nan)
    kv, qo_indptr = view_with(layout, name, device, lambda t: ints(values, device))
    q = torch.zeros(2, 1, 16, device=device)
    monkeypatch.setenv("SPLITKV_DEBUG", "1")
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, given .*row {row}\b|^page_.*of row {row}, given"):
        splitkv.decode(q, kv, workspace, qo_indptr=qo_indptr)
    assert workspace.out.isnan().all()
    assert splitkv.supports(q, kv, workspace, qo_indptr=qo_indptr) is not None
    monkeypatch.setenv("SPLITKV_DEBUG", "0")
    assert splitkv.supports(q, kv, workspace, qo_indptr=qo_indptr) is None


@pytest.mark.parametrize("layout", ["paged", "contiguous", "csr", "ragged", "hnd"])
def test_values_that_nobody_follows(device, layout, monkeypatch):
    """Case 13: debug mode lets pass page ids past the length, left of the window and of kv_start."""
    monkeypatch.setenv("SPLITKV_DEBUG", "1")
    probe = index_probe(device, 3, 13)
    q = torch.zeros(3, 1, 16, device=device)
    kv = view_of(layout, *probe, [13, 0, 5])
    counts = torch.tensor([13.0, 0.0, 5.0], dtype=torch.float64)[:, None]
    assert_rows(attend(q, kv, Cut(num_splits=2)), [[6.0], [0.0], [2.0]], counts.log())
    if layout not in ("paged", "hnd"):
        return
    kv.page_table[0, :2] = -1
    assert_rows(attend(q[:1], kv, Cut(num_splits=2), window_left=4), 10.0, math.log(5))
    with pytest.raises(ValueError, match=r"^page_table: .* of row 0, given -1 for its page 1"):
        attend(q[:1], kv, window_left=5)
    kv = splitkv.PagedKV(kv.k, kv.v, kv.page_table, kv.seq_lens, kv_start=ints([8], device), layout=kv.layout)
    assert_rows(attend(q[:1], kv, Cut(num_splits=2)), 10.0, math.log(5))


def on_other_device(tensor):
    """The tensor on a device that the call is not on."""
    return tensor.to("meta" if tensor.device.type == "cpu" else "cpu")


def spaced(tensor):
    """The same values with a last stride of 2."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


BREAKAGES = {
    "int64": (lambda t: t.long(), TypeError),
    "int16": (lambda t: t.short(), TypeError),
    "float": (lambda t: t.float(), TypeError),
    "device": (on_other_device, ValueError),
    "spaced": (spaced, ValueError),
    "short": (lambda t: t[:-1], ValueError),
    "list": (lambda t: t.tolist(), TypeError),
    "rank": (lambda t: t[None], ValueError),
}
INTEGER_TENSORS = [
    ("paged", "seq_lens"),
    ("paged", "page_table"),
    ("paged", "rows"),
    ("paged", "kv_start"),
    ("contiguous", "seq_lens"),
    ("contiguous", "rows"),
    ("contiguous", "kv_start"),
    ("ragged", "kv_indptr"),
    ("ragged", "kv_start"),
    ("csr", "page_indptr"),
    ("csr", "page_indices"),
    ("csr", "last_page_len"),
    ("paged", "qo_indptr"),
]


def view_with(layout, name, device, change):
    """A view of lengths 3 and 5 and a qo_indptr, after `change` has had the integer tensor called `name`."""
    k, v = index_probe(device, 2, 8)
    values = {
        "paged": {"page_table": [[0, 1], [2, 3]], "seq_lens": [3, 5]},
        "contiguous": {"seq_lens": [3, 5]},
        "ragged": {"kv_indptr": [0, 3, 8]},
        "csr": {"page_indptr": [0, 1, 3], "page_indices": [0, 2, 3], "last_page_len": [3, 1]},
    }[layout]
    values |= {"qo_indptr": [0, 1, 2], "rows": [0, 1], "kv_start": [0, 0]}
    if layout in ("ragged", "csr") or name == "page_table":
        del values["rows"]  # with rows, how long the table must be is known on the device alone
    tensors = {n: ints(value, device) for n, value in values.items()}
    tensors[name] = change(tensors[name])
    qo_indptr = tensors.pop("qo_indptr")
    if layout == "contiguous":
        return splitkv.ContiguousKV(k, v, tensors.pop("seq_lens"), **tensors), qo_indptr
    if layout == "ragged":
        k, v = (torch.cat([t[0, :3], t[1, :5]]) for t in (k, v))
        return splitkv.RaggedKV(k, v, **tensors), qo_indptr
    pages = [t.view(4, 4, 1, 16) for t in (k, v)]
    if layout == "csr":
        return splitkv.PagedKV.from_csr(*pages, **tensors), qo_indptr
    return splitkv.PagedKV(*pages, **tensors), qo_indptr


REFUSALS = [
    (layout, name, breakage)
    for layout, name in INTEGER_TENSORS
    for breakage in BREAKAGES
    # How many page indices there must be is known on the device alone, and a shorter qo_indptr is a smaller batch.
    if breakage != "short" or name not in ("page_indices", "qo_indptr")
]


@pytest.mark.parametrize(("layout", "name", "breakage"), REFUSALS, ids=["-".join(case) for case in REFUSALS])
def test_integer_types(device, layout, name, breakage):
    """Case 14: an integer tensor that the kernels could not take is refused by its name, and nothing is written."""
    change, error = BREAKAGES[breakage]
    workspace = splitkv.Workspace.allocate(splitkv.WorkspaceConfig(2, 1, 1, 16, dtype=torch.float32), device)
    workspace.out.fill_(math.nan)
    word = {"device": "device", "spaced": "stride", "rank": "dimensions"}.get(breakage, "expected")
    with pytest.raises(error, match=rf"^{name}: .*{word}.* given"):
        kv, qo_indptr = view_with(layout, name, device, change)
        splitkv.decode(torch.zeros(2, 1, 16, device=device), kv, workspace, qo_indptr=qo_indptr)
    assert workspace.out.isnan().all()


def test_fewer_prefix_sums(device):
    """Case 14: a shorter qo_indptr is a smaller batch, whose last query tokens belong to nobody."""
    kv, qo_indptr = view_with("paged", "qo_indptr", device, lambda t: t[:-1])
    result = attend(torch.zeros(2, 1, 16, device=device), kv, qo_indptr=qo_indptr)
    assert_rows(result, [[1.0], [0.0]], [[math.log(3)], [-INF]])


@pytest.mark.parametrize(("layout", "name"), INTEGER_TENSORS, ids=["-".join(case) for case in INTEGER_TENSORS])
def test_integer_tensors_at_any_place(device, layout, name):
    """Case 14: a vector that starts at an odd element, longer than the batch, or rows of a wider table: honoured."""

    def shifted(t):
        if t.dim() == 2:
            border = ints([[9]] * len(t), device)
            return torch.cat([border, t, border], dim=1)[:, 1:-1]
        # The length of qo_indptr is the batch; every other vector may be longer.
        tail = [] if name == "qo_indptr" else [t.new_full((2,), int(t[-1]))]
        return torch.cat([ints([9], device), t, *tail])[1:]

    kv, qo_indptr = view_with(layout, name, device, shifted)
    for cut in (WHOLE, Cut(num_splits=2)):
        result = attend(torch.zeros(2, 1, 16, device=device), kv, cut, qo_indptr=qo_indptr)
        assert_rows(result, [[1.0], [2.0]], [[math.log(3)], [math.log(5)]])
