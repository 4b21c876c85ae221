# Everything a person or CI does with this repository. `make help` lists the targets.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup check test format

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

help:  ## this list
	@grep -hE '^[a-z][a-z-]*:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(VENV)/.ready  ## the development environment in .venv
$(VENV)/.ready: pyproject.toml constraints.txt
	@scripts/setup-venv $(VENV) constraints.txt
	@touch $@

format: setup  ## rewrite the code in the project's style
	$(BIN)/ruff check --fix -q . ; $(BIN)/ruff format -q .

check: setup  ## style, types, import contracts, fast tests; under a minute
	$(BIN)/ruff check . && $(BIN)/ruff format --check -q .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/pytest -q -m "not slow and not cluster"

test: setup  ## all tests
	$(BIN)/ruff check . && $(BIN)/ruff format --check -q .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/pytest
