# Two commands set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= $(shell scripts/python 3.11)
VENV := .venv
BIN := $(VENV)/bin
DIR ?= .

.PHONY: help demo test quick lint types unit pythons wheel storm bench clean

help:            ## this list
	@grep -E '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

demo: $(VENV)/ready      ## run the main job on real input: one job per file of DIR, embedded LMDB
	$(BIN)/tidemill demo "$(patsubst ~%,$(HOME)%,$(DIR))"

test: lint types unit pythons wheel  ## everything CI runs

quick: $(VENV)/dev lint  ## the fast part of the tests, under a minute
	@scripts/servers
	TIDEMILL_EXAMPLES=10 $(BIN)/pytest -n 2 -m "not slow" tests/unit tests/conformance

lint: $(VENV)/dev        ## style
	$(BIN)/ruff check .

types: $(VENV)/dev       ## mypy strict and pyright
	$(BIN)/mypy
	$(BIN)/pyright

unit: $(VENV)/dev        ## all tests on this Python
	@scripts/servers
	$(BIN)/pytest -n 2 --dist worksteal

pythons: $(VENV)/dev     ## the fast tests on the other Pythons that are installed
	scripts/other-pythons 3.12 3.13

wheel: $(VENV)/dev       ## the wheel, installed into a clean environment, runs the demo
	scripts/try-wheel

storm: $(VENV)/dev       ## random kills at full size; SEED, KILLS and BROKER may be given
	$(BIN)/python -m tests.faults.storm --kills $(or $(KILLS),200) $(if $(SEED),--seed $(SEED)) $(if $(BROKER),--broker $(BROKER))

bench: $(VENV)/dev       ## tidemill beside its peers, one table; ARGS go to benchmarks/run.py
	$(BIN)/python benchmarks/run.py $(ARGS)

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable .
	@touch $@

$(VENV)/dev: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@ $(VENV)/ready

clean:           ## remove what was made here
	rm -rf $(VENV) dist build .tidemill .hypothesis .make
