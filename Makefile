# Every target first prepares .venv, once; afterwards it starts at once. Needs Python >= 3.10 and make.
#
#   make test PYTHON=python3.12     build .venv with this Python (only when .venv does not exist yet)
#   make test-gpu PY=python         skip .venv and use the environment of this Python as it is

.DEFAULT_GOAL := help
.NOTPARALLEL:

VENV := .venv
STAMP := $(VENV)/.ready
# Test processes of the lanes that run in parallel.
JOBS ?= 2

# Without a choice of the caller's, the first of these that is recent enough builds .venv.
ifeq ($(origin PYTHON),undefined)
PYTHONS := python3 python3.11 python3.12 python3.13 python3.10
else
PYTHONS := $(PYTHON)
endif

ifeq ($(origin PY),command line)
READY :=
else
PY := $(VENV)/bin/python
READY := $(STAMP)
endif

PIP := $(VENV)/bin/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt
PYTEST := $(PY) -m pytest
COMPILED := env -u TRITON_INTERPRET
INTERPRETED := env TRITON_INTERPRET=1
LANES := lint test-cpu test-interpret test-sanitize bench-smoke

.PHONY: help setup demo recipes study docs test test-cpu test-megatron test-interpret test-sanitize test-sglang test-docs \
	test-gpu soak gpu-check bench bench-smoke kernel-report lint format clean

help: ## show this table
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(READY) ## prepare .venv: torch, triton, this package and the tools, pinned
	@echo "$(PY) is ready"

# The constraints are in force where torch is first resolved. The stamp comes last, so that an interrupted
# set-up starts again.
$(STAMP): pyproject.toml constraints.txt
	@rm -f $@
	@python=; for candidate in $(PYTHONS); do \
	    if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; \
	    then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "make: no Python >= 3.10 among: $(PYTHONS). Install one, or name it: make setup PYTHON=..." >&2; \
	    exit 1; \
	fi; \
	if ! $(VENV)/bin/python -c 'import pip' 2>/dev/null; then \
	    $$python -m venv --clear $(VENV) || { \
	        echo "make: $$python cannot create $(VENV); Debian and Ubuntu ship venv as python3-venv" >&2; \
	        exit 1; \
	    }; \
	fi; \
	echo "Preparing $(VENV) with $$($(VENV)/bin/python -V); the first time takes a few minutes."
	@$(PIP) torch "triton; platform_system == 'Linux'" setuptools
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@$(PIP) --no-deps --ignore-requires-python ttsem || \
	    echo "Note: ttsem could not be installed; test-sanitize will be skipped."
	@touch $@

DEMO_RUN := build/demo

demo: $(READY) ## p3o train --preset tiny: a small model on Megatron-Core, on the CPU, with curves
	@rm -rf $(DEMO_RUN)
	@$(PY) -m p3o_train train --preset tiny --run-dir $(DEMO_RUN)

recipes: $(READY) ## four ways to drift, P3O and GRPO each, in tiny size: one table
	@$(PY) -m examples.recipes all --size tiny --root build/recipes

study: $(READY) ## P3O beside GRPO, CISPO and PG under drift, into docs; 25 minutes on 2 cores, and goes on where it stopped
	@$(PY) -m p3o_train study --run-dir build/study --output docs

test: $(READY) ## all that needs no GPU: lint, the three CPU lanes and a smoke run of the benchmarks
	@begin=$$(date +%s); for lane in $(LANES); do \
	    printf '\n== %s ==\n' $$lane; \
	    $(MAKE) --no-print-directory $$lane || { \
	        printf '\n== FAILED in %s after %d s ==\n' $$lane $$(($$(date +%s) - begin)); exit 1; \
	    }; \
	done; printf '\n== passed in %d s: %s ==\n' $$(($$(date +%s) - begin)) '$(LANES)'

# A file stays in one process: what its tests share is computed once.
test-cpu: $(READY) ## references, gradients, compile budgets, memory and launch counts
	@$(COMPILED) $(PYTEST) tests -n $(JOBS) --dist loadfile -m "not gpu"

test-megatron: $(READY) ## a part of test-cpu: steps on Megatron-Core, and the table of how little a cut changes
	@$(COMPILED) $(PYTEST) tests/megatron -m "not gpu"

test-interpret: $(READY) ## the kernels under Triton's interpreter
	@$(INTERPRETED) $(PYTEST) tests/kernels -n $(JOBS) -m "not gpu"

# Two processes side by side, no workers: the checker replaces the launcher in the process that started it.
SANITIZE := $(COMPILED) $(PY) -m ttsem.sanitize pytest -m "not gpu and not host_only"
VOCABULARY_TESTS := $(wildcard tests/kernels/test_row_*.py tests/kernels/test_vocabulary_*.py)
TOKEN_TESTS := $(filter-out $(VOCABULARY_TESTS),$(wildcard tests/kernels/test_*.py))
test-sanitize: $(READY) ## the compiled kernels under ttsem: bounds, races, uninitialised memory
	@if $(PY) -c 'import ttsem.sanitize' 2>/dev/null; then \
	    $(SANITIZE) $(TOKEN_TESTS) & tokens=$$!; \
	    $(SANITIZE) $(VOCABULARY_TESTS); vocabulary=$$?; \
	    wait $$tokens && exit $$vocabulary; \
	else \
	    echo "test-sanitize: skipped, ttsem is not installed"; \
	fi

# The server wants an environment of its own, and on a CPU stand-ins for three packages that need CUDA.
SGLANG := build/sglang
test-sglang: $(READY) $(SGLANG)/.ready ## rollouts by a real SGLang server on the CPU; first builds its environment (3 GB)
	@P3O_SGLANG_PYTHON=$(abspath $(SGLANG)/bin/python) $(COMPILED) $(PYTEST) tests/sglang -x

$(SGLANG)/.ready: tests/sglang/requirements.txt
	@rm -f $@
	@echo "Preparing $(SGLANG); the first time takes some minutes."
	@$(PY) -m venv --clear $(SGLANG)
	@$(SGLANG)/bin/python -m pip install -qq --disable-pip-version-check -r tests/sglang/requirements.txt
	@$(SGLANG)/bin/python -m pip install -qq --disable-pip-version-check --no-deps sglang==0.5.23
	@touch $@

docs: $(READY) ## write the pages and pictures of docs again that study, bench and soak do not; 5 minutes
	@$(PY) -m docs.make.reference
	@$(PY) -m docs.make.pictures
	@$(COMPILED) $(PY) -m docs.make.numerics
	@$(COMPILED) $(PY) -m tests.megatron.partition_table
	@$(PY) -m p3o_train plot docs/data/report_runs/grpo docs/data/report_runs/p3o --smooth 10 \
	    --output docs/images/report_compare.png

test-docs: $(READY) ## run the commands of README and docs for real, shortened; five minutes
	@$(COMPILED) $(PY) -m tests.project.run_docs

soak: $(READY) ## kills, full disks, dead servers, damaged files, random input: docs/reliability.md, in 12 minutes
	@$(COMPILED) OMP_NUM_THREADS=1 $(PY) -m tests.soak.campaign

test-gpu: $(READY) ## the tests that need a CUDA device (PY=python: with your own environment)
	@$(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { \
	    echo "test-gpu: $(PY) finds no torch with a CUDA device. Run it on a GPU machine," \
	        "or name the Python that has one: make test-gpu PY=python" >&2; exit 1; \
	}
	@$(COMPILED) $(PYTEST) tests -m gpu -o addopts=-ra

bench: $(READY) ## check the speed of the CPU backends, measure, and write docs/performance.md; 7 minutes on 2 cores
	-@$(COMPILED) $(PY) -m bench.check_speed
	-@$(COMPILED) $(PY) -m bench.check_vocabulary --rounds 3
	@$(COMPILED) $(PY) -m bench.page

gpu-check: $(READY) ## on a GPU: tests, then times at real sizes into bench/results, in 10 minutes (PY=python too)
	@$(COMPILED) $(PY) -m bench.gpu_check

bench-smoke: $(READY)
	@$(COMPILED) $(PYTEST) bench --benchmark-disable

kernel-report: $(READY) ## registers, spills and memory instructions of every kernel, compiled without a GPU
	@$(COMPILED) $(PY) -m bench.kernel_report

lint: $(READY) ## ruff, mypy, import-linter and codespell
	@$(PY) -m ruff check --quiet
	@$(PY) -m ruff format --check --quiet
	@$(PY) -m mypy
	@$(PY) -c 'from importlinter.cli import lint_imports_command as run; run(["--no-logo"])'
	@$(PY) -m codespell_lib

format: $(READY) ## rewrite the Python files in the project's format
	@$(PY) -m ruff check --fix-only --quiet
	@$(PY) -m ruff format --quiet

clean: ## remove .venv, caches and build outputs
	@rm -rf $(VENV) build dist *.egg-info .benchmarks .hypothesis .import_linter_cache .mypy_cache \
	    .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
