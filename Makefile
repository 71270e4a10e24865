.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT := out
CASES ?= 200
SEED ?= 0
STEPS ?= 300
# The versions of other packages: those that were tested, or with LATEST=1 the newest ones.
PIP_INSTALL := install --quiet --disable-pip-version-check $(if $(LATEST),,--constraint constraints.txt)

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /|/' | column -t -s '|'

setup: $(VENV)/.ready ## make .venv and install everything into it
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip $(PIP_INSTALL) --editable ".[dev]"
	touch $@

# Numba compiles the loops of the planners when they first run, and keeps them beside the sources.
$(VENV)/.compiled: $(VENV)/.ready
	$(BIN)/penstock plan --ranks 2 --microbatches 4 --memory 1.5 >/dev/null
	$(BIN)/penstock paths examples/cluster.toml --parts 2 --microbatches 2 --forward 0.05 --message 4e6 --gradients 1e6 --iterations 100 >/dev/null
	touch $@

demo: setup ## train a small Llama on four workers; the report, checkpoint and sample are in runs/
	$(BIN)/penstock train

figures: setup ## plan, simulate and draw schedules; the figures are in out/
	mkdir -p $(OUT)
	$(BIN)/penstock plan --ranks 4 --microbatches 8 --comm 0.05 --memory 4 --top 8 --output $(OUT)/plan.json
	$(BIN)/penstock check $(OUT)/plan.json --run
	$(BIN)/penstock simulate $(OUT)/plan.json --comm 0.05
	$(BIN)/penstock draw $(OUT)/plan.json --comm 0.05
	$(BIN)/penstock draw $(OUT)/plan.json --comm 0.05 --output $(OUT)/plan.svg
	$(BIN)/penstock draw $(OUT)/plan.json --comm 0.05 --output $(OUT)/plan.trace.json
	$(BIN)/penstock draw 1f1b --ranks 4 --microbatches 8 --output $(OUT)/1f1b.json
	$(BIN)/penstock compare $(OUT)/1f1b.json $(OUT)/plan.json --comm 0.05 --output $(OUT)/compare.html
	@echo "open $(OUT)/compare.html in a browser: 1F1B over the plan"

# Let Python keep its bytecode, or every process compiles all files anew.
test: export PYTHONDONTWRITEBYTECODE :=
# Many tests wait, for processes or for emulated links, so that four workers keep two cores busy.
test: setup $(VENV)/.compiled ## run all tests
	$(BIN)/pytest --workers 4

# torchtitan, Ray, peft and datasets are extras of ours. The other frameworks are only read, so they come without what
# they need to train.
INTEGRATIONS := build/integrations
FRAMEWORKS := megatron-core==0.16.1 deepspeed==0.19.8 nemo-automodel==0.7.0 \
	kubeflow-trainer-api==2.3.0 hjson py-cpuinfo ninja msgpack einops pydantic pydantic-core annotated-types typing-inspection
INTEGRATION_TESTS := tests/titan tests/advice tests/peers tests/docs/test_engines.py tests/train/test_ray.py tests/train/test_lora.py \
	tests/train/test_datasets.py tests/train/test_history.py

test-integrations: $(INTEGRATIONS)/.ready ## test with torchtitan, Ray, peft and others, in an environment of their own
	$(INTEGRATIONS)/bin/pytest --no-skips $(INTEGRATION_TESTS)
$(INTEGRATIONS)/.ready: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/pip $(PIP_INSTALL) --editable ".[dev,datasets,lora,ray,titan]" wandb
	$(INTEGRATIONS)/bin/pip install --quiet --disable-pip-version-check --no-deps $(FRAMEWORKS)
	touch $@

fuzz: setup ## compare CASES random pipelines with unsplit models: of Hugging Face, and of modules that pass several tensors
	$(BIN)/python tests/fuzz.py --cases $(CASES) --seed $(SEED)
	$(BIN)/python tests/fuzz.py --cases $(CASES) --seed $(SEED) --modules

chaos: setup ## train STEPS steps with 12 workers that are killed, stopped, slowed and cut off at random, by SEED
	$(BIN)/python tests/chaos.py --steps $(STEPS) --seed $(SEED)

check: setup ## run ruff, mypy and the test of the import graph
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest tests/test_imports.py

bench: setup ## run the benchmarks that need no quiet machine; tables go to docs/results
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/portfolio.py
	$(BIN)/python benchmarks/surprises.py
	$(BIN)/python benchmarks/documents.py
	$(BIN)/python benchmarks/paths.py
	$(BIN)/python benchmarks/slicing.py
	$(BIN)/python benchmarks/terapipe.py

docs: setup $(VENV)/.docs ## generate the pages and build the site; open build/site/index.html
	$(BIN)/python docs/build.py
	$(BIN)/python docs/measure.py --write
	$(BIN)/python docs/website.py
$(VENV)/.docs: $(VENV)/.ready
	$(BIN)/pip $(PIP_INSTALL) --editable ".[docs]"
	touch $@

clean: ## remove everything that the other targets made
	rm -rf $(VENV) $(OUT) build runs

.PHONY: help setup demo figures test test-integrations fuzz chaos check bench docs clean
