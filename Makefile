# `make demo` and `make test` are all a newcomer needs: both build .venv first.
SHELL := /bin/bash
VENV := .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin
export PYTHONPATH := $(CURDIR)
export RAY_USAGE_STATS_ENABLED := 0
export TOKENIZERS_PARALLELISM := false
SEED ?= 0
BACKEND ?= fsdp
ENGINE ?= embedded
PYTEST := $(BIN)/python -m pytest

.PHONY: demo test test-full check docs install sglang-cpu clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       train a small model by reinforcement on this machine (no GPU needed)"
	@echo "make test       the tests (under 20 minutes on two cores)"
	@echo "make test-full  the slower tests"
	@echo "make check      format, lint, types, import layers"
	@echo "make docs       regenerate docs/configuration.md"
	@echo "make sglang-cpu add released SGLang, for --rollout-engine sglang without a GPU"

$(STAMP): pyproject.toml constraints.txt scripts/bootstrap.sh
	@scripts/bootstrap.sh $(VENV)
	@touch $(STAMP)

install: $(STAMP)

SGLANG_STAMP := $(VENV)/.sglang-cpu

$(SGLANG_STAMP): $(STAMP) constraints-sglang-cpu.txt scripts/install_sglang_cpu.sh
	@scripts/install_sglang_cpu.sh $(VENV)
	@touch $(SGLANG_STAMP)

sglang-cpu: $(SGLANG_STAMP)

demo: $(STAMP) $(if $(filter sglang,$(ENGINE)),sglang-cpu)
	@$(BIN)/python scripts/run_demo_cpu.py --seed $(SEED) --train-backend $(BACKEND) \
		--rollout-engine $(ENGINE)

test: $(STAMP)
	$(PYTEST) -m "not full"

test-full: $(STAMP)
	$(PYTEST) -m full

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

docs: $(STAMP)
	$(BIN)/python -m miles.utils.arguments > docs/configuration.md

clean:
	rm -rf $(VENV) runs
