"""Measure collectives, as nccl-tests does, and how near they come to what a model predicts and the machine allows.

mpirun -n 4 python -m collectives.bench all_reduce all_gather -b 1K -e 16M --peers gloo --json results.json
mpirun -n 4 python -m collectives.bench --tune tuning.json
COLLECTIVES_TUNING=tuning.json mpirun -n 4 python examples/sum.py
python -m collectives.bench --compare before.json after.json

Sizes are of the whole vector: what all_reduce, reduce_scatter and all_to_all take, what all_gather gives.  A bound is
the time in which the memory of a node could be copied as much, or the wire between nodes carry as much, at the rates
that are measured first.
"""

import sys


def main() -> int:
    if {"--compare", "--from"} & set(sys.argv):  # which need no ranks, and no MPI
        from collectives.bench import documents

        return documents.main()
    from collectives import job

    job.begin()  # ahead of what imports MPI
    from collectives.bench import run

    return run.main()


if __name__ == "__main__":
    sys.exit(main())
