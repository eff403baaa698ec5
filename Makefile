# `make help` lists what there is. The work is done by setup.py, CMake and the scripts in tools/.
#
#   TORCH=debian   use Debian's torch 1.13.1 and .venv-debian instead of torch 2.13 and .venv
#   PYTHON=        the interpreter to make .venv from
#   TORCH_INDEX=   a package index to take torch from
#   ARGS=          further options of the demo, or of bench, bench-hosts and bench-end-to-end
#   RANKS=         processes of the demo

TORCH ?= pypi
RANKS ?= 2
ARGS ?=

export TORCH
ifdef PYTHON
export PYTHON
endif
ifdef TORCH_INDEX
export TORCH_INDEX
endif

environment := $(if $(filter debian,$(TORCH)),.venv-debian,.venv)
python := $(environment)/bin/python

.PHONY: help setup demo check test drill bench bench-hosts bench-end-to-end wheels test-wheel \
  docs release lint format clean
.DEFAULT_GOAL := help

help:
	@echo "make setup    packages, $(environment) and the editable install"
	@echo "make demo     train on digits under torchrun, time it beside gloo (RANKS=2 ARGS=...)"
	@echo "make check    the quick loop: build, core tests, each collective on two ranks"
	@echo "make test     everything, on torch 2.13 and then on Debian's torch"
	@echo "make drill    the long form: all kill counts, mutations, soak"
	@echo "make bench    all-reduces and messages on this host, beside gloo, MPIs and others (ARGS=...)"
	@echo "make bench-hosts  collectives between hosts, beside gloo and three MPIs (ARGS=...)"
	@echo "make bench-end-to-end  decodes, training steps, checkpoints, beside gloo (ARGS=...)"
	@echo "make wheels   a wheel for this Python and several torches, in dist/ (ARGS=...)"
	@echo "make test-wheel   installs the wheel of dist/ in an empty environment, and uses it"
	@echo "make docs     the pages as a site with an API reference, in build/docs/site"
	@echo "make release  tags the version that CHANGELOG.md begins with"
	@echo "make lint     formatting and lint (make format: apply the formatting)"
	@echo "make clean    remove what was built; the environments stay"
	@echo "TORCH=debian  with any of them: Debian's torch 1.13.1 instead of 2.13"

setup:
	@tools/setup

# Debian's torchrun on Python 3.11 stumbles over its own defaults of these two; what they name here,
# a tenth rank's output going nowhere special, is the default too.
launcher_options := $(if $(filter debian,$(TORCH)),--redirects 9:0 --tee 9:0)

# torchrun gives each rank one OpenMP thread and says so at length; setting it says it shorter.
demo: setup
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(python) -m torch.distributed.run --standalone \
	  --nproc_per_node=$(RANKS) $(launcher_options) -m deepspeed_comm.demo $(ARGS)

check: setup
	@tools/run_stages check

test: setup
	@tools/run_stages test

drill: setup
	@tools/run_stages drill

bench: setup
	@$(python) -m benchmarks.one_host $(ARGS)

bench-hosts: setup
	@$(python) -m benchmarks.hosts $(ARGS)

# 77: no package index was reached. What needs DeepSpeed is left out then, and says so.
bench-end-to-end: setup
	@status=0; python=.venv-clients/bin/python; \
	PYTHON=$(python) tests/clients/setup || status=$$?; \
	if [ $$status -eq 77 ]; then python=$(python); elif [ $$status -ne 0 ]; then exit $$status; fi; \
	$$python benchmarks/end_to_end $(ARGS)

# For every torch whose headers can be fetched; ARGS="--torches 2.13" and the like change that.
wheels: setup
	@$(python) tools/wheels $(ARGS)

test-wheel: setup
	@WHEEL=$$(ls -t dist/*.whl | head -n 1) $(python) -m pytest -q tests/packaging/test_wheel.py $(ARGS)

docs:
	@tools/docs

release:
	@tools/release

lint:
	@tools/lint

format:
	@tools/lint --fix

clean:
	rm -rf build dist deepspeed_comm.egg-info deepspeed_comm/_native .pytest_cache .hypothesis \
	  .ruff_cache
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
