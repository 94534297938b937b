"""That every kernel is run by `sanitized.py`, and what NVIDIA's sanitizers say of it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sanitized
import torch
from conftest import COMPILED

ROOT = Path(__file__).parents[1]
SUMMARIES = {
    "memcheck": r"ERROR SUMMARY: 0 errors",
    "racecheck": r"RACECHECK SUMMARY: 0 hazards displayed \(0 errors, 0 warnings\)",
    "initcheck": r"ERROR SUMMARY: 0 errors",
}


@pytest.mark.skipif(COMPILED, reason="launches that were prepared do not pass through Triton")
def test_every_kernel_is_run(monkeypatch):
    from triton.runtime.interpreter import InterpretedFunction

    run, seen = InterpretedFunction.run, set()

    def remember(kernel, *args, **kwargs):
        seen.add(kernel.fn.__name__)
        return run(kernel, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", remember)
    sanitized.main()
    kernels = re.findall(
        r"^def (\w+_kernel)\(", "\n".join(file.read_text() for file in (ROOT / "splitkv/kernels").glob("*.py")), re.M
    )
    assert len(kernels) >= 15 and seen == set(kernels)


def program(*tool: str) -> "subprocess.CompletedProcess[str]":
    # Without PyTorch's cache every tensor is an allocation of its own, whose ends and first writes the tool knows.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    command = [*tool, sys.executable, str(ROOT / "tests" / "sanitized.py")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)


@pytest.fixture(scope="module")
def sanitizer() -> str:
    tool = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ["PATH"], "/usr/local/cuda/bin"]))
    if tool is None or not torch.version.cuda:
        pytest.skip("needs NVIDIA's compute-sanitizer")
    plain = program()  # compiles: under the tools that would take longer
    assert plain.returncode == 0, plain.stderr[-4000:]
    return tool


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("tool", SUMMARIES)
def test_a_sanitizer_finds_nothing(sanitizer, tool):
    """initcheck knows what was written to global memory: a kernel that it names has read what nobody had written."""
    done = program(sanitizer, "--tool", tool, "--error-exitcode", "99", "--print-limit", "20")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    assert "every kernel ran" in done.stdout and re.search(SUMMARIES[tool], done.stdout), done.stdout[-8000:]
