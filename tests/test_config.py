"""Sizes are plain integers: what a workspace holds, and how many bytes that takes."""

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import H200

from splitkv.config import ALIGNMENT, MAX_HEAD_DIM, WorkspaceConfig, tile_bound
from splitkv.tiles import Blocks, Target, Tiles, choose, fit_rows, shared_bytes
from splitkv.tiles_io import TileKey, TileTable
from splitkv.variants import choose_tiles

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@st.composite
def configs(draw: st.DrawFn, **fixed: object) -> WorkspaceConfig:
    num_kv_heads = draw(st.integers(1, 128))
    split_tokens = draw(st.none() | st.integers(1, 4096))
    values = dict(
        max_batch_size=draw(st.integers(1, 300)),
        num_q_heads=num_kv_heads * draw(st.integers(1, 128)),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.integers(1, MAX_HEAD_DIM)),
        head_dim_v=draw(st.none() | st.integers(1, MAX_HEAD_DIM)),
        max_total_q=draw(st.none() | st.integers(1, 5000)),
        max_splits=draw(st.none() | st.integers(1, 5000)),
        q_tile_rows=draw(st.sampled_from([None, 16, 32, 64, 128])),
        split_tokens=split_tokens,
        max_parts=draw(st.integers(1, 64)),
        dtype=draw(st.sampled_from(DTYPES)),
    )
    return WorkspaceConfig(**{**values, **fixed})


@given(configs())
def test_sections_are_aligned_disjoint_and_as_large_as_their_shape(config):
    end = 0
    for section in config.sections():
        assert section.offset % ALIGNMENT == 0
        assert end <= section.offset < end + ALIGNMENT  # no overlap, and no more than alignment between
        assert section.nbytes == math.prod(section.shape) * section.dtype.itemsize
        end = section.end
    assert config.nbytes == end


def test_sections_have_the_names_shapes_and_dtypes_of_the_buffers():
    config = WorkspaceConfig(3, 8, 2, 64, head_dim_v=40, max_total_q=10, max_splits=7, dtype=torch.float16)
    named = {section.name: (section.shape, section.dtype) for section in config.sections()}
    assert config.q_tile_rows == 64  # several query tokens per request
    assert named == {
        "partial_out": ((7, 64, 40), torch.float32),
        "partial_lse": ((7, 64), torch.float32),
        "out": ((10, 8, 40), torch.float16),
        "lse": ((10, 8), torch.float32),
    }
    # 7·64·40·4 = 71680 bytes; 7·64·4 = 1792; 10·8·40·2 = 6400; 10·8·4 = 320: all multiples of 256 but the last.
    assert [section.offset for section in config.sections()] == [0, 71680, 73472, 79872]
    assert config.nbytes == 80192


@pytest.mark.parametrize(
    ("heads", "head_dim", "head_dim_v"),
    [((64, 8), 128, None), ((32, 8), 128, None), ((128, 1), 576, 512), ((128, 128), 192, 128), ((71, 1), 64, None)],
)
@pytest.mark.parametrize("batch", [1, 128, 1024])
def test_partials_take_at_most_64_megabytes_by_default(heads, head_dim, head_dim_v, batch):
    for max_total_q in (None, 16 * batch):
        config = WorkspaceConfig(batch, *heads, head_dim, head_dim_v, max_total_q)
        partial_out, partial_lse = config.sections()[:2]
        assert partial_out.nbytes + partial_lse.nbytes <= 64 * 10**6
        # No fewer than fit, up to the default number.
        one = config.q_tile_rows * (config.head_dim_v + 1) * 4
        assert config.max_splits == 2048 or (config.max_splits + 1) * one > 64 * 10**6


def test_partials_take_17_megabytes_at_128_requests_of_64_heads():
    config = WorkspaceConfig(128, 64, 8, 128)
    partial_out, partial_lse = config.sections()[:2]
    assert config.max_splits == 2048
    assert partial_out.nbytes + partial_lse.nbytes <= 17 * 10**6


@pytest.mark.parametrize(
    ("group_size", "max_total_q", "rows"),
    [
        (1, None, 16),
        (16, None, 16),
        (17, None, 32),
        (33, None, 64),
        (128, None, 64),
        (1, 9, 64),
        (15, 68, 64),
        (16, 64, 128),
        (4, 255, 64),
        (4, 256, 128),
        (128, 9, 128),
    ],
)
def test_default_tile_rows(group_size, max_total_q, rows):
    assert WorkspaceConfig(8, group_size * 2, 2, 64, max_total_q=max_total_q).q_tile_rows == rows


def test_split_tokens_need_every_part_of_every_tile():
    # 4 requests, 2 KV heads, one tile each, 5 parts.
    assert WorkspaceConfig(4, 8, 2, 64, split_tokens=64, max_parts=5).max_splits == 4 * 2 * 5
    # Uncapped, whatever it takes.
    wide = WorkspaceConfig(256, 128, 1, 576, 512, split_tokens=64)
    assert wide.max_splits == 256 * 2 * 32
    assert wide.nbytes > 10**9


def test_defaults_are_replaced_by_values():
    config = WorkspaceConfig(8, 16, 4, 96)
    assert (config.head_dim_v, config.max_total_q, config.max_parts, config.dtype) == (96, 8, 32, torch.bfloat16)
    assert config == WorkspaceConfig(8, 16, 4, 96, head_dim_v=96, max_total_q=8, q_tile_rows=16, max_splits=2048)
    assert hash(config) == hash(dataclasses.replace(config))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.head_dim = 1


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 130), st.sampled_from([16, 32, 64, 128]))
def test_tile_bound_holds_for_every_spread_of_query_tokens(q_lens, group_size, rows):
    tiles = sum(-(-n * group_size // rows) for n in q_lens)
    assert tiles <= tile_bound(len(q_lens), sum(q_lens), group_size, rows)


def test_tile_bound_is_reached():
    assert tile_bound(4, 4, 8, 16) == 4
    assert tile_bound(2, 40, 8, 64) == -(-1 * 8 // 64) + -(-39 * 8 // 64)
    assert tile_bound(3, 3, 128, 64) == 6
    assert tile_bound(3, 0, 4, 16) == 0


@given(st.data())
def test_cover_holds_every_buffer_of_each(data):
    split_tokens, dtype = data.draw(st.sampled_from([None, 64])), data.draw(st.sampled_from(DTYPES))
    shared = dict(split_tokens=split_tokens, max_parts=4, dtype=dtype)
    parts = data.draw(st.lists(configs(**shared), min_size=1, max_size=4))
    cover = WorkspaceConfig.cover(*parts)
    for config in parts:
        assert cover.max_batch_size >= config.max_batch_size
        for all_of_them, section in zip(cover.sections(), config.sections(), strict=True):
            assert all_of_them.name == section.name
            assert math.prod(all_of_them.shape) >= math.prod(section.shape)
    if len(parts) == 1:
        assert cover == parts[0]


def test_cover_refuses_what_one_workspace_cannot_be():
    base = WorkspaceConfig(8, 16, 4, 64)
    with pytest.raises(ValueError, match="configs: expected at least one"):
        WorkspaceConfig.cover()
    with pytest.raises(TypeError, match="configs: expected WorkspaceConfig, given int"):
        WorkspaceConfig.cover(base, 3)
    for name, value in (("dtype", torch.float16), ("split_tokens", 64), ("max_parts", 3)):
        other = dataclasses.replace(base, max_splits=None, **{name: value})
        with pytest.raises(ValueError, match=f"configs: expected one {name}, given"):
            WorkspaceConfig.cover(base, other)


BAD = [
    ("max_batch_size", 0, ValueError, "an integer in 1…", "0"),
    ("max_batch_size", 2.0, TypeError, "an integer in 1…", "2.0"),
    ("max_batch_size", True, TypeError, "an integer in 1…", "True"),
    ("num_q_heads", 6, ValueError, "a multiple of num_kv_heads = 4", "6"),
    ("num_q_heads", 0, ValueError, "an integer in 1…", "0"),
    ("num_kv_heads", 0, ValueError, "an integer in 1…", "0"),
    ("num_kv_heads", None, TypeError, "an integer in 1…", "None"),
    ("head_dim", 0, ValueError, "an integer in 1…576", "0"),
    ("head_dim", 577, ValueError, "an integer in 1…576", "577"),
    ("head_dim", "64", TypeError, "an integer in 1…576", "'64'"),
    ("head_dim_v", 577, ValueError, "an integer in 1…576", "577"),
    ("head_dim_v", 0, ValueError, "an integer in 1…576", "0"),
    ("max_total_q", 0, ValueError, "an integer in 1…", "0"),
    ("max_splits", 0, ValueError, "an integer in 1…", "0"),
    ("q_tile_rows", 8, ValueError, "an integer in 16…128", "8"),
    ("q_tile_rows", 256, ValueError, "an integer in 16…128", "256"),
    ("q_tile_rows", 48, ValueError, "a power of two", "48"),
    ("split_tokens", 0, ValueError, "an integer in 1…", "0"),
    ("split_tokens", 64.0, TypeError, "an integer in 1…", "64.0"),
    ("max_parts", 0, ValueError, "an integer in 1…", "0"),
    ("dtype", torch.float64, ValueError, "torch.float16, torch.bfloat16, torch.float32", "torch.float64"),
    ("dtype", "float16", ValueError, "torch.float16, torch.bfloat16, torch.float32", "float16"),
]


@pytest.mark.parametrize(("name", "value", "error", "expected", "shown"), BAD, ids=lambda value: str(value)[:20])
def test_bad_fields_are_named_with_expected_and_given(name, value, error, expected, shown):
    good = dict(max_batch_size=8, num_q_heads=16, num_kv_heads=4, head_dim=64)
    with pytest.raises(error) as raised:
        WorkspaceConfig(**{**good, name: value})
    message = str(raised.value)
    assert message.startswith(f"{name}: expected ")
    assert expected in message and message.endswith(f"given {shown}")


@pytest.mark.parametrize("tree", [False, True], ids=["plain", "tree"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("limit", [232448, 166912], ids=["sm_90", "sm_80"])
def test_every_geometry_has_tiles_that_fit(limit, dtype, tree):
    target = Target("cuda:90", 132, limit, sm_shared_memory=limit + 1024)
    widths = (1, 16, 59, 128, 192, 256, 320, 512, 576)
    for head_dim, head_dim_v, most in itertools.product(widths, widths, (16, 32, 64, 128)):
        rows = fit_rows(target, dtype, head_dim, head_dim_v, most, tree=tree)
        tiles = choose(target, dtype, head_dim, head_dim_v, rows, tree=tree)
        needed = shared_bytes(target, dtype, head_dim, head_dim_v, rows, tiles.block_n, tiles.num_stages, tree=tree)
        assert 16 <= rows <= most and needed <= limit
        # Results on their way from the layout of products to that of stores are float32 in shared memory too.
        assert rows == 16 or 4 * rows * head_dim_v <= limit


def test_tiles_of_a_table_that_do_not_fit_are_refused_or_passed_over_where_it_is_for_a_tree():
    target, sizes = H200, (torch.bfloat16, 128, 128, 16)
    built_in = choose(target, *sizes, tree=True)

    def chosen(block_n: int, tree: bool) -> Tiles:
        table = TileTable({TileKey.of(target.arch, *sizes): dataclasses.replace(built_in, block_n=block_n)})
        return choose_tiles(target, table, *sizes, True, Blocks.SHORT, torch.bfloat16, latent=False, tree=tree)

    assert chosen(64, tree=True).block_n == 64
    assert chosen(128, tree=False).block_n == 128
    plain, tree = (shared_bytes(target, *sizes, 128, 4, tree=tree) for tree in (False, True))
    assert plain < target.shared_memory < tree
    built_in = dataclasses.replace(built_in, num_stages=4)
    assert chosen(128, tree=False).num_stages == 4 and chosen(128, tree=True).num_stages == 3
    for tree in (False, True):
        with pytest.raises(ValueError, match=r"^tiles: expected entries that fit 232448 .* given block_n 512"):
            chosen(512, tree)
