# Everything runs in a virtual environment of its own that the first target makes.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test test-all check bench clean

demo: $(READY)
	$(BIN)/paceline demo

test: $(READY) check
	$(BIN)/pytest -m "not slow"

test-all: $(READY) check
	$(BIN)/pytest

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python benchmarks/overhead.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis runs

# The constraints pin every version; the build tools are installed first, so that no build reaches for others.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt hatchling editables torch
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e ".[dev]"
	touch $@
