"""The collectives as a backend of torch.distributed, for programs started by mpirun or srun.

    import collectives.torch_backend

    torch.distributed.init_process_group("collectives")

Ranks, their number and how they find each other come from MPI, unless env:// or a store says otherwise.
"""

import torch.distributed as dist

from collectives.job.launch import import_mpi

import_mpi()  # before the modules below import mpi4py, which would start MPI

from collectives.torch_backend.ddp import adapt_ddp  # noqa: E402
from collectives.torch_backend.group import create_group  # noqa: E402
from collectives.torch_backend.rendezvous import create_store, offer_mpi  # noqa: E402

__all__ = ["create_store"]

dist.Backend.register_backend("collectives", create_group, extended_api=True, devices=["cpu", "cuda"])
# From 2.15 on torch's flight recorder asks groups for backends, which one in Python lacks, unless told to skip it.
if passed_by := getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None):
    passed_by.add("collectives")
offer_mpi()
adapt_ddp()
