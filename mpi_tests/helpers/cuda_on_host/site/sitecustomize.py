"""Of processes with this folder in their PYTHONPATH: CuPy works on the stand-in."""

from mpi_tests.helpers.cuda_on_host.load import load_when_imported

load_when_imported()
