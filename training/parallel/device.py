"""Process and device of a rank, and the precision of float32 products."""

from __future__ import annotations

import os
import sys

import torch

import collectives
from collectives.arrays import views
from collectives.job import environment
from parallelism.numerics.precision import HALVES


def prepare_process(comm: collectives.Communicator) -> None:
    """Silence the ranks other than 0, and set the number of a rank's threads."""
    sys.stdout = open(os.devnull, "w", encoding="utf-8") if comm.rank else sys.__stdout__  # noqa: SIM115
    torch.set_num_threads(environment.threads_per_rank())


def own_device(name: str, comm: collectives.Communicator) -> str:
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


def set_matrix_precision(dtype: str) -> None:
    """Allow TF32 for float32 products if the run computes in 16 bits; otherwise they have full precision.

    Source: nanoGPT, train.py, which allows TF32.
    """
    torch.set_float32_matmul_precision("high" if dtype in HALVES else "highest")
