"""The command line: what it prints, and with which exit code it ends."""

import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import H200

import splitkv
from splitkv import cli, demo, doctor, screen

pytest.importorskip("rich")

NO_GPU_HERE = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, nothing is wrong")
Shown = Callable[..., tuple[int, str]]


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Shown:
    def run(*argv: str) -> tuple[int, str]:
        code = cli.main(argv)
        return code, capsys.readouterr().out

    return run


def in_a_process(first: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process that runs `first` before anything is imported."""
    code = f"{first}\nfrom splitkv.cli import main\nraise SystemExit(main({list(argv)!r}))"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)


def test_doctor_says_what_is_here_and_what_would_be_launched(shown: Shown) -> None:
    code, text = shown("doctor", "--lens", "1000", "1000", "3", "0", "--dtype", "float16", "--num-splits", "4")
    assert code == 0 and "Nothing is wrong." in text
    assert str(torch.__version__) in text and "kernels run" in text
    assert re.search(r"partial_out +\[2048, 16, 128\] +float32 +0 +16,777,216", text)
    assert re.search(r"split_decode_kernel +128 ", text)  # 4 requests · 8 KV heads · 4 parts
    assert "Schedule: 4 parts per tile" in text
    assert re.search(r" 0 … 1 +1000 +1 +4 +250 ", text)
    assert re.search(r" 2 +3 +1 +4 +0 … 1 ", text)
    assert "128 of 128 programs have work, 250 tokens at most" in text
    assert "128 partials are left to merge" in text


@pytest.mark.parametrize("lens", [(4000, 4000), (4000, 7), (900, 80, 0, 7, 7)])
def test_doctor_shows_the_schedule_that_decode_takes(shown: Shown, lens: tuple[int, ...]) -> None:
    sizes = doctor.Sizes(lens, 4, 2, 64, torch.float16, split_tokens=None, num_splits=None)
    _, launches = doctor.make_plan(sizes, doctor.kernel_device())
    partition = doctor.Partition.of_launch(launches[0].operands, launches[0].constants)
    stretches = list(partition.stretches([doctor.Request(length) for length in lens]))
    parts = sum(each.request == 0 for each in stretches)
    assert parts > 2  # the long request is cut at least twice
    options = "--q-heads 4 --kv-heads 2 --head-dim 64 --dtype float16 --lens".split()
    code, text = shown("doctor", *options, *map(str, lens))
    assert code == 0
    assert re.search(rf" {lens[0]} +1 +{parts} ", text)
    assert f"of {launches[0].grid[0]} programs have work" in text
    assert f"{2 * sum(each.slot is not None for each in stretches)} partials are left to merge" in text


def test_plans_are_made_for_a_gpu_that_is_not_here() -> None:
    sizes = doctor.Sizes((4096,) * 32, 32, 8, 128, torch.bfloat16, split_tokens=None, num_splits=None)
    grids = [
        doctor.make_plan(sizes, doctor.kernel_device(), H200, max_splits)[1][0].grid[0] for max_splits in (None, 512)
    ]
    assert grids == [528, 256]  # four programs per multiprocessor, or as many as leave two partials each


def test_doctor_says_what_decode_refuses(shown: Shown) -> None:
    code, text = shown("doctor", "--q-heads", "10")
    assert code == 1
    assert "wrong: decode refuses these sizes: num_q_heads: expected a multiple of num_kv_heads = 8, given 10" in text
    code, text = shown("doctor", "--head-dim", "1000")
    assert code == 1 and "head_dim" in text


def test_doctor_notices_a_wrong_result(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitkv, "decode", lambda q, kv, workspace, **rules: torch.full_like(q, 2.5))
    code, text = shown("doctor")
    assert code == 1 and "wrong: decode fails here" in text

    def broken(*args: Any, **rules: Any) -> None:
        raise RuntimeError("no compiler\nand more")

    monkeypatch.setattr(splitkv, "decode", broken)
    code, text = shown("doctor")
    assert code == 1 and "wrong: decode fails here: RuntimeError: no compiler" in text


@pytest.mark.parametrize(
    "argv", [[], ["nothing"], ["doctor", "--batch", "0"], ["doctor", "--lens", "1", "2", "--batch", "3"]]
)
def test_a_wrong_command_line_ends_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    assert "error" in capsys.readouterr().err


@NO_GPU_HERE
def test_doctor_says_that_triton_was_imported_first() -> None:
    done = in_a_process("import triton", "doctor")
    assert done.returncode == 1
    assert "wrong: this machine has no GPU, and triton was imported before splitkv" in done.stdout


@NO_GPU_HERE
def test_doctor_says_that_numpy_is_missing() -> None:
    done = in_a_process("import sys; sys.modules['numpy'] = None", "doctor")
    assert done.returncode == 1 and "wrong: Triton's CPU interpreter needs numpy" in done.stdout


def test_without_rich_the_extra_is_named() -> None:
    done = in_a_process("import sys; sys.modules['rich'] = None; sys.modules['rich.console'] = None", "doctor")
    assert done.returncode == 1 and "pip install 'splitkv[bench]'" in done.stderr


def test_old_and_missing_packages_are_named() -> None:
    versions: dict[str, str | None] = {"python": "3.10.2", "torch": "2.10.0+cpu", "triton": "3.10.0", "einops": "0.8.2"}
    assert doctor.version_faults(versions) == []
    faults = doctor.version_faults({"python": "3.9.19", "torch": "2.9.1", "triton": "3.5.1", "einops": None})
    assert [fault.split()[0] for fault in faults] == ["python", "torch", "triton", "einops"]


SMALL = (demo.Generated((40, 0, 7), num_q_heads=4, num_kv_heads=2, head_dim=32),)


def test_demo_without_the_checkout_goes_on_with_generated_data(
    shown: Shown, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "ACTIVATIONS", tmp_path / "absent.pt")
    monkeypatch.setattr(demo, "ON_CPU", SMALL)
    monkeypatch.setattr(demo, "ON_GPU", SMALL)
    code, text = shown("demo")
    assert code == 0
    assert "No real activations" in text and "40, 0, 7" in text and "partial_out" in text
    assert "All results are within the error budget" in text


def test_demo_notices_a_wrong_result(shown: Shown, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = splitkv.decode_with_lse

    def wrong(*args: Any, **rules: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = right(*args, **rules)
        return out * 1.1, lse

    monkeypatch.setattr(demo, "ACTIVATIONS", tmp_path / "absent.pt")
    monkeypatch.setattr(demo, "ON_CPU", SMALL)
    monkeypatch.setattr(demo, "ON_GPU", SMALL)
    monkeypatch.setattr(splitkv, "decode_with_lse", wrong)
    code, text = shown("demo")
    assert code == 1 and "times the error budget" in text


@pytest.mark.slow
@NO_GPU_HERE
def test_demo_decodes_the_real_activations(shown: Shown) -> None:
    code, text = shown("demo")
    assert code == 0
    assert all(f"layer {layer}" in text for layer in (0, 18, 28))
    assert "3 requests of 1434 to 1481 tokens" in text
    assert all(dtype in text for dtype in ("float16", "bfloat16", "float32"))


@pytest.mark.gpu
def test_demo_times_decode_beside_a_plain_read(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "ON_GPU", (demo.Generated((4096,) * 4),))
    code, text = shown("demo")
    assert code == 0
    share = re.search(r"(\d+) %", text)
    words = " ".join(text.split())  # lines break where the terminal ends
    assert "48 requests" in words
    assert "plain read" in words
    assert share is not None and 1 < int(share[1]) < 150


def test_the_progress_bar_appears_only_where_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    def show(seconds: float) -> str:
        shown = screen.Screen()
        written = io.StringIO()
        shown.console = Console(file=written, force_terminal=True, width=80)
        with shown.progress(2) as tell:
            tell("first")
            time.sleep(seconds)
            tell("second")
        return written.getvalue()

    assert show(0.0) == ""
    monkeypatch.setattr(screen, "SLOW", 0.05)
    assert "first" in show(0.6)
