"""What is global in PyTorch and in the process changes no call, and no call and no import changes it."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import COMPILED
from public import state, tensors_in
from test_bad_input import CALLS, group  # noqa: F401 - a fixture
from torch import Tensor

from splitkv.testing import same_bits

NO_GLOO = pytest.mark.skipif(COMPILED, reason="a gloo group does not exchange what lies on the GPU")

STATES = [
    ("meta", "float64", "inference_mode"),
    ("cpu", "float16", "no_grad"),
    pytest.param("cuda", "bfloat16", "grad", marks=pytest.mark.gpu),
]
# One of each kernel, of each class that makes tensors, and of what reads host numbers.
SOME = [
    ("decode", "ragged"), ("decode_with_lse", "latent"), ("decode_shared_prefix", "one"), ("merge", "ragged"),
    ("append_kv", "paged"), ("move_kv", "paged"), ("supports", "several"), ("warmup", "one"),
    ("Workspace.allocate", "good"), ("Workspace.from_buffer", "good"), ("PagedKV", "int8"), ("LatentKV", "int8"),
    ("Schedule.allocate", "good"), ("Schedule.update", "good"), ("StepState.allocate", "good"),
    ("StepState.from_buffer", "good"), ("StepState.bind", "good"), ("StepState.advance", "good"),
    ("StepState.fill_input_ids", "good"), ("StepState.fill_input_ids_from_device", "good"),
    ("StepState.decode_mask", "good"), ("PagePool.admit", "good"), ("masks.validity_mask", "good"),
    ("masks.attention_mask", "good"), ("masks.ragged_mask", "good"), ("masks.position_mask", "good"),
    ("masks.pack_tree_mask", "good"), ("masks.tree_mask_from_parents", "good"),
    ("distributed.Exchange.allocate", "good"), ("distributed.round_robin_lens", "good"),
    pytest.param("distributed.decode", "one", marks=NO_GLOO),
]  # fmt: skip


UNINITIALISED = ("Workspace.allocate", "Workspace.from_buffer")


def settings() -> tuple[Any, ...]:
    """What is global in PyTorch, as far as a library may be tempted to set it."""
    return (
        torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(), torch.get_num_threads(), torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32, torch.get_rng_state().tolist(), torch.is_anomaly_enabled(),
        torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"),
    )  # fmt: skip


def good(name: str, base: str) -> dict[str, Any]:
    """The arguments of a good call, numbers at random in all that are such, the same each time."""
    arguments = CALLS[name].bases[base]()
    for value in arguments.values():
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            numbers = torch.Generator().manual_seed(value.numel())
            value.copy_(torch.randn(value.shape, generator=numbers).to(value.dtype))
    return arguments


@pytest.mark.parametrize(("name", "base"), SOME)
@pytest.mark.parametrize(("device", "dtype", "mode"), STATES)
def test_another_state_changes_no_bit(name: str, base: str, device: str, dtype: str, mode: str) -> None:
    plain = good(name, base)
    returned = CALLS[name].run(**plain)
    left = [*tensors_in(plain), *tensors_in(returned)]
    arguments = good(name, base)
    with state(device, dtype, mode):
        before = settings()
        returned = CALLS[name].run(**arguments)
        assert settings() == before
    there = [*tensors_in(arguments), *tensors_in(returned)]
    assert there or name in ("PagePool.admit", "supports", "warmup")
    for tensor, other in zip(left, there, strict=True):
        assert (tensor.dtype, tensor.device, tensor.shape) == (other.dtype, other.device, other.shape)
        assert name in UNINITIALISED or same_bits(tensor, other)


IMPORTING = """
import gc, locale, logging, os, random, signal, sys, threading, warnings
import numpy, torch
random.seed(0)

def found():
    return {
        "environment": dict(os.environ),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "tasks": len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0,
        "files": sorted(os.path.join(path, name) for path, _, names in os.walk(".") for name in names),
        "directory": os.getcwd(),
        "path": list(sys.path),
        "hooks": [sys.excepthook, sys.displayhook, sys.unraisablehook, threading.excepthook, gc.callbacks[:]],
        "signals": [signal.getsignal(number) for number in sorted(signal.valid_signals())],
        "warnings": list(warnings.filters),
        "logging": (logging.root.level, list(logging.root.handlers), logging.root.manager.disable),
        "locale": locale.setlocale(locale.LC_ALL),
        "cuda": torch.cuda.is_initialized(),
        "torch": SETTINGS,
        "random": (random.getstate(), numpy.random.get_state()[1].tolist(), numpy.geterr()),
        "printing": (repr(torch.tensor(1 / 3)), numpy.get_printoptions()["precision"]),
    }

before = found()
import splitkv
after = found()
for name, value in after.items():
    if value != before[name]:
        if isinstance(value, dict):
            value = {key: each for key, each in value.items() if before[name].get(key) != each}
        print(name, value)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_import_has_no_side_effect_but_the_choice_of_the_interpreter(tmp_path: Path) -> None:
    settings_there = inspect.getsource(settings).split("return ", 1)[1]
    script = IMPORTING.replace("SETTINGS", settings_there)
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    home = {name: str(tmp_path) for name in ("HOME", "TMPDIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME", "TRITON_HOME")}
    for variables, effect in (
        ({}, "" if torch.cuda.is_available() else "environment {'TRITON_INTERPRET': '1'}"),
        ({"TRITON_INTERPRET": "0"}, ""),
        ({"TRITON_INTERPRET": "1"}, ""),
    ):
        done = subprocess.run(
            [sys.executable, "-B", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120,
            env=kept | home | variables | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == effect and not done.stderr
        assert not list(tmp_path.iterdir())
