# Everything a fresh machine needs is Python (3.10 or newer), pip and make.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test test-slow test-minimum check format figures reference bench faults soak clean

setup: .venv/.installed

# The stamp is newer than what it was made from: a second call installs nothing.
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/patchmix demo

# One worker for each core, four at most; all tests of a file run in the same one.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

test: check
	$(PYTEST) -m "not slow"

test-slow: setup
	$(PYTEST)

# The quick tests with the lowest versions that pyproject.toml allows, in an environment of their own.
test-minimum: .venv-minimum/.installed
	OMP_NUM_THREADS=1 .venv-minimum/bin/python -m pytest -n auto --maxprocesses 4 --dist loadfile -m "not slow"

.venv-minimum/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-minimum
	grep -oE '"[A-Za-z0-9_-]+(\[[a-z]+\])?>=[0-9.]+' pyproject.toml | sed -E 's/"([^[>]+).*>=/\1==/' > .venv-minimum/constraints.txt
	.venv-minimum/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	.venv-minimum/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-minimum/constraints.txt \
		--build-constraint .venv-minimum/constraints.txt -e '.[dev,wandb]'
	touch $@

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The pictures of README and docs: make figures RUN=runs/cifar-small
figures: setup
	$(BIN)/python docs/figures.py $(RUN)

# The tables of options in docs/reference.md, from the code.
reference: setup
	$(BIN)/python docs/reference.py

# Ratios against plain baselines, each with its target: make bench, or make bench ARGS="step --quick"
bench: setup
	$(BIN)/python -m benchmarks $(ARGS)

# Harm of every kind, TIMES times each, and a table of what was lost; as root also full disks and two hosts.
TIMES ?= 3
faults: setup
	$(BIN)/python -m tests.faults $(TIMES)

# A training that is killed every two minutes must end like one that is not.
MINUTES ?= 30
soak: setup
	$(BIN)/python -m tests.faults.soak $(MINUTES)

clean:
	rm -rf .venv .venv-minimum build dist runs .mypy_cache .pytest_cache .ruff_cache
