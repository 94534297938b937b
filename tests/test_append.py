"""append_kv and move_kv against the reference, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import STEP, ints, moved, spacious
from torch import Tensor

import splitkv
from splitkv import append, reference

HEADS, WIDTH, WIDTH_V = 3, 20, 16  # neither is a power of two, nor are rows of keys aligned


def caches(shape: tuple[int, ...], swap: bool, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """K and V of this shape as stretches of larger tensors, so that strides are not what the shape says."""
    out = []
    for width in (WIDTH, WIDTH_V):
        middle = (shape[2], shape[1]) if swap else shape[1:]
        whole = torch.randn(shape[0], *middle, width + 4, device=device).to(dtype)[..., :width]
        out.append(whole)
    return out


def paged(device: torch.device, dtype: torch.dtype) -> splitkv.PagedKV:
    k, v = caches((6, 4, HEADS), False, dtype, device)
    return splitkv.PagedKV(k, v, ints([0], device).view(1, 1), ints([0], device))


def paged_hnd(device: torch.device, dtype: torch.dtype) -> splitkv.PagedKV:
    k, v = caches((6, 4, HEADS), True, dtype, device)
    return splitkv.PagedKV(k, v, ints([0], device).view(1, 1), ints([0], device), layout="HND")


def csr(device: torch.device, dtype: torch.dtype) -> splitkv.PagedKV:
    k, v = caches((6, 4, HEADS), False, dtype, device)
    return splitkv.PagedKV.from_csr(k, v, ints([0, 1], device), ints([0], device), ints([1], device))


def contiguous(device: torch.device, dtype: torch.dtype) -> splitkv.ContiguousKV:
    k, v = caches((3, 8, HEADS), False, dtype, device)
    return splitkv.ContiguousKV(k, v, ints([0, 0, 0], device))


def contiguous_heads_first(device: torch.device, dtype: torch.dtype) -> splitkv.ContiguousKV:
    k, v = caches((3, 8, HEADS), True, dtype, device)
    return splitkv.ContiguousKV(k.transpose(1, 2), v.transpose(1, 2), ints([0, 0, 0], device))


def ragged(device: torch.device, dtype: torch.dtype) -> splitkv.RaggedKV:
    k, v = (c for c in caches((24, HEADS), False, dtype, device))
    return splitkv.RaggedKV(k, v, ints([0, 24], device))


LAYOUTS: list[Callable[[torch.device, torch.dtype], Any]] = [
    paged, paged_hnd, csr, contiguous, contiguous_heads_first, ragged,
]  # fmt: skip
SLOTS = 24  # of each


def base(cache: Tensor) -> Tensor:
    """All memory that a cache is a view of, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())


def twin(kv: Any) -> Any:
    """A view of the same kind over copies of the caches, with the same strides."""
    other = object.__new__(type(kv))
    other.__dict__.update(kv.__dict__)
    for name in ("k", "v"):
        cache = getattr(kv, name)
        copied = torch.empty(0, dtype=cache.dtype, device=cache.device).set_(base(cache).clone().untyped_storage())
        other.__dict__[name] = copied.as_strided(cache.shape, cache.stride(), cache.storage_offset())
    return other


def assert_same_memory(a: Any, b: Any) -> None:
    assert torch.equal(base(a.k), base(b.k)) and torch.equal(base(a.v), base(b.v))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_new_tokens_and_nothing_else(device: torch.device, layout: Callable[..., Any], dtype: torch.dtype) -> None:
    kv = layout(device, dtype)
    expected = twin(kv)
    # Slices of a fused projection: rows lie far apart, and start where alignment is lost.
    fused = torch.randn(9, HEADS, WIDTH + WIDTH_V + 1, device=device).to(dtype)
    k_new, v_new = fused[..., 1 : WIDTH + 1], fused[..., WIDTH + 1 :]
    # Skipped, the last one, past the end by one and by far; more slots than tokens.
    slots = ints([5, -1, 0, SLOTS - 1, SLOTS, 2**31 - 1, 11, -(2**31), 6, 3, 4], device)
    reference.append_kv(k_new, v_new, expected, slots)
    splitkv.append_kv(k_new, v_new, kv, slots)
    assert_same_memory(kv, expected)
    assert not torch.equal(base(kv.k), base(layout(device, dtype).k))


@pytest.mark.parametrize(
    ("heads", "width", "width_v"), [(1, 1, 1), (8, 128, 128), (1, 576, 512), (2, 96, 200), (130, 16, 16)]
)
def test_widths(device: torch.device, heads: int, width: int, width_v: int) -> None:
    k, v = torch.zeros(5, 2, heads, width, device=device), torch.zeros(5, 2, heads, width_v, device=device)
    kv = splitkv.PagedKV(k, v, ints([0], device).view(1, 1), ints([0], device))
    k_new, v_new = torch.randn(4, heads, width, device=device), torch.randn(4, heads, width_v, device=device)
    expected = twin(kv)
    slots = ints([9, 2, -1, 4], device)
    reference.append_kv(k_new, v_new, expected, slots)
    splitkv.append_kv(k_new, v_new, kv, slots)
    assert_same_memory(kv, expected)
    assert torch.equal(k[4, 1], k_new[0]) and torch.equal(v[2, 0], v_new[3])


def test_no_tokens_and_an_empty_cache(device: torch.device) -> None:
    kv = paged(device, torch.float32)
    before = twin(kv)
    none = ints([], device)
    splitkv.append_kv(
        torch.empty(0, HEADS, WIDTH, device=device), torch.empty(0, HEADS, WIDTH_V, device=device), kv, none
    )
    splitkv.move_kv(kv, none, none)
    assert_same_memory(kv, before)
    empty = splitkv.RaggedKV(
        torch.empty(0, HEADS, WIDTH, device=device), torch.empty(0, HEADS, WIDTH_V, device=device), ints([0], device)
    )
    new = torch.ones(1, HEADS, WIDTH, device=device)
    splitkv.append_kv(new, new[..., :WIDTH_V], empty, ints([0], device))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"k_new": torch.zeros(2, HEADS, WIDTH, dtype=torch.float16)}, TypeError, "k_new: expected torch.float32"),
        ({"k_new": torch.zeros(2, HEADS, WIDTH + 1)}, ValueError, "k_new: expected shape"),
        ({"k_new": torch.zeros(2, HEADS + 1, WIDTH)}, ValueError, "k_new: expected shape"),
        ({"k_new": torch.zeros(2, 1, HEADS, WIDTH)}, ValueError, "k_new: expected shape"),
        ({"k_new": torch.zeros(2, WIDTH, HEADS).transpose(1, 2)}, ValueError, "k_new: expected a last stride of 1"),
        ({"v_new": torch.zeros(3, HEADS, WIDTH_V)}, ValueError, "v_new: expected 2 tokens"),
        ({"v_new": None}, TypeError, "v_new"),
        ({"slots": torch.zeros(1, dtype=torch.int32)}, ValueError, "slots: expected at least 2"),
        ({"slots": torch.zeros(2, dtype=torch.int64)}, TypeError, "slots: expected torch.int32"),
        ({"slots": torch.zeros(2, 2, dtype=torch.int32)[:, 0]}, ValueError, "slots: expected a stride of 1"),
        ({"slots": [0, 1]}, TypeError, "slots"),
        ({"kv": "cache"}, TypeError, "kv"),
    ],
)
def test_append_refuses(device: torch.device, change: dict[str, Any], error: type[Exception], text: str) -> None:
    kv = paged(device, torch.float32)
    before = twin(kv)
    arguments: dict[str, Any] = {
        "k_new": torch.zeros(2, HEADS, WIDTH),
        "v_new": torch.zeros(2, HEADS, WIDTH_V),
        "kv": kv,
        "slots": torch.zeros(2, dtype=torch.int32),
        **change,
    }
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            arguments[name] = moved(value, device)
    with pytest.raises(error, match=text):
        splitkv.append_kv(**arguments)
    assert_same_memory(kv, before)


def test_a_cache_whose_pages_share_memory_is_refused(device: torch.device) -> None:
    k = torch.zeros(1, 4, 2, 16, device=device).expand(3, 4, 2, 16)
    kv = splitkv.PagedKV(k, k, ints([0], device).view(1, 1), ints([0], device))
    new = torch.ones(1, 2, 16, device=device)
    with pytest.raises(ValueError, match=r"kv\.k: expected memory of its own"):
        splitkv.append_kv(new, new, kv, ints([0], device))


def test_slots_past_the_end_raise_in_debug_mode(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = ragged(device, torch.float32)
    new, new_v = torch.ones(2, HEADS, WIDTH, device=device), torch.ones(2, HEADS, WIDTH_V, device=device)
    monkeypatch.setenv("SPLITKV_DEBUG", "1")
    splitkv.append_kv(new, new_v, kv, ints([1, SLOTS - 1, SLOTS], device))  # the third belongs to no token
    with pytest.raises(ValueError, match=f"slots: expected slots < {SLOTS} .* given {SLOTS} at index 1"):
        splitkv.append_kv(new, new_v, kv, ints([1, SLOTS], device))
    with pytest.raises(ValueError, match=f"dst_slots: expected slots < {SLOTS}"):
        splitkv.move_kv(kv, ints([1], device), ints([SLOTS], device))


@given(
    layout=st.sampled_from(LAYOUTS),
    moves=st.lists(
        st.tuples(st.integers(-2, SLOTS + 2), st.integers(-2, SLOTS + 2)), unique_by=lambda move: move[1], max_size=20
    ),
)
def test_moves_happen_as_if_at_once(
    device: torch.device, layout: Callable[..., Any], moves: list[tuple[int, int]]
) -> None:
    """Any overlap: chains, swaps, cycles."""
    kv = layout(device, torch.float32)
    expected = twin(kv)
    source, target = ints([a for a, _ in moves], device), ints([b for _, b in moves], device)
    reference.move_kv(expected, source, target)
    splitkv.move_kv(kv, source, target)
    assert_same_memory(kv, expected)


def test_more_moves_than_a_block_towards_the_front(device: torch.device) -> None:
    tokens = 3 * append.MOVE_BLOCK + 17
    k = torch.arange(float(tokens), device=device)[:, None, None].expand(tokens, 1, 16).contiguous()
    kv = splitkv.RaggedKV(k, k.clone(), ints([0, tokens], device))
    kept = [t for t in range(tokens) if t % 7 != 3]
    splitkv.move_kv(kv, ints(kept, device), ints(list(range(len(kept))), device))
    assert kv.k[: len(kept), 0, 5].tolist() == kept
    assert kv.v[: len(kept), 0, 15].tolist() == kept


@pytest.mark.parametrize(
    ("source", "target", "text"),
    [
        (torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32), "src_slots"),
        (torch.zeros(2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), "dst_slots"),
        (torch.zeros(2, dtype=torch.int32), [0, 1], "dst_slots"),
    ],
)
def test_move_refuses(device: torch.device, source: Any, target: Any, text: str) -> None:
    slots = [moved(x, device) if isinstance(x, Tensor) else x for x in (source, target)]
    with pytest.raises((TypeError, ValueError), match=text):
        splitkv.move_kv(paged(device, torch.float32), *slots)


def test_decode_sees_what_was_appended(device: torch.device) -> None:
    """One token at a time into scattered pages; uniform weights make the output the mean of the values."""
    k, v = (torch.full((4, 2, 1, 16), float("nan"), device=device) for _ in range(2))
    table, lens = ints([2, 0, 3, -1], device).view(1, 4), ints([0], device)
    kv = splitkv.PagedKV(k, v, table, lens)
    workspace = splitkv.Workspace.allocate(
        splitkv.WorkspaceConfig(1, 1, 1, 16, dtype=torch.float32, max_splits=64), device
    )
    for token, slot in enumerate([4, 5, 0, 1, 6]):
        new = torch.full((1, 1, 16), float(token), device=device)
        splitkv.append_kv(torch.zeros_like(new), new, kv, ints([slot], device))
        lens.fill_(token + 1)
        out = splitkv.decode(torch.ones(1, 1, 16, device=device), kv, workspace)
        torch.testing.assert_close(out, torch.full_like(out, token / 2), rtol=1e-5, atol=0)


def test_a_known_form_is_written_to_where_its_tensors_lie(device: torch.device) -> None:
    """Calls of a form are prepared once: what was given then is not what is written to now, and faults stay faults."""
    kvs = [paged(device, torch.float32) for _ in range(2)]
    assert kvs[0].form == kvs[1].form
    for turn, kv in enumerate((kvs[0], kvs[1], kvs[0])):
        k_new, v_new = torch.randn(3, HEADS, WIDTH, device=device), torch.randn(3, HEADS, WIDTH_V, device=device)
        slots = ints([turn, 23 - turn, -1], device)
        expected = twin(kv)
        reference.append_kv(k_new, v_new, expected, slots)
        splitkv.append_kv(k_new, v_new, kv, slots)
        assert_same_memory(kv, expected)
        source, target = ints([turn, 2], device), ints([11, 12 + turn], device)
        reference.move_kv(expected, source, target)
        splitkv.move_kv(kv, source, target)
        assert_same_memory(kv, expected)
    for name, bad in (
        ("k_new", (k_new.half(), v_new, kv, slots)),
        ("k_new", (k_new[..., 1:], v_new, kv, slots)),
        ("v_new", (k_new, v_new[:2], kv, slots)),
        ("v_new", (k_new, None, kv, slots)),
        ("slots", (k_new, v_new, kv, slots.long())),
        ("slots", (k_new, v_new, kv, slots[:2])),
        ("slots", (k_new, v_new, kv, [0, 1, 2])),
        ("kv", (k_new, v_new, kv.k, slots)),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{name}: expected"):
            splitkv.append_kv(*bad)  # type: ignore[arg-type]
    assert_same_memory(kv, expected)


@pytest.mark.parametrize("layout", ["pages", "tokens", "heads"])
def test_strides_past_32_bits(device: torch.device, layout: str) -> None:
    """Pages, tokens and heads that lie more than 2³¹ elements from a cache's start are written and moved there."""
    heads = 3 if layout == "heads" else 1
    shape, strides = {
        "pages": ((3, 2, 1, 16), (STEP, 16, 16, 1)),
        "tokens": ((3, 1, 16), (STEP, 16, 1)),
        "heads": ((1, 3, 3, 16), (64, 16, STEP, 1)),
    }[layout]
    k, v = (spacious(2 * STEP + 64, torch.float16, device).as_strided(shape, strides).zero_() for _ in range(2))
    if layout == "tokens":
        kv: splitkv.kv.KVView = splitkv.RaggedKV(k, v, ints([0, 0], device))
    else:
        kv = splitkv.PagedKV(k, v, ints([0], device).view(1, 1), ints([0], device))
    last = k.shape[0] * (1 if layout == "tokens" else k.shape[1]) - 1
    new = torch.randn(2, heads, 16, device=device).half()
    splitkv.append_kv(new, 2 * new, kv, ints([last, 0], device))
    splitkv.move_kv(kv, ints([last], device), ints([last - 1], device))
    for cache, tokens in ((k, new), (v, 2 * new)):
        rows = cache.reshape(-1, heads, 16)
        assert torch.equal(rows[-2:], tokens[:1].expand(2, heads, 16)) and torch.equal(rows[0], tokens[1])
        assert not rows[1:-2].any()


@pytest.mark.gpu
def test_offsets_past_32_bits(device: torch.device) -> None:
    heads, width = 8, 128
    pages = 2**31 // (16 * heads * width) + 2
    k = torch.zeros(pages, 16, heads, width, dtype=torch.bfloat16, device=device)
    v = torch.zeros(pages, 16, heads, 16, dtype=torch.bfloat16, device=device)
    kv = splitkv.PagedKV(k, v, ints([0], device).view(1, 1), ints([0], device))
    new = torch.randn(2, heads, width, dtype=torch.bfloat16, device=device)
    last = pages * 16 - 1
    splitkv.append_kv(new, new[..., :16].contiguous(), kv, ints([last, 0], device))
    assert torch.equal(k[-1, -1], new[0]) and torch.equal(k[0, 0], new[1]) and torch.equal(v[-1, -1], new[0, :, :16])
    assert k.count_nonzero() == new.count_nonzero()
    splitkv.move_kv(kv, ints([last, 0], device), ints([last - 1, last], device))
    assert torch.equal(k[-1, -2], new[0]) and torch.equal(k[-1, -1], new[1])


@pytest.mark.gpu
def test_replay_with_other_slots(device: torch.device) -> None:
    kv = paged(device, torch.float16)
    k_new = torch.randn(4, HEADS, WIDTH, device=device).half()
    v_new = torch.randn(4, HEADS, WIDTH_V, device=device).half()
    slots = ints([-1] * 4, device)
    splitkv.append_kv(k_new, v_new, kv, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        splitkv.append_kv(k_new, v_new, kv, slots)
    for values in ([0, 1, 2, 3], [23, -1, 24, 7], [5, 4, 9, 8]):
        slots.copy_(ints(values, device))
        k_new.normal_()
        expected = twin(kv)
        reference.append_kv(k_new, v_new, expected, slots)
        graph.replay()
        assert_same_memory(kv, expected)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current() -> None:
    device = torch.device("cuda:1")
    kv = paged(device, torch.float32)
    new, new_v = torch.ones(1, HEADS, WIDTH, device=device), torch.ones(1, HEADS, WIDTH_V, device=device)
    with torch.cuda.device(0):
        splitkv.append_kv(new, new_v, kv, ints([7], device))
        assert torch.cuda.current_device() == 0
    assert torch.equal(kv.k[1, 3], new[0])
