.DEFAULT_GOAL := help
PYTHON ?= python3
OUT := out
CASES ?= 200
SEED ?= 0
STEPS ?= 300
# Many tests wait, for processes or for emulated links, so that four workers keep two cores busy.
WORKERS ?= $(shell nproc 2>/dev/null | awk '{print $$1 < 8 ? 2 * $$1 : 16}' | grep . || echo 4)
# How many tests may be skipped on a machine without a GPU and without a browser, where `make setup` has installed everything.
MOST_SKIPS ?= 145

# The environment: .venv, or with TORCH=2.15 one of its own with that version of torch, or with SETUP=none the packages that
# this machine has. Packages have the versions that were tested or, with LATEST=1, the newest ones.
VENV := $(if $(TORCH),build/torch-$(TORCH),.venv)
BIN := $(VENV)/bin
PIP_INSTALL = install --quiet --disable-pip-version-check $(if $(LATEST),,--constraint $(VENV)/constraints.txt)
ifeq ($(SETUP),none)
PY := $(PYTHON)
READY :=
COMPILED :=
export PYTHONPATH := $(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := $(BIN)/python
READY := $(VENV)/.ready
COMPILED := $(VENV)/.compiled
endif
PENSTOCK := $(PY) -m penstock

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /|/' | column -t -s '|'

setup: $(READY) ## make .venv and install everything into it
$(VENV)/.ready: $(VENV)/.users pyproject.toml constraints.txt
	$(BIN)/pip $(PIP_INSTALL) --editable ".[dev]"
	touch $@

# Users need neither linters nor browsers.
$(VENV)/.users: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH).*/; /^setuptools==/d; /^triton==/d)' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/pip $(PIP_INSTALL) --editable ".[lora,tensorboard]"
	touch $@

# Numba compiles the loops of the planners when they first run, and keeps them beside the sources.
$(VENV)/.compiled: $(READY)
	$(PENSTOCK) plan --pp 2 --microbatches 4 --memory 1.5mb >/dev/null
	$(PENSTOCK) lab paths --cluster examples/cluster.toml --stages 2 --microbatches 2 --iterations 100 >/dev/null --cost F=0.05,message=4e6,gradients=1e6
	touch $@

demo: $(if $(READY),$(VENV)/.users) ## train a small Llama on four workers; the report, checkpoint and sample are in runs/
	$(PENSTOCK) train

figures: $(READY) ## plan, simulate and draw schedules; the figures are in out/
	mkdir -p $(OUT)
	$(PENSTOCK) plan --pp 4 --microbatches 8 --memory 4mb --cost comm=0.05 --top 8 --output $(OUT)/plan.json
	$(PENSTOCK) check $(OUT)/plan.json --run
	$(PENSTOCK) draw $(OUT)/plan.json --cost comm=0.05
	$(PENSTOCK) draw $(OUT)/plan.json --cost comm=0.05 --output $(OUT)/plan.svg
	$(PENSTOCK) draw $(OUT)/plan.json --cost comm=0.05 --output $(OUT)/plan.trace.json
	$(PENSTOCK) draw 1f1b --pp 4 --microbatches 8 --output $(OUT)/1f1b.json
	$(PENSTOCK) draw $(OUT)/1f1b.json $(OUT)/plan.json --cost comm=0.05 --output $(OUT)/compare.html
	@echo "open $(OUT)/compare.html in a browser: 1F1B over the plan"

# Let Python keep its bytecode, or every process compiles all files anew.
test test-gpu durations mutants: export PYTHONDONTWRITEBYTECODE :=
# Other plugins of pytest that a machine may have would warn, and warnings are errors.
test test-gpu durations: export PYTEST_DISABLE_PLUGIN_AUTOLOAD := 1
PYTEST := $(PY) -m pytest --part $(or $(PART),1/1)
SIDE_BY_SIDE = $$($(PY) -c 'import xdist' 2>/dev/null && echo "-p xdist -n $(WORKERS) --dist worksteal")
HAS_GPU = $(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'
test: $(COMPILED) ## run all tests; SETUP=none takes the packages that are installed, PART=1/3 a share of the files, TORCH=2.15 that torch
	$(PYTEST) $(SIDE_BY_SIDE) $(if $(SETUP)$(TORCH),,--most-skips $(MOST_SKIPS))
	if $(HAS_GPU); then $(MAKE) test-gpu; fi

NCCL := $(PENSTOCK) lab testbed --workers 4 --backend nccl -- $(PY) -m pytest -m gpu tests/runtime/test_nccl.py -k
test-gpu: $(COMPILED) ## run the tests that need a GPU
	$(PYTEST) -m gpu --ignore tests/runtime/test_nccl.py
	$(NCCL) "not goes_wrong_ends"
	for way in raise sleep kill; do $(NCCL) "goes_wrong_ends and $$way" || exit 1; done

durations: $(COMPILED) ## run all tests, and record how long each file takes
	$(PYTEST) $(SIDE_BY_SIDE) --record-durations

# torchtitan, Ray, peft and datasets are extras of ours. The other frameworks are only read, so they come without what
# they need to train.
INTEGRATIONS := build/integrations
FRAMEWORKS := megatron-core==0.16.1 kubeflow-trainer-api==2.3.0 pydantic pydantic-core annotated-types typing-inspection
INTEGRATION_TESTS := tests/integrations tests/docs/test_engines.py tests/train/test_lora.py tests/train/test_datasets.py \
	tests/train/test_history.py

test-integrations: $(INTEGRATIONS)/.ready ## test with torchtitan, Ray, peft and others, in an environment of their own
	$(INTEGRATIONS)/bin/pytest --most-skips 0 $(INTEGRATION_TESTS)
$(INTEGRATIONS)/.ready: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/pip install --quiet --disable-pip-version-check $(if $(LATEST),,--constraint constraints.txt) --editable ".[dev,datasets,lora,ray,titan,wandb]"
	$(INTEGRATIONS)/bin/pip install --quiet --disable-pip-version-check --no-deps $(FRAMEWORKS)
	touch $@

fuzz: $(READY) ## compare CASES random pipelines with unsplit models: of Hugging Face, and of modules of many kinds
	$(PY) tests/fuzz.py --cases $(CASES) --seed $(SEED)
	$(PY) tests/fuzz.py --cases $(CASES) --seed $(SEED) --modules

chaos: $(READY) ## train STEPS steps with 12 workers that are killed, stopped, slowed and cut off at random, by SEED
	$(PY) tests/chaos.py --steps $(STEPS) --seed $(SEED)

mutants: $(COMPILED) ## put known faults into a copy of the package, and see that the tests catch them; ONLY=verify takes some
	$(PY) tests/mutants.py --only '$(ONLY)'

check: $(READY) ## run ruff, mypy and the test of the import graph
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PY) -m pytest tests/test_imports.py

KEPT := auto gpu/compiled gpu/profiles gpu/slices gpu/transports gpu/workers
bench: $(READY) ## run the benchmarks that need no quiet machine; tables go to docs/results
	for name in $(KEPT); do $(PY) benchmarks/$$name.py --kept >/dev/null || exit 1; done
	for name in planner paths slicing papers; do $(PY) benchmarks/$$name.py || exit 1; done

docs: $(READY) $(VENV)/.docs ## generate the pages and build the site; open build/site/index.html
	$(PY) docs/build.py
	$(PY) docs/website.py
$(VENV)/.docs: $(VENV)/.ready
	$(BIN)/pip $(PIP_INSTALL) --editable ".[docs]"
	touch $@

clean: ## remove everything that the other targets made
	rm -rf $(VENV) $(OUT) build runs

.PHONY: help setup demo figures test test-gpu durations test-integrations fuzz chaos mutants check bench docs clean
