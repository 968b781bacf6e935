"""Device of a rank, its peak memory, and the precision of float32 products."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from collectives.arrays import views
from models.report import peak_memory_mib
from parallelism.numerics.precision import HALVES

if TYPE_CHECKING:
    from collectives import Communicator


def own_device(name: str, comm: Communicator) -> str:
    """Return this rank's device, and make it current in torch and CuPy; "cuda" assigns a node's devices in turn.

    Raises: ValueError for a device that does not exist.
    """
    if name == "cpu":
        return name
    memory = views.device(name)  # raises if it does not exist
    if not torch.cuda.is_available():
        raise ValueError(f"device {name!r}: this torch sees no CUDA device; install one built for CUDA, or use 'cpu'")
    node = comm.topology.nodes[comm.topology.node_of[comm.rank]]
    _, _, index = name.partition(":")
    number = int(index) if index else node.index(comm.rank) % torch.cuda.device_count()
    torch.cuda.set_device(number)
    memory.xp.cuda.Device(number).use()
    return f"cuda:{number}"


def memory_mib(device: str) -> float:
    """Return the peak memory of this rank's process, or of its device, in MiB."""
    return peak_memory_mib() if device == "cpu" else torch.cuda.max_memory_allocated(device) / 2**20


def set_matrix_precision(dtype: str) -> None:
    """Allow TF32 for float32 products if the run computes in 16 bits; otherwise they have full precision.

    Source: nanoGPT, train.py, which allows TF32.
    """
    torch.set_float32_matmul_precision("high" if dtype in HALVES else "highest")
