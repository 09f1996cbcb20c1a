# Two commands set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= $(shell scripts/python 3.11)
VENV := .venv
BIN := $(VENV)/bin
DIR ?= .
# How many tests run at a time: one per processor, so that no test waits for another.
JOBS ?= $(shell getconf _NPROCESSORS_ONLN)
PYTEST = scripts/in-memory $(BIN)/pytest -n $(JOBS)
OTHERS := 3.12 3.13
WORKER_TESTS = $(wildcard tests/e2e/test_worker_*.py)
# Where it is set each process compiles all that it imports, and the tests start a thousand.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo quick test full lint types mypy pyright servers unit pythons others wheel matrix orm storm faults abuse fuzz beanstalk clients long breaks bench screenshots site clean

help:            ## this list
	@grep -E '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

demo: $(VENV)/ready      ## run the main job on real input: one job per file of DIR, embedded LMDB
	$(BIN)/tidemill demo "$(patsubst ~%,$(HOME)%,$(DIR))"

quick: lint              ## about one minute, without servers: units, the contract on memory and LMDB, house rules
	$(PYTEST) -n $$(($(JOBS) + 1)) --tier quick tests/unit tests/simulation tests/conformance  # a few tests wait

test:            ## what CI runs, about eight minutes: quick, types, each store, one test with processes for each law and verb
	@$(MAKE) --no-print-directory -j 2 servers lint types
	$(PYTEST) --tier test

full:            ## everything, before a release or a large change: hours on two processors
	@$(MAKE) --no-print-directory -j 2 servers lint types others wheel site
	@$(MAKE) --no-print-directory unit matrix orm pythons

lint: $(VENV)/dev        ## style
	$(BIN)/ruff check .

types: mypy pyright      ## mypy strict and pyright

mypy: $(VENV)/dev
	$(BIN)/mypy

pyright: $(VENV)/dev
	$(BIN)/pyright

unit: $(VENV)/dev servers  ## all tests on this Python
	$(PYTEST)

servers:
	@scripts/servers

pythons: others          ## the fast tests on the other Pythons that are installed
	scripts/other-pythons test "$(JOBS)" $(OTHERS)

others:
	@scripts/other-pythons prepare "$(JOBS)" $(OTHERS)

wheel: $(VENV)/dev       ## the wheel in a clean environment: strict type checks of a small project, and the demo
	scripts/try-wheel

matrix: $(VENV)/dev servers  ## the tests of workers on Redis and PostgreSQL
	for broker in redis postgresql; do TIDEMILL_TEST_BROKER=$$broker $(PYTEST) $(ARGS) $(WORKER_TESTS) || exit 1; done

orm: $(VENV)/dev servers  ## the conformance suite of django:// on PostgreSQL and MariaDB, and its tests with Django 6.0
	TIDEMILL_TEST_DJANGO=1 TIDEMILL_TEST_MARIADB=1 $(PYTEST) -k "django+" tests/conformance
	scripts/try-django "$(JOBS)" 6.0

storm: $(VENV)/dev       ## random kills at full size; SEED, KILLS and BROKER may be given
	$(BIN)/python -m tests.faults.storm --kills $(or $(KILLS),200) $(if $(SEED),--seed $(SEED)) $(if $(BROKER),--broker $(BROKER))

faults: $(VENV)/dev      ## the storm with misfortunes of servers and disks, writes the table in docs/brokers/faults.md; SEED, KILLS, BROKER, ONLY, TIMES may be given
	$(BIN)/python -m tests.faults.faults --kills $(or $(KILLS),200) $(if $(SEED),--seed $(SEED)) $(if $(BROKER),--broker $(BROKER)) \
		$(if $(TIMES),--times $(TIMES)) $(if $(ONLY),--only $(ONLY),--write)

abuse: $(VENV)/dev       ## misdeeds of tasks in all pools; ARGS may be given
	TIDEMILL_ALL_POOLS=1 $(PYTEST) $(ARGS) tests/abuse

fuzz: $(VENV)/dev        ## random requests to the job server, at length; SEED and SECONDS may be given
	$(BIN)/python -m tests.faults.fuzz $(if $(SEED),--seed $(SEED)) $(if $(SECONDS),--seconds $(SECONDS))

beanstalk: $(VENV)/dev   ## our beanstalk port, at length; SEEDS, FIRST and STEPS may be given
	TIDEMILL_BEANSTALK_SEEDS=$(or $(SEEDS),50) TIDEMILL_BEANSTALK_FIRST=$(or $(FIRST),0) \
	TIDEMILL_BEANSTALK_STEPS=$(or $(STEPS),20000) \
		scripts/in-memory $(BIN)/pytest -n 2 -q tests/e2e/test_beanstalk_oracle.py

clients: $(VENV)/dev     ## test suites of clients of beanstalkd, from PyPI and npm, against our beanstalk port
	$(BIN)/python scripts/clients $(ARGS)

long: $(VENV)/dev servers  ## each crash point twenty times, a signal at each bytecode, random moves at length
	TIDEMILL_ROUNDS=20 TIDEMILL_EXAMPLES=300 $(PYTEST) \
		tests/faults/test_crash_points.py tests/conformance/test_contract_state_machine.py \
		tests/conformance/test_contract_signals.py

breaks: $(VENV)/dev servers  ## break the product in ten and more places; a test must notice each; WORDS may be given
	$(BIN)/python -m tests.breaks $(WORDS)

bench: $(VENV)/dev       ## tidemill beside its peers, one table; ARGS go to benchmarks/run.py
	$(BIN)/python benchmarks/run.py $(ARGS)

screenshots: $(VENV)/dev  ## the pictures of the README, in docs/assets, by chromium
	$(BIN)/python scripts/screenshots/take.py

site: $(VENV)/dev        ## the documentation as a site, in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

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
