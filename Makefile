# All targets need only Python 3.11 to 3.13 and a network: `make test`, `make demo`.

# A candidate must run (version managers leave shims that do not), be in range and be able to create a venv.
PROBE   := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON  ?= $(shell for p in python3.12 python3.11 python3.13 python3; do $$p -c '$(PROBE)' >/dev/null 2>&1 && echo $$p && break; done)
TORCH   ?= torch==2.13.0
# More than cores: every second test waits for a disk, a signal or a deadline.
WORKERS ?= 3
ARGS    ?=
MODULE  ?= benchmarks.save

# Without bytecode every process compiles all of ours again, and pytest rewrites every test.
unexport PYTHONDONTWRITEBYTECODE

VENV    := .venv
BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help setup demo test check ruff mypy pyright lint-imports docs exactness bench versions release clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.installed  ## Create .venv and install everything (TORCH=torch==… chooses torch)

$(VENV)/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 to 3.13 (with venv) is needed: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(BIN)/python -c '' 2>/dev/null || { echo "Creating $(VENV) with $(PYTHON)"; "$(PYTHON)" -m venv --clear $(VENV); }
	@echo "Installing (a few minutes the first time)"
	@$(PIP) install --upgrade "pip>=25.1"  # the first that knows groups
	@$(PIP) install "$(TORCH)"
	@$(PIP) install --editable ".[all]" --group dev
	@$(PIP) install --upgrade --no-deps --target $(VENV)/low-bit torchao bitsandbytes  # see tests/support/low_bit.py
	@$(PIP) install --upgrade --no-deps --target $(VENV)/outside/site-packages litgpt  # see tests/outside/test_outside.py
	@mkdir -p $(VENV)/azurite && cp tests/support/azurite/*.json $(VENV)/azurite
	@npm ci --silent --ignore-scripts --no-audit --no-fund --fetch-retries=0 --fetch-timeout=20000 --prefix $(VENV)/azurite || echo "Without npm the tests of Azure are skipped"
	@touch $@

demo: setup  ## Kill a training, resume it, and compare every value
	@$(BIN)/python -m examples.demo $(ARGS)

test: setup  ## Run all tests (ARGS="-m 'not slow'": only the quick ones; THOROUGH=1: every case)
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

check: ruff mypy pyright lint-imports docs  ## Check format, lint, types and layers; change nothing

ruff: setup
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .

mypy: setup
	@$(BIN)/mypy

pyright: setup
	@$(BIN)/pyright --pythonpath $(BIN)/python

lint-imports: setup
	@$(BIN)/lint-imports

docs: setup  ## Build the site in site/; a warning, such as of a dead link, is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

exactness: setup  ## Run the matrix of exact resumes and write docs/reference/exactness.md (a quarter of an hour)
	@$(BIN)/python -m tests.exactness $(ARGS)

bench: setup $(VENV)/.bench  ## Measure saves, or loads with MODULE=benchmarks.load (ARGS="--gib 2 --rounds 11 --picture out.png")
	@$(BIN)/python -m $(MODULE) $(ARGS)

$(VENV)/.bench: $(VENV)/.installed
	@$(PIP) install --group bench
	@touch $@

versions: setup  ## Run the quick tests with the oldest versions, or ARGS="newest --python python3.13"
	@$(BIN)/python -m tests.versions $(or $(ARGS),minima)

release: setup  ## Build, check and try what is to be released (ARGS=--tag: tag it)
	@$(PIP) install --group release
	@$(BIN)/python -m tests.release $(ARGS)

clean:  ## Remove the files that make and the tools created
	rm -rf $(VENV) dist build site demo-out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
