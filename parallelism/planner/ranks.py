"""Best layout for a running job, from a short measurement of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import collectives
from collectives.job import system
from models.model import make
from parallelism.pipeline.layer_times import now
from parallelism.planner.layout import TrainingJob
from parallelism.planner.place import SPARE, Machine
from parallelism.planner.search import PlannedLayout, best

LEAST_S = 0.1
MOST_ROWS = 4096


def best_layout(
    comm: collectives.Communicator, job: TrainingJob, fixed: Mapping[str, Any] = {}, device: str = "cpu"
) -> PlannedLayout:
    """Return the best layout for the ranks of `comm` with the `fixed` values, computed on rank 0.  Collective.

    Raises: InputError on every rank if no layout fits, or the model cannot be divided.
    """
    hardware = machine(comm, job, device)
    with comm.agreed("best_layout"):
        planned = best(job, hardware, fixed) if comm.rank == 0 else None
    return comm.broadcast_object(planned)


def machine(comm: collectives.Communicator, job: TrainingJob, device: str = "cpu") -> Machine:
    """Measure the ranks of `comm` while all compute at once; link speeds are those that `comm` uses.  Collective."""
    ranks = max(map(len, comm.topology.nodes))
    mine = np.array([flops_per_s(job, device), memory_bytes(device, ranks), -least_pass_s(job, device)])
    rate, memory, least = comm.all_reduce(mine, op="min").tolist()
    return Machine(comm.topology.nodes, comm.network, rate, memory * (1 - SPARE), -least)


def flops_per_s(job: TrainingJob, device: str = "cpu") -> float:
    """Measure the speed of matrix products of the model's block sizes, in floating-point operations per second."""
    width, rows = job.model.n_embd, job.model.block_size * max(1, MOST_ROWS // job.model.block_size)
    x = torch.ones(rows, width, dtype=getattr(torch, job.dtype), device=device)
    weight = x.new_ones(4 * width, width)
    return 2 * x.numel() * len(weight) / seconds(lambda: torch.nn.functional.linear(x, weight), device)


def least_pass_s(job: TrainingJob, device: str = "cpu") -> float:
    """Measure the time of a minimal block of the same family, which is launch overhead.

    It has as many experts, and grouped heads if the model has them.
    """
    kv = 1 if job.model.num_kv_heads < job.model.n_head else 2
    shape = replace(job.model, vocab_size=1, block_size=2, n_layer=1, n_head=2, n_embd=4, n_kv_head=kv, n_hidden=8)
    block = make(shape).transformer.h[0].to(device)
    x = torch.ones(1, shape.block_size, shape.n_embd, device=device)
    return seconds(lambda: block(x), device)


def seconds(act: Callable[[], object], device: str) -> float:
    """Return the mean seconds per call, over at least LEAST_S."""
    act()
    number, begin = 0, now(device)
    while (elapsed_s := now(device) - begin) < LEAST_S:
        act()
        number += 1
    return elapsed_s / number


def memory_bytes(device: str = "cpu", ranks: int = 1) -> float:
    """Return the bytes of a device's memory, or a rank's part of its host's free memory."""
    if device != "cpu":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return system.available_memory_bytes() / ranks
