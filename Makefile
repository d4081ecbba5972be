# Two commands cover a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
# Modules are compiled when they are first imported: the demo imports few of them.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# Without bytecode, every process that a test starts would compile torch again.
export PYTHONDONTWRITEBYTECODE :=
# The suite is sized for two cores, and torch runs one thread in each worker. A third worker uses
# the time in which the others wait for disks and processes.
JOBS ?= 3

.PHONY: demo test lint typecheck imports rooms unit slow docs fuzz coverage versions clean

# The demo needs the package and its report page; development needs every extra.
$(DEMO_STAMP): pyproject.toml constraints.txt
	@echo "Creating $(VENV) and installing (first run only; torch is a large download)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e ".[report]"
	@touch $@

$(STAMP): $(DEMO_STAMP)
	$(PIP) -e ".[dev]"
	@touch $@

demo: $(DEMO_STAMP)
	$(BIN)/moemerge demo

test: lint typecheck imports unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports

# The earlier name of `imports`.
rooms: imports

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# A file's tests share what its fixtures make, so one worker runs them all.
DIST := --dist loadfile --no-loadscope-reorder
unit: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) $(DIST) -m "not slow"

# Tests of many processes, of whole trainings, or of every family: minutes on two cores.
slow: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) $(DIST) -m slow

# Hostile files of every kind, thousands of them; `make test` runs a share.
COUNT ?= 8000
SEED ?= 1
fuzz: $(STAMP)
	OMP_NUM_THREADS=1 nice $(BIN)/python -m tools.fuzz.run --count $(COUNT) --seed $(SEED)

# Branch coverage of src by the fast tests, the least covered files first; half an hour.
coverage: $(STAMP)
	$(PIP) coverage
	OMP_NUM_THREADS=1 $(BIN)/coverage run --branch --source=src/moemerge -m pytest -m "not slow"
	$(BIN)/coverage report --sort=cover

# The fast tests with the oldest supported releases and with the newest: docs/compatibility.md.
versions:
	$(PYTHON) tools/versions.py

clean:
	rm -rf $(VENV) build dist demo-output .mypy_cache .ruff_cache .pytest_cache
