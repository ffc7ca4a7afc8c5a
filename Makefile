PYTHON ?= python3
VENV ?= .venv
ARGS ?=
STRESS ?= 20000
JOBS ?= 4
BIN := $(VENV)/bin
# Files side by side, since most tests wait for other processes; in their order, so that the long ones don't come last.
SIDE_BY_SIDE = --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder
# A test that hangs fails after ten minutes, with the stacks of its threads, and the tests after it still run.
ONE_BY_ONE := $(BIN)/python -m pytest --timeout 600
PYTEST = $(ONE_BY_ONE) $(SIDE_BY_SIDE)
EVALUATE := examples/evaluate.py
# Hundreds of processes import the package: compile it once.
unexport PYTHONDONTWRITEBYTECODE
# One thread a rank: as torchrun does it, and the same sums on 1, 2 and 3 ranks.
ranks = OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo quick test ray notebook launchers gpu simulated slurm stress torch-tests mutants coverage lint format docs captures bench bench-all release matrix clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.test ## evaluate a classifier on 1, 2 and 3 ranks
	OMP_NUM_THREADS=1 $(BIN)/python $(EVALUATE)
	$(ranks) 2 $(EVALUATE)
	$(ranks) 3 $(EVALUATE)
	@export PATH="$(abspath $(BIN)):$$PATH"; command -v mpirun >/dev/null || { echo "no mpirun here: accelerate launch starts no ranks on the CPU"; exit 0; }; \
	set -x; OMP_NUM_THREADS=1 accelerate launch --config_file examples/accelerate_cpu.yaml --main_process_port $$((20000 + $$$$ % 10000)) $(EVALUATE)

# Each process loads all tests, and these wait little. The number of random values is relative to 1200.
quick: JOBS = 2
quick: $(VENV)/.test ## run the tests that are not marked slow, on one and two ranks, three cases of each
	EASYDIST_STRESS=300 $(PYTEST) -m "not slow and not wide and not further" $(ARGS)

test: $(VENV)/.test ## run the tests, of ray, notebook, launchers and slurm a sample; ARGS="-k gather -x" goes to pytest
	$(PYTEST) -m "sample or not (ray or notebook or launchers or slurm)" $(ARGS)

ray: $(VENV)/.test ## run the tests that need a cluster of Ray
	$(PYTEST) -m ray $(ARGS)

notebook: $(VENV)/.test ## run the tests that need the kernel of a notebook
	$(PYTEST) -m notebook $(ARGS)

launchers: $(VENV)/.test ## run the tests that start launchers, or processes as they do
	$(PYTEST) -m launchers $(ARGS)

gpu: $(VENV)/.test ## run the tests that need a GPU, which may be one for all ranks, and compare with accelerate
	$(ONE_BY_ONE) tests/gpu $(ARGS)
	$(BIN)/python benchmarks/gpu.py

# In processes of its own: to torch, the device is their accelerator from then on.
simulated: JOBS = 2
simulated: $(VENV)/.test ## run those that any GPU can run on a simulated one, which c++ and ninja build in half a minute
	SIMULATED_GPU=1 $(PYTEST) tests/gpu $(ARGS)

slurm: $(VENV)/.test ## run the tests on a SLURM cluster of this machine, as root: apt-get install slurm-wlm munge
	$(ONE_BY_ONE) tests/slurm $(ARGS)

stress: $(VENV)/.test ## all cases of batteries, and many more random calls, messages and trees; STRESS=100000 calls
	EASYDIST_STRESS=1200 $(PYTEST) --timeout 0 -m "not stress" $(ARGS)
	EASYDIST_STRESS=$(STRESS) $(PYTEST) --timeout 0 -m stress $(ARGS)

torch-tests: $(VENV)/.test ## torch's own tests of process groups, on gloo and on easydist_shm; minutes
	EASYDIST_STRESS=$(STRESS) $(BIN)/python -m pytest -rP -m stress tests/torch_backend/test_torch_battery.py $(ARGS)

mutants: $(VENV)/.test ## plant faults, and see whether the tests notice them; ARGS="data verbs" for some rooms
	PYTHONPATH=tests $(BIN)/python -m mutants.planting $(ARGS)

coverage: $(VENV)/.test ## run the tests and list the lines they miss
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

lint: $(VENV)/.lint ## formatting, lint, docstrings, types, spelling, prose; changes nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/codespell easydist docs tests examples benchmarks *.md Makefile setup.cfg
	$(BIN)/proselint check docs *.md

format: $(VENV)/.lint ## format the code and fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.docs ## build build/docs and execute its examples
	$(BIN)/sphinx-build -W --keep-going -q -d build/doctrees -b html docs build/docs
	$(BIN)/sphinx-build -W --keep-going -q -d build/doctrees -b doctest docs build/doctest

captures: $(VENV)/.docs ## renew what terminals show in the docs; minutes
	$(BIN)/python docs/captures/top.py
	$(BIN)/python docs/captures/first_hour.py

bench: $(VENV)/.bench ## compare with the peers, ratios in one run, and say which bounds hold
	$(BIN)/python benchmarks/nested.py $(ARGS)
	$(BIN)/python benchmarks/message_queue.py
	$(BIN)/python benchmarks/coordinator.py
	$(BIN)/python benchmarks/metrics.py

bench-all: bench $(VENV)/.test ## the same, and what costs more time: communicators, backends, gloo alone, links, weights on Ray
	$(BIN)/python benchmarks/comms.py
	$(BIN)/python benchmarks/shm.py
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/weights.py
	$(BIN)/python benchmarks/cluster.py
	$(BIN)/python benchmarks/trace.py
	test $$(id -u) != 0 || $(BIN)/python benchmarks/links.py --seconds 1

release: $(VENV)/.release ## build wheel and sdist, and try both in empty environments; publishes nothing
	BIN=$(BIN) .ci/release

matrix: ## test the oldest and the newest torch, and other Pythons; gigabytes
	.ci/matrix

clean: ## remove what was built, not $(VENV)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov
	find easydist tests examples docs -name __pycache__ -type d -prune -exec rm -rf {} +

# $(VENV)/.test stands for the extra `test`, and so on; a stamp is renewed when the requirements change.
$(VENV)/.%: setup.cfg setup.py pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$*]'
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "easydist needs Python 3.10 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
