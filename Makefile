# Every target sets up what it needs. PYTHON names the interpreter (tested: 3.11), VENV the environment's folder.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: demo test test-slow test-gpu bench lint clean

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(VENV)/.ready  ## every table and figure at demo scale, from documents to the page, on two CPU cores
	pytest -q bench/
	maelm runs runs/suite/demo/runs/demo runs/suite/demo/runs/demo-roberta
	maelm report --scale demo

test: $(VENV)/.ready  ## the fast suite, two tests at a time; with MAELM_DATA naming a folder of real data, that too
	pytest -q -n 2 --dist loadfile

test-slow: $(VENV)/.ready
	pytest -q -m slow

test-gpu: $(VENV)/.ready
	pytest -q -m gpu

bench: $(VENV)/.ready  ## training and fine-tuning speed against Hugging Face, and the way in
	pytest -q -s bench/ -m throughput

lint: $(VENV)/.ready
	ruff check .
	ruff format --check .
	mypy maelm_composer

clean:  ## the environment, what the demo made, and caches
	rm -rf $(VENV) data/demo runs/suite/demo results/demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
