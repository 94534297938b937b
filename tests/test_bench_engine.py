"""The table of whole models, in small: that every way generates, is checked, and comes into the record."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the extra splitkv[transformers] is not installed")
from splitkv.bench import engine

SMALL = ["--model", "tiny", "--batch", "1", "--prompt", "3", "--tokens", "3", "--repeats", "1", "--dtype", "float32"]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "WARM_TOKENS", 1)
    monkeypatch.setattr(engine, "ENGINE_BURST", 1)


@pytest.mark.filterwarnings("ignore:::torch")  # PyTorch's compiler warns of much, on a GPU
def test_every_way_is_timed_and_checked(
    tmp_path: Path, device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "record.json"
    assert engine.main([*SMALL, "--json", str(path), "--device", device.type]) == 0
    record = json.loads(path.read_text())
    assert [row["way"] for row in record["rows"]] == list(engine.ways(device))
    for row in record["rows"]:
        assert row["tokens_per_s"] > 0 and row["gap"] < 1e-3 and row["same"] == 1.0, row
    assert record["run"]["weights"] == "random" and record["run"]["model"] == "tiny"
    assert "engine" in capsys.readouterr().out


def test_wrong_tokens_are_seen(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    def wrong(model: Any, prompts: list[list[int]], tokens: int) -> Any:
        while True:
            yield 0.1, [[9] * tokens for _ in prompts]

    monkeypatch.setattr(engine, "ways", lambda device: {"engine": wrong})
    assert engine.main([*SMALL, "--device", device.type]) == 1


def test_a_way_that_fails_leaves_the_others_their_figures(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(model: Any, prompts: list[list[int]], tokens: int) -> Any:
        raise RuntimeError("cannot run here")
        yield

    monkeypatch.setattr(engine, "ways", lambda device: {"engine": failing})
    assert engine.main([*SMALL, "--device", device.type]) == 1
    assert "engine, batch 1: RuntimeError: cannot run here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--tokens", "1"], "--tokens: expected"), (["--batch", "0"], "--batch: expected"), (["--repeats", "0"], "--rep")],
)
def test_bad_options_are_refused(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        engine.main(["--model", "tiny", *options])
    assert stopped.value.code == 2 and message in capsys.readouterr().err
