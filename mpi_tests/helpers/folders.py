"""Folders shared by the ranks of a test."""

from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


@contextmanager
def shared_folder(mpi_comm):
    """Yield a folder that only the first rank creates and removes, as concurrent removals of pytest's own conflict."""
    own = TemporaryDirectory() if mpi_comm.rank == 0 else None
    try:
        yield Path(mpi_comm.bcast(own and own.name))
        mpi_comm.barrier()
    finally:
        if own:
            own.cleanup()
