"""A default group of torch.distributed for tests, and the inputs of its ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

# Never freed: a gloo thread that dropped the last reference would join itself, which aborts.
GLOO: list[dist.ProcessGroup] = []


@contextmanager
def world(mpi_comm, backend: str = "collectives") -> Iterator[None]:
    """Make a default group of the test's ranks within a `with` block."""
    from collectives.torch_backend import create_store

    store = create_store(mpi_comm)
    dist.init_process_group(
        backend, store=store, rank=mpi_comm.rank, world_size=mpi_comm.size, timeout=timedelta(seconds=60)
    )
    if backend == "gloo":
        GLOO.append(dist.group.WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()


def of(rank: int, count: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a rank's input."""
    return (torch.arange(count) % 5 + rank).to(dtype)
