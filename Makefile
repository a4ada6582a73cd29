# `make train` and `make test` do all set-up themselves; `make help` lists the rest.

PYTHON ?= python3
VENV ?= .venv
WORKDIR ?= runs/tiny_k3
JOBS ?= 2
# Passed through to the command: make train ARGS='--set train.num_steps=20', make test ARGS='-k kda'
ARGS ?=

PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
RUN := $(VENV)/bin/python -m
ON_CPU := JAX_PLATFORMS=cpu

.PHONY: help setup runtime train test test-slow lint bench bench-kernels clean
.DELETE_ON_ERROR:

help:
	@echo 'make train      set up, train the tiny K3 on the CPU or accelerator that JAX finds, into WORKDIR'
	@echo 'make test       set up, run the default tests'
	@echo 'make test-slow  set up, run the tests that the default leaves out'
	@echo 'make bench      set up, print tokens/s on the CPU'
	@echo 'make bench-kernels  set up, print what the TPU kernels cost by the static simulator'
	@echo 'make lint       set up, check the style'
	@echo 'make setup      only make $(VENV); PYTHON and VENV choose another Python and folder'
	@echo 'make clean      remove $(VENV) and caches; runs/ stay'

setup: $(VENV)/.dev $(VENV)/.oracle $(VENV)/.aot

runtime: $(VENV)/.runtime

$(VENV)/.runtime: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'error: $(PYTHON) is missing or older than 3.11; say make PYTHON=/path/to/python' >&2; exit 1; }
	@test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV) || \
	  { echo 'error: $(PYTHON) has no working venv module (Debian: apt-get install python3-venv)' >&2; exit 1; }
	$(PIP) install -qq --upgrade pip
	$(PIP) install -qq --requirement requirements.txt
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime pyproject.toml
	$(PIP) install -qq --editable '.[dev]'
	@touch $@

# Not to be had on every platform: then the tests that need it are skipped, and say so.
$(VENV)/.oracle: $(VENV)/.dev
	@$(PIP) install -qq --editable '.[oracle]' && touch $@ || \
	  echo 'warning: no MLX here; tests marked oracle will be skipped' >&2

# libtpu, to compile for TPUs that are not there; on a TPU machine its own stays.
$(VENV)/.aot: $(VENV)/.dev
	@$(VENV)/bin/python -c 'import libtpu' 2>/dev/null || $(PIP) install -qq --editable '.[aot]' || \
	  echo 'warning: no libtpu here; tests marked aot will be skipped' >&2
	@touch $@

train: $(VENV)/.runtime
	$(RUN) experiments.train --config=configs/tiny_k3.py --workdir=$(WORKDIR) $(ARGS)

test: setup
	$(ON_CPU) $(RUN) pytest -n $(JOBS) --dist loadfile -m 'not slow' $(ARGS)

test-slow: setup
	$(ON_CPU) $(RUN) pytest -n $(JOBS) -m slow $(ARGS)

lint: $(VENV)/.dev
	$(RUN) ruff check .
	$(RUN) ruff format --check .

bench: setup
	$(ON_CPU) $(RUN) experiments.bench $(ARGS)

bench-kernels: setup
	$(ON_CPU) $(RUN) experiments.bench_kernels $(ARGS)

clean:
	rm -rf $(VENV) .jax_cache .pytest_cache .ruff_cache .hypothesis k3jax.egg-info
	find k3jax pallas_kernels configs experiments tests -name __pycache__ -prune -exec rm -rf {} +
