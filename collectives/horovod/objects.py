"""Parameters, an optimizer's state and Python objects of one rank, or all, on every rank."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from collectives.horovod.functions import allgather, broadcast_, broadcast_async_
from collectives.horovod.handles import synchronize
from collectives.horovod.process_sets import ProcessSet, global_process_set, rank


def broadcast_parameters(params: Mapping[str, Tensor] | Iterable, root_rank: int) -> None:
    """Copy the root's tensors into every rank's: of a state_dict, of named parameters or of parameters."""
    named = sorted(params.items()) if isinstance(params, Mapping) else [*params]
    pairs = [each if isinstance(each, tuple) else (None, each) for each in named]
    handles = [broadcast_async_(tensor, root_rank, name) for name, tensor in pairs if isinstance(tensor, Tensor)]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Copy the state and options of the root's optimizer to every rank's; `model` is not read."""
    is_root = rank() == root_rank
    state = tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, optimizer.state_dict()) if is_root else None
    state = broadcast_object(state, root_rank, "optimizer")
    if not is_root:
        optimizer.load_state_dict(state)


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's object, pickled in transit, on every rank."""
    is_root = rank() == root_rank
    data = as_bytes(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    length = broadcast_(torch.tensor([len(data)]), root_rank, name and f"{name}.length", process_set)
    if not is_root:
        data = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(data, root_rank, name and f"{name}.data", process_set)
    return obj if is_root else pickle.loads(data.numpy().tobytes())


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return every rank's object, pickled in transit, by rank."""
    data = as_bytes(obj)
    lengths = allgather(torch.tensor([len(data)]), name and f"{name}.lengths", process_set)
    every = allgather(data, name and f"{name}.data", process_set)
    return [pickle.loads(part.numpy().tobytes()) for part in every.split(lengths.tolist())]


def as_bytes(obj: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
