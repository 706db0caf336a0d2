# Every target sets up what it needs. PYTHON names the interpreter (tested: 3.11), VENV the environment's folder.
# STACK names the versions (docs/versions.md): default, latest, or own for those of PYTHON's torch and transformers.
PYTHON ?= python3
STACK ?= default
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check
ifeq ($(STACK),default)
VENV ?= .venv
LOCK := constraints.txt
INSTALL = $(PIP) -c $(LOCK) -e '.[dev,docs]'
else ifeq ($(STACK),latest)
VENV ?= .venv-latest
LOCK := constraints-latest.txt
INSTALL = $(PIP) --no-deps -r $(LOCK) && $(PIP) --no-deps -e .
else ifeq ($(STACK),own)
VENV ?= .venv-own
LOCK := constraints-latest.txt
# The environment sees PYTHON's packages, its own first, and gets those of the lock that are not there.
INSTALL = $(PYTHON) -c "$(LIST_PACKAGES)" > $$($(BIN)/python -c "import site; print(site.getsitepackages()[0])")/own.pth \
	&& $(BIN)/python -m maelm_composer.versions $(LOCK) > $(VENV)/missing.txt \
	&& $(PIP) --no-deps -r $(VENV)/missing.txt && $(PIP) --no-deps -e .
LIST_PACKAGES = import sys; [print(f'import site; site.addsitedir({p!r})') for p in sys.path if p.endswith('-packages')]
else
$(error STACK=$(STACK) is unknown: default, latest or own)
endif
BIN := $(VENV)/bin
# The interpreter that the caller's PATH has: below, the environment's own comes first.
override PYTHON := $(or $(shell command -v $(PYTHON) 2>/dev/null),$(PYTHON))
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: demo test test-ranks test-slow test-gpu bench docs lint clean

$(VENV)/.ready: pyproject.toml $(LOCK)
	case "$(PYTHON)" in "$(abspath $(BIN))"/*) ;; *) rm -f $(BIN)/python* ;; esac  # venv would keep another interpreter
	$(PYTHON) -m venv $(VENV)
	$(INSTALL)
	touch $@

demo: $(VENV)/.ready  ## every table and figure at demo scale, from documents to the page, on two CPU cores
	python -m pytest -q bench/
	maelm runs runs/suite/demo/runs/demo runs/suite/demo/runs/demo-roberta
	maelm report --scale demo

test: $(VENV)/.ready  ## the fast suite, two tests at a time; with MAELM_DATA naming a folder of real data, that too
	python -m pytest -q -n 2 --dist worksteal

test-ranks: $(VENV)/.ready  ## the slow tests of two ranks under the launcher and of sharded checkpoints
	python -m pytest -q -m slow -k "two_ranks or bad_input or sharded" $(addprefix tests/training/test_,processes.py checkpoints.py object_storage.py)

test-slow: $(VENV)/.ready
	python -m pytest -q -m slow

test-gpu: $(VENV)/.ready
	python -m pytest -q -m gpu

bench: $(VENV)/.ready  ## training and fine-tuning speed against Hugging Face, and that of the data's path to the model
	python -m pytest -q -s bench/ -m throughput

docs: $(VENV)/.ready  ## the documentation as a site, in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 python -m mkdocs build --strict

lint: $(VENV)/.ready docs
	python -m ruff check .
	python -m ruff format --check .
	python -m mypy maelm_composer

clean:  ## the environment, the site, what the demo made, and caches
	rm -rf $(VENV) build data/demo runs/suite/demo results/demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
