# Everything a person or CI does with this repository; `make` alone lists the targets.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup demo serve format generate lint check test test-long test-neuron-versions bench programs cluster cluster-images cluster-down cluster-deps clean-cache

PYTHON ?= python3
BIN := .venv/bin
RIG := PYTHONPATH=tests $(BIN)/python -m cluster.rig
FAST := not slow and not cluster and not long
# Two test processes share the machine: each computes on one processor.
TWO := OMP_NUM_THREADS=1

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 22

setup: .venv/.ready  ## the development environment in .venv
.venv/.ready: pyproject.toml constraints.txt scripts/setup-venv
	@PYTHON=$(PYTHON) scripts/setup-venv .venv constraints.txt operator,runtime,bench,dev
	@touch $@

.venv-neuron/.ready: pyproject.toml constraints-neuron.txt scripts/setup-venv
	@PYTHON=$(PYTHON) scripts/setup-venv .venv-neuron constraints-neuron.txt runtime,bench,dev
	@touch $@

demo: setup  ## serve the demo model here, ask it one question, end
	@$(BIN)/neuron-operator local -f examples/neuronmodel-local.yaml --ask "What is neuron-serving?" --exit

serve: setup  ## the same, and stay
	@$(BIN)/neuron-operator local -f examples/neuronmodel-local.yaml --ask "What is neuron-serving?"

format: setup  ## rewrite the code in the project's style
	@$(BIN)/ruff check --fix -q . ; $(BIN)/ruff format -q .

generate: setup  ## rewrite what follows from declarations: the CRD, tables of the docs
	@$(BIN)/python scripts/generate.py

lint: setup
	@$(BIN)/ruff check -q . && $(BIN)/ruff format --check -q . && $(BIN)/mypy && $(BIN)/lint-imports --no-cache
	@$(BIN)/python scripts/generate.py --check

check: lint  ## style, types, import contracts, fast tests; two minutes
	@$(TWO) $(BIN)/pytest -q -n 2 -m "$(FAST)"

test: cluster-deps  ## all tests, the cluster included where this machine can hold it
	@$(MAKE) --no-print-directory -j 2 programs lint .venv-neuron/.ready
	@$(MAKE) --no-print-directory test-neuron-versions
	@$(TWO) $(BIN)/pytest -q -n 2 --dist loadscope -m "not long"

test-long: setup cluster-deps  ## what `make test` leaves out: 100,000 random loads, the test cluster under faults
	@NEURON_SERVING_PROPERTY_EXAMPLES=100000 $(TWO) $(BIN)/pytest -q -n 2 --dist loadscope \
	  tests/neuron_runtime/test_engine_property.py
	@$(TWO) $(BIN)/pytest -q -n 2 --dist loadscope -m long

# What those versions can change: tests that name one of the libraries or a model made with them.
VERSIONED = $(shell grep -lE "torch|transformers|tokenizers|safetensors|(chat|tiny)_model" tests/neuron_runtime/test_*.py)
test-neuron-versions: .venv-neuron/.ready  ## the tests that AWS's Neuron images can change, with the images' versions
	@$(TWO) .venv-neuron/bin/pytest -q -n 2 -m "$(FAST)" $(VERSIONED)

bench: setup  ## the figures, into bench-results/; QUICK=1 for a short look, PAGES="README.md ..." to put them there
	@PYTHONPATH=tests $(BIN)/python -m bench.suite --folder bench-results $(if $(QUICK),--quick) $(if $(PAGES),--markdown $(PAGES))

programs:  # those that tests run, from Go modules: minutes, once; a test that needs one says why there is none
	-@PYTHONPATH=tests $(PYTHON) -m cluster.rig.binaries

cluster: setup cluster-deps  ## a real cluster on this machine, fake Neuron devices; prints the KUBECONFIG
	@$(RIG) up

cluster-images: setup cluster-deps  ## build the images of Dockerfile.neuron and load them into the cluster's nodes
	@$(RIG) images

cluster-down: setup  ## end the cluster; leaves nothing behind
	@$(RIG) down

cluster-deps:  ## the Debian packages that the cluster needs
	@scripts/cluster-deps

clean-cache: setup  ## remove compiled programs, images and volumes from the cache folder
	@PYTHONPATH=tests $(BIN)/python -m cluster.rig.cache clear
