# Every target makes its own .venv (again when pyproject.toml changes); only Python >= 3.12 and make are needed.
# PYTHON=/path/to/python3.12 picks the interpreter; JOBS=N sets how many tests run at once.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory --no-builtin-rules

PY := .venv/bin/python
JOBS ?= 2
PACKAGES := slora_jax pallas_kernels sharding server
CODE := $(PACKAGES) tests $(wildcard benchmarks examples)
# The type checker sees the packages as they are imported; its messages name the files as they lie here.
LINKED := s,build/links/slora_jax/\(pallas_kernels\|sharding\|server\)/,\1/,;s,build/links/,,

.PHONY: help demo test test-slow soak test-aot test-gpu check lint types format packaging bench-cpu bench-gpu clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.* ## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

demo: .venv/ready ## SmolLM2 with the adapters of examples/, one mixed batch, streamed to this terminal
	@$(PY) -m slora_jax.cli.main demo $(ARGS)

test: .venv/ready ## the tests (ARGS="-k NAME -x" are passed on)
	@echo "test: pytest on $(JOBS) processes"
	@$(PY) -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder --ignore tests/test_packaging.py $(ARGS)

test-slow: .venv/ready ## the tests marked slow: longer runs, more seeds
	@$(PY) -m pytest -q -m slow $(ARGS)

soak: .venv/ready ## an hour of simulated traffic that must leave nothing behind (ARGS="--minutes 5")
	@$(PY) -m benchmarks.soak $(ARGS)

test-aot: .venv-aot/ready ## GPU kernels compiled for an H200 (no GPU needed, but a ptxas on PATH)
	@JAX_PLATFORMS=cpu .venv-aot/bin/python -m pytest -q -m aot --timeout 1200 tests/kernels $(ARGS)

check: lint types packaging ## formatting, lint rules, types, import rules, the wheel in a clean environment

lint: .venv/ready
	@echo "check: ruff"
	@$(PY) -m ruff check -q --output-format concise $(CODE)
	@$(PY) -m ruff format -q --check $(CODE) || { echo "format these files with: make format"; exit 1; }

types: .venv/ready
	@echo "check: mypy --strict"
	@$(PY) .ci/link_tree.py
	@$(PY) -m mypy --no-error-summary build/links/slora_jax $(filter-out $(PACKAGES),$(CODE)) | sed '$(LINKED)'

packaging: .venv/ready
	@echo "check: import rules, the wheel"
	@$(PY) -m pytest -q --no-header tests/test_imports.py tests/test_packaging.py

format: .venv/ready ## rewrite the code as the formatter and the fixable lint rules want it
	@$(PY) -m ruff check -q --fix $(CODE); $(PY) -m ruff format -q $(CODE)

bench-cpu: .venv/ready .venv-peft/ready ## output tokens/s and memory against Hugging Face PEFT, both on this CPU
	@$(PY) -m benchmarks.bench_cpu --peft-python .venv-peft/bin/python $(ARGS)

test-gpu: .venv-gpu/ready ## GPU kernels against plain JAX in float32, on this machine's Hopper GPU
	@JAX_PLATFORMS=cuda .venv-gpu/bin/python -m pytest -q -m gpu tests/kernels $(ARGS)

bench-gpu: $(if $(ARGS),.venv-gpu,.venv)/ready ## what is published of one H200: lists its parts (ARGS="kernels 7b" runs these)
	@$(if $(ARGS),.venv-gpu,.venv)/bin/python -m benchmarks.suite $(ARGS)

clean: ## remove what make made: environments, caches, build
	@rm -rf .venv .venv-peft .venv-aot .venv-gpu build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache

.venv/ready: pyproject.toml .ci/make-venv
	@.ci/make-venv .venv

.venv-aot/ready: pyproject.toml .ci/make-venv
	@.ci/make-venv .venv-aot

.venv-gpu/ready: pyproject.toml .ci/make-venv
	@.ci/make-venv .venv-gpu

.venv-peft/ready: pyproject.toml .ci/make-venv
	@.ci/make-venv .venv-peft
