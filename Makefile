# Two commands do everything, including the set-up: `make quickstart` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Threads of the numerical libraries inside each test process.
export OMP_NUM_THREADS ?= 1

.PHONY: help install quickstart test test-full lint format clean

help:
	@echo "make quickstart  set up, then train and compare softmax and sMGK on a small ListOps"
	@echo "make test        lint, types and the tests (under 25 minutes on 2 cores, no GPU needed)"
	@echo "make test-full   the same with the slow tests"
	@echo "make lint        ruff, mypy and codespell only"

install: $(STAMP)

# uv installs in about half a minute; if it is not available, pip takes about two.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt uv \
		&& $(BIN)/python -m uv pip install --python $(BIN)/python --compile-bytecode \
			-c constraints.txt -e ".[dev,uea,entmax]" \
		|| $(BIN)/python -m pip install -q -c constraints.txt -e ".[dev,uea,entmax]"
	@touch $(STAMP)

quickstart: install
	$(BIN)/python -m lit_probattn.quickstart

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell lit_probattn datamodules profiling tests configs docs *.md

test: lint
	$(BIN)/python -m pytest -n 2 -m "not slow" --durations=10

test-full: lint
	$(BIN)/python -m pytest -n 2 --durations=20

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
