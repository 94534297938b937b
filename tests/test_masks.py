"""Masks against the rule of the reference, and tree masks against their definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import ints, moved
from torch import Tensor

from splitkv import masks, reference


def expected(
    max_len: int,
    rows: list[tuple[int, int, int]],
    **rules: Any,
) -> Tensor:
    """[total_q, max_len] for requests given as (q_len, kv_start, seq_len)."""
    blocks = [torch.zeros(0, max_len, dtype=torch.bool)]
    for q_len, start, seq_len in rows:
        block = torch.zeros(q_len, max_len, dtype=torch.bool)
        sees = reference.visible(q_len, start, seq_len, **rules)[:, :max_len]
        block[:, : sees.shape[1]] = sees
        blocks.append(block)
    return torch.cat(blocks)


requests = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20), st.integers(0, 150)), min_size=1, max_size=5)
windows = st.one_of(st.none(), st.sampled_from([0, 1, 5, 2**31 - 1, 2**40]))


@given(
    rows=requests,
    max_len=st.sampled_from([1, 7, 129, 160]),
    causal=st.booleans(),
    window=windows,
    extra=st.integers(0, 3),
)
def test_ragged(
    device: torch.device, rows: list[tuple[int, int, int]], max_len: int, causal: bool, window: int | None, extra: int
) -> None:
    q_lens = [q for q, _, _ in rows]
    total_q = sum(q_lens)
    indptr = ints([sum(q_lens[:b]) for b in range(len(rows) + 1)], device)
    shape = masks.ragged_mask_shape(total_q + extra, max_len)
    # A stretch of a wider tensor: what lies beside it is a guard.
    wide = torch.ones(shape[0], max_len + 3, dtype=torch.bool, device=device)
    out = masks.ragged_mask(
        wide[:, :max_len],
        indptr,
        ints([s for _, _, s in rows], device),
        causal=causal,
        window_left=window,
        kv_start=ints([start for _, start, _ in rows], device),
    )
    assert wide[:, max_len:].all()
    assert not out[total_q:].any()
    assert torch.equal(out[:total_q].cpu(), expected(max_len, rows, causal=causal, window_left=window))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 0, 2])
def test_uniform(device: torch.device, causal: bool, window: int | None) -> None:
    lens, starts = [9, 0, 3, 200], [0, 0, 2, 130]
    out = torch.empty(masks.attention_mask_shape(4, 3, 200), dtype=torch.bool, device=device)
    returned = masks.attention_mask(
        out, ints(lens, device), causal=causal, window_left=window, kv_start=ints(starts, device)
    )
    assert returned is out
    want = expected(200, [(3, a, b) for a, b in zip(starts, lens, strict=True)], causal=causal, window_left=window)
    assert torch.equal(out.reshape(12, 200).cpu(), want)


def test_validity(device: torch.device) -> None:
    lens, starts = [0, 3, 300, -5], [0, 1, 290, 0]
    out = torch.ones(masks.validity_mask_shape(4, 300), dtype=torch.bool, device=device)
    masks.validity_mask(out, ints(lens, device), kv_start=ints(starts, device))
    keys = torch.arange(300)
    want = (keys >= torch.tensor(starts)[:, None]) & (keys < torch.tensor(lens)[:, None])
    assert torch.equal(out.cpu(), want)
    masks.validity_mask(out, ints(lens, device))
    assert torch.equal(out.cpu(), keys < torch.tensor(lens)[:, None])


def test_positions(device: torch.device) -> None:
    positions = torch.tensor([0, 5, -1, 2**40], device=device)
    out = torch.ones(masks.position_mask_shape(4, 9), dtype=torch.bool, device=device)
    masks.position_mask(out, positions)
    assert torch.equal(out[:, 0], positions[:, None] >= torch.arange(9, device=device))
    strided = torch.stack([positions, positions * 0], dim=1)[:, :1]
    again = torch.zeros_like(out)
    assert torch.equal(masks.position_mask(again, strided), out)


def test_cells_written_are_what_the_size_function_says(device: torch.device) -> None:
    """Case 26: batch 2, context 5, 4 drafts: 2 · 4 · 9 cells; one cell less raises; a larger batch later raises."""
    shape = masks.attention_mask_shape(2, 4, 5 + 4)
    cells = 2 * 4 * 9
    assert shape == (2, 4, 9)
    lens = ints([9, 9], device)
    buffer = torch.full((cells + 32,), 2, dtype=torch.uint8, device=device)
    out = buffer[16 : 16 + cells].view(torch.bool).view(shape)
    masks.attention_mask(out, lens)
    assert (buffer[:16] == 2).all() and (buffer[16 + cells :] == 2).all()
    assert (buffer[16 : 16 + cells] < 2).all()
    assert torch.equal(out.reshape(8, 9).cpu(), expected(9, [(4, 0, 9)] * 2))

    ragged_shape = masks.ragged_mask_shape(8, 9)
    ragged = buffer[16 : 16 + cells].view(torch.bool).view(ragged_shape)
    masks.ragged_mask(ragged.fill_(False), ints([0, 4, 8], device), lens)
    assert torch.equal(ragged.cpu(), expected(9, [(4, 0, 9)] * 2))

    before = buffer.clone()
    short = buffer[16 : 16 + cells - 1].view(torch.bool)
    for writer, arguments in (
        (masks.attention_mask, (short, lens)),
        (masks.ragged_mask, (short, ints([0, 4, 8], device), lens)),
        (masks.validity_mask, (short, lens)),
        (masks.position_mask, (short, lens)),
    ):
        with pytest.raises(ValueError, match="out: expected shape"):
            writer(*arguments)
    with pytest.raises(ValueError, match="out: expected shape"):
        masks.position_mask(torch.empty(2, 1, 9, dtype=torch.bool, device=device), ints([1, 2, 3], device))
    with pytest.raises(ValueError, match="seq_lens: expected at least 2 elements, given 1"):
        masks.attention_mask(out, lens[:1])
    with pytest.raises(ValueError, match="seq_lens: expected at least 3 elements, given 2"):
        masks.ragged_mask(ragged, ints([0, 4, 8, 8], device), lens)
    assert torch.equal(buffer, before)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"out": torch.zeros(2, 3, 8)}, TypeError, "out: expected torch.bool"),
        (
            {"out": torch.zeros(2, 8, 3, dtype=torch.bool).transpose(1, 2)},
            ValueError,
            "out: expected a last stride of 1",
        ),
        ({"out": torch.zeros(1, 3, 8, dtype=torch.bool).expand(2, 3, 8)}, ValueError, "out: expected memory"),
        ({"seq_lens": torch.zeros(2, dtype=torch.int64)}, TypeError, "seq_lens: expected torch.int32"),
        ({"kv_start": torch.zeros(1, dtype=torch.int32)}, ValueError, "kv_start: expected at least 2"),
        ({"causal": 1}, TypeError, "causal"),
        ({"window_left": -1}, ValueError, "window_left"),
        ({"window_left": 1.0}, TypeError, "window_left"),
    ],
)
def test_refusals(device: torch.device, change: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments: dict[str, Any] = {
        "out": torch.zeros(2, 3, 8, dtype=torch.bool),
        "seq_lens": torch.zeros(2, dtype=torch.int32),
        **change,
    }
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            arguments[name] = moved(value, device)
    with pytest.raises(error, match=text):
        masks.attention_mask(**arguments)


def test_size_functions_take_counts() -> None:
    for sizes in ((-1, 3), (2.0, 3), (True, 3)):
        with pytest.raises((TypeError, ValueError), match="batch"):
            masks.validity_mask_shape(*sizes)  # type: ignore[arg-type]


def test_empty_masks(device: torch.device) -> None:
    lens = ints([1], device)
    for shape in ((0, 2, 5), (1, 0, 5), (1, 2, 0)):
        out = torch.empty(shape, dtype=torch.bool, device=device)
        assert masks.attention_mask(out, lens).shape == shape


def test_lengths_past_the_mask_raise_in_debug_mode(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    out = torch.empty(2, 1, 4, dtype=torch.bool, device=device)
    masks.attention_mask(out, ints([4, 6], device))
    monkeypatch.setenv("SPLITKV_DEBUG", "1")
    masks.attention_mask(out, ints([4, 4], device))
    with pytest.raises(ValueError, match=r"seq_lens: expected lengths up to 4 .* given 6 in row 1"):
        masks.attention_mask(out, ints([4, 6], device))


# Tree masks


def ancestors(row: list[int]) -> list[set[int]]:
    """Each node's own index and those of its ancestors; a parent that does not lie before its child is none."""
    sees: list[set[int]] = []
    for node, parent in enumerate(row):
        sees.append({node} | (sees[parent] if 0 <= parent < node else set()))
    return sees


def bits_of(words: Tensor, q_len: int) -> list[set[int]]:
    """Per row of one request, which bits are set, those past the last node included."""
    return [
        {32 * w + bit for w, word in enumerate(row) for bit in range(32) if (word >> bit) & 1}
        for row in words.tolist()[:q_len]
    ]


def tree_out(device: torch.device, batch: int, q_len: int) -> tuple[Tensor, Tensor]:
    """A tree mask of garbage, and the wider tensor that it is a stretch of; what lies beside it is a guard."""
    shape = masks.tree_mask_shape(batch, q_len)
    wide = torch.full((batch + 1, q_len + 2, shape[2] + 3), -7, dtype=torch.int32, device=device)
    return wide[:batch, :q_len, : shape[2]], wide


def assert_beside_untouched(wide: Tensor, out: Tensor) -> None:
    wide = wide.clone()
    wide[: out.shape[0], : out.shape[1], : out.shape[2]] = -7
    assert (wide == -7).all()


@st.composite
def forests(draw: st.DrawFn) -> list[list[int]]:
    """Parents of the nodes of several requests, one of which may have none of them valid."""
    q_len = draw(st.integers(1, 40) | st.sampled_from([63, 64, 65, 300]))
    batch = draw(st.integers(1, 3))
    random = draw(st.randoms(use_true_random=False))
    kind = draw(st.sampled_from(["tree", "chain", "wrong"]))
    if kind == "chain":
        return [[node - 1 for node in range(q_len)]] * batch
    if kind == "tree":
        return [[random.randint(-1, node - 1) for node in range(q_len)] for _ in range(batch)]
    wrong = (-(2**31), -2, q_len, 2**31 - 1)
    return [[random.choice((*wrong, random.randint(-1, q_len - 1))) for _ in range(q_len)] for _ in range(batch)]


@given(forest=forests(), long=st.booleans(), strided=st.booleans())
def test_tree_mask_from_parents(device: torch.device, forest: list[list[int]], long: bool, strided: bool) -> None:
    """Ancestors and the node itself; parents of any other kind make a root, and no way is endless."""
    dtype = torch.int64 if long else torch.int32
    parents = torch.tensor(forest, dtype=dtype, device=device)
    if long:
        parents[parents == 2**31 - 1] = 2**40  # would be node 0 in 32 bits
    if strided:
        parents = torch.stack([parents, parents * 0 - 9], dim=2)[:, :, 0]
    batch, q_len = parents.shape
    out, wide = tree_out(device, batch, q_len)
    assert masks.tree_mask_from_parents(parents, out) is out
    assert_beside_untouched(wide, out)
    for b, row in enumerate(forest):
        assert bits_of(out[b], q_len) == ancestors(row)
    assert torch.equal(reference.tree_mask_from_parents(parents), out)


@given(
    batch=st.integers(1, 3),
    q_len=st.integers(1, 40) | st.sampled_from([64, 65]),
    seed=st.integers(0, 2**16),
    how=st.sampled_from(["dense", "transposed", "every second"]),
)
def test_pack_tree_mask(device: torch.device, batch: int, q_len: int, seed: int, how: str) -> None:
    """Any matrix, the last bit of a word included; bits past the last node are 0."""
    mask = torch.rand(batch, q_len, 2 * q_len, generator=torch.Generator().manual_seed(seed)) < 0.5
    mask = mask[:, :, ::2] if how == "every second" else mask[:, :, :q_len]
    mask = moved(mask.transpose(1, 2) if how == "transposed" else mask.contiguous() if how == "dense" else mask, device)
    out, wide = tree_out(device, batch, q_len)
    assert masks.pack_tree_mask(mask, out) is out
    assert_beside_untouched(wide, out)
    for b in range(batch):
        assert bits_of(out[b], q_len) == [set(row.nonzero()[:, 0].tolist()) for row in mask[b].cpu()]
    assert torch.equal(reference.pack_tree_mask(mask), out)


def test_tree_words_written_are_what_the_size_function_says(device: torch.device) -> None:
    """Case 26: batch 2, 4 drafts: 2 · 4 · 1 words; one less raises; guards intact; a larger batch later raises."""
    shape = masks.tree_mask_shape(2, 4)
    words = 2 * 4 * 1
    assert shape == (2, 4, 1)
    buffer = torch.full((words + 8,), -7, dtype=torch.int32, device=device)
    out, short = buffer[4 : 4 + words].view(shape), buffer[4 : 4 + words - 1]
    parents = ints([-1, 0, 0, 2], device).repeat(2, 1)
    sees = torch.zeros(2, 4, 4, dtype=torch.bool, device=device)
    for row, seen in enumerate(ancestors([-1, 0, 0, 2])):
        sees[:, row, list(seen)] = True
    for writer, argument in ((masks.tree_mask_from_parents, parents), (masks.pack_tree_mask, sees)):
        out.fill_(-7)
        writer(argument, out)
        assert (buffer[:4] == -7).all() and (buffer[4 + words :] == -7).all()
        assert out.tolist() == [[[0b0001], [0b0011], [0b0101], [0b1101]]] * 2
        before = buffer.clone()
        for wrong in (short, short.view(1, 7, 1), out[:, :3], out[:1]):
            with pytest.raises(ValueError, match=r"^out: expected shape \[2, 4, 1\], given"):
                writer(argument, wrong)
        larger = torch.cat([argument, argument])
        with pytest.raises(ValueError, match=r"^out: expected shape \[4, 4, 1\], given \[2, 4, 1\]"):
            writer(larger, out)
        assert torch.equal(buffer, before)


@pytest.mark.parametrize(
    ("writer", "change", "error", "text"),
    [
        ("both", {"out": torch.zeros(2, 3, 1, dtype=torch.int64)}, TypeError, "out: expected torch.int32"),
        ("both", {"out": torch.zeros(2, 3, 2, dtype=torch.int32)[:, :, :1].expand(2, 3, 2)}, ValueError, "out: exp"),
        ("both", {"out": torch.zeros(1, 3, 1, dtype=torch.int32).expand(2, 3, 1)}, ValueError, "out: expected memory"),
        ("both", {"out": None}, TypeError, "out: expected a torch.Tensor"),
        ("both", {"out": torch.zeros(2, 3, 1, dtype=torch.int32, device="meta")}, ValueError, "device"),
        ("pack", {"mask": torch.zeros(2, 3, 3, dtype=torch.uint8)}, TypeError, "mask: expected torch.bool"),
        ("pack", {"mask": torch.zeros(2, 3, 4, dtype=torch.bool)}, ValueError, r"mask: expected shape \[batch, 3, 3\]"),
        ("pack", {"mask": torch.zeros(3, 3, dtype=torch.bool)}, ValueError, "mask: expected 3 dimensions"),
        ("parents", {"parents": torch.zeros(2, 3)}, TypeError, "parents: expected torch.int32 or torch.int64"),
        ("parents", {"parents": torch.zeros(3, dtype=torch.int32)}, ValueError, "parents: expected 2 dimensions"),
    ],
)
def test_tree_refusals(
    device: torch.device, writer: str, change: dict[str, Any], error: type[Exception], text: str
) -> None:
    first: dict[str, Any] = {
        "pack": {"mask": torch.zeros(2, 3, 3, dtype=torch.bool)},
        "parents": {"parents": torch.full((2, 3), -1, dtype=torch.int32)},
    }
    write = {"pack": masks.pack_tree_mask, "parents": masks.tree_mask_from_parents}
    for name in ("pack", "parents") if writer == "both" else (writer,):
        arguments = {**first[name], "out": torch.zeros(2, 3, 1, dtype=torch.int32), **change}
        for key, value in arguments.items():
            if isinstance(value, Tensor) and value.device.type != "meta":
                arguments[key] = moved(value, device)
        with pytest.raises(error, match=text):
            write[name](**arguments)


def test_wrong_parents_raise_in_debug_mode(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITKV_DEBUG", "1")
    out = torch.zeros(masks.tree_mask_shape(2, 3), dtype=torch.int32, device=device)
    good = ints([-1, 0, 1, -1, -1, -1], device).view(2, 3)
    masks.tree_mask_from_parents(good, out)
    before = out.clone()
    for node, wrong in ((0, 0), (1, 1), (1, 2), (2, 3), (2, -2)):
        bad = good.clone()
        bad[1, node] = wrong
        with pytest.raises(
            ValueError, match=rf"parents: expected values in -1…{node - 1} for node {node} .* {wrong} in row 1"
        ):
            masks.tree_mask_from_parents(bad, out)
    assert torch.equal(out, before)


def test_empty_tree_masks(device: torch.device) -> None:
    for batch, q_len in ((0, 4), (2, 0)):
        out = torch.empty(masks.tree_mask_shape(batch, q_len), dtype=torch.int32, device=device)
        parents = torch.empty(batch, q_len, dtype=torch.int32, device=device)
        assert masks.tree_mask_from_parents(parents, out) is out
        assert masks.pack_tree_mask(torch.empty(batch, q_len, q_len, dtype=torch.bool, device=device), out) is out
