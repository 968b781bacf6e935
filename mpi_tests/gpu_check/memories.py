"""Kinds of device memory that collectives accept, and copies between them and the host."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np

import collectives
from collectives.arrays import views
from collectives.arrays.device import Device

Put = Callable[[np.ndarray], Any]


def kinds(comm: collectives.Communicator, device: str) -> Mapping[str, Put]:
    """Return the kinds of memory: the device's own arrays, torch's if it is installed, and symmetric ones."""
    memory = views.device(device)

    def own(values: np.ndarray) -> Any:
        return filled(memory, memory.empty(values.size, values.dtype), values)

    def symmetric(values: np.ndarray) -> Any:
        return filled(memory, comm.empty(values.size, values.dtype, device), values)

    torchs = {"torch": lambda values: torch_tensor(values).to(device)} if knows(device) else {}
    return {"own": own, "symmetric": symmetric, **torchs}


def knows(device: str) -> bool:
    """Return whether torch is installed and has arrays on the device."""
    if find_spec("torch") is None:
        return False
    import torch

    return device == "cpu" or torch.cuda.is_available()


def filled(memory: Device, array: Any, values: np.ndarray) -> Any:
    memory.begin()
    memory.copy(array, values)
    memory.end(memory.record())
    memory.synchronize()
    return array


def torch_tensor(values: np.ndarray) -> Any:
    return views.to_torch(values.copy())


def fetched(x: Any) -> np.ndarray | None:
    """Return a copy on the host."""
    if x is None:
        return None
    if "torch" in sys.modules and isinstance(x, sys.modules["torch"].Tensor):
        return views.flat(x.cpu())[1].copy()
    memory, view = views.flat(x)
    host = np.empty(len(view), view.dtype)
    memory.begin()
    memory.copy(host, view)
    memory.synchronize()
    return host
