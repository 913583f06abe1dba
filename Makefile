# Two commands do everything on a fresh machine with git, make and Python 3.11+: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-all lint clean

demo: .venv/.ready
	$(BIN)/python tools/demo.py

# The suite of every commit: meant to stay below 25 minutes on two cores.
test: .venv/.ready
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not gpu" $(ARGS)

# Full products, fuzz, overload and soaks as well.
test-all: .venv/.ready
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu" $(ARGS)

lint: .venv/.ready
	$(BIN)/ruff check src tests tools

.venv/.ready: pyproject.toml constraints.txt tools/install.sh
	$(PYTHON) -m venv .venv
	tools/install.sh $(BIN)/python
	touch $@

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .hypothesis .ruff_cache
