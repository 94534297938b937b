"""A whole step again and again while requests join, grow and leave: 10,000 replays of its graph on a GPU."""

import json

import pytest
import replays
import torch
from conftest import COMPILED
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("cuda" if COMPILED else "cpu")
SIZES = replays.Sizes() if COMPILED else replays.SMALL


def test_steps_are_right_while_requests_join_and_leave():
    found = replays.run(DEVICE, 1000 if COMPILED else 12, seed=1, sizes=SIZES)
    assert not found.failures and len(found.worst) == 3
    assert found.joined >= 3 and found.left >= 1 and found.binds < found.replays


@pytest.mark.gpu
def test_ten_thousand_replays_of_one_graph():
    found = replays.run(DEVICE, 10_000, seed=0, sizes=SIZES)
    assert not found.failures, found.failures[:5]
    assert found.replays == 10_000 and found.joined > 1000 and found.left > 1000
    assert min(found.lengths) == 1 and max(found.lengths) == SIZES.max_tokens
    print(f"{found.seconds:.1f} s, largest errors over the budget {found.worst}")


def pages_of_others(engine: replays.Engine) -> None:
    table = engine.table
    table.copy_(torch.where(table >= 0, (table + 1) % table.numel(), table))


def one_token_less(engine: replays.Engine) -> None:
    engine.step.seq_lens.sub_(1).clamp_(min=0)


def a_row_of_nobody_is_not_zero(engine: replays.Engine) -> None:
    engine.step.seq_lens[-1] = 1


@pytest.mark.parametrize("fault", [pages_of_others, one_token_less, a_row_of_nobody_is_not_zero])
def test_a_planted_fault_is_found_at_its_replay(fault):
    count = 4
    found = replays.run(
        DEVICE, count, 5, SIZES, spoil=lambda engine, number: fault(engine) if number == count - 1 else None
    )
    assert found.failures and {number for number, _, _ in found.failures} == {count - 1}


def test_a_run_says_how_far_it_is_and_ends_in_time(tmp_path, monkeypatch, capsys):
    file = tmp_path / "found.json"
    monkeypatch.setattr(replays, "LOOK_EVERY", 2)
    assert replays.main(["--replays", "5", "--seconds", "0", "--json", str(file)]) == 0
    assert capsys.readouterr().err.startswith("2 of 5 replays in ")
    assert json.loads(file.read_text())["replays"] == 2


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_a_look_can_be_captured():
    """It reads no value on the host, and takes no number from there that would have to be copied."""
    check = replays.Check(replays.Engine(DEVICE, SIZES), 1)
    with Operators() as operators:
        check._forward()
    assert "aten::bmm" in operators.seen
    waits = {f"aten::{name}" for name in ("_local_scalar_dense", "nonzero", "equal", "lift_fresh", "scalar_tensor")}
    assert not operators.seen & waits
