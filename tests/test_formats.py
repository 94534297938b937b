"""Quantised caches and latent rows: what their bytes mean, how they are scaled, and how they are written."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from conftest import COMPILED
from support import ints
from torch import Tensor

import splitkv
from splitkv import append, reference
from splitkv.config import FNUZ_DTYPES, QUANTIZED_DTYPES
from splitkv.testing import expect, make_problem, same_bits
from splitkv.tiles import Target

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
EVERYWHERE = tuple(dtype for dtype in QUANTIZED_DTYPES if dtype not in FNUZ_DTYPES)
QUANTIZED = pytest.mark.parametrize("cache", EVERYWHERE, ids=str)
ALL_QUANTIZED = pytest.mark.parametrize("cache", QUANTIZED_DTYPES, ids=str)


def all_bytes(cache: torch.dtype) -> tuple[Tensor, Tensor]:
    """The 256 numbers of a dtype, and what PyTorch reads them as, on the CPU."""
    codes = torch.arange(256, dtype=torch.uint8).view(cache)
    return codes, codes.float()


def workspace_for(
    q: Tensor, kv: splitkv.kv.KVView, dtype: torch.dtype, fnuz: bool = False, **more: Any
) -> splitkv.Workspace:
    """A workspace; `fnuz`: as on a GPU that has such numbers."""
    config = splitkv.WorkspaceConfig(
        q.shape[0], q.shape[-2], kv.num_kv_heads, kv.head_dim, kv.head_dim_v, dtype=dtype, **more
    )
    workspace = splitkv.Workspace.allocate(config, q.device)
    if fnuz:
        here = workspace.target
        workspace.target = Target("hip:gfx942", here.num_sms, 65536, sm_shared_memory=65536)
    return workspace


def exact(actual: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(actual.detach().cpu().float(), wanted, rtol=0, atol=0, equal_nan=True)


# Every byte.


@ALL_QUANTIZED
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "unaligned"])
def test_every_byte_is_read_as_torch_reads_it(
    device: torch.device, cache: torch.dtype, dtype: torch.dtype, shift: int
) -> None:
    """Of a single key its value is the output, and where queries are unit vectors its numbers are the scores."""
    codes, numbers = all_bytes(cache)
    scale = {} if cache.is_floating_point else dict(k_scale=1.0, v_scale=1.0)
    fnuz = cache in FNUZ_DTYPES

    def lay(values: Tensor) -> Tensor:
        memory = torch.zeros(values.numel() + shift, dtype=torch.uint8, device=device).view(cache)[shift:]
        memory.view(torch.uint8).copy_(values.view(torch.uint8).flatten())
        return memory.view(values.shape)

    rows, width = 2, 128
    v = lay(codes.view(1, 1, rows, width))
    kv = splitkv.ContiguousKV(lay(torch.zeros(v.shape).to(cache)), v, ints([1], device), **scale)
    q = torch.zeros(1, rows, width, dtype=dtype, device=device)
    out = splitkv.decode(q, kv, workspace_for(q, kv, dtype, fnuz), num_splits=1)
    exact(out.flatten(), numbers.to(dtype).float())

    # A query head per number, on a KV head per row of them. What is not finite makes every score of its row NaN.
    finite = numbers.isfinite()
    row = codes.view(torch.uint8).masked_fill(~finite, 0).view(cache).view(1, 1, rows, width)
    kv = splitkv.ContiguousKV(lay(row), lay(torch.zeros(row.shape).to(cache)), ints([1], device), **scale)
    q = torch.eye(width, dtype=dtype, device=device).repeat(rows, 1)[None]
    _, lse = splitkv.decode_with_lse(q, kv, workspace_for(q, kv, dtype, fnuz), sm_scale=1.0, num_splits=1)
    # To a rounding of the score's size, or of ln 2.
    wanted = numbers.masked_fill(~finite, 0.0)
    torch.testing.assert_close(lse.cpu().flatten(), wanted, rtol=3e-7, atol=2e-6)
    broken = codes.view(torch.uint8)[~finite]
    if len(broken):
        row = torch.zeros(len(broken), 1, 1, width, dtype=torch.uint8)
        row[..., 0] = broken[:, None, None]
        kv = splitkv.ContiguousKV(
            lay(row.view(cache)), lay(torch.zeros(row.shape).to(cache)), ints([1] * len(broken), device)
        )
        q = torch.ones(len(broken), 1, width, dtype=dtype, device=device)
        _, lse = splitkv.decode_with_lse(q, kv, workspace_for(q, kv, dtype, fnuz), sm_scale=1.0, num_splits=1)
        assert not lse.isfinite().any()


@ALL_QUANTIZED
@pytest.mark.parametrize("tail_width", [16, 32])
def test_latent_rows_are_read_as_torch_reads_them(device: torch.device, cache: torch.dtype, tail_width: int) -> None:
    """As keys, as values and in the tail, from one place."""
    codes, numbers = all_bytes(cache)
    rows = codes.view(4, 1, 64).expand(4, 1, 64)
    tail = codes.view(torch.uint8).view(4, 64).flip(1)[:, None, :tail_width]
    both = torch.cat([rows.view(torch.uint8), tail], dim=-1).to(device).view(cache)
    kv = splitkv.LatentKV(
        both, ints([[0], [1], [2], [3]], device), ints([1] * 4, device), head_dim_v=64,
        scale=None if cache.is_floating_point else 1.0,
    )  # fmt: skip
    q = torch.zeros(4, 3, 64 + tail_width, dtype=torch.float16, device=device)
    workspace = workspace_for(q, kv, torch.float16, cache in FNUZ_DTYPES)
    out = splitkv.decode(q, kv, workspace, sm_scale=1.0)
    # 0 · NaN in a key is NaN, and so is 0 · inf.
    broken = ~both.cpu().float().isfinite().all(dim=-1)
    exact(out[:, 0], numbers.view(4, 64).masked_fill(broken, math.nan))
    # Unit vectors as queries: of rows without what is no number every column is the score.
    q = torch.eye(64 + tail_width, dtype=torch.float16, device=device).expand(4, -1, -1)
    workspace = workspace_for(q, kv, torch.float16, cache in FNUZ_DTYPES)
    _, lse = splitkv.decode_with_lse(q, kv, workspace, sm_scale=1.0, num_splits=1)
    fine = ~broken[:, 0]
    assert fine.any()
    torch.testing.assert_close(lse.cpu()[fine], both.cpu().float()[fine, 0], rtol=3e-7, atol=2e-6)


# Queries in float16.


@QUANTIZED
@pytest.mark.parametrize("size", [1e35, 1e-37, 3e4])
def test_bfloat16_queries_of_any_size(device: torch.device, cache: torch.dtype, size: float) -> None:
    """They are computed in float16, whose range is smaller: rows of one call may be of any size, each of its own."""
    problem = make_problem(
        3, device=device, dtype=torch.bfloat16, cache=cache, kind="paged", query="one", mask="causal", window_left=None,
        lens=(40, 7), group_size=3, num_kv_heads=2, head_dim=80, softcap=None, sinks=None, alibi=False, poison="nan",
        k_scale="number", v_scale="number", q_strides="contiguous",
    )  # fmt: skip
    problem.q[:, 1] *= size
    problem.q[:, 2, :40] *= 1e-4  # within a row too
    rules = dict(problem.rules)
    usual = [row for row in range(problem.q.shape[1]) if row != 1]
    # The row of another size has usual scores where the scale of scores is smaller (or larger) by as much.
    for rows, sm_scale in ((usual, 0.05), ([1], 0.05 / size)):
        rules["sm_scale"] = sm_scale
        want = expect(problem.q, problem.kv, **rules)
        out, lse = problem.decode(problem.workspace(), **rules)
        dataclasses.replace(want, out=want.out[:, rows], lse=want.lse[:, rows]).check(out[:, rows], lse[:, rows])


@QUANTIZED
def test_queries_that_are_no_numbers_show(device: torch.device, cache: torch.dtype) -> None:
    """NaN and infinite scores give NaN, as with a 16-bit cache, and beside them other rows are right."""
    k = torch.ones(1, 20, 1, 16).to(cache).to(device)
    scale = {} if cache.is_floating_point else dict(k_scale=1.0, v_scale=1.0)
    kv = splitkv.ContiguousKV(k, k, ints([20], device), **scale)
    q = torch.full((1, 4, 16), 1e37, dtype=torch.bfloat16, device=device)
    q[0, 0, 3], q[0, 1, 3], q[0, 2, 3] = math.nan, math.inf, -math.inf
    out, lse = splitkv.decode_with_lse(q, kv, workspace_for(q, kv, torch.bfloat16), sm_scale=2e-38)
    want, want_lse = reference.decode_with_lse(q, kv, sm_scale=2e-38)
    assert bool(out[0, :3].isnan().all()) and not lse[0, :3].isfinite().any()
    torch.testing.assert_close(out[0, 3], want[0, 3])
    torch.testing.assert_close(lse[0, 3], want_lse[0, 3], rtol=1e-5, atol=0)


@QUANTIZED
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_small_weights_keep_their_precision(device: torch.device, cache: torch.dtype, dtype: torch.dtype) -> None:
    """One key outweighs each other ten million times; only the others have values."""
    tokens = 600
    k, v = torch.zeros(1, tokens, 1, 16), torch.ones(1, tokens, 1, 16)
    k[0, 5, 0, 0], v[0, 5] = 1.0, 0.0
    scale = {} if cache.is_floating_point else dict(k_scale=1.0, v_scale=1.0)
    kv = splitkv.ContiguousKV(k.to(cache).to(device), v.to(cache).to(device), ints([tokens], device), **scale)
    q = torch.zeros(1, 1, 16, dtype=dtype, device=device)
    q[..., 0] = 16.0
    for splits in (1, 3):
        out = splitkv.decode(q, kv, workspace_for(q, kv, dtype), num_splits=splits, sm_scale=1.0)
        small = (tokens - 1) * math.exp(-16.0)  # 6.7e-5; a weight alone is two of float16's least numbers
        assert float(out[0, 0, 0]) == pytest.approx(small / (1 + small), rel=2.0**-8)


# Scales.


@QUANTIZED
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("latent", [False, True], ids=["paged", "latent"])
def test_scales_of_tokens_may_be_of_any_size(
    device: torch.device, cache: torch.dtype, dtype: torch.dtype, latent: bool
) -> None:
    """Weights times scales of values are summed in 16 bits: whatever the scales, they keep to the range."""
    tokens, width = 70, 32
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(2, tokens, 1, width, generator=generator).mul(20)
    k, v = (reference.quantize(x, cache)[None].to(device) for x in numbers)
    # They grow along the sequence, so that what was summed before has to be made smaller, and differ among neighbours.
    growth = torch.arange(tokens) // 10 - 3 * torch.randint(0, 4, (tokens,), generator=generator)
    for low in (-6,) if dtype == torch.float16 else (-60, 0, 50):  # in float16 the output must fit
        own = torch.exp2(low + growth.float()).view(1, tokens, 1).to(device)
        q = torch.randn(1, 2, width, generator=generator).to(dtype).to(device)
        if latent:
            kv: splitkv.kv.KVView = splitkv.LatentKV(
                k[:, :, 0], ints([[0]], device), ints([tokens], device), head_dim_v=16, scale=own[..., 0]
            )
        else:
            kv = splitkv.ContiguousKV(k, v, ints([tokens], device), k_scale=0.05, v_scale=own)
        rules = dict(sm_scale=0.05 * 2.0 ** -(low + 5) if latent else 0.1)
        workspace = workspace_for(q, kv, dtype)
        for splits in (1, 3):
            want = expect(q, kv, **rules)
            want.check(*splitkv.decode_with_lse(q, kv, workspace, num_splits=splits, **rules), what=(low, splits))


@pytest.mark.parametrize("scale", [0.0, math.nan], ids=str)
def test_scales_on_the_device_are_what_they_are(device: torch.device, scale: float) -> None:
    k = torch.ones(1, 20, 1, 16, device=device).to(torch.int8)
    kv = splitkv.ContiguousKV(k, k, ints([20], device), k_scale=1.0, v_scale=torch.tensor(scale, device=device))
    own = torch.ones(1, 20, 1, device=device)
    own[0, 3] = scale
    mine = splitkv.ContiguousKV(k, k, ints([20], device), k_scale=1.0, v_scale=own)
    q = torch.ones(1, 1, 16, dtype=torch.float16, device=device)
    for view, want in ((kv, scale), (mine, 19 / 20 if scale == 0 else scale)):
        out = splitkv.decode(q, view, workspace_for(q, view, torch.float16))
        torch.testing.assert_close(out, torch.full_like(out, want), equal_nan=True)


def test_scales_are_read_on_the_device(device: torch.device) -> None:
    """Overwritten between calls of one form, with no check and no plan in between."""
    k = torch.ones(1, 8, 1, 16, device=device).to(torch.float8_e4m3fn)
    scale = torch.ones(1, device=device)
    kv = splitkv.ContiguousKV(k, k, ints([8], device), v_scale=scale)
    q = torch.ones(1, 1, 16, dtype=torch.float16, device=device)
    workspace = workspace_for(q, kv, torch.float16)
    for value in (1.0, 0.5, 3.0):
        scale.fill_(value)
        exact(splitkv.decode(q, kv, workspace), torch.full((1, 1, 16), value))


def test_numbers_of_views_are_told_apart(device: torch.device) -> None:
    """Views that differ in a scale alone, in turns on one workspace, and forms of scales."""
    k = torch.ones(1, 8, 2, 16, device=device).to(torch.float8_e5m2)
    lens = ints([8], device)
    q = torch.ones(1, 2, 16, dtype=torch.float16, device=device)
    heads = torch.tensor([2.0, 3.0], device=device)
    tokens = torch.full((1, 8, 2), 4.0, device=device)
    wanted = [(None, 1.0, 1.0), (0.5, 0.5, 0.5), (2, 2.0, 2.0), (heads, 2.0, 3.0), (tokens, 4.0, 4.0)]
    workspace = workspace_for(q, splitkv.ContiguousKV(k, k, lens), torch.float16)
    for _ in range(2):
        for scale, first, second in wanted:
            kv = splitkv.ContiguousKV(k, k, lens, v_scale=scale)
            want = torch.tensor([first, second]).view(1, 2, 1).expand(1, 2, 16)
            exact(splitkv.decode(q, kv, workspace), want)
            # K's: 16 · scale, and the logarithm of 8 keys.
            kv = splitkv.ContiguousKV(k, k, lens, k_scale=scale)
            _, lse = splitkv.decode_with_lse(q, kv, workspace, sm_scale=1.0)
            torch.testing.assert_close(lse.cpu(), 16 * want[..., 0] + math.log(8), rtol=1e-6, atol=0)


def test_a_product_of_scales_past_float32_is_refused(device: torch.device) -> None:
    k = torch.ones(1, 8, 1, 16, device=device).to(torch.int8)
    kv = splitkv.ContiguousKV(k, k, ints([8], device), k_scale=1e30, v_scale=1.0)
    q = torch.ones(1, 1, 16, dtype=torch.float16, device=device)
    with pytest.raises(ValueError, match=r"^sm_scale · k_scale: expected a number that is finite in float32"):
        splitkv.decode(q, kv, workspace_for(q, kv, torch.float16), sm_scale=1e30)


# What is refused.


@pytest.mark.parametrize("cache", FNUZ_DTYPES, ids=str)
def test_numbers_that_the_device_lacks_are_refused(device: torch.device, cache: torch.dtype) -> None:
    k = torch.zeros(1, 8, 1, 16, device=device).to(cache)
    kv = splitkv.ContiguousKV(k, k, ints([8], device))
    q = torch.ones(1, 1, 16, dtype=torch.float16, device=device)
    workspace = workspace_for(q, kv, torch.float16)
    with pytest.raises(TypeError, match=rf"^kv: expected .* {workspace.target.arch}, .*, given {cache}"):
        splitkv.decode(q, kv, workspace)
    reason = splitkv.supports(q, kv, workspace)
    assert reason is not None and str(cache) in reason
    with pytest.raises(TypeError, match=rf"^kv: expected .*, given {cache}"):
        splitkv.append_kv(q, q, kv, ints([0], device))


def test_latent_calls_need_a_scale_of_scores(device: torch.device) -> None:
    kv = splitkv.LatentKV(
        torch.zeros(2, 4, 24, device=device), ints([[0, 1]], device), ints([5], device), head_dim_v=16
    )
    q = torch.zeros(1, 3, 24, device=device)
    workspace = workspace_for(q, kv, torch.float32)
    for call in (splitkv.decode, splitkv.decode_with_lse, splitkv.warmup, reference.decode):
        with pytest.raises(ValueError, match=r"^sm_scale: expected a number with a LatentKV"):
            call(q, kv, workspace)
    splitkv.decode(q, kv, workspace, sm_scale=1.0)
    reason = splitkv.supports(q, kv, workspace)
    assert reason is not None and reason.startswith("sm_scale: ")


# Quantising.


def halves() -> Tensor:
    """Every float16 as float32: all ties of numbers with up to 9 bits, infinities and NaN among them."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()


@ALL_QUANTIZED
@pytest.mark.parametrize("scale", [1.0, 0.25, 3e-3, 700.0])
def test_numbers_are_rounded_as_torch_rounds_them(
    device: torch.device, cache: torch.dtype, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cache in FNUZ_DTYPES:
        monkeypatch.setattr(append.tile_sizes.Target, "of", lambda _: Target("hip:gfx942", 1, 65536))
    numbers = halves().view(256, 2, 128)
    k = torch.full((256, 2, 128), 0x55, dtype=torch.uint8, device=device).view(cache)
    v = k.clone()
    kv = splitkv.RaggedKV(k, v, ints([0, 256], device), k_scale=scale, v_scale=torch.tensor(1 / scale, device=device))
    slots = torch.arange(256, dtype=torch.int32, device=device)
    splitkv.append_kv(numbers.to(device), numbers.to(device), kv, slots)
    for written, by in ((k, torch.tensor(scale)), (v, torch.tensor(1 / scale))):
        wanted = reference.quantize(numbers / by, cache)
        exact(written, wanted.float())
        negative, number = written.cpu().view(torch.int8) < 0, ~wanted.float().isnan()
        assert torch.equal(negative[number], (wanted.view(torch.int8) < 0)[number])  # signs of zeros too
    # What the numbers beyond all are, by hand.
    most = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0}.get(cache, 57344.0)
    edge = torch.tensor([math.inf, -math.inf, math.nan, 3e38, -3e38, 0.0], device=device).view(1, 1, 6)
    k = torch.zeros(1, 1, 6, device=device).to(cache)
    kv = splitkv.RaggedKV(k, k.clone(), ints([0, 1], device), k_scale=1.0, v_scale=1.0)
    splitkv.append_kv(edge, edge, kv, ints([0], device))
    least = -128.0 if cache == torch.int8 else -most
    nan = 0.0 if cache == torch.int8 else math.nan
    exact(k.flatten(), torch.tensor([most, least, nan, most, least, 0.0]))


@ALL_QUANTIZED
def test_numbers_that_a_format_has_come_back(
    device: torch.device, cache: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cache in FNUZ_DTYPES:
        monkeypatch.setattr(append.tile_sizes.Target, "of", lambda _: Target("hip:gfx942", 1, 65536))
    codes, numbers = all_bytes(cache)
    finite = numbers.isfinite()
    k = torch.zeros(1, 1, 256, dtype=torch.uint8, device=device).view(cache)
    kv = splitkv.RaggedKV(k, k.clone(), ints([0, 1], device), k_scale=1.0, v_scale=1.0)
    new = numbers.view(1, 1, 256).to(device)
    splitkv.append_kv(new, new, kv, ints([0], device))
    assert torch.equal(k.cpu().view(torch.uint8).flatten()[finite], codes.view(torch.uint8)[finite])


def rows_to_append(dtype: torch.dtype, device: torch.device, *shape: int) -> Tensor:
    """Ordinary rows, and some that are all 0, tiny, huge, or hold what is no number."""
    rows = torch.randn(shape)
    rows[1], rows[2, 0], rows[3, 0] = 0.0, rows[2, 0] * 1e-6, rows[3, 0] * 1e4
    rows[4, 0, 2], rows[5, 0, 1], rows[6, 0, 3] = math.inf, -math.inf, math.nan
    rows[7, 0] = math.inf
    return rows.to(dtype).to(device)


@QUANTIZED
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k_scale", ["number", "tensor", "head", "token"])
@pytest.mark.parametrize("layout", ["NHD", "HND", "contiguous", "ragged"])
def test_append_writes_what_the_reference_writes(
    device: torch.device, cache: torch.dtype, dtype: torch.dtype, k_scale: str, layout: str
) -> None:
    """Numbers and computed scales, bit by bit, and nothing else; K's and V's scales of unlike forms."""
    heads, tokens, width, width_v = 2, 9, 20, 150
    v_scale = {"number": "token", "token": "head", "head": "tensor", "tensor": "number"}[k_scale]
    shape = {"NHD": (5, 4, heads), "HND": (5, heads, 4), "contiguous": (4, 5, heads), "ragged": (20, heads)}[layout]

    def view() -> tuple[splitkv.kv.KVView, list[Tensor]]:
        made = []
        for n in (width, width_v):
            made.append(torch.full((*shape, n + 4), 0x31, dtype=torch.uint8, device=device).view(cache)[..., :n])
        scales: list[Any] = []
        for kind in (k_scale, v_scale):
            own = torch.full(shape, 5.0, device=device)
            some = dict(number=0.02, tensor=torch.tensor(0.03, device=device), token=own)
            scales.append(some.get(kind, torch.tensor([0.01, 0.04], device=device)))
        given = dict(k_scale=scales[0], v_scale=scales[1])
        kv: splitkv.kv.KVView
        if layout == "ragged":
            kv = splitkv.RaggedKV(*made, ints([0, 20], device), **given)
        elif layout == "contiguous":
            kv = splitkv.ContiguousKV(*made, ints([5] * 4, device), **given)
        else:
            kv = splitkv.PagedKV(*made, ints([[0]], device), ints([4], device), layout=layout, **given)
        return kv, [*made, *(scale for scale in scales if isinstance(scale, Tensor))]

    kv, written = view()
    twin, wanted = view()
    torch.manual_seed(3)
    k_new, v_new = (
        rows_to_append(dtype, device, tokens, heads, width),
        rows_to_append(dtype, device, tokens, heads, 150),
    )
    slots = ints([3, -1, 0, 19, 7, 20, 11, 6, 4], device)
    splitkv.append_kv(k_new, v_new, kv, slots)
    reference.append_kv(k_new, v_new, twin, slots)
    for a, b in zip(written, wanted, strict=True):
        exact(a, b.cpu().float())
        base = [torch.empty(0, dtype=torch.uint8, device=device).set_(t.untyped_storage()) for t in (a, b)]
        assert a.is_floating_point() or torch.equal(*base)
        if a.element_size() == 1:
            assert torch.equal(a.isnan() if a.is_floating_point() else a, b.isnan() if b.is_floating_point() else b)


@QUANTIZED
def test_numbers_that_are_quantised_already_are_copied(device: torch.device, cache: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(cache).view(2, 1, 128)
    k = torch.zeros(4, 1, 128, device=device).to(cache)
    scale = torch.full((4, 1), 7.0, device=device)
    kv = splitkv.RaggedKV(k, k.clone(), ints([0, 4], device), k_scale=scale, v_scale=2.0)
    splitkv.append_kv(codes, codes.flip(0), kv, ints([3, 1], device))
    assert torch.equal(kv.k.view(torch.uint8)[[3, 1]], codes.view(torch.uint8))
    assert torch.equal(kv.v.view(torch.uint8)[[1, 3]], codes.view(torch.uint8))
    assert bool((scale == 7.0).all()) and not kv.k.view(torch.uint8)[[0, 2]].any()


@pytest.mark.parametrize("cache", [None, *EVERYWHERE], ids=str)
@pytest.mark.parametrize("own", [False, True], ids=["number", "tokens"])
def test_latent_rows_are_appended_and_moved(device: torch.device, cache: torch.dtype | None, own: bool) -> None:
    """Rows and the scales that they have of their own; chains of moves, each row moved once."""
    dtype = cache or torch.bfloat16

    def view() -> splitkv.LatentKV:
        scale: Any = torch.full((3, 4), 5.0, device=device) if own else 0.02
        rows = torch.zeros(3, 4, 24, device=device).to(dtype)
        return splitkv.LatentKV(
            rows, ints([[0, 1, 2]], device), ints([12], device), head_dim_v=16, scale=scale if cache else None
        )

    kv, twin = view(), view()
    new = rows_to_append(torch.bfloat16, device, 10, 1, 24)
    slots = ints([3, 0, 11, 7, 8, 2, 1, 5, 4, -1], device)
    splitkv.append_kv(new, None, kv, slots)
    reference.append_kv(new, None, twin, slots)

    def check() -> None:
        exact(kv.cache, twin.cache.cpu().float())
        if isinstance(kv.scale, Tensor) and isinstance(twin.scale, Tensor):
            exact(kv.scale, twin.scale.cpu())

    check()
    source, target = ints([3, 4, 5, 7, 11, 8], device), ints([2, 3, 4, 5, 8, 11], device)
    splitkv.move_kv(kv, source, target)
    reference.move_kv(twin, source, target)
    check()
    with pytest.raises(TypeError, match=r"^v_new: expected None with a LatentKV"):
        splitkv.append_kv(new, new, kv, slots)  # type: ignore[arg-type]


def test_values_within_keys_are_moved_once(device: torch.device) -> None:
    k = torch.arange(6.0, device=device)[:, None, None].expand(6, 1, 24).contiguous()
    kv = splitkv.RaggedKV(k, k[..., :16], ints([0, 6], device))
    splitkv.move_kv(kv, ints([1, 2, 3], device), ints([0, 1, 2], device))
    assert k[:, 0, 0].tolist() == k[:, 0, 20].tolist() == [1, 2, 3, 3, 4, 5]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_scales_of_tokens_move_with_them(device: torch.device, layout: str) -> None:
    shape = (3, 4, 2) if layout == "NHD" else (3, 2, 4)

    def view() -> splitkv.PagedKV:
        codes = torch.arange(24 * 16, dtype=torch.int32, device=device).to(torch.int8).view(*shape, 16)
        own = torch.arange(24.0, device=device).view(shape)
        return splitkv.PagedKV(
            codes, codes.clone(), ints([[0]], device), ints([4], device), layout=layout, k_scale=own, v_scale=own + 0.5
        )

    kv, twin = view(), view()
    source, target = ints([3, 4, 5, 11, -1, 0], device), ints([2, 3, 4, 0, 7, 11], device)
    splitkv.move_kv(kv, source, target)
    reference.move_kv(twin, source, target)
    for name in ("k", "v", "k_scale", "v_scale"):
        assert torch.equal(getattr(kv, name), getattr(twin, name))
    assert not torch.equal(kv.k_scale, view().k_scale)  # type: ignore[arg-type]


@QUANTIZED
def test_what_was_appended_is_decoded(device: torch.device, cache: torch.dtype) -> None:
    """With scales of its own a token keeps a relative precision, whatever its size."""
    tokens, width = 40, 64
    torch.manual_seed(5)
    k_new, v_new = (torch.randn(tokens, 2, width, device=device) for _ in range(2))
    v_new *= torch.exp2(torch.arange(tokens, device=device) % 7 - 3.0)[:, None, None]
    own = [torch.zeros(tokens, 2, device=device) for _ in range(2)]
    k = torch.zeros(tokens, 2, width, device=device).to(cache)
    kv = splitkv.RaggedKV(k, k.clone(), ints([0, tokens], device), k_scale=own[0], v_scale=own[1])
    splitkv.append_kv(k_new, v_new, kv, torch.arange(tokens, dtype=torch.int32, device=device))
    plain = splitkv.RaggedKV(k_new, v_new, ints([0, tokens], device))
    q = torch.randn(1, 4, width, device=device)
    out = splitkv.decode(q, kv, workspace_for(q, kv, torch.float32))
    want = reference.decode(q, plain, dtype=torch.float64)
    step = {torch.int8: 1 / 127, torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3}[cache]
    assert float((out.double() - want).norm() / want.norm()) < 1.5 * step
    # What is decoded is what lies in the cache, to float32's precision.
    expect(q, kv).check(out)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (dict(k_new=torch.float64), TypeError, "k_new: expected torch.int8 or torch.float16 or torch.bfloat16 or"),
        (dict(k_new=torch.float8_e4m3fn), TypeError, "k_new: expected torch.int8 or"),
        (dict(v_new=torch.float16), TypeError, "v_new: expected torch.float32, given torch.float16"),
        (dict(v_new=torch.int8), TypeError, "v_new: expected torch.float32, given torch.int8"),
    ],
    ids=str,
)
def test_new_tokens_of_other_dtypes_are_refused(
    device: torch.device, change: dict[str, torch.dtype], error: type[Exception], text: str
) -> None:
    k = torch.zeros(4, 1, 16, dtype=torch.int8, device=device)
    kv = splitkv.RaggedKV(k, k.clone(), ints([0, 4], device), k_scale=1.0, v_scale=1.0)
    new = {name: torch.ones(1, 1, 16, device=device).to(change.get(name, torch.float32)) for name in ("k_new", "v_new")}
    with pytest.raises(error, match=f"^{text}"):
        splitkv.append_kv(**new, kv=kv, slots=ints([0], device))


# Latent rows.


@pytest.mark.parametrize(
    ("width", "width_v"), [(576, 512), (320, 256), (24, 16), (80, 40), (64, 64), (40, 33), (17, 1)]
)
@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_latent_widths_and_page_sizes(device: torch.device, width: int, width_v: int, page_size: int) -> None:
    problem = make_problem(
        width, device=device, kind="latent", lens=(70, 3), head_dim=width, head_dim_v=width_v, page_size=page_size,
        group_size=16, dtype=torch.float16, cache=None, query="one", num_splits=3, split_tokens=None,
    )  # fmt: skip
    problem.expected().check(*problem.decode(problem.workspace()), what=problem)


@pytest.mark.parametrize(("cache", "group_size"), [(None, 5), (torch.float8_e4m3fn, 5), (None, 64)], ids=str)
def test_gaps_between_latent_rows_change_no_bit(
    device: torch.device, cache: torch.dtype | None, group_size: int
) -> None:
    """Rows without gaps are addressed by constants, in query tiles of many rows other ones."""
    problem = make_problem(
        8, device=device, kind="latent", lens=(300, 3, 65), head_dim=96, head_dim_v=64, page_size=64,
        group_size=group_size,
        dtype=torch.bfloat16, cache=cache, query="one", kv_strides="contiguous", split_tokens=None, num_splits=2,
        k_scale="number",
    )  # fmt: skip
    kv = problem.kv
    assert isinstance(kv, splitkv.LatentKV)
    wide = torch.full((*kv.cache.shape[:-1], 160 * kv.cache.element_size()), 0xFF, dtype=torch.uint8, device=device)
    gapped = wide.view(kv.cache.dtype)[..., :96]
    bytes_of = torch.uint8 if cache else torch.int16
    gapped.view(bytes_of).copy_(kv.cache.view(bytes_of))
    other = splitkv.LatentKV(
        gapped, kv.page_table, kv.seq_lens, head_dim_v=64, rows=kv.rows, kv_start=kv.kv_start, scale=kv.scale
    )
    results = [dataclasses.replace(problem, kv=view).decode(problem.workspace(), num_splits=2) for view in (kv, other)]
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    problem.expected().check(*results[0], what=problem)


@pytest.mark.parametrize("group_size", [1, 16, 20, 128])
@pytest.mark.parametrize("cache", [None, torch.float8_e4m3fn], ids=str)
def test_query_heads_on_one_latent_head(device: torch.device, group_size: int, cache: torch.dtype | None) -> None:
    problem = make_problem(
        group_size, device=device, kind="latent", lens=(70, 3), head_dim=80, head_dim_v=64, page_size=64,
        group_size=group_size, dtype=torch.bfloat16, cache=cache, query="several" if group_size < 100 else "one",
        q_len=2, mask="causal", q_tile_rows=None, num_splits=1 if group_size > 100 else 3, split_tokens=None,
    )  # fmt: skip
    problem.expected().check(*problem.decode(problem.workspace()), what=problem)


def test_a_latent_view_is_what_a_view_of_its_columns_is(device: torch.device) -> None:
    """Values within keys, as PagedKV takes them too: the same results, with and without a work list."""
    problem = make_problem(
        5, device=device, kind="latent", lens=(70, 3, 33), head_dim=80, head_dim_v=64, page_size=16, group_size=4,
        dtype=torch.float16, cache=None, query="one", window_left=None, split_tokens=None, num_splits=None, rows=False,
    )  # fmt: skip
    kv = problem.kv
    assert isinstance(kv, splitkv.LatentKV)
    schedule = splitkv.Schedule.allocate(problem.config, device)
    listed = splitkv.LatentKV(
        kv.cache, kv.page_table, kv.seq_lens, head_dim_v=64, kv_start=kv.kv_start, schedule=schedule
    )
    schedule.update(listed)
    alike = splitkv.PagedKV(kv.k, kv.v, kv.page_table, kv.seq_lens, kv_start=kv.kv_start)
    want = problem.expected()
    for view in (kv, listed, alike):
        want.check(*dataclasses.replace(problem, kv=view).decode(problem.workspace()), what=type(view))


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [None, *EVERYWHERE], ids=str)
@pytest.mark.parametrize("kind", ["paged", "latent"])
@pytest.mark.parametrize("scale", ["number", "token"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_long_sequences(cache: torch.dtype | None, kind: str, scale: str, dtype: torch.dtype) -> None:
    """Tiles and pipelines of the sizes that a GPU gets, unlike the interpreter's."""
    if cache is None and (scale == "token" or kind == "paged"):
        pytest.skip("others show it")
    for group, width, width_v in ((4, 128, 128), (16, 576, 512), (128, 576, 512), (7, 64, 64), (8, 192, 128)):
        problem = make_problem(
            group, device="cuda", kind=kind, lens=(3000, 17, 900), head_dim=width, head_dim_v=width_v, page_size=64,
            group_size=group, num_kv_heads=2, dtype=dtype, cache=cache, query="one", mask="causal", alias_v=False,
            k_scale=scale, v_scale=scale, kv_strides="contiguous", poison="nan", window_left=None, softcap=None,
            alibi=False, sinks=None, num_splits=None, split_tokens=None,
        )  # fmt: skip
        problem.expected().check(*problem.decode(problem.workspace()), what=problem)


@pytest.mark.gpu
@pytest.mark.skipif(not COMPILED, reason="needs a GPU")
@pytest.mark.parametrize("kind", ["paged", "latent"])
def test_a_graph_is_right_after_scales_and_tokens_have_changed(device: torch.device, kind: str) -> None:
    problem = make_problem(
        2, device=device, kind=kind, lens=(300, 5), head_dim=128, head_dim_v=128, page_size=16, dtype=torch.bfloat16,
        cache=torch.float8_e4m3fn, query="one", k_scale="token", v_scale="token", poison="zero",
        kv_strides="contiguous", clamped=False, alias_v=False, kv_start=False, shared_pages=False,
    )  # fmt: skip
    workspace = problem.workspace()
    problem.decode(workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = problem.decode(workspace)
    for turn in range(3):
        for scale in {id(scale): scale for scale in (problem.kv.k_scale, problem.kv.v_scale)}.values():
            assert isinstance(scale, Tensor)
            scale.mul_(0.5 + turn)
        problem.kv.k.view(torch.uint8).bitwise_xor_(3)
        out.fill_(math.nan)
        graph.replay()
        problem.expected().check(out, lse, turn)
    assert same_bits(out, problem.decode(problem.workspace())[0])


@pytest.mark.parametrize("cache", [None, torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("kind", ["paged", "latent"])
def test_shared_prefixes(device: torch.device, kind: str, cache: torch.dtype | None) -> None:
    """Common tokens are attended once for all requests, by scales of their own; then each one's others."""
    problem = make_problem(
        5, device=device, kind=kind, cache=cache, k_scale="token", v_scale="token", dtype=torch.bfloat16, head_dim=64,
        head_dim_v=32, group_size=4, num_kv_heads=2, layout="NHD", alias_v=False, lens=(90, 75, 80, 33), page_size=16,
        query="one", mask="causal", window_left=None, num_splits=None, split_tokens=None, shared_pages=True,
        kv_start=False, clamped=False, rows=False, max_splits=None, q_tile_rows=64,
    )  # fmt: skip
    shared = dict(group_ids=ints([7, 7, 7, 7], device), prefix_lens=ints([64, 64, 64, 32], device))
    out = splitkv.decode_shared_prefix(problem.q, problem.kv, problem.workspace(), **shared, **problem.rules)
    problem.expected().check(out, what=problem)
