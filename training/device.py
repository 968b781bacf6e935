"""The GPU that a rank computes on, and how exactly it multiplies float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from collectives.arrays import views
from models.report import peak_memory_mib
from parallelism.numerics.precision import HALVES

if TYPE_CHECKING:
    from collectives import Communicator


def own_device(name: str, comm: Communicator) -> str:
    """Return this rank's device and make it current in torch and CuPy; "cuda" takes a node's devices in turn.

    Raises: ValueError for a device that there isn't.
    """
    if name == "cpu":
        return name
    memory = views.device(name)  # refuses what is not there
    if not torch.cuda.is_available():
        raise ValueError(f"device {name!r}: this torch sees no CUDA device; install one built for CUDA, or use 'cpu'")
    node = comm.topology.nodes[comm.topology.node_of[comm.rank]]
    _, _, index = name.partition(":")
    number = int(index) if index else node.index(comm.rank) % torch.cuda.device_count()
    torch.cuda.set_device(number)
    memory.xp.cuda.Device(number).use()
    return f"cuda:{number}"


def memory_mib(device: str) -> float:
    """Return the peak memory of this rank in MiB: its process's, or its device's."""
    return peak_memory_mib() if device == "cpu" else torch.cuda.max_memory_allocated(device) / 2**20


def set_matrix_precision(dtype: str) -> None:
    """Allow TF32 products of float32 beside 16-bit computing; otherwise they are exact to float32.

    Source: nanoGPT, train.py, which allows TF32.
    """
    torch.set_float32_matmul_precision("high" if dtype in HALVES else "highest")
