"""Predicts collectives on networks of any size, without MPI: `python -m collectives.simulate --help`."""
