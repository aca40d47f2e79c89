# Everything runs in a virtual environment of its own that the first target makes.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# Tests at once; 0 for one after the other. Most wait for processes of their own most of the time.
JOBS   ?= 2
TOGETHER := --numprocesses $(JOBS) --dist loadgroup

.PHONY: demo test test-all check bench docs clean

demo: $(READY)
	$(BIN)/paceline demo

test: $(READY) check
	$(BIN)/pytest -m "not slow" $(TOGETHER)

# With what some examples and the site need; without, their tests are skipped.
test-all: $(READY) check $(VENV)/.docs $(VENV)/.examples
	$(BIN)/pytest $(TOGETHER)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The short set, in about five minutes; the last one needs root.
bench: $(READY)
	$(BIN)/python benchmarks/overhead.py --rounds 0.25
	$(BIN)/python benchmarks/contest.py --task digits --seconds 10
	$(BIN)/python benchmarks/links.py --rounds 1

# Into an empty folder, so that no page of before is left; -W makes a warning an error.
docs: $(VENV)/.docs
	rm -rf site
	$(BIN)/sphinx-build -W --keep-going --quiet -d $(VENV)/doctrees docs site

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis runs site

# The constraints pin every version; the build tools are installed first, so that no build reaches for others.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt hatchling editables torch
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e ".[dev]"
	touch $@

$(VENV)/.docs $(VENV)/.examples: $(VENV)/.%: $(READY)
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e ".[$*]"
	touch $@

# An environment for each peer of the contest: what they depend on never enters ours.
.PHONY: peers
peers: $(patsubst benchmarks/peers/%.txt,.peers/%/.ready,$(wildcard benchmarks/peers/*.txt))

.peers/%/.ready: benchmarks/peers/%.txt
	$(PYTHON) -m venv --clear .peers/$*
	.peers/$*/bin/pip install --quiet -r $<
	touch $@
