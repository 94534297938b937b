"""Shapes and precision: groups, widths, and what float32 and bfloat16 must keep."""

import math

import pytest
import torch
from support import WHOLE, Cut, assert_cut, assert_rows, assert_values, attend, each_way, ints, view_of

import splitkv

GROUPS = [(12, 2), (10, 2), (14, 2), (12, 1), (7, 1), (71, 1), (40, 2), (48, 2), (80, 4), (128, 1)]


@pytest.mark.parametrize(
    ("number", "heads"), list(enumerate(GROUPS)), ids=[f"{q_heads}-{kv_heads}" for q_heads, kv_heads in GROUPS]
)
def test_groups(device, number, heads):
    """Case 15: any number of query heads per KV head, each with its own KV head's values."""
    q_heads, kv_heads = heads
    k = torch.zeros(1, 5, kv_heads, 16, device=device)
    v = k + torch.arange(1, kv_heads + 1, device=device)[:, None]
    q = torch.randn(1, q_heads, 16, device=device)
    want = [[i // (q_heads // kv_heads) + 1 for i in range(q_heads)]]
    layouts = ("paged", "contiguous", "hnd")
    parts, fixed = Cut(num_splits=3), Cut(split_tokens=2)
    for turn, cut in enumerate((WHOLE, parts, fixed) if q_heads <= 16 else (WHOLE, (parts, fixed)[number % 2])):
        result = attend(q, view_of(layouts[(number + turn) % 3], k, v, [5]), cut)
        assert_cut(result, cut, 5)
        assert_rows(result, want, math.log(5))
    if q_heads > 16:
        return
    # Several query tokens: packed rows of a tile belong to different heads and tokens.
    result = attend(q[:, None].expand(1, 2, q_heads, 16), view_of(layouts[number % 3], k, v, [5]), Cut(num_splits=2))
    assert result.parts == 2
    assert_rows(result, [[want[0], want[0]]], [[[math.log(4)], [math.log(5)]]])


@pytest.mark.parametrize("heads", [(3, 2), (33, 2), (4, 0)], ids=str)
def test_groups_that_are_none(device, heads):
    """Case 15: query heads that are no multiple of the KV heads are refused, by the config and by the call."""
    q_heads, kv_heads = heads
    with pytest.raises(ValueError, match=r"^num_q_heads: .* given|^num_kv_heads: .* given 0"):
        splitkv.WorkspaceConfig(1, q_heads, kv_heads, 16)
    config = splitkv.WorkspaceConfig(1, q_heads, 1, 16, dtype=torch.float32)
    workspace = splitkv.Workspace.allocate(config, device)
    k = torch.zeros(1, 5, kv_heads, 16, device=device)
    with pytest.raises(
        ValueError, match=rf"^q: .* multiple of kv's {kv_heads}, given {q_heads}|^k: .* no empty dimension"
    ):
        kv = splitkv.ContiguousKV(k, k, ints([5], device))
        splitkv.decode(torch.zeros(1, q_heads, 16, device=device), kv, workspace)


def spaced_rows(tensor):
    """The same values with rows 8 elements further apart and NaN in between."""
    buffer = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 8), math.nan)
    buffer[..., :-8] = tensor
    return buffer[..., :-8]


HEAD_DIMS = [16, 24, 59, 64, 80, 96, 112, 128, 160, 192, 256, 576]


@pytest.mark.parametrize(
    ("width", "cut", "dtype"),
    [
        *(
            (width, cut, torch.float32)
            for number, width in enumerate(HEAD_DIMS)
            for cut in (WHOLE, (Cut(num_splits=2), Cut(split_tokens=1))[number % 2])
        ),
        # Widths that fill no block, nor, the last, the tail of one: 16-bit rows are loaded in other pieces.
        *((width, Cut(num_splits=2), torch.float16) for width in (24, 59, 72)),
    ],
    ids=str,
)
def test_head_dims(device, width, cut, dtype):
    """Case 16: any head_dim: the last column counts, and nothing past it is read or written."""
    q = torch.zeros(1, 1, width, dtype=dtype, device=device)
    k, v = (torch.zeros(1, 2, 1, width, dtype=dtype, device=device) for _ in range(2))
    q[..., -1], k[:, 1, :, -1], v[:, 1, :, -1] = 1.0, math.log(3), 1.0
    want = torch.zeros(1, 1, width)
    want[..., -1] = 0.75
    score = k[0, 1, 0, -1].item()  # ln 3 as the dtype has it
    lens = ints([2], device)
    pages = [spaced_rows(t[0, [1, 0], None]) for t in (k, v)]  # of one token each, in the other order
    q, k, v = spaced_rows(q), spaced_rows(k), spaced_rows(v)
    for kv in (splitkv.ContiguousKV(k, v, lens), splitkv.PagedKV(*pages, ints([[1, 0]], device), lens)):
        assert kv.k.stride(-2) == kv.v.stride(-2) == width + 8
        result = attend(q, kv, cut, given=True)
        assert_cut(result, cut, 2)
        assert_values(result.out, want)
        assert_values(result.lse, math.log1p(math.exp(score)))


WIDTHS = [(24, 16), (16, 24), (192, 128), (320, 256), (576, 512)]
KEY_ROWS = [(*widths, own) for widths in WIDTHS for own in (True, False) if own or widths[1] < widths[0]]


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
@pytest.mark.parametrize(
    ("width", "width_v", "own"), KEY_ROWS, ids=[f"{k}-{v}-{'own' if own else 'shared'}" for k, v, own in KEY_ROWS]
)
def test_keys_and_values_of_different_width(device, width, width_v, own, layout):
    """Case 17: values wider or narrower than keys, in rows of their own or as the first columns of the key's."""
    k = torch.full((1, 37, 1, width), 1000.0, device=device)
    index = torch.arange(37, device=device, dtype=torch.float32)[:, None, None]
    k[..., : min(width, width_v)] = index
    v = k[..., :width_v] if not own else index.expand(1, 37, 1, width_v)
    q = torch.zeros(1, 1, width, device=device)
    for cut in (WHOLE, Cut(num_splits=3) if layout == "paged" else Cut(split_tokens=8)):
        kv = view_of(layout, k, v, [37])
        if not own and layout == "paged":
            kv = splitkv.PagedKV(kv.k, kv.k[..., :width_v], kv.page_table, kv.seq_lens)
        elif not own:
            kv = splitkv.ContiguousKV(kv.k, kv.k[..., :width_v], kv.seq_lens)
        result = attend(q, kv, cut, given=cut == WHOLE)
        assert_cut(result, cut, 37)
        assert_rows(result, 18.0, math.log(37))


@pytest.mark.parametrize(("width", "width_v"), WIDTHS)
def test_default_scale_is_of_the_key(device, width, width_v):
    """Case 17: without sm_scale scores are scaled by 1/√(key width), whatever the value's width."""
    q = torch.zeros(1, 1, width, device=device)
    k, v = torch.zeros(1, 2, 1, width, device=device), torch.zeros(1, 2, 1, width_v, device=device)
    q[..., 0], k[:, 1, :, 0], v[:, 1] = math.sqrt(width), math.log(3), 1.0
    for cut in (WHOLE, Cut(num_splits=2)):
        result = attend(q, splitkv.ContiguousKV(k, v, ints([2], device)), cut, sm_scale=None)
        assert_rows(result, 0.75, math.log(4))


def test_latent_cache_has_no_default_scale(device):
    """Case 17: a latent cache's scale is not 1/√width: a call without one is refused."""
    cache = torch.full((10, 4, 24), 1000.0, device=device)
    cache[..., :16] = torch.arange(40, device=device, dtype=torch.float32).view(10, 4, 1)
    table = ints([list(range(10))], device)
    kv = splitkv.LatentKV(cache, table, ints([37], device), head_dim_v=16)
    q = torch.zeros(1, 1, 24, device=device)
    for cut in (WHOLE, Cut(num_splits=3)):
        assert_rows(attend(q, kv, cut), 18.0, math.log(37))
    workspace = splitkv.Workspace.allocate(splitkv.WorkspaceConfig(1, 1, 1, 24, 16, dtype=torch.float32), device)
    with pytest.raises((TypeError, ValueError), match=r"^sm_scale: "):
        splitkv.decode(q, kv, workspace)


@each_way(tokens=1, splits=2)
def test_float32_is_not_tf32(device, cut, layout):
    """Case 29: products of float32 keep 24 bits, of scores and of values."""
    fine = 1 + 2.0**-12  # rounds to 1 in TF32
    ones = torch.ones(1, 1, 1, 16, device=device)
    result = attend(fine * torch.ones(1, 1, 16, device=device), view_of(layout, ones, fine * ones, [1]), cut)
    assert_cut(result, cut, 1)
    assert_rows(result, fine, 16.00390625)
    both = torch.ones(1, 2, 1, 16, device=device)
    result = attend(fine * both[:, 0], view_of(layout, both, fine * both, [2]), cut)
    assert_cut(result, cut, 2)
    assert_rows(result, fine, 16.00390625 + math.log(2))


@each_way(tokens=1, splits=2)
def test_bfloat16_products(device, cut, layout):
    """Case 29: bfloat16 scores are right, in the interpreter too."""
    ones = torch.ones(1, 2, 1, 16, device=device, dtype=torch.bfloat16)
    v = torch.tensor([1.0, 3.0], device=device, dtype=torch.bfloat16)[:, None, None].expand_as(ones)
    for tokens, want in ((1, 1.0), (2, 2.0)):
        result = attend(2 * ones[:, 0], view_of(layout, ones, v, [tokens]), cut)
        assert_cut(result, cut, tokens)
        assert_rows(result, want, 32.0 + math.log(tokens))
