# Everything a fresh machine needs is Python (3.10 or newer), pip and make.
PYTHON ?= python3
BIN := .venv/bin

# The tested versions; `make test PINS=` takes the newest ones.
PINS ?= -c constraints.txt
PIP := -m pip install --quiet --disable-pip-version-check

.PHONY: setup demo test test-slow test-minimum test-extras check format docs notebooks wheel figures reference bench \
	faults soak clean

setup: .venv/.installed

# The stamp is newer than what it was made from: a second call installs nothing.
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python $(PIP) --upgrade pip
	$(BIN)/python $(PIP) $(PINS) -e '.[dev]'
	touch $@

# What only one target needs: .venv/.docs is the extra `docs`, and so on.
.venv/.%: .venv/.installed
	$(BIN)/python $(PIP) $(PINS) -e '.[$*]'
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
	.venv-minimum/bin/python $(PIP) --upgrade pip
	.venv-minimum/bin/python $(PIP) -c .venv-minimum/constraints.txt \
		--build-constraint .venv-minimum/constraints.txt -e '.[dev]'
	touch $@

# Trackers and transformers, the real ones, offline; in an environment of their own, because their pins differ.
test-extras: .venv-extras/.installed
	OMP_NUM_THREADS=1 .venv-extras/bin/python -m pytest tests/train/test_trackers.py tests/interop/test_share.py \
		tests/data/test_python.py

.venv-extras/.installed: pyproject.toml .venv/.release
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-extras
	$(BIN)/uv pip install --quiet --python .venv-extras/bin/python -e '.[extras]'
	touch $@

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/hadolint Dockerfile

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The site, in build/site; an unknown link or a broken page is an error.
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Runs the notebooks; ARGS=--write keeps their outputs.
notebooks: .venv/.notebooks
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python docs/notebooks.py $(ARGS)

# The package as users get it: built, checked, installed into an empty environment, and run from there.
wheel: .venv/.release
	rm -rf dist build/wheel
	$(BIN)/python -m build --installer uv --outdir dist
	$(BIN)/twine check --strict dist/*
	$(BIN)/uv venv --quiet --python $(BIN)/python build/wheel
	$(BIN)/uv pip install --quiet --python build/wheel/bin/python $(PINS) dist/*.whl
	build/wheel/bin/patchmix demo --budget 20s --out build/wheel/demo
	$(BIN)/uvx --quiet --python $(BIN)/python $(PINS) --from dist/*.whl patchmix-ssl --version

# The pictures of README and docs: make figures RUN=runs/fast PHOTOS=clothing
figures: setup
	$(BIN)/python docs/figures.py $(RUN) $(PHOTOS)

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
	rm -rf .venv .venv-minimum .venv-extras build dist runs .mypy_cache .pytest_cache .ruff_cache
