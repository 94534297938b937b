"""Step state against a model in plain Python, and whole decode steps against the reference."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import moved, no_synchronisation
from torch import Tensor

import splitkv
from splitkv import StepConfig, StepState, reference
from splitkv import step as step_module
from splitkv.bench import step as bench_step
from splitkv.config import align_up

INT32_MAX = 2**31 - 1


class Model:
    """What a StepState holds, one request and token at a time."""

    def __init__(self, config: StepConfig, table: Tensor, page_size: int) -> None:
        self.config, self.page_size = config, page_size
        self.table = table.tolist()
        self.input_ids = [0] * config.max_total_q
        self.rows: list[int] = []
        self.lens: list[int] = []
        self.q_lens: list[int] = []
        self.waiting: list[int] = []
        self.positions = [0] * config.max_total_q
        self.slots = [-1] * config.max_total_q

    def slot(self, row: int, position: int) -> int:
        column = position // self.page_size
        page = self.table[row][column] if column < len(self.table[row]) else -1
        return page * self.page_size + position % self.page_size if page >= 0 else -1

    def bind(
        self,
        rows: list[int],
        lens: list[int],
        q_lens: list[int] | None = None,
        tokens: list[int] | None = None,
        page_updates: list[tuple[int, int, int]] = (),  # type: ignore[assignment]
        pad_to: int | None = None,
    ) -> None:
        for row in {row for row, column, _ in page_updates if column == 0}:
            last = max(column for r, column, _ in page_updates if r == row)
            self.table[row][last + 1 :] = [-1] * (len(self.table[row]) - last - 1)
        for row, column, page in page_updates:
            self.table[row][column] = page
        self.rows, self.lens = list(rows), list(lens)
        self.q_lens = [1] * len(rows) if q_lens is None else list(q_lens)
        if tokens is not None:
            padded = len(rows) if pad_to is None else pad_to
            padding = [0] * (min(padded, self.config.max_total_q) - len(tokens))
            self.input_ids[: len(tokens) + len(padding)] = tokens + padding
        self.positions = [0] * self.config.max_total_q
        self.slots = [-1] * self.config.max_total_q
        self.waiting = [0] * len(rows)
        self.place([q if length else 0 for length, q in zip(self.lens, self.q_lens, strict=True)], grow=False)

    def advance(self, num_new: list[int] | None = None) -> None:
        counts = []
        for b, q in enumerate(self.q_lens):
            count = 1 if num_new is None else num_new[b] if b < len(num_new) else 0
            count = min(max(count, 0), q)
            counts.append(self.waiting[b] or (count if self.lens[b] else 0))
        self.place(counts, grow=True)

    def place(self, counts: list[int], grow: bool) -> None:
        first = 0
        for b, count in enumerate(counts):
            wanted = self.lens[b] + count if grow else self.lens[b]
            lacks = count > 0 and self.slot(self.rows[b], wanted - 1) < 0
            for t in range(first, first + self.q_lens[b]):
                if wanted > 0:
                    self.positions[t] = wanted - self.q_lens[b] + t - first
                    self.slots[t] = -1 if lacks else self.slot(self.rows[b], self.positions[t])
            self.waiting[b] = count if lacks else 0
            self.lens[b] = wanted - count if lacks else wanted
            first += self.q_lens[b]

    def buffers(self) -> dict[str, list[int]]:
        config = self.config
        batch, tiles = config.max_batch_size, config.max_q_tiles

        def sums(values: list[int]) -> list[int]:
            out = [0]
            for b in range(batch):
                out.append(out[-1] + (values[b] if b < len(values) else 0))
            return out

        spans = [(b, i) for b, q in enumerate(self.q_lens) for i in range(-(-q // config.tile_tokens))]
        spans += [(-1, -1)] * (tiles - len(spans))
        empty = [0] * (batch - len(self.rows))
        return {
            "input_ids": self.input_ids,
            "position_ids": self.positions,
            "req_pool_indices": self.rows + empty,
            "seq_lens": self.lens + empty,
            "pending": self.waiting + empty,
            "kv_indptr": sums(self.lens),
            "qo_indptr": sums(self.q_lens),
            "inc": list(range(batch + 1)),
            "q_tile_to_batch": [b for b, _ in spans],
            "q_tile_to_index": [i for _, i in spans],
            "out_cache_loc": self.slots,
            "needs_page": [sum(w > 0 for w in self.waiting)],
        }


def assert_state(state: StepState, model: Model) -> None:
    for name, expected in model.buffers().items():
        assert getattr(state, name).tolist() == expected, name
    assert state.page_table.tolist() == model.table


def make(
    device: torch.device, config: StepConfig, table: Tensor | list[list[int]], page_size: int
) -> tuple[StepState, Model]:
    table = torch.as_tensor(table, dtype=torch.int32)
    return StepState.allocate(config, table.to(device), page_size, device), Model(config, table, page_size)


def snapshot(state: StepState) -> dict[str, Tensor]:
    buffers = {section.name: getattr(state, section.name).clone() for section in state.config.sections()}
    return {**buffers, "page_table": state.page_table.clone()}


def test_config_is_integers_alone() -> None:
    config = StepConfig(3, max_total_q=130, tile_tokens=64, max_mask_len=5, max_page_updates=7)
    shapes = {section.name: section.shape for section in config.sections()}
    assert shapes["input_ids"] == shapes["position_ids"] == shapes["out_cache_loc"] == (130,)
    assert shapes["req_pool_indices"] == shapes["seq_lens"] == (3,)
    assert shapes["kv_indptr"] == shapes["qo_indptr"] == shapes["inc"] == (4,)
    assert shapes["q_tile_to_batch"] == shapes["q_tile_to_index"] == (3 + 130 // 64,)
    assert shapes["arange"] == (5,) and shapes["input_mask"] == (3, 1, 5)
    end = 0
    for section in config.sections():
        assert section.offset % 256 == 0 and section.offset >= end
        end = section.end
    assert config.nbytes == end
    assert StepConfig(5).max_total_q == 5


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"max_batch_size": 2.0}, "max_batch_size"),
        ({"max_batch_size": 2, "max_total_q": 0}, "max_total_q"),
        ({"max_batch_size": 2, "tile_tokens": 0}, "tile_tokens"),
        ({"max_batch_size": 2, "max_mask_len": -1}, "max_mask_len"),
        ({"max_batch_size": 2, "max_page_updates": 0}, "max_page_updates"),
    ],
)
def test_config_refuses(fields: dict[str, Any], name: str) -> None:
    with pytest.raises((TypeError, ValueError), match=name):
        StepConfig(**fields)


def test_a_fresh_state_is_all_padding(device: torch.device) -> None:
    state, model = make(device, StepConfig(3, max_total_q=70, max_mask_len=6), [[1, 2]], 4)
    assert_state(state, model)
    assert state.arange.tolist() == list(range(6))
    assert not state.input_mask.any()
    assert all(getattr(state, s.name).data_ptr() % 256 == 0 for s in state.config.sections() if s.nbytes)


def test_from_buffer_takes_exactly_nbytes(device: torch.device) -> None:
    config = StepConfig(2, max_total_q=5, max_page_updates=3)
    table = torch.zeros(2, 3, dtype=torch.int32, device=device)
    guarded = torch.full((config.nbytes + 512,), 0xAB, dtype=torch.uint8, device=device)
    start = -guarded.data_ptr() % 256
    state = StepState.from_buffer(config, table, 4, guarded[start : start + config.nbytes])
    state.bind([0, 1], [3, 12], q_lens=[3, 2], tokens=[1, 2, 3, 4, 5], page_updates=[(0, 0, 1), (1, 2, 5)])
    assert state.out_cache_loc.tolist() == [4, 5, 6, 22, 23]
    assert (guarded[:start] == 0xAB).all() and (guarded[start + config.nbytes :] == 0xAB).all()
    small = torch.full((config.nbytes + 256,), 0xCD, dtype=torch.uint8, device=device)
    start = -small.data_ptr() % 256
    with pytest.raises(ValueError, match=f"at least {config.nbytes} bytes, given {config.nbytes - 1}"):
        StepState.from_buffer(config, table, 4, small[start : start + config.nbytes - 1])
    assert (small == 0xCD).all()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"config": splitkv.WorkspaceConfig(1, 1, 1, 16)}, "config"),
        ({"page_table": [[1]]}, "page_table"),
        ({"page_table": torch.zeros(2, 3)}, "page_table"),
        ({"page_table": torch.zeros(6, dtype=torch.int32)}, "page_table"),
        ({"page_table": torch.zeros(2, 0, dtype=torch.int32)}, "page_table"),
        ({"page_table": torch.zeros(3, 2, dtype=torch.int32).t()}, "page_table"),
        ({"page_table": torch.zeros(1, 3, dtype=torch.int32).expand(2, 3)}, "page_table"),
        ({"page_size": 0}, "page_size"),
        ({"page_size": 16.0}, "page_size"),
    ],
)
def test_allocate_refuses(device: torch.device, change: dict[str, Any], name: str) -> None:
    arguments: dict[str, Any] = {
        "config": StepConfig(2),
        "page_table": torch.zeros(2, 3, dtype=torch.int32, device=device),
        "page_size": 16,
        "device": device,
        **change,
    }
    if isinstance(arguments["page_table"], Tensor):
        arguments["page_table"] = moved(arguments["page_table"], device)
    with pytest.raises((TypeError, ValueError), match=name):
        StepState.allocate(**arguments)


def test_tile_maps_of_three_prompts(device: torch.device) -> None:
    state, model = make(device, StepConfig(5, max_total_q=256), torch.arange(15).reshape(5, 3), 64)
    state.bind([4, 0, 2], [70, 10, 130], q_lens=[70, 10, 130])
    assert state.qo_indptr.tolist() == [0, 70, 80, 210, 210, 210]
    assert state.q_tile_to_batch.tolist() == [0, 0, 1, 2, 2, 2, -1, -1, -1]
    assert state.q_tile_to_index.tolist() == [0, 1, 0, 0, 1, 2, -1, -1, -1]
    model.bind([4, 0, 2], [70, 10, 130], q_lens=[70, 10, 130])
    assert_state(state, model)


@st.composite
def scripts(draw: st.DrawFn) -> dict[str, Any]:
    """A config, a table with pages missing, and some steps to take."""
    page_size = draw(st.sampled_from([1, 2, 3, 16]))
    num_rows, max_pages = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    batch = draw(st.integers(1, 6))
    config = StepConfig(
        batch,
        max_total_q=draw(st.integers(batch, 20)),
        tile_tokens=draw(st.sampled_from([1, 2, 4, 64])),
        max_page_updates=32,
    )
    pages = st.one_of(st.just(-1), st.integers(0, 50), st.integers(0, 50))
    table = [[draw(pages) for _ in range(max_pages)] for _ in range(num_rows)]
    actions: list[tuple[str, dict[str, Any]]] = []
    for _ in range(draw(st.integers(1, 4))):
        live = draw(st.integers(0, min(batch, num_rows)))
        rows = draw(st.permutations(range(num_rows)))[:live]
        action: dict[str, Any] = {"rows": list(rows)}
        lens = [draw(st.integers(0, max_pages * page_size)) for _ in rows]
        total = live
        if draw(st.booleans()):
            room, q_lens = config.max_total_q, []
            for length in lens:
                q_lens.append(draw(st.integers(0, min(length, room, 7))))
                room -= q_lens[-1]
            action["q_lens"], total = q_lens, sum(q_lens)
        action["lens"] = lens
        if draw(st.booleans()):
            action["tokens"] = draw(st.lists(st.integers(0, 2**63 - 1), min_size=total, max_size=total))
        if draw(st.booleans()):
            action["pad_to"] = draw(st.integers(live, batch))
        if draw(st.booleans()):
            entries = st.tuples(st.integers(0, num_rows - 1), st.integers(0, max_pages - 1))
            action["page_updates"] = [
                (row, column, draw(pages)) for row, column in draw(st.lists(entries, unique=True, max_size=8))
            ]
        actions.append(("bind", action))
        for _ in range(draw(st.integers(0, 2))):
            counts = st.lists(st.integers(-1, 8), max_size=batch)
            actions.append(("advance", {"num_new": draw(st.one_of(st.none(), counts))}))
    return {"config": config, "table": table, "page_size": page_size, "actions": actions}


@given(script=scripts())
def test_any_steps_are_as_the_model_says(device: torch.device, script: dict[str, Any]) -> None:
    state, model = make(device, script["config"], script["table"], script["page_size"])
    addresses = [getattr(state, section.name).data_ptr() for section in state.config.sections()]
    for name, arguments in script["actions"]:
        if name == "bind":
            model.bind(**arguments)
            given_arguments = dict(arguments)
            lens = given_arguments.pop("lens")
            state.bind(given_arguments.pop("rows"), lens, **given_arguments)
        else:
            counts = arguments["num_new"]
            model.advance(counts)
            dtype = torch.int64 if counts and len(counts) % 2 else torch.int32
            state.advance(None if counts is None else torch.tensor(counts, dtype=dtype, device=device))
        assert_state(state, model)
    assert addresses == [getattr(state, section.name).data_ptr() for section in state.config.sections()]


def test_a_wide_batch_and_many_tokens(device: torch.device) -> None:
    """More requests, tokens, tiles and page updates than one block of a kernel."""
    batch, page_size = 600, 4
    config = StepConfig(batch, max_total_q=1300, tile_tokens=1)
    table = torch.full((batch, 4), -1)
    state, model = make(device, config, table, page_size)
    q_lens = [b % 4 for b in range(batch)]
    lens = [q + (7 * b) % 5 for b, q in enumerate(q_lens)]
    rows = list(reversed(range(batch)))
    updates = [
        (row, column, 3 * row + column)
        for row, length in zip(rows, lens, strict=True)
        for column in range(-(-length // page_size))
    ]
    tokens = list(range(sum(q_lens)))
    for target in (model, state):
        target.bind(rows, lens, q_lens=q_lens, tokens=tokens, page_updates=updates)
    assert_state(state, model)
    for target in (model, state):
        target.advance()
    assert model.buffers()["needs_page"][0] > 0
    assert_state(state, model)


def test_a_row_that_begins_anew_forgets_its_last_request(device: torch.device) -> None:
    state, _ = make(device, StepConfig(2, max_total_q=12), torch.full((2, 4), -1), 4)
    state.bind([0], [12], q_lens=[12], page_updates=[(0, 0, 5), (0, 1, 6), (0, 2, 7)])
    state.bind([0], [3], q_lens=[3], page_updates=[(0, 0, 9)])
    assert state.page_table.tolist() == [[9, -1, -1, -1], [-1, -1, -1, -1]]
    state.advance()
    assert state.needs_page.item() == 0 and state.seq_lens.tolist() == [4, 0]
    state.advance()
    assert state.needs_page.item() == 1 and state.seq_lens.tolist() == [4, 0]
    assert state.out_cache_loc.tolist() == [-1] * 12


def test_ids_are_padded_up_to_the_requests(device: torch.device) -> None:
    """As many rows as a step of these requests may run with, also where some have no new token."""
    state, _ = make(device, StepConfig(4, max_total_q=6), [[0, 1]] * 4, 4)
    state.input_ids.fill_(99)
    for tokens, q_lens, pad_to, expected in (
        ([5], [1, 0], None, [5, 0, 99]),
        ([], [0, 0], None, [0, 0, 99]),
        ([7], [0, 1], 3, [7, 0, 0]),
    ):
        state.bind([0, 1], [3, 3], q_lens=q_lens, tokens=tokens, pad_to=pad_to)
        assert state.input_ids[:3].tolist() == expected


def test_more_pages_ahead_stay_when_others_join(device: torch.device) -> None:
    state, _ = make(device, StepConfig(2), torch.full((2, 4), -1), 4)
    state.bind([0], [4], page_updates=[(0, 0, 5), (0, 1, 6)])
    state.bind([0, 1], [4, 1], page_updates=[(1, 0, 7)])
    state.advance()
    assert state.out_cache_loc.tolist() == [24, 29]
    state.bind([0, 1], [5, 2], page_updates=[(0, 1, -1), (0, 2, 8)])
    assert state.page_table.tolist() == [[5, -1, 8, -1], [7, -1, -1, -1]]
    assert state.out_cache_loc.tolist() == [-1, 29]
    assert state.seq_lens.tolist() == [4, 2] and state.needs_page.item() == 1


def test_a_request_without_a_page_waits_until_it_has_one(device: torch.device) -> None:
    state, _ = make(device, StepConfig(3, max_total_q=6), [[0, -1], [2, 3], [4, 5]], 4)
    state.bind([0, 1, 2], [4, 4, 7])
    for _ in range(3):
        state.advance()
    assert state.seq_lens.tolist() == [4, 7, 8]
    assert state.needs_page.item() == 2  # row 2 is full
    assert state.kv_indptr.tolist() == [0, 4, 11, 19]
    assert state.out_cache_loc[:3].tolist() == [-1, 14, -1]
    state.page_table[0, 1] = 9
    state.advance(torch.zeros(3, dtype=torch.int32, device=device))
    assert state.seq_lens.tolist() == [5, 7, 8]
    assert state.out_cache_loc[:3].tolist() == [36, 14, -1]
    assert state.position_ids[:3].tolist() == [4, 6, 8]


def test_accepted_drafts_are_counted_on_the_device(device: torch.device) -> None:
    state, _ = make(device, StepConfig(2, max_total_q=10), torch.arange(16).reshape(2, 8), 4)
    state.bind([0, 1], [10, 12], q_lens=[5, 5])
    state.advance(torch.tensor([5, 1], device=device))
    assert state.seq_lens.tolist() == [15, 13]
    assert state.position_ids.tolist() == [10, 11, 12, 13, 14, 8, 9, 10, 11, 12]
    assert state.qo_indptr.tolist() == [0, 5, 10]
    # More than was written can't become visible.
    state.advance(torch.tensor([99, -3], device=device))
    assert state.seq_lens.tolist() == [20, 13]


HOST_FORMS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "int32 array": lambda values: np.array(values, dtype=np.int32),
    "int64 array": lambda values: np.array(values, dtype=np.int64),
    "uint16 array": lambda values: np.array(values, dtype=np.uint16),
    "strided array": lambda values: np.array([[v, -7] for v in values], dtype=np.int64).reshape(-1, 2)[:, 0],
    "big-endian array": lambda values: np.array(values, dtype=">i8"),
    "int64 tensor": lambda values: torch.tensor(values, dtype=torch.int64),
    "int32 tensor": lambda values: torch.tensor(values, dtype=torch.int32),
    "strided tensor": lambda values: torch.tensor([[v, -7] for v in values], dtype=torch.int64).reshape(-1, 2)[:, 0],
}


@pytest.mark.parametrize("form", HOST_FORMS)
def test_numbers_come_in_any_host_form(device: torch.device, form: str) -> None:
    state, model = make(device, StepConfig(4, max_total_q=8), torch.full((4, 3), -1), 4)
    rows, lens, q_lens, tokens = [3, 1], [5, 9], [2, 3], [11, 12, 13, 14, 15]
    updates = [(3, 0, 2), (3, 1, 4), (1, 2, 1)]
    model.bind(rows, lens, q_lens=q_lens, tokens=tokens, page_updates=updates)
    make_form = HOST_FORMS[form]
    if "array" in form:
        given_updates: Any = np.array(updates)
    else:
        given_updates = torch.tensor(updates) if "tensor" in form else updates
    state.bind(
        make_form(rows), make_form(lens), q_lens=make_form(q_lens), tokens=make_form(tokens), page_updates=given_updates
    )
    assert_state(state, model)
    assert state.fill_input_ids(make_form([1, 2, 3])).tolist() == [1, 2, 3]
    view = state.fill_input_ids(make_form([]))
    assert view.shape == (0,) and view.dtype == torch.int64
    assert state.input_ids.tolist() == [1, 2, 3, 14, 15, 0, 0, 0]


BAD_BINDS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("batch over capacity", dict(rows=[0, 1, 2], seq_lens=[1, 1, 1]), ValueError, "rows: expected at most 2"),
    ("tokens over capacity", dict(q_lens=[3, 3]), ValueError, "q_lens: expected a sum of at most 5"),
    ("one length over capacity", dict(q_lens=[6, 0]), ValueError, "q_lens: expected integers in 0…5"),
    ("other count of lengths", dict(seq_lens=[1]), ValueError, "seq_lens: expected 2"),
    ("other count of query lengths", dict(q_lens=[1]), ValueError, "q_lens: expected 2"),
    ("negative length", dict(seq_lens=[-1, 1]), ValueError, "seq_lens: expected integers in 0…12, given -1 at index 0"),
    ("length past the table", dict(seq_lens=[4, 13]), ValueError, "seq_lens: expected integers in 0…12, given 13"),
    ("negative query length", dict(q_lens=[1, -1]), ValueError, "q_lens"),
    ("more new tokens than tokens", dict(q_lens=[3, 1], seq_lens=[2, 1]), ValueError, "seq_lens: expected at least q"),
    ("negative row", dict(rows=[-1, 0]), ValueError, "rows: expected integers in 0…3, given -1"),
    ("row past the table", dict(rows=[4, 0]), ValueError, "rows: expected integers in 0…3, given 4"),
    ("row past 32 bits", dict(rows=[2**40, 0]), ValueError, "rows: expected integers of 32 bits"),
    ("the same row twice", dict(rows=[1, 1]), ValueError, "rows: expected a row of its own"),
    ("float lengths", dict(seq_lens=[1.0, 2.0]), TypeError, "seq_lens: expected integers"),
    ("float array", dict(seq_lens=np.array([1.0, 2.0])), TypeError, "seq_lens: expected integers"),
    ("float tensor", dict(seq_lens=torch.tensor([1.0, 2.0])), TypeError, "seq_lens"),
    ("matrix", dict(seq_lens=torch.tensor([[1, 2]])), ValueError, "seq_lens: expected 1 dimension"),
    ("a string", dict(rows="01"), TypeError, "rows: expected a list"),
    ("other count of tokens", dict(tokens=[1, 2, 3]), ValueError, "tokens: expected 2, one per new token, given 3"),
    ("negative token", dict(tokens=[1, -2]), ValueError, "tokens: expected ids in 0…"),
    ("float tokens", dict(tokens=[1.5, 2.0]), TypeError, "tokens: expected integers"),
    ("padding below the batch", dict(pad_to=1), ValueError, "pad_to"),
    ("padding over capacity", dict(pad_to=3), ValueError, "pad_to"),
    ("page row past the table", dict(page_updates=[(4, 0, 0)]), ValueError, "page_updates"),
    ("page column past the table", dict(page_updates=[(0, 3, 0)]), ValueError, "page_updates"),
    ("page below -1", dict(page_updates=[(0, 0, -2)]), ValueError, "page_updates"),
    ("slot past 32 bits", dict(page_updates=[(0, 0, 2**29)]), ValueError, "page_updates"),
    ("pairs", dict(page_updates=[(0, 1)]), ValueError, "page_updates"),
    ("tuples of several lengths", dict(page_updates=[(0, 0, 1), (0, 1)]), TypeError, "page_updates"),
    ("no triples", dict(page_updates=[3]), TypeError, "page_updates"),
    ("matrix of pairs", dict(page_updates=torch.zeros(2, 2, dtype=torch.int32)), ValueError, "page_updates"),
    ("an entry twice", dict(page_updates=[(2, 1, 0), (0, 1, 2), (2, 1, 5)]), ValueError, r"several of \(2, 1\)"),
    ("too many updates", dict(page_updates=[(0, 0, 1), (0, 1, 1), (0, 2, 1), (1, 0, 1)]), ValueError, "at most 3"),
]


@pytest.mark.parametrize(("change", "error", "text"), [case[1:] for case in BAD_BINDS], ids=[c[0] for c in BAD_BINDS])
def test_bind_refuses_before_it_writes(
    device: torch.device, change: dict[str, Any], error: type[Exception], text: str
) -> None:
    config = StepConfig(2, max_total_q=5, max_page_updates=3)
    state, _ = make(device, config, torch.arange(12).reshape(4, 3), 4)
    state.bind([3, 1], [5, 9], q_lens=[2, 3], tokens=[1, 2, 3, 4, 5], page_updates=[(3, 1, 0)])
    before = snapshot(state)
    arguments = {"rows": [0, 1], "seq_lens": [4, 2], **change}
    with pytest.raises(error, match=text):
        state.bind(arguments.pop("rows"), arguments.pop("seq_lens"), **arguments)
    assert all(torch.equal(value, before[name]) for name, value in snapshot(state).items())


def test_the_last_slot_that_fits_is_taken(device: torch.device) -> None:
    state, _ = make(device, StepConfig(1), [[-1, -1]], 4)
    state.bind([0], [8], page_updates=[(0, 1, 2**29 - 1)])
    assert state.out_cache_loc.tolist() == [INT32_MAX]
    state.page_table[0, 1] = 2**29  # by other hands: its slots outgrow 32 bits, so there is no slot
    state.bind([0], [8])
    assert state.out_cache_loc.tolist() == [-1] and state.needs_page.item() == 1


def test_sums_of_lengths_past_32_bits_are_refused(device: torch.device) -> None:
    config = StepConfig(2)
    table = torch.zeros(2, 2, dtype=torch.int32, device=device)
    state = StepState.allocate(config, table, 2**30, device)
    with pytest.raises(ValueError, match="seq_lens: expected a sum of at most"):
        state.bind([0, 1], [2**30, 2**30 + 1])
    state.bind([0, 1], [2**30, 2**30 - 1])
    assert state.kv_indptr.tolist() == [0, 2**30, INT32_MAX]
    state.advance()  # on the device nobody can be told: the sum stays at what 32 bits hold
    assert state.seq_lens.tolist() == [2**30 + 1, 2**30]
    assert state.kv_indptr.tolist() == [0, 2**30 + 1, INT32_MAX]


@pytest.mark.parametrize(
    ("ids", "error", "text"),
    [
        ([1, 2, 3, 4], ValueError, "at most 3"),
        (np.arange(4), ValueError, "at most 3"),
        ([1.0], TypeError, "integers"),
        (np.array([1.0]), TypeError, "integers"),
        (torch.tensor([1.0]), TypeError, "ids"),
        (np.array([True]), TypeError, "integers"),
        (torch.tensor([True]), TypeError, "ids"),
        ([-1], ValueError, "0…"),
        (np.array([3, -1]), ValueError, "0…"),
        (torch.tensor([3, -1]), ValueError, "0…"),
        ([2**63], ValueError, "64 bits"),
        (np.array([2**63], dtype=np.uint64), ValueError, "0…"),
        (torch.tensor([[1]]), ValueError, "1 dimension"),
        (np.array([[1]]), ValueError, "1 dimension"),
        ([[1]], TypeError, "integers"),
        ("12", TypeError, "list"),
        (b"12", TypeError, "list"),
        (7, TypeError, "list"),
        ({1, 2}, TypeError, "list"),
    ],
)
def test_fill_input_ids_refuses_before_it_writes(
    device: torch.device, ids: Any, error: type[Exception], text: str
) -> None:
    state, _ = make(device, StepConfig(3), [[0]], 4)
    state.fill_input_ids([7, 8, 9])
    with pytest.raises(error, match=text):
        state.fill_input_ids(ids)
    assert state.input_ids.tolist() == [7, 8, 9]


def test_fill_input_ids_returns_one_address(device: torch.device) -> None:
    state, _ = make(device, StepConfig(3), [[0]], 4)
    big = 2**63 - 1
    for ids in ([1], [4, big], [0, 2, 3]):
        view = state.fill_input_ids(ids)
        assert view.tolist() == ids
        assert view.data_ptr() == state.input_ids.data_ptr()
    readonly = np.array([5, 6])
    readonly.flags.writeable = False
    assert state.fill_input_ids(readonly).tolist() == [5, 6]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_fill_from_the_device(device: torch.device, dtype: torch.dtype) -> None:
    state, _ = make(device, StepConfig(4), [[0]], 4)
    tokens = torch.tensor([[5, 1], [6, 1], [7, 1]], dtype=dtype, device=device)[:, 0]
    view = state.fill_input_ids_from_device(tokens)
    assert view.tolist() == [5, 6, 7] and view.data_ptr() == state.input_ids.data_ptr()
    assert state.input_ids.tolist() == [5, 6, 7, 0]
    for bad, text in (
        (torch.zeros(5, dtype=dtype, device=device), "at most 4"),
        (torch.zeros(2, device=device), "torch.int64"),
        (torch.zeros(2, dtype=torch.bool, device=device), "torch.int64"),
        (torch.zeros(2, 1, dtype=dtype, device=device), "1 dimensions"),
        (torch.zeros(2, dtype=dtype, device="meta"), "device"),
        ([1, 2], "torch.Tensor"),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            state.fill_input_ids_from_device(bad)  # type: ignore[arg-type]
    assert state.input_ids.tolist() == [5, 6, 7, 0]


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_decode_mask(device: torch.device, shape: tuple[int, ...]) -> None:
    state, _ = make(device, StepConfig(4, max_mask_len=200), [[0]], 4)
    state.input_mask.fill_(True)
    positions = torch.tensor([0, 150, 129], device=device)
    mask = state.decode_mask(positions.reshape(shape), 150)
    assert mask.dtype == torch.bool and mask.shape == (3, 1, 150)
    assert torch.equal(mask[:, 0], positions[:, None] >= torch.arange(150, device=device))
    assert state.input_mask[:3, :, 150:].all() and state.input_mask[3].all()
    assert mask.data_ptr() == state.input_mask.data_ptr()
    with pytest.raises(ValueError, match="total_len: expected an integer in 0…200, given 201"):
        state.decode_mask(positions, 201)
    with pytest.raises(ValueError, match="position_ids: expected at most 4 rows, given 5"):
        state.decode_mask(torch.zeros(5, dtype=torch.int64, device=device), 10)
    with pytest.raises(TypeError, match="position_ids"):
        state.decode_mask(positions.float(), 10)
    assert state.decode_mask(positions, 0).shape == (3, 1, 0)


@pytest.mark.parametrize(
    "bad",
    [
        [1, 1],
        torch.ones(2),
        torch.ones(3, dtype=torch.int32),
        torch.ones(1, 2, dtype=torch.int32),
        torch.ones(2, 2, dtype=torch.int32)[:, 0],
        torch.ones(2, dtype=torch.int32, device="meta"),
    ],
    ids=["list", "float", "too many", "matrix", "strided", "device"],
)
def test_advance_refuses(device: torch.device, bad: Any) -> None:
    state, _ = make(device, StepConfig(2), torch.arange(4).reshape(2, 2), 4)
    state.bind([0, 1], [1, 2])
    if isinstance(bad, Tensor) and bad.device.type == "cpu":
        bad = moved(bad, device)
    with pytest.raises((TypeError, ValueError), match="num_new"):
        state.advance(bad)
    assert state.seq_lens.tolist() == [1, 2]


@pytest.mark.parametrize("reads_host", [True, False], ids=["kernels read the host", "copies"])
def test_launches_and_copies_of_a_step(device: torch.device, reads_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not reads_host:
        monkeypatch.setattr(step_module, "read_in_place", lambda memory, device: False)
    table = torch.arange(8, dtype=torch.int32, device=device).reshape(4, 2)
    state = StepState.allocate(StepConfig(4), table, 4, device)
    assert state._reads_host == reads_host
    state.fill_input_ids([1])  # tells torch of the stream
    calls: list[str] = []
    prepared = step_module.PreparedLaunch.__call__
    copy = StepState._copy

    def counted_launch(self: Any, *arguments: Any, **given: Any) -> None:
        calls.append("launch")
        prepared(self, *arguments, **given)

    def counted_copy(self: Any, *arguments: Any) -> None:
        calls.append("copy")
        copy(self, *arguments)

    monkeypatch.setattr(step_module.PreparedLaunch, "__call__", counted_launch)
    monkeypatch.setattr(StepState, "_copy", counted_copy)
    state.bind([0, 1], [1, 2], tokens=[5, 6])
    assert calls == (["launch", "launch"] if reads_host else ["copy", "launch"])
    assert state.input_ids.tolist() == [5, 6, 0, 0] and state.out_cache_loc.tolist() == [0, 9, -1, -1]
    calls.clear()
    state.bind([0, 1], [1, 2], tokens=[5, 6], page_updates=[(0, 0, 1), (1, 0, 3)])
    assert calls == (["launch", "launch"] if reads_host else ["copy", "launch", "launch"])
    assert table.tolist() == [[1, -1], [3, -1], [4, 5], [6, 7]] and state.out_cache_loc.tolist() == [4, 13, -1, -1]
    calls.clear()
    assert state.fill_input_ids([7, 8, 9]).tolist() == [7, 8, 9] and state.input_ids.tolist() == [7, 8, 9, 0]
    assert calls == ["launch" if reads_host else "copy"]
    calls.clear()
    state.advance()
    assert calls == ["launch"]


class Copying:
    """The event of a copy that has not run."""

    def __init__(self) -> None:
        self.waited, self.recorded = False, 0

    def record(self, stream: object) -> None:
        self.recorded += 1

    def query(self) -> bool:
        return self.waited

    def synchronize(self) -> None:
        self.waited = True


def test_a_staging_buffer_in_use_is_not_written(device: torch.device) -> None:
    state, _ = make(device, StepConfig(2), [[0]], 4)
    buffers = state._staging

    def take() -> tuple[int, int]:
        """Buffer and slot that the next copy gets."""
        slot = state._acquire("bind")
        return next((i, each.slots.index(slot)) for i, each in enumerate(buffers) if slot in each.slots)

    events = [Copying() for _ in buffers]
    for staging, event in zip(buffers, events, strict=True):
        staging.event = event
    events[2].waited = True
    each = step_module.COPIES_PER_BUFFER
    assert [take() for _ in range(each)] == [(0, slot) for slot in range(each)]
    assert [take() for _ in range(each)] == [(2, slot) for slot in range(each)]  # 1 is in use
    assert events[0].recorded == 1 and not events[2].recorded
    # All are in flight: wait for the oldest, and for no other.
    events[2].waited = False
    assert take() == (3, 0)
    assert [event.waited for event in events] == [False, False, False, True]


def test_default_device_and_dtype_do_not_matter(device: torch.device) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            table = torch.arange(8, dtype=torch.int32, device=device).reshape(4, 2)
            state = StepState.allocate(StepConfig(2, max_mask_len=3), table, 4, device)
            state.bind([0, 1], [1, 5], tokens=[3, 4], page_updates=[(1, 0, 6), (1, 1, 7)])
            state.advance()
            state.fill_input_ids([8, 9])
            mask = state.decode_mask(state.position_ids, 3)
    finally:
        torch.set_default_dtype(before)
    assert state.out_cache_loc.tolist() == [1, 29] and state.input_ids.tolist() == [8, 9]
    assert mask[:, 0].tolist() == [[True, True, False], [True, True, True]]
    assert state.arange.dtype == torch.int64


def test_made_in_inference_mode_on_one_thread_and_driven_from_another(device: torch.device) -> None:
    made: list[tuple[StepState, Tensor]] = []

    def make_there() -> None:
        with torch.inference_mode():
            table = torch.arange(8, dtype=torch.int32, device=device).reshape(4, 2)
            made.append((StepState.allocate(StepConfig(2, max_mask_len=4), table, 4, device), table))

    thread = threading.Thread(target=make_there)
    thread.start()
    thread.join()
    state, table = made[0]
    assert table.is_inference()
    assert not any(getattr(state, section.name).is_inference() for section in state.config.sections())

    def drive() -> None:
        state.bind([2, 0], [5, 1], tokens=[3, 4], page_updates=[(2, 1, 6)])
        state.advance()
        state.fill_input_ids(torch.tensor([8, 9]))
        state.fill_input_ids_from_device(state.input_ids + 1)
        state.decode_mask(state.position_ids, 4)

    drive()
    state.seq_lens.add_(0)  # outside inference mode, and with autograd watching
    assert state.input_ids.tolist() == [9, 10] and state.seq_lens.tolist() == [6, 2]
    with torch.inference_mode():
        drive()
    assert state.input_ids.tolist() == [9, 10] and state.page_table[2].tolist() == [4, 6]


class Engine:
    """A decoder of several layers without weights: every layer's k, v and q are fixed functions of token and
    position."""

    num_q_heads, num_kv_heads, head_dim, layers, vocabulary = 4, 2, 16, 2, 97

    def __init__(self, device: torch.device, batch: int, max_pages: int, page_size: int, **rules: Any) -> None:
        self.device, self.page_size, self.rules = device, page_size, rules
        self.table = torch.full((batch, max_pages), -1, dtype=torch.int32, device=device)
        self.step = StepState.allocate(StepConfig(batch), self.table, page_size, device)
        config = splitkv.WorkspaceConfig(
            batch, self.num_q_heads, self.num_kv_heads, self.head_dim, dtype=torch.float32, max_splits=256
        )
        self.workspace = splitkv.Workspace.allocate(config, device)
        shape = (batch * max_pages, page_size, self.num_kv_heads, self.head_dim)
        self.kvs = []
        for _ in range(self.layers):
            # What was never written must never be read.
            k, v = (torch.full(shape, float("nan"), device=device) for _ in range(2))
            self.kvs.append(splitkv.PagedKV(k, v, self.table, self.step.seq_lens, rows=self.step.req_pool_indices))
        generator = torch.Generator().manual_seed(7)
        width = (self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim
        self.embedding = torch.randn(self.layers, self.vocabulary, width, generator=generator).to(device)
        self.sampled = torch.zeros(batch, dtype=torch.int64, device=device)
        self.outs = torch.zeros(self.layers, batch, self.num_q_heads, self.head_dim, device=device)

    def qkv(self, layer: int, ids: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        fused = self.embedding[layer][ids] * (1 + 0.01 * positions[:, None])
        heads = fused.view(fused.shape[0], -1, self.head_dim)  # the slices below are strided
        return heads.split([self.num_q_heads, self.num_kv_heads, self.num_kv_heads], dim=1)

    def forward(self) -> None:
        """One step: every layer, sampling, and the next step's state."""
        step = self.step
        for layer, kv in enumerate(self.kvs):
            q, k, v = self.qkv(layer, step.input_ids, step.position_ids)
            splitkv.append_kv(k, v, kv, step.out_cache_loc)
            self.outs[layer].copy_(splitkv.decode(q, kv, self.workspace, **self.rules))
        self.sampled.copy_((step.input_ids * 31 + step.position_ids) % self.vocabulary)
        step.fill_input_ids_from_device(self.sampled)
        step.advance()

    def expected(self, ids: list[int]) -> Tensor:
        """[layers, num_q_heads, head_dim]: the last token's attention over all of a request's tokens."""
        tokens = torch.tensor(ids, device=self.device)
        outs = []
        for layer in range(self.layers):
            q, k, v = self.qkv(layer, tokens, torch.arange(len(ids), device=self.device))
            indptr = torch.tensor([0, len(ids)], dtype=torch.int32, device=self.device)
            kv = splitkv.RaggedKV(k.contiguous(), v.contiguous(), indptr)
            outs.append(reference.decode(q[-1:].double(), kv, dtype=torch.float64))
        return torch.cat(outs)


def run_engine(engine: Engine, forward: Callable[[], None], steps: int, seed: int) -> tuple[int, int]:
    """Decode `steps` tokens with requests joining and leaving; compare each step. Returns how many joined and left."""
    batch, max_pages = engine.table.shape
    rng = np.random.default_rng(seed)
    free_pages = list(range(batch * max_pages))
    histories: dict[int, list[int]] = {}  # ids of each row's request, the one about to be computed included
    pages: dict[int, list[int]] = {}
    joined = left = 0
    rebind = True
    order: list[int] = []
    for step in range(steps):
        updates: list[tuple[int, int, int]] = []
        for row in [
            row for row in histories if rng.random() < 0.08 or len(histories[row]) >= max_pages * engine.page_size
        ]:
            free_pages += pages.pop(row)
            del histories[row]
            left += 1
            rebind = True
        for row in range(batch):
            if row not in histories and len(histories) < batch - 1 and rng.random() < 0.3:
                histories[row], pages[row] = [int(rng.integers(engine.vocabulary))], []
                joined += 1
                rebind = True
        for row, ids in histories.items():
            while len(pages[row]) * engine.page_size < len(ids):
                page = free_pages.pop(int(rng.integers(len(free_pages))))
                updates.append((row, len(pages[row]), page))
                pages[row].append(page)
                rebind = True
        if rebind:
            order = list(rng.permutation(list(histories)).astype(int)) if histories else []
            engine.step.bind(
                order,
                [len(histories[row]) for row in order],
                tokens=[histories[row][-1] for row in order],
                page_updates=updates,
                pad_to=batch,
            )
            rebind = False
        forward()
        for b, row in enumerate(order):
            ids = histories[row]
            torch.testing.assert_close(
                engine.outs[:, b].double(), engine.expected(ids), rtol=1e-4, atol=1e-5, msg=f"step {step}, row {row}"
            )
            ids.append((ids[-1] * 31 + len(ids) - 1) % engine.vocabulary)
        if len(order) < batch:
            assert not engine.outs[:, len(order) :].any()
        assert engine.step.input_ids[: len(order)].tolist() == [histories[row][-1] for row in order]
    return joined, left


def test_decoding_with_requests_that_join_and_leave(device: torch.device) -> None:
    engine = Engine(device, batch=4, max_pages=6, page_size=3, num_splits=1)  # one part: few programs to interpret
    joined, left = run_engine(engine, engine.forward, steps=24, seed=3)
    assert joined >= 4 and left >= 2


@pytest.mark.gpu
def test_a_whole_step_in_one_graph(device: torch.device) -> None:
    engine = Engine(device, batch=6, max_pages=6, page_size=16)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        engine.step.bind([], [], pad_to=6)
        engine.forward()  # compiles what the capture will launch
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        engine.forward()
    joined, left = run_engine(engine, graph.replay, steps=200, seed=2)
    assert joined > 20 and left > 20


def test_the_benchmark_counts_launches(device: torch.device, tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    options = ["--batch", "2", "--repeats", "1", "--passes", "2", "--device", device.type, "--json", str(path)]
    assert bench_step.main(options) == 0
    record = json.loads(path.read_text())
    rows = {row["call"]: row for row in record["rows"]}
    launches = {name: row["launches"] for name, row in rows.items()}
    two, four = ("bind", "bind with new pages", "decode"), ("decode_shared_prefix",)
    assert all(launches[name] == 2 for name in two) and all(launches[name] == 4 for name in four)
    copying = ("fill_input_ids_from_device",)
    assert all(n == 1 for name, n in launches.items() if name not in (*two, *four, *copying))
    if device.type == "cuda":
        # What is staged is read by a kernel.
        assert all(row["copies"] == 0 for name, row in rows.items() if name not in copying)
    assert record["passes"] == 2 and record["repeats"] == 1
    for row in rows.values():
        least, most = sorted(row["passes_us"])
        assert 0 < least == row["host_us_least"] and row["host_us"] == pytest.approx((least + most) / 2)
        assert row["batch"] == 2 and row["host_us_p90"] == most


@pytest.mark.gpu
def test_advance_may_first_be_called_in_a_capture(device: torch.device) -> None:
    state, _ = make(device, StepConfig(2), torch.arange(4).reshape(2, 2), 4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state.advance()
    state.bind([0, 1], [1, 2])
    graph.replay()
    graph.replay()
    assert state.seq_lens.tolist() == [3, 4]


@pytest.mark.gpu
def test_bind_and_fill_refuse_a_capture(device: torch.device) -> None:
    state, _ = make(device, StepConfig(2), torch.arange(4).reshape(2, 2), 4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="captured"):
            state.bind([0, 1], [1, 2])
        with pytest.raises(RuntimeError, match="captured"):
            state.fill_input_ids([1, 2])
        state.advance()
    state.bind([0, 1], [1, 2])
    graph.replay()
    assert state.seq_lens.tolist() == [2, 3]


HELD_CYCLES = 400_000_000
"""Clock cycles that a stream is held back for: some 0.2 s."""


@pytest.mark.gpu
def test_the_next_step_is_prepared_while_this_one_waits(device: torch.device) -> None:
    """With the stream held back, several steps are bound before the first copy has run; all are seen in their turn."""
    table = torch.arange(64, dtype=torch.int32, device=device).reshape(8, 8)
    state = StepState.allocate(StepConfig(8), table, 4, device)
    seen = torch.empty(4, 3, 8, dtype=torch.int64, device=device)
    steps = [(list(range(n, 8)), [3 + n + i for i in range(8 - n)]) for n in range(4)]

    def enqueue() -> None:
        for n, (rows, lens) in enumerate(steps):
            if n < 3:
                state.bind(rows, lens, tokens=[100 * n + row for row in rows], pad_to=8)
            else:
                state.fill_input_ids([7] * 8)
            seen[n, 0].copy_(state.input_ids)
            seen[n, 1].copy_(state.seq_lens)
            seen[n, 2].copy_(state.out_cache_loc)

    enqueue()  # loads every kernel: loading one may wait for the device
    torch.cuda.synchronize()
    seen.zero_()
    held = torch.cuda.Event()
    torch.cuda._sleep(HELD_CYCLES)
    held.record(torch.cuda.current_stream())
    enqueue()
    assert not held.query(), "the host waited for the device"
    torch.cuda.synchronize()
    for n, (rows, lens) in enumerate(steps[:3]):
        pad = 8 - len(rows)
        slots = [row * 32 + length - 1 for row, length in zip(rows, lens, strict=True)]
        assert seen[n].tolist() == [
            [100 * n + row for row in rows] + [0] * pad, lens + [0] * pad, slots + [-1] * pad
        ]  # fmt: skip
    assert seen[3][0].tolist() == [7] * 8 and seen[3][1:].tolist() == seen[2][1:].tolist()


@pytest.mark.gpu
def test_copies_far_ahead_of_the_device_wait(device: torch.device) -> None:
    state, _ = make(device, StepConfig(4), [[0]], 4)
    copies = 3 * step_module.STAGING_BUFFERS * step_module.COPIES_PER_BUFFER
    views = torch.empty(copies, 4, dtype=torch.int64, device=device)
    torch.cuda.synchronize()
    torch.cuda._sleep(HELD_CYCLES // 10)
    for n in range(copies):
        views[n].copy_(state.fill_input_ids([n, n + 1, n + 2, n + 3]))
    assert views.tolist() == [[n, n + 1, n + 2, n + 3] for n in range(copies)]


@pytest.mark.gpu
def test_copies_of_several_streams_are_each_waited_for(device: torch.device) -> None:
    """A slot is taken again only once its copy ran, on whichever stream that was."""
    state, _ = make(device, StepConfig(4), [[0]], 4)
    copies = 3 * step_module.STAGING_BUFFERS * step_module.COPIES_PER_BUFFER
    views = torch.empty(copies, 4, dtype=torch.int64, device=device)
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    torch.cuda.synchronize()
    for n in range(copies):
        with torch.cuda.stream(streams[n // 3 % 2]):
            if n % 3 == 0:
                streams[n // 3 % 2].wait_stream(streams[1 - n // 3 % 2])
                torch.cuda._sleep(HELD_CYCLES // 100)
            views[n].copy_(state.fill_input_ids([n, n + 1, n + 2, n + 3]))
    torch.cuda.synchronize()
    assert views.tolist() == [[n, n + 1, n + 2, n + 3] for n in range(copies)]


@pytest.mark.gpu
def test_what_was_staged_outlives_the_state(device: torch.device) -> None:
    """Pinned memory of a state that is gone is not used again before the kernels that read it have run."""
    table = torch.zeros(8, 64, dtype=torch.int32, device=device)
    updates = [(row, column, 64 * row + column) for row in range(8) for column in range(64)]

    def bind_and_drop() -> int:
        state = StepState.allocate(StepConfig(8), table, 4, device)
        state.bind(range(8), [256] * 8, page_updates=updates)
        return 4 * step_module.STAGING_BUFFERS * step_module.COPIES_PER_BUFFER * align_up(state.config.staged_words, 4)

    nbytes = bind_and_drop()  # compiles
    torch.cuda.synchronize()
    table.zero_()
    torch.cuda._sleep(HELD_CYCLES)
    bind_and_drop()
    others = [torch.full((nbytes,), 255, dtype=torch.uint8).pin_memory() for _ in range(3)]
    assert table.flatten().tolist() == list(range(512)) and others


@pytest.mark.gpu
def test_a_step_neither_waits_nor_allocates(device: torch.device) -> None:
    state, _ = make(device, StepConfig(8, max_mask_len=64), torch.arange(64).reshape(8, 8), 4)
    assert state._reads_host
    counts = torch.ones(8, dtype=torch.int32, device=device)
    sampled = torch.arange(8, device=device)

    def one_step() -> None:
        state.bind(range(8), [3] * 8, tokens=[5] * 8, page_updates=[(0, 0, 1), (1, 0, 2)], pad_to=8)
        state.fill_input_ids([6] * 8)
        state.fill_input_ids_from_device(sampled)
        state.decode_mask(state.position_ids, 64)
        state.advance()
        state.advance(counts)

    one_step()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_synchronisation():
        one_step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated


@pytest.mark.gpu
def test_work_goes_to_the_current_stream(device: torch.device) -> None:
    state, _ = make(device, StepConfig(2), torch.arange(4).reshape(2, 2), 4)
    side = torch.cuda.Stream()
    state.bind([0, 1], [1, 2], tokens=[4, 5])  # loads the kernels: that may wait for the device
    state.advance()
    state.bind([], [])
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(HELD_CYCLES // 4)
        state.bind([0, 1], [1, 2], tokens=[4, 5])
        state.advance()
        held = torch.cuda.Event()
        held.record(side)
    # Nothing of it may have run elsewhere while the side stream is held back.
    before = state.seq_lens.clone().tolist()
    assert not held.query() and before == [0, 0]
    side.synchronize()
    assert state.seq_lens.tolist() == [2, 3]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current() -> None:
    with torch.cuda.device(0):
        state, model = make(torch.device("cuda:1"), StepConfig(2), torch.arange(4).reshape(2, 2), 4)
        for target in (state, model):
            target.bind([0, 1], [1, 2], tokens=[4, 5], page_updates=[(0, 1, 9)])
            target.advance()
        state.fill_input_ids([4, 5])
        assert torch.cuda.current_device() == 0
    assert_state(state, model)
