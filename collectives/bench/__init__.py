"""Benchmark of the collectives: `mpirun -n 4 python -m collectives.bench --help`."""
