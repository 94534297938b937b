"""Formats and platforms: scales of quantised caches, and GPUs without 8-bit floats."""

import dataclasses
import math

import pytest
import torch
from conftest import COMPILED
from support import assert_cut, assert_rows, attend, each_way, ints, view_of

import splitkv
from splitkv.tiles import Target

E4M3 = torch.float8_e4m3fn


@each_way(tokens=1, splits=2)
def test_scales(device, cut, layout):
    """Case 27: K's scale multiplies scores (and so the LSE), V's the output, each once."""
    k = torch.zeros(1, 2, 2, 16, device=device)
    v = k.clone()
    k[:, 1, :, 0], v[:, 1] = 2.0, 4.0
    q = torch.zeros(1, 2, 16, device=device)
    q[..., 0] = 1.0
    one = dict(k_scale=0.5, v_scale=0.25)
    for heads, scales in (
        (1, one),
        (1, {name: torch.tensor(value, device=device) for name, value in one.items()}),
        (2, dict(k_scale=torch.tensor([0.5, 0.0], device=device), v_scale=torch.tensor([0.25, 0.5], device=device))),
    ):
        kv = view_of(layout, k[:, :, :heads].to(E4M3), v[:, :, :heads].to(E4M3), [2], **scales)
        result = attend(q[:, :heads], kv, cut)
        assert_cut(result, cut, 2)
        # The second head: both scores 0, values 0 and 4 · 0.5.
        assert_rows(result, [[0.731059, 1.0][:heads]], [[1.313262, math.log(2)][:heads]])


def test_scales_with_a_16_bit_cache(device):
    """Case 27: refused, by every view."""
    k = torch.zeros(1, 2, 1, 16, device=device, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"^v_scale: expected none, .*torch.bfloat16"):
        splitkv.ContiguousKV(k, k, ints([2], device), v_scale=0.25)


@pytest.mark.parametrize("arch", ["cuda:80", "cuda:86"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_all_bytes_without_8_bit_floats(device, arch, dtype):
    """Case 28: e4m3 on GPUs that cannot convert it is converted by other means, to the same values."""
    if COMPILED:
        limits = dataclasses.asdict(Target.of(device)) | dict(arch=arch, shared_memory=101376)
        target = Target(**limits)
    else:
        target = Target(arch, num_sms=4, shared_memory=101376, sm_shared_memory=102400)
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    v = codes.view(E4M3).view(2, 1, 1, 128)
    kv = splitkv.ContiguousKV(torch.zeros_like(v.float()).to(E4M3), v, ints([1, 1], device))
    workspace = splitkv.Workspace.allocate(splitkv.WorkspaceConfig(2, 1, 1, 128, dtype=dtype), device)
    workspace.target = target
    out = splitkv.decode(torch.zeros(2, 1, 128, dtype=dtype, device=device), kv, workspace)
    # On the CPU PyTorch converts without any GPU's instructions.
    wanted = codes.cpu().view(E4M3).float()
    torch.testing.assert_close(out.cpu().float().flatten(), wanted, rtol=0, atol=0, equal_nan=True)


def test_bfloat16_before_sm_80(device):
    """Case 28: bfloat16 on sm_75 is refused at the call, which names both."""
    k = torch.zeros(1, 2, 1, 16, device=device, dtype=torch.bfloat16)
    kv = splitkv.ContiguousKV(k, k, ints([2], device))
    workspace = splitkv.Workspace.allocate(splitkv.WorkspaceConfig(1, 1, 1, 16), device)
    workspace.target = dataclasses.replace(workspace.target, arch="cuda:75")
    with pytest.raises(TypeError, match=r"cuda:75.*given torch.bfloat16"):
        splitkv.decode(k[:, 0], kv, workspace)
    assert "cuda:75" in str(splitkv.supports(k[:, 0], kv, workspace))


def test_an_8_bit_cache_of_another_kind_of_gpu(device):
    """Case 28: what only AMD's gfx940 … gfx942 have is refused elsewhere, by name."""
    k = torch.zeros(1, 2, 1, 16, device=device).to(torch.float8_e4m3fnuz)
    kv = splitkv.ContiguousKV(k, k, ints([2], device))
    q = torch.zeros(1, 1, 16, dtype=torch.float16, device=device)
    for arch in ("cuda:90", "hip:gfx90a", "hip:gfx950"):
        workspace = splitkv.Workspace.allocate(splitkv.WorkspaceConfig(1, 1, 1, 16, dtype=torch.float16), device)
        workspace.target = dataclasses.replace(workspace.target, arch=arch)
        with pytest.raises(TypeError, match=rf"^kv: .* on {arch}, .*given torch.float8_e4m3fnuz"):
            splitkv.decode(q, kv, workspace)
