# Two commands do everything on a fresh machine with git, make and Python 3.11+: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest

.PHONY: demo test test-fast test-all clients lint gpu-due oldest clean

demo: .venv/.ready
	$(BIN)/python tools/demo.py

# The suite of every commit, on two cores.
test: .venv/.ready
	$(PYTEST) -n 2 --dist worksteal -m "not slow and not gpu" $(ARGS)

# What needs no torch: under 20 seconds, for the minutes between two commits.
test-fast: .venv/.ready
	$(PYTEST) -q -p tests.no_torch -n 2 --dist worksteal -m "not slow and not gpu" $(ARGS)

# Full products, fuzz, overload and soaks as well.
test-all: .venv/.ready
	-$(MAKE) clients
	$(PYTEST) -n 2 --dist worksteal -m "not gpu" $(ARGS)

# Clients that tests/clients runs against a server. Without a package index those tests are skipped.
clients: .venv/clients/.ready

.venv/clients/.ready: .venv/.ready tests/clients/requirements.txt tests/clients/package.json tools/clients.sh
	tools/clients.sh $(BIN)/python .venv/clients
	touch $@

lint: .venv/.ready
	$(BIN)/ruff check src packages tests tools
	$(BIN)/ruff format --check src packages tests tools
	$(BIN)/mypy

# Files of GPU tests that changed since a GPU last ran them. It fails nothing: CI has no GPU.
gpu-due: .venv/.ready
	$(BIN)/python -m tools.gpu_tests due

# The tests that touch each dependency, with the oldest versions that pyproject.toml allows.
oldest: .venv/.ready
	$(BIN)/python -m tools.oldest

.venv/.ready: pyproject.toml packages/lab/pyproject.toml constraints.txt tools/install.sh
	$(PYTHON) -m venv .venv
	tools/install.sh $(BIN)/python
	touch $@

clean:
	rm -rf .venv .venv-oldest build dist src/*.egg-info packages/lab/src/*.egg-info packages/lab/build .pytest_cache .hypothesis .ruff_cache .mypy_cache
