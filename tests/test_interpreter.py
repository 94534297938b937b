"""How splitkv chooses between compiled kernels and Triton's interpreter, each choice in a process of its own."""

import os
import subprocess
import sys

import pytest
import torch

from splitkv._interpreter import numpy_fault

ASKS = """
import splitkv, torch
config = splitkv.WorkspaceConfig(1, 2, 1, 16, dtype=torch.float32)
k = torch.ones(1, 3, 1, 16)
kv = splitkv.ContiguousKV(k, k, torch.tensor([3], dtype=torch.int32))
q, workspace = torch.zeros(1, 2, 16), splitkv.Workspace.allocate(config, "cpu")
reason = splitkv.supports(q, kv, workspace)
print(reason or splitkv.decode(q, kv, workspace).sum().item())
"""

NO_GPU_HERE = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, the CPU gets another answer")


def ask(first: str = "", **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    done = subprocess.run(
        [sys.executable, "-c", first + ASKS], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@NO_GPU_HERE
def test_without_a_gpu_the_interpreter_is_chosen_by_itself() -> None:
    assert float(ask()) == 32.0


@NO_GPU_HERE
def test_triton_imported_first_says_which_variable_to_set() -> None:
    assert "triton was imported before splitkv" in ask("import triton")
    assert float(ask("import triton", TRITON_INTERPRET="1")) == 32.0


@NO_GPU_HERE
def test_a_variable_that_turns_the_interpreter_off_is_named() -> None:
    assert "TRITON_INTERPRET=0 keeps Triton's CPU interpreter off" in ask(TRITON_INTERPRET="0")


@NO_GPU_HERE
@pytest.mark.filterwarnings("ignore")
def test_without_numpy_it_imports_and_says_what_is_missing() -> None:
    assert "pip install numpy" in ask("import sys; sys.modules['numpy'] = None")


@pytest.mark.parametrize(
    ("triton_version", "numpy_version", "works"),
    [
        ("3.6.0", "2.3.5", True),
        ("3.6.0+git9844da95", "2.4.0", False),
        ("3.6.0", "2.10.0", False),
        ("3.7.0", "2.4.6", True),
        ("3.10.0", "2.4.6", True),
    ],
)
def test_which_numpy_an_interpreter_runs_with(triton_version: str, numpy_version: str, works: bool) -> None:
    fault = numpy_fault(triton_version, numpy_version)
    assert (fault is None) == works
    if fault is not None:
        assert triton_version in fault and numpy_version in fault and "numpy<2.4" in fault
