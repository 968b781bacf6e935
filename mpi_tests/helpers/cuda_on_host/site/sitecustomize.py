"""Redirect CuPy to the stand-in in processes that have this folder in their PYTHONPATH."""

from mpi_tests.helpers.cuda_on_host.load import load_when_imported

load_when_imported()
