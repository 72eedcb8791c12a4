# The front door. `make help` lists what there is.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DATA := data/python-stdlib
# More Hydra settings for run and submit: make run ARGS="loop.steps=50 optim.lr=3e-4"
ARGS ?=
# Length of the trainings of `make sweep`.
STEPS ?= 100

.DEFAULT_GOAL := help
.PHONY: help setup run submit sweep nccl status lab-up lab-down test test-quick chaos bench check clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.ready  ## Make .venv with the pinned versions

run: $(DATA).idx  ## Train a small Llama on this machine: 2 ranks, about three minutes
	@# 75: stopped on request, which is no failure of make's.
	$(BIN)/trierarch train --ranks 2 recipe=first_run $(ARGS) || [ $$? = 75 ]

submit: $(DATA).idx  ## The same training as a batch job, on the Slurm that is there or on this machine
	$(BIN)/trierarch submit recipe=first_run run.name=first-job job.ranks_per_node=2 $(ARGS)

sweep: $(DATA).idx  ## Six short trainings as one job array (needs a Slurm, or the lab)
	$(BIN)/trierarch sweep recipe=first_run job.ranks_per_node=2 optim.lr=1e-3,3e-3 seed=1,2,3 loop.steps=$(STEPS) $(ARGS)

nccl: $(VENV)/.ready  ## Test the network in a job and report what is slow: make nccl ARGS="nodes=16"
	$(BIN)/trierarch nccl test --wait $(ARGS)

status: $(VENV)/.ready  ## Show all runs
	$(BIN)/trierarch status

lab-up: $(VENV)/.ready  ## Start a real multi-node Slurm on this machine
	$(BIN)/trierarch lab up

lab-down: $(VENV)/.ready  ## Stop it
	$(BIN)/trierarch lab down

test: check  ## All tests but the long ones (Slurm tests are skipped where Slurm is not installed)
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not chaos"

test-quick: $(VENV)/.dev  ## The tests that need no Slurm and little time
	$(BIN)/python -m pytest -n 2 -m "not chaos and not slurm and not slow"

chaos: $(VENV)/.dev  ## Long runs: random faults, and more layouts
	$(BIN)/python -m pytest -m chaos

bench: $(VENV)/.dev $(DATA).idx  ## Measure: ratios against a peer in the same run
	for bench in tests/bench/*.py; do echo "== $$bench" && $(BIN)/python $$bench || exit 1; done

check: $(VENV)/.dev  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:  ## Remove the environment and the prepared data; runs stay
	rm -rf $(VENV) data build *.egg-info

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "trierarch needs Python 3.11 or newer: give one with make PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(DATA).idx: | $(VENV)/.ready
	$(BIN)/trierarch data prepare python-stdlib --prefix $(DATA) --train-bpe 2048
