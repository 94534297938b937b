import splitkv  # isort: skip # noqa: F401 - before anything imports triton: without a GPU it chooses the interpreter

import os
from collections.abc import Callable

import hypothesis
import interpreting
import public
import pytest
import torch
import triton

COMPILED = torch.cuda.is_available() and not triton.knobs.runtime.interpret
"""Kernels run on a GPU here, and not under Triton's interpreter."""

collect_ignore = ["fake_gpu.py"]  # replaces parts of torch and triton: for processes of their own, not for doctests

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True, max_examples=50)
hypothesis.settings.register_profile("dev", derandomize=False, deadline=None, print_blob=True, max_examples=25)
hypothesis.settings.register_profile("few", derandomize=True, deadline=None, print_blob=True, max_examples=5)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))

if public.CHOSEN:
    public.enter_in_calls(*public.CHOSEN.split(","))

if not COMPILED:
    interpreting.patch_language_once_per_launch()
    # Tensors are small here, and threads that share a core with other work wait for each other at every operation.
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needs_gpu = pytest.mark.skip(reason="needs a GPU and compiled kernels")
    needs_cpu = pytest.mark.skip(reason="docstring examples decode CPU tensors: run them with TRITON_INTERPRET=1")
    for item in items:
        if not COMPILED and item.get_closest_marker("gpu"):
            item.add_marker(needs_gpu)
        if COMPILED and isinstance(item, pytest.DoctestItem):
            item.add_marker(needs_cpu)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run here: the GPU, or without one the CPU under Triton's interpreter."""
    return torch.device("cuda" if COMPILED else "cpu")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def record_ratios(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Keeps errors as shares of the error budget: `record_ratios(dtype, out, lse)`; the worst are shown at the end."""

    def record(dtype: torch.dtype, *ratios: float) -> None:
        for name, ratio in zip(("out", "lse"), ratios, strict=False):
            record_property(f"error ratio {name} {str(dtype).removeprefix('torch.')}", ratio)

    return record


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    worst: dict[str, tuple[float, str]] = {}
    for report in [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]:
        for name, value in report.user_properties:
            if name.startswith("error ratio ") and not value <= worst.get(name, (-1.0, ""))[0]:
                worst[name] = (value, report.nodeid)
    if worst:
        terminalreporter.section("largest errors as shares of the error budget")
        for name, (value, where) in sorted(worst.items()):
            terminalreporter.line(f"{value:6.3f}  {name.removeprefix('error ratio '):14s}  {where}")
