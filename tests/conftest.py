import splitkv  # isort: skip # noqa: F401 - before anything imports triton: without a GPU it chooses the interpreter

import os

import hypothesis
import pytest
import torch
import triton

COMPILED = torch.cuda.is_available() and not triton.knobs.runtime.interpret
"""Kernels run on a GPU here, and not under Triton's interpreter."""

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True, max_examples=50)
hypothesis.settings.register_profile("dev", derandomize=False, deadline=None, print_blob=True, max_examples=25)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # as many workers as cores: more threads would only wait for each other


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
