# Inference & Serving from Scratch. `make help` lists the targets.
# Set-up happens once, in .venv; every target brings it about by itself.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
  $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
  2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
FIRST := kv_cache
# idle OpenMP threads must sleep, not spin: two workers share two cores
export OMP_WAIT_POLICY := PASSIVE
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --durations=15

.PHONY: help setup model book book-zip book-links cards test test-all lint start bench bench-gpu \
  notebooks clean

help:
	@echo "make book       build the website into _build/html"
	@echo "make book-zip   the website as one file that reads offline"
	@echo "make book-links does every external link answer? (needs a network)"
	@echo "make test       run the test suite"
	@echo "make test-all   the same, executing every demo again"
	@echo "make start      open the first chapter in JupyterLab"
	@echo "make notebooks  authors: record every ready chapter"
	@echo "make cards      authors: draw the social cards anew (needs Chromium)"
	@echo "make lint       ruff and mypy"
	@echo "make bench      speed against named peers, as ratios"
	@echo "make bench-gpu  on a CUDA machine: time the kernels (ARGS=--quick)"
	@echo "make clean      remove what was built (not your work/)"

setup: $(VENV)/.installed model

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 is needed; none was found" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  -c constraints.txt -e '.[book,dev]'
	@touch $@

model: $(VENV)/.model

$(VENV)/.model: $(VENV)/.installed
	$(BIN)/python -m course.lm.weights
	@touch $@

book: setup
	$(BIN)/python -m course.book

book-zip: setup
	$(BIN)/python -m course.book --zip _build/inference-from-scratch.zip

book-links: setup
	$(BIN)/python -m course.book --links

cards: setup
	$(BIN)/python book/site/cards.py

test: setup
	$(PYTEST) tests

test-all: setup
	COURSE_TEST_ALL=1 $(PYTEST) tests

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check course book tests conftest.py
	$(BIN)/ruff format --check --line-length 79 kernels solutions
	$(BIN)/mypy

start: setup
	$(BIN)/course start $(FIRST)

notebooks: setup
	$(BIN)/course record --all

bench: setup
	$(BIN)/python -m course.bench

bench-gpu: $(VENV)/.installed
	$(BIN)/python -m kernels.bench $(ARGS)

clean:
	rm -rf _build .pytest_cache .mypy_cache .ruff_cache .hypothesis
