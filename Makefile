# make setup   a virtual environment in .venv and the weights of the frozen networks (seconds when nothing changed);
#              everything after it works offline
# make caption captions of the sample photos: what a newcomer should see first
# make lint    ruff and mypy
# make docs    the documentation as a site in site/; broken links fail
# make test    all tests but the slow ones; sets up first if needed
# make test-all  the slow ones too
# make browser  Debian's Chromium and Firefox for the tests of the page, if they are not there
# make audit   known weaknesses of the packages that are installed, where their list can be reached
# make bench   what is claimed about speed, as ratios in one run
# make bench-compare A=COMMIT B=COMMIT  what got slower from A to B, beyond noise
# make best    the shipped model from photos with captions: DATA=folder OUT=folder; run it again to go on

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
DATA ?= ../shared/data
OUT ?= runs/best
A ?= HEAD~1
B ?= HEAD

.PHONY: help setup caption lint docs test test-all browser audit bench bench-compare best

help:
	@sed -n 's/^# //p' Makefile

setup: $(STAMP)
	@# What the shipped model needs, and what tests and text databases do. The cache may be empty when .venv is not.
	@$(VENV)/bin/haav weights fetch best minilm-l6 dinov2-vit-s14 efficientnet-lite2 yolov4-tiny >/dev/null

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

caption: setup
	$(VENV)/bin/haav caption src/haav/samples

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: setup
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

test: setup
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal

test-all: setup
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal -m "slow or not slow"

browser:
	@for browser in chromium firefox-esr; do \
		command -v $$browser >/dev/null || { \
			apt-get update -qq && apt-get install -y -qq --no-install-recommends $$browser >/dev/null; } || \
			echo "no $$browser: some tests of the page will be skipped"; \
	done

audit: setup
	$(VENV)/bin/python -m pip freeze --exclude-editable | grep -v @ > $(VENV)/audited.txt
	$(VENV)/bin/pip-audit --requirement $(VENV)/audited.txt --no-deps --disable-pip --progress-spinner off --timeout 10

bench: setup
	$(VENV)/bin/python -m benchmarks

bench-compare: setup
	$(VENV)/bin/python -m benchmarks.compare $(A) $(B)

best: setup
	HAAV=$(CURDIR)/$(VENV)/bin/haav docs/experiments/best.sh $(DATA) $(OUT)
