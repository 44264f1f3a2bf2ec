# `make quickstart` and `make test` also create the environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OLDEST ?= .venv-oldest
# Extras that the tests need.
EXTRAS := completion,demo,entmax,html,interop,rl,series,slurm,tensorboard,text
# Threads of the numerical libraries inside each test process.
export OMP_NUM_THREADS ?= 1
# Tests start our packages in many processes, which should not compile them again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install quickstart test test-full parts test-oldest mutants docs lint format clean

help:
	@echo "make quickstart  set up, then train and compare softmax and sMGK on a small ListOps"
	@echo "make test        lint, types and the tests (3 to 7 minutes on 2 cores, no GPU needed)"
	@echo "make test-full   all tests, the slow ones too, by folder; resumes (PARTS=\"tests/cli ...\")"
	@echo "make test-oldest the fast tests with the oldest versions that pyproject.toml declares"
	@echo "make mutants     plant small faults in IN=\"folders\" and list those that no test detects"
	@echo "make docs        the documentation as a site, build/docs/index.html, links checked"
	@echo "make lint        ruff, mypy and codespell only"

install: $(STAMP)

# uv installs in about half a minute; if it is not available, a new pip takes about two.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt uv \
		&& $(BIN)/python -m uv pip install --python $(BIN)/python --compile-bytecode \
			-c constraints.txt --group dev -e ".[$(EXTRAS)]" \
		|| { $(BIN)/python -m pip install -q --upgrade "pip>=25.1" \
			&& $(BIN)/python -m pip install -q -c constraints.txt --group dev -e ".[$(EXTRAS)]"; }
	@touch $(STAMP)

quickstart: install
	$(BIN)/python -m lit_probattn compare --task lra_listops_quickstart --seeds 0 \
		--attention softmax "smgk num_heads=4" --out runs/quickstart-report

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests/typed_calls.py
	$(BIN)/codespell lit_probattn datamodules profiling tests configs docs *.md

# The checks of `lint` run beside the tests, which leave room on two cores at both ends.
test: install
	@log=$$(mktemp); $(MAKE) --no-print-directory lint >$$log 2>&1 & lint=$$!; \
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" --durations=10; tests=$$?; \
	wait $$lint; linted=$$?; [ $$linted -eq 0 ] || cat $$log; rm -f $$log; \
	[ $$tests -eq 0 ] && [ $$linted -eq 0 ]

# Folder by folder. Safe to interrupt: a part that has passed at this revision is not run again.
PARTS ?= $(shell find tests -name "test_*.py" | cut -d/ -f1,2 | LC_ALL=C sort -u)
test-full: lint
	@revision=$$(git rev-parse HEAD)-$$(git diff HEAD | git hash-object --stdin); \
	$(MAKE) --no-print-directory --keep-going PASSED=build/test-full/$$revision parts

parts: $(PARTS:%=$(PASSED)/%.passed)

# Status 5: the libraries that all tests of a part need are not installed.
$(PASSED)/%.passed: | %
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations=3 $* || [ $$? -eq 5 ]
	@mkdir -p $(@D) && touch $@

# Every direct dependency at the first version declared, others as new as these allow.
$(OLDEST)/.installed: pyproject.toml | install
	$(BIN)/python -m uv venv -q --clear --python $(PYTHON) $(OLDEST)
	$(BIN)/python -m uv pip install --python $(OLDEST)/bin/python --compile-bytecode \
		--resolution lowest-direct --group dev -e ".[$(EXTRAS)]"
	@touch $@

test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest -W default::UserWarning -n 2 -m "not slow"

# Hours for many folders; safe to interrupt, and resumes. C is changed in its text.
IN ?= lit_probattn/attention/masks.py
SAMPLE ?= 60
SEED ?= 0
mutants: install
	$(BIN)/python -m tests.mutants $(IN) --sample $(SAMPLE) --seed $(SEED)

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install -q --upgrade "pip>=25.1"
	$(BIN)/python -m pip install -q -c constraints.txt --group docs
	@touch $@

# mkdocs, or zensical where it is installed: both read mkdocs.yml.
GENERATOR ?= mkdocs
docs: $(VENV)/.docs
	$(BIN)/python docs/site.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/$(GENERATOR) build --strict

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(OLDEST) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
