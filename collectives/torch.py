"""Run a program written for torchrun on our collectives: `mpirun -n 4 python -m collectives.torch program.py args`.

It finds the variables that torchrun sets, and the backends "gloo", "nccl" and "mpi", and torch's default, are ours.
"""

import os
import socket
from typing import Any

from collectives import world
from collectives.algorithms.groups import Topology
from collectives.job.program import run_program

SERVED = {"gloo", "nccl", "mpi", "collectives", "undefined"}  # the last is that of who names none


def be_torchrun() -> None:
    comm = world()
    variables = rank_variables(comm.rank, comm.topology)
    os.environ |= variables
    if variables["LOCAL_WORLD_SIZE"] != "1":
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
    import torch.distributed as dist

    from collectives.torch_backend.rendezvous import address_of_first

    os.environ["MASTER_ADDR"] = address_of_first(comm.mpi)
    os.environ["MASTER_PORT"] = str(comm.mpi.bcast(free_port() if comm.rank == 0 else None))
    comm.free()
    serve_names(dist.Backend)


def rank_variables(rank: int, topology: Topology) -> dict[str, str]:
    """Return the variables by which torchrun numbers ranks and nodes.

    >>> variables = rank_variables(2, Topology((0, 0, 1)))
    >>> [variables[name] for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")]
    ['2', '0', '1', '1']
    """
    node, size = topology.node_of[rank], len(topology.node_of)
    local_ranks = topology.nodes[node]
    variables = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_ranks.index(rank),
        "LOCAL_WORLD_SIZE": len(local_ranks),
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": len(topology.nodes),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": "mpi",
    }
    return {name: str(value) for name, value in variables.items()}


def free_port() -> int:
    """Return a port that no other process gets while this one runs, and on which torch's store can listen."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    port: int = holder.getsockname()[1]
    holder.detach()  # open until the process ends
    return port


def serve_names(backends: Any) -> None:
    """Have torch read the names of its own backends as ours, alone or by device, as in "cpu:gloo,cuda:nccl"."""
    import collectives.torch_backend  # noqa: F401  registers ours

    by_name = backends.__new__

    def served(cls: type, name: Any) -> str:
        names = {word.rpartition(":")[2] for word in str(name).lower().split(",")}
        return "collectives" if names <= SERVED else by_name(cls, name)

    backends.__new__ = served


if __name__ == "__main__":
    run_program("collectives.torch", be_torchrun)
