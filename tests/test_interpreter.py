"""How the kernels come to run on a machine without a GPU, each way in a process of its own."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

DECODE = """
import torch
config = splitkv.WorkspaceConfig(2, num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.{dtype})
workspace = splitkv.Workspace.allocate(config, "cpu")
k, v = torch.randn(2, 2, 40, 2, 16).to(torch.{dtype})
kv = splitkv.ContiguousKV(k, v, torch.tensor([40, 17], dtype=torch.int32))
q = torch.randn(2, 4, 16).to(torch.{dtype})
out, lse = splitkv.decode_with_lse(q, kv, workspace, num_splits=3)
expected, _ = splitkv.reference.decode_with_lse(q, kv, dtype=torch.float64)
assert (out.double() - expected).abs().max() < 0.02
"""


def run(source: str, *, interpret: str | None = None, gpu: bool = False) -> subprocess.CompletedProcess:
    """Run a program as a user would, with TRITON_INTERPRET as given, and no GPU in sight unless asked for."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if interpret is not None:
        environment["TRITON_INTERPRET"] = interpret
    if not gpu:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def succeeds(source: str, **how: object) -> str:
    done = run(source, **how)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_without_a_gpu_kernels_are_interpreted_and_warn_of_nothing(dtype):
    output = succeeds(
        "import torch, warnings\nwarnings.simplefilter('error')\nimport splitkv\n"
        + DECODE.format(dtype=dtype)
        + "import os; print(os.environ['TRITON_INTERPRET'], splitkv._interpreter.interpreting())"
    )
    assert output.split() == ["1", "True"]


def test_triton_first_is_an_error_that_names_the_variable():
    done = run("import triton\nimport splitkv\n" + DECODE.format(dtype="float16"))
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError: q: ") and "TRITON_INTERPRET=1" in last and "import splitkv first" in last


def test_triton_first_says_the_same_of_merge_and_supports():
    output = succeeds("""
        import triton, torch, splitkv
        try:
            splitkv.merge(torch.zeros(2, 3, 4), torch.zeros(2, 3))
        except ValueError as error:
            assert str(error).startswith("outs: ") and "TRITON_INTERPRET=1" in str(error), error
        else:
            raise SystemExit("merged")
        config = splitkv.WorkspaceConfig(1, 1, 1, 16, dtype=torch.float32)
        kv = splitkv.ContiguousKV(torch.zeros(1, 4, 1, 16), torch.zeros(1, 4, 1, 16), torch.ones(1, dtype=torch.int32))
        print(splitkv.supports(torch.zeros(1, 1, 16), kv, splitkv.Workspace.allocate(config, "cpu")))
    """)
    assert output.startswith("q: this machine has no GPU") and "TRITON_INTERPRET=1" in output


def test_triton_first_is_fine_where_the_variable_is_set():
    succeeds("import triton\nimport splitkv\n" + DECODE.format(dtype="bfloat16"), interpret="1")


def test_a_value_that_the_user_has_set_is_kept():
    output = succeeds(
        "import splitkv, os; print(os.environ['TRITON_INTERPRET'], splitkv._interpreter.interpreting())", interpret="0"
    )
    assert output.split() == ["0", "False"]
    done = run("import splitkv\n" + DECODE.format(dtype="float16"), interpret="0")
    assert done.returncode != 0 and "TRITON_INTERPRET=1" in done.stderr.splitlines()[-1]


def test_importing_chooses_the_interpreter_and_does_nothing_else():
    output = succeeds("""
        import os, random, signal, sys, threading, warnings
        import numpy, torch

        def state():
            return {
                "environment": {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
                "default dtype": torch.get_default_dtype(),
                "default device": torch.get_default_device(),
                "threads of torch": torch.get_num_threads(),
                "grad": torch.is_grad_enabled(),
                "precision": torch.get_float32_matmul_precision(),
                "random": torch.get_rng_state().tolist(),
                "python's random": random.getstate(),
                "numpy's errors": numpy.geterr(),
                "numpy's random": str(numpy.random.get_state()),
                "filters": list(warnings.filters),
                "path": list(sys.path),
                "threads": threading.active_count(),
                "directory": (os.getcwd(), sorted(os.listdir())),
                "signals": signal.getsignal(signal.SIGINT),
            }

        before = state()
        import splitkv
        after = state()
        changed = [name for name in before if before[name] != after[name]]
        assert not changed, changed
        assert os.environ["TRITON_INTERPRET"] == "1"
        assert not torch.cuda.is_initialized()
        loaded = {name.partition(".")[0] for name in sys.modules}
        print(sorted(loaded & {"rich", "matplotlib", "pytest", "hypothesis", "transformers", "pandas"}))
    """)
    assert output.strip() == "[]"


@pytest.mark.gpu
def test_cpu_tensors_beside_a_gpu_are_refused_with_a_way_out():
    done = run("import splitkv\n" + DECODE.format(dtype="float16"), gpu=True)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError: q: expected tensors on the GPU") and "TRITON_INTERPRET=1" in last
    assert ".to('cuda')" in last
    succeeds("import splitkv\n" + DECODE.format(dtype="float16"), interpret="1", gpu=True)


@pytest.mark.gpu
def test_importing_beside_a_gpu_leaves_triton_compiling():
    output = succeeds(
        "import splitkv, os, torch; print('TRITON_INTERPRET' in os.environ, torch.cuda.is_initialized())", gpu=True
    )
    assert output.split() == ["False", "False"]


def test_tests_run_on_the_machine_that_they_say(device):
    assert device.type == ("cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu")
