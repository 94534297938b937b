"""The fuzz driver: that it passes here on a few problems, and that it finds what is wrong, and finds it again."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import fuzz
import pytest
import torch
from conftest import COMPILED
from hypothesis import settings

import splitkv

DEVICE = torch.device("cuda" if COMPILED else "cpu")
SMALL = not COMPILED
SEEDS = [1000 + form + fuzz.FORMS * turn for turn in range(30) for form in range(10)]
"""Of ten forms: another one takes a GPU seconds to compile, and the interpreter none."""
if not COMPILED:
    SEEDS = [*range(1000, 1000 + min(9, settings().max_examples))]


def test_problems_from_seeds_hold():
    report = fuzz.run(SEEDS, DEVICE, SMALL)
    assert not report.failures, "\n".join(text for _, text in report.failures)
    assert report.problems == len(SEEDS) and report.worst


def test_a_form_serves_many_seeds_and_forms_differ():
    first, again, other, elsewhere = (fuzz.Form.of(seed, True) for seed in (7, 7 + 9 * fuzz.FORMS, 8, 7 + fuzz.BLOCK))
    assert first == again and first != other and first != elsewhere
    one, two = (fuzz.problem_of(seed, "cpu", True) for seed in (7, 7 + 9 * fuzz.FORMS))
    assert one.lens != two.lens
    for problem in (one, two):
        assert {name: problem.choices[name] for name in first.choices} == first.choices


def test_all_there_is_occurs():
    """Every option of every face, over the forms of one pool."""
    forms = [fuzz.Form.of(seed, False) for seed in range(fuzz.FORMS)]
    for faces, part in ((fuzz.FACES, "choices"), (fuzz.MORE_FACES, "more")):
        for name, options in faces.items():
            found = {getattr(form, part)[name] for form in forms}
            assert found >= set(options), name
    lens = [n for seed in range(fuzz.FORMS) for n in fuzz.problem_of(seed, "cpu", True).lens]
    assert {0, 1} <= set(lens)


def wrong_scale(monkeypatch):
    """Scores of a wrong base, but for those of calls that look at them in natural units."""
    from splitkv.kernels import split_decode

    monkeypatch.setattr(split_decode, "LOG2E", type(split_decode.LOG2E)(1.4))


def wrong_lse(monkeypatch):
    def decode_with_lse(*args, **rules):
        out, lse = decode(*args, **rules)
        return out, lse.add_(0.05)

    decode = splitkv.decode_with_lse
    monkeypatch.setattr(splitkv, "decode_with_lse", decode_with_lse)


def writes_too_far(monkeypatch):
    def too_far(call):
        found = run(call)
        call.scratch._memory[:4096].view(torch.float32)[-1] = 1.0  # the last word before the workspace
        return found

    run = fuzz.Call.run
    monkeypatch.setattr(fuzz.Call, "run", too_far)


def empty_rows_of_noise(monkeypatch):
    def decode_with_lse(*args, **rules):
        out, lse = decode(*args, **rules)
        out[lse == -math.inf] = 1e-7
        return out, lse

    decode = splitkv.decode_with_lse
    monkeypatch.setattr(splitkv, "decode_with_lse", decode_with_lse)


def another_answer_each_time(monkeypatch):
    def decode_with_lse(*args, **rules):
        out, lse = decode(*args, **rules)
        times.append(0)
        return out, lse.add_(len(times) * 1e-6)

    times: list[int] = []
    decode = splitkv.decode_with_lse
    monkeypatch.setattr(splitkv, "decode_with_lse", decode_with_lse)


FAULTS = {
    wrong_scale: r"error of at most|error up to",
    wrong_lse: r"lse: expected an error up to",
    writes_too_far: r"elements around it were written",
    empty_rows_of_noise: r"out: expected an error of at most",
    another_answer_each_time: r"expected the same bits of a call repeated",
}


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=pytest.mark.skipif(COMPILED and f is wrong_scale, reason="is compiled already"))
              for f in FAULTS], ids=lambda f: f.__name__)  # fmt: skip
def test_a_planted_fault_is_found_and_its_seed_replays(fault, monkeypatch, capsys):
    with monkeypatch.context() as planted:
        fault(planted)
        for seed in range(2000, 2200):
            report = fuzz.run([seed], DEVICE, SMALL)
            if report.failures:
                break
        [(found, text)] = report.failures
        assert found == seed and re.search(FAULTS[fault], text), text
        assert f"make_problem({seed}" in text and f"--replay {seed}" in text
        replay = ["--replay", str(seed), *["--small"] * SMALL]
        assert fuzz.main(replay) == 1
        assert re.search(FAULTS[fault], capsys.readouterr().err)
    assert fuzz.main(replay) == 0


def compile_only(*arguments, before=""):
    """A run of the driver that compiles and runs nothing, in a process of its own, where nothing is interpreted."""
    root = Path(__file__).parents[1]
    path = os.pathsep.join(filter(None, [str(root), str(root / "tests"), os.environ.get("PYTHONPATH")]))
    code = f"import sys, fuzz, compiling\n{before}\nsys.exit(fuzz.main({['--compile-only', *arguments]}))"
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.parametrize("seed", [61, 65540])
def test_what_is_launched_compiles(seed):
    """Two forms of each pool, of which the GPU need not be there."""
    done = compile_only("--problems", "2", "--seed", str(seed))
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"problems": 2, "unchecked": 0' in done.stdout


def test_what_does_not_fit_is_found_without_a_gpu():
    room = "fuzz.compile_launch = lambda launch, *_: used._replace(kernel=launch.kernel.__name__)"
    used = "used = __import__('collections').namedtuple('Used', 'kernel shared estimate')('', 5000, 4999)"
    done = compile_only("--replay", "7", before=f"{used}\n{room}")
    assert done.returncode == 1
    assert "expected at most 4999 bytes of shared memory, given 5000" in done.stderr
    assert "--replay 7 --compile-only --arch cuda:90" in done.stderr


def test_processes_share_the_seeds(tmp_path):
    file, root = tmp_path / "found.json", Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, str(root / "tests" / "fuzz.py"), "--problems", "6", "--seed", "30", "--processes", "2",
         "--json", str(file)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert found["problems"] == 6 and found["unchecked"] == 0 and not found["failures"]
    assert sum(n for kind, n in found["kinds"].items() if kind.startswith("query ")) == 6


def test_a_run_that_is_cut_short_leaves_its_counts(tmp_path, monkeypatch, capsys):
    def check(seed, *_):
        if seed == 32:
            raise KeyboardInterrupt
        return 0.5, 0.25

    file = tmp_path / "found.json"
    monkeypatch.setattr(fuzz, "TELL_EVERY", 0)
    monkeypatch.setattr(fuzz, "check", check)
    with pytest.raises(KeyboardInterrupt):
        fuzz.main(["--problems", "6", "--seed", "30", "--json", str(file)])
    found = json.loads(file.read_text())
    assert found["problems"] == 2 and found["unchecked"] == 4
    assert "2 of 6 problems in " in capsys.readouterr().err
    assert fuzz.main(["--problems", "6", "--seed", "30", "--seconds", "0", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["problems"] == 0 and found["unchecked"] == 6


def test_a_process_that_dies_is_a_failure(monkeypatch):
    """What ends a process, as a read of memory that is not mapped does, is told with the seed at which it ended."""
    report = fuzz.run_everywhere(range(0), 1, SMALL, math.inf)
    assert report.problems == 0 and not report.failures
    monkeypatch.setattr(fuzz, "work", _dies)
    report = fuzz.run_everywhere(range(77, 78), 1, SMALL, 60)
    assert [seed for seed, _ in report.failures] == [77] and "ended with exit status 3" in report.failures[0][1]
    assert report.unchecked == 1


def _dies(tasks, results, current, device_index, small):
    current.value = tasks.get(timeout=60)[0]
    os._exit(3)


@pytest.mark.parametrize(("refusals", "held"), [(3, True), (4, False)])
def test_a_problem_waits_for_memory_that_others_hold(refusals, held):
    asked = []

    def check(*arguments):
        asked.append(arguments)
        if len(asked) <= refusals:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "held"

    if held:
        assert fuzz.patiently(check, 5, DEVICE, SMALL, pause=0.0) == "held"
    else:
        with pytest.raises(torch.OutOfMemoryError):
            fuzz.patiently(check, 5, DEVICE, SMALL, pause=0.0)
    assert asked == [(5, DEVICE, SMALL)] * (refusals + held)


def test_other_errors_do_not_wait():
    def check(*_):
        raise RuntimeError("illegal memory access")

    with pytest.raises(RuntimeError, match="illegal"):
        fuzz.patiently(check, 5, DEVICE, SMALL, pause=math.inf)
