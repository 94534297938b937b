"""Workspaces, modes of autograd, the rest of the batch, and what a call launches."""

import itertools
import math
from contextlib import nullcontext

import pytest
import torch
from conftest import COMPILED
from support import (
    DEFAULT,
    GARBAGE,
    WHOLE,
    Cut,
    Scratch,
    assert_rows,
    assert_values,
    attend,
    index_probe,
    no_synchronisation,
    view_of,
)
from torch.utils._python_dispatch import TorchDispatchMode

import splitkv
from splitkv.api import plan_decode
from splitkv.kernels import prepared
from splitkv.testing import same_bits

SIZES = [
    (batch, tokens, heads, widths, cut, dtype)
    for (batch, tokens, heads, widths), (cut, dtype) in itertools.product(
        # Any two of them beside each other, in half of all combinations.
        (
            (1, 3, (1, 1), (16, 16)),
            (1, 3, (6, 2), (24, 59)),
            (3, 1, (1, 1), (24, 59)),
            (3, 1, (6, 2), (16, 16)),
        ),
        (
            (Cut(num_splits=3), torch.float32),
            (Cut(split_tokens=2, max_parts=3), torch.float16),
            (DEFAULT, torch.bfloat16),
        ),
    )
]


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "-".join(map(str, sizes)).replace(" ", ""))
def test_exactly_enough(device, sizes):
    """Case 30: exactly nbytes bytes do, and nothing outside is written; with one less nothing is written at all."""
    batch, tokens, (q_heads, kv_heads), (width, width_v), cut, dtype = sizes
    k = torch.zeros(batch, 5, kv_heads, width, dtype=dtype, device=device)
    v = index_probe(device, batch, 5, heads=kv_heads, head_dim=width_v, dtype=dtype)[1]
    kv = view_of("paged", k, v, [5] * batch)
    q = torch.randn(batch, tokens, q_heads, width, device=device).to(dtype)
    result = attend(q, kv, cut)  # looks at the guards, the gaps between sections and what the call does not use
    assert result.parts == (0 if cut == DEFAULT else 3)
    last = torch.arange(5 - tokens, 5, dtype=torch.float64)[None, :, None]
    assert_rows(result, (last / 2).expand(result.lse.shape), (last + 1).log().expand(result.lse.shape))

    config = result.scratch.config
    sections = config.sections()
    assert all(section.offset % 256 == 0 for section in sections)
    assert all(a.end <= b.offset for a, b in itertools.pairwise(sections))
    assert sections[-1].end == config.nbytes
    scratch = Scratch(config, device)
    for section in sections:
        buffer = getattr(scratch.workspace, section.name)
        assert (buffer.shape, buffer.dtype) == (section.shape, section.dtype)
        assert buffer.data_ptr() == scratch.buffer.data_ptr() + section.offset
        assert buffer.numel() * buffer.element_size() == section.nbytes
    before = scratch.block.clone()
    with pytest.raises(
        ValueError, match=rf"^buffer: expected at least {config.nbytes} bytes, given {config.nbytes - 1}\b"
    ):
        splitkv.Workspace.from_buffer(config, scratch.buffer[:-1])
    assert torch.equal(scratch.block, before)


def test_every_partial_is_used(device):
    """Case 30: a call that needs more partials than there are is refused with both numbers; one that needs all fits."""
    kv = view_of("paged", *index_probe(device, 2, 8), [8, 8])
    q = torch.zeros(2, 1, 16, device=device)
    scratch = Scratch(splitkv.WorkspaceConfig(2, 1, 1, 16, max_splits=8, dtype=torch.float32), device)
    before = scratch.block.clone()
    with pytest.raises(ValueError, match=r"^num_splits: expected at most 8 partial tiles .* given 10 "):
        splitkv.decode(q, kv, scratch.workspace, num_splits=5)
    assert torch.equal(scratch.block, before)
    out, lse = splitkv.decode_with_lse(q, kv, scratch.workspace, num_splits=4)
    assert_values(out, 3.5)
    assert_values(lse, math.log(8))
    assert scratch.partial_tiles(16) == (8, 8)
    assert scratch.changed(scratch.workspace.partial_out).view(8, 16, 16)[:, 0].all()
    scratch.assert_guards()
    scratch = Scratch(
        splitkv.WorkspaceConfig(2, 1, 1, 16, max_splits=5, split_tokens=2, max_parts=3, dtype=torch.float32), device
    )
    with pytest.raises(ValueError, match=r"^split_tokens: expected at most 5 partial tiles .* given 6 "):
        splitkv.decode(q, kv, scratch.workspace)
    assert scratch.partial_tiles(16) == (0, 0)


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 16])
def test_default_schedule_keeps_to_its_partials(device, slots):
    """Case 30: the default schedule uses as many partials as there are, and no more."""
    kv = view_of("paged", *index_probe(device, 2, 300), [300, 170], page_size=16)
    q = torch.zeros(2, 2, 16, device=device)
    scratch = Scratch(splitkv.WorkspaceConfig(2, 2, 1, 16, max_splits=slots, dtype=torch.float32), device)
    out, lse = splitkv.decode_with_lse(q, kv, scratch.workspace, sm_scale=1.0)
    scratch.assert_guards()
    cut, _ = scratch.partial_tiles(16)
    assert cut <= slots
    assert slots < 16 or cut >= 4, "too little was cut"
    assert_values(out, torch.tensor([149.5, 84.5])[:, None, None])
    assert_values(lse, torch.tensor([300.0, 170.0], dtype=torch.float64).log()[:, None])


def test_wrong_workspace(device):
    """Case 30: dtype, device, alignment and capacity are checked by name before anything is written."""
    config = splitkv.WorkspaceConfig(2, 1, 1, 16, dtype=torch.float32)
    scratch = Scratch(config, device)
    block, start, nbytes = scratch.block, scratch.start, config.nbytes
    before = block.clone()
    with pytest.raises(TypeError, match=r"^buffer: expected torch.uint8, given torch.float32"):
        splitkv.Workspace.from_buffer(config, scratch.buffer.view(torch.float32))
    with pytest.raises(TypeError, match=r"^buffer: expected torch.uint8, given torch.int8"):
        splitkv.Workspace.from_buffer(config, scratch.buffer.view(torch.int8))
    with pytest.raises(ValueError, match=r"^buffer: expected 1 dimensions"):
        splitkv.Workspace.from_buffer(config, scratch.buffer[None])
    with pytest.raises(ValueError, match=r"^buffer: expected a last stride of 1"):
        splitkv.Workspace.from_buffer(config, torch.zeros(2 * nbytes, dtype=torch.uint8, device=device)[::2])
    for off in (1, 2, 4, 16, 128):
        with pytest.raises(ValueError, match=rf"^buffer: expected a start aligned to 256 bytes, given .* \({off} past"):
            splitkv.Workspace.from_buffer(config, block[start + off : start + off + nbytes])

    q = torch.zeros(3, 1, 16, device=device)
    kv = view_of("contiguous", *index_probe(device, 3, 4), [4, 4, 4])
    for splits in (1, 3, None):
        with pytest.raises(ValueError, match=r"^workspace: expected out of at least 48 elements .* given 32 "):
            splitkv.decode(q, kv, scratch.workspace, num_splits=splits)
        out = torch.full_like(q, math.nan)
        with pytest.raises(ValueError, match=r"^workspace: expected lse of at least 3 elements .* given 2 "):
            splitkv.decode_with_lse(q, kv, scratch.workspace, num_splits=splits, out=out)
        assert out.isnan().all()
    other = "meta" if device.type == "cpu" else "cpu"
    elsewhere = splitkv.Workspace.allocate(config, other)
    with pytest.raises(
        ValueError, match=rf"^q: expected device {other} \(that of the workspace\), given {device.type}"
    ):
        splitkv.decode(q[:2], kv, elsewhere)
    for name, moved in (("q", (q[:2].to(other), kv)), ("kv", (q[:2], kv_on(kv, other)))):
        with pytest.raises(ValueError, match=rf"^{name}: expected device {device.type}.* given {other}"):
            splitkv.decode(*moved, scratch.workspace)
    for name in ("out", "lse"):
        given = torch.zeros(2, 1, 16, device=other) if name == "out" else torch.zeros(2, 1, device=other)
        with pytest.raises(ValueError, match=rf"^{name}: expected device {device.type}.* given {other}"):
            splitkv.decode(q[:2], kv, scratch.workspace, **{name: given})
    half = splitkv.Workspace.allocate(splitkv.WorkspaceConfig(2, 1, 1, 16, dtype=torch.float16), device)
    with pytest.raises(TypeError, match=r"^q: expected torch.float16, given torch.float32"):
        splitkv.decode(q[:2], kv, half)
    with pytest.raises(TypeError, match=r"^kv: expected torch.float16 .* given torch.float32"):
        splitkv.decode(q[:2].half(), kv, half)
    assert torch.equal(block, before)


def kv_on(kv, device):
    """The same contiguous view on another device."""
    return splitkv.ContiguousKV(kv.k.to(device), kv.v.to(device), kv.seq_lens.to(device))


@pytest.mark.parametrize("made_in", ["inference", "normal"])
@pytest.mark.parametrize("used_in", ["inference", "no_grad", "grad"])
@pytest.mark.parametrize("cut", [WHOLE, Cut(num_splits=3)], ids=str)
def test_inference_mode(device, made_in, used_in, cut):
    """Case 32: tensors made inside inference mode are written outside of it, and the reverse."""
    with torch.inference_mode(made_in == "inference"):
        config = splitkv.WorkspaceConfig(2, 1, 1, 16, dtype=torch.float32)
        workspaces = [splitkv.Workspace.allocate(config, device), Scratch(config, device).workspace]
        out = torch.full((2, 1, 16), math.nan, device=device)
        lse = torch.full((2, 1), math.nan, device=device)
        kv = view_of("paged", *index_probe(device, 2, 8), [8, 5])
    q = torch.randn(2, 1, 16, device=device)
    mode = {"inference": torch.inference_mode, "no_grad": torch.no_grad, "grad": nullcontext}[used_in]
    want_out, want_lse = (
        torch.tensor([3.5, 2.0])[:, None, None],
        torch.tensor([8.0, 5.0], dtype=torch.float64).log()[:, None],
    )
    with mode():
        for workspace in workspaces:
            got = splitkv.decode(q, kv, workspace, sm_scale=1.0, num_splits=cut.num_splits, out=out, lse=lse)
            assert got is out
            assert_values(out, want_out)
            assert_values(lse, want_lse)
            own_out, own_lse = splitkv.decode_with_lse(q, kv, workspace, sm_scale=1.0, num_splits=cut.num_splits)
            assert_values(own_out, want_out)
            assert_values(own_lse, want_lse)
            merged, merged_lse = splitkv.merge(out[None], lse[None], out=own_out, lse=own_lse)
            assert_values(merged, want_out)
            assert_values(merged_lse, want_lse)
    # The workspace's own tensors are plain ones, whatever the mode they were made in: they may always be written.
    assert not any(workspace.out.is_inference() for workspace in workspaces)
    workspaces[0].out.zero_()


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_the_rest_of_the_batch(device, layout):
    """Case 33: with split_tokens a request's bits do not depend on others, on its place, or on the run."""
    config = splitkv.WorkspaceConfig(33, 2, 1, 16, split_tokens=64, max_parts=6, dtype=torch.float16)
    generator = torch.Generator().manual_seed(33)

    def rand(*shape):
        return torch.randn(*shape, generator=generator).to(device, torch.float16)

    q, k, v = rand(1, 2, 16), rand(1, 300, 1, 16), rand(1, 300, 1, 16)
    very_long = 700 if device.type == "cpu" else 20_000

    def run(batch, place, garbage="nan"):
        lens = torch.randint(1, 200, (batch,), generator=generator).tolist()
        lens[(place + 1) % batch] = very_long
        if batch > 2:
            lens[(place + 2) % batch] = 0
        lens[place] = 300
        longest = max(lens)
        queries, keys, values = rand(batch, 2, 16), rand(batch, longest, 1, 16), rand(batch, longest, 1, 16)
        queries[place], keys[place, :300], values[place, :300] = q[0], k[0], v[0]
        scratch = Scratch(config, device, garbage)
        kv = view_of(layout, keys, values, lens, page_size=16)
        out, lse = splitkv.decode_with_lse(queries, kv, scratch.workspace)
        scratch.assert_guards()
        return out[place].clone(), lse[place].clone(), scratch.partial_tiles(16)[0]

    alone_out, alone_lse, parts = run(1, 0)
    assert parts == 5
    want, _ = splitkv.reference.decode_with_lse(q, view_of(layout, k, v, [300]), dtype=torch.float64)
    assert (alone_out - want[0]).norm() <= 2e-3 * want.norm()
    # The interpreter runs programs in one order, always.
    repeats = list(itertools.islice(itertools.cycle(GARBAGE), 10 if device.type == "cuda" else 3))
    for batch, place, garbage in [
        (2, 0, "nan"),
        (2, 1, "huge"),
        (8, 5, "plausible"),
        (33, 32 if layout == "paged" else 17, "nan"),
        *((3, turn % 3, garbage) for turn, garbage in enumerate(repeats)),
    ]:
        out, lse, _ = run(batch, place, garbage)
        assert same_bits(out, alone_out), f"out differs in a batch of {batch} at {place}"
        assert same_bits(lse, alone_lse), f"lse differs in a batch of {batch} at {place}"


class Operators(TorchDispatchMode):
    """Notes every operator of torch that runs: views aside, each would launch, allocate or wait."""

    VIEWS = ("aten::view", "aten::slice", "aten::select", "aten::alias", "aten::detach", "aten::as_strided")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name not in self.VIEWS:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


CALLS = {
    "default": {},
    "whole": {"num_splits": 1},
    "parts": {"num_splits": 4},
    "rules": {"window_left": 50, "softcap": 30.0, "num_splits": 2},
}


@pytest.mark.parametrize("layout", ["paged", "contiguous", "ragged"])
@pytest.mark.parametrize("call", CALLS)
def test_launches(device, layout, call):
    """Case 35: at most two kernels and no operator of torch, and the same launches whatever the length."""
    config = splitkv.WorkspaceConfig(1, 1, 1, 128, max_splits=64, dtype=torch.float16)
    workspace = splitkv.Workspace.allocate(config, device)
    q = torch.zeros(1, 1, 128, dtype=torch.float16, device=device)
    probe = index_probe(device, 1, 128, head_dim=128, dtype=torch.float16)
    kv = view_of(layout, *probe, [128], page_size=16)
    lens = kv.addressing.lens if kv.addressing.lens is not None else kv.addressing.indptr[1:]
    shapes = []
    for tokens in (2**30, 1, 0, 128):
        lens.fill_(tokens)
        with Operators() as operators:
            plan = plan_decode(q, kv, workspace, want_lse=True, **CALLS[call])
        assert operators.seen == []
        assert 1 <= len(plan.launches) <= 2
        shapes.append([(launch.grid, launch.constants) for launch in plan.launches])
    assert all(shape == shapes[0] for shape in shapes)
    plan.out.fill_(math.nan)
    plan.run()
    assert_values(plan.lse, math.log(51 if call == "rules" else 128))
    assert_values(plan.out, 102.0 if call == "rules" else 63.5)


@pytest.mark.skipif(COMPILED, reason="on a GPU the next test looks at the real launches")
@pytest.mark.parametrize("call", CALLS)
def test_calls_neither_allocate_nor_launch_more(device, call, monkeypatch):
    """Case 35: of a form that was seen before or not, a call is its launches and no operator of torch."""
    config = splitkv.WorkspaceConfig(1, 1, 1, 16, max_splits=64, dtype=torch.float16)
    workspace = splitkv.Workspace.allocate(config, device)
    q = torch.zeros(1, 1, 16, dtype=torch.float16, device=device)
    kv = view_of("paged", *index_probe(device, 1, 40, dtype=torch.float16), [40], page_size=16)
    launched = []
    monkeypatch.setattr(prepared, "launch", lambda kernel, *_: launched.append(kernel))
    for _ in range(3):
        launched.clear()
        with Operators() as operators:
            out, lse = splitkv.decode_with_lse(q, kv, workspace, **CALLS[call])
        assert operators.seen == [] and 1 <= len(launched) <= 2
        assert out.data_ptr() == workspace.out.data_ptr() and lse.data_ptr() == workspace.lse.data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize(("call", "layout"), [*((call, "paged") for call in CALLS), ("default", "contiguous")])
def test_launches_on_the_gpu(device, layout, call):
    """Case 35: what reaches the GPU: at most two kernels, no allocation, no synchronisation, whatever the length."""
    config = splitkv.WorkspaceConfig(1, 1, 1, 128, max_splits=64, dtype=torch.float16)
    workspace = splitkv.Workspace.allocate(config, device)
    q = torch.zeros(1, 1, 128, dtype=torch.float16, device=device)
    probe = index_probe(device, 1, 4096, head_dim=128, dtype=torch.float16)
    kv = view_of(layout, *probe, [4096], page_size=16)

    def step():
        return splitkv.decode_with_lse(q, kv, workspace, **CALLS[call])

    step()  # compiles
    kernels = []
    for tokens in (128, 1, 0, 4096):
        kv.seq_lens.fill_(tokens)
        allocations = torch.cuda.memory_stats(device)["allocation.all.allocated"]
        with no_synchronisation(), Operators() as operators:
            out, lse = step()
        assert operators.seen == []
        assert torch.cuda.memory_stats(device)["allocation.all.allocated"] == allocations
        seen = min(tokens, 51) if call == "rules" else tokens
        assert_values(lse, math.log(seen) if seen else -math.inf, zero=1e-5)
        assert_values(out, tokens - (seen + 1) / 2 if seen else 0.0)
        # With acc_events, since without it the profiler warns that there may be several cycles.
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            step()
            torch.cuda.synchronize(device)
        kernels.append(
            [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        )
    assert all(1 <= len(names) <= 2 for names in kernels), kernels
    assert all(names == kernels[0] for names in kernels), kernels
