"""The collectives as a backend of torch.distributed, for programs started by mpirun or srun.

    import collectives.torch_backend

    torch.distributed.init_process_group("collectives")

Ranks, their number and how they find each other come from MPI, unless env:// or a store says otherwise.

The import neither starts MPI, as data loaders import their program, too, nor imports mpi4py.MPI: the program may do
that itself, before or after, and has MPI started then as without this package.
"""

from typing import Any

import torch.distributed as dist

from collectives.job import environment
from collectives.job.launch import start_mpi
from collectives.torch_backend.ddp import adapt_ddp
from collectives.torch_backend.rendezvous import communicator, create_store, offer_mpi

__all__ = ["create_store"]


def create_group(options: Any, backend_options: Any) -> dist.ProcessGroup:
    """Create a group on its ranks, and only there, for torch."""
    world = start_mpi().COMM_WORLD
    from collectives.torch_backend.group import Group  # imports mpi4py.MPI, which start_mpi has set up

    # Torch counts groups by rank: disjoint groups may have the same name, and the same part of the store.
    store = dist.PrefixStore(" ".join(map(str, options.global_ranks_in_group)), options.store)
    comm = communicator(world, store, options.group_rank, options.group_size, options.group_id)
    return Group(comm, store, options.timeout, options.group_id)


dist.Backend.register_backend("collectives", create_group, extended_api=True, devices=["cpu", "cuda"])
# From 2.15 on torch's flight recorder asks groups for backends, which one in Python lacks, unless told to skip it.
if passed_by := getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None):
    passed_by.add("collectives")
environment.before_mpi()
offer_mpi()
adapt_ddp()
