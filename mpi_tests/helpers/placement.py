"""Emulate torch tensors on a GPU with host memory, and refuse operations that mix device and host tensors.

Results are computed, so that whole training runs can be compared.  As on a GPU, an operation on tensors of both
memories fails, except for copies and scalars, and so does NumPy's access to device tensors.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from collectives.arrays import views
from collectives.arrays.device import Device
from collectives.communicator import Communicator
from parallelism.numerics import clipping

DEVICE = torch.device("cuda", 0)
COPIES = {"aten::copy_", "aten::_to_copy", "aten::set_"}
READS = {"numpy", "__array__", "__dlpack__", "data_ptr"}


class Placement:
    """The storages that count as device memory."""

    def __init__(self) -> None:
        self.storages: dict[int, Any] = {}  # by address; the references keep host tensors from reusing it

    def put(self, x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.nbytes():
            self.storages[storage.data_ptr()] = storage
        return x

    def has(self, x: torch.Tensor) -> bool:
        return x.untyped_storage().data_ptr() in self.storages


class Names(TorchFunctionMode):
    """Torch functions that take or return devices, in Python."""

    def __init__(self, placement: Placement):
        super().__init__()
        self.placement = placement

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        x = args[0] if args and isinstance(args[0], torch.Tensor) else None
        of = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else ""
        here = x is not None and self.placement.has(x)
        if here and of in ("device", "is_cuda"):
            return DEVICE if of == "device" else True
        if here and name in READS:
            raise TypeError(f"{name} of a tensor on {DEVICE}")
        kwargs.pop("pin_memory", None)
        if name == "pin_memory":
            return x
        if x is not None and name in ("to", "cpu"):
            return self.moved(x, torch.Tensor.to, ("cpu",) if name == "cpu" else args[1:], kwargs)
        if is_device(kwargs.get("device")):
            return self.placement.put(func(*args, **{**kwargs, "device": "cpu"}))
        return func(*args, **kwargs)

    def moved(self, x: torch.Tensor, func, args, kwargs) -> torch.Tensor:
        """Return the result of `x.to`."""
        named = [arg for arg in (*args, kwargs.get("device")) if isinstance(arg, str | torch.device)]
        if not named:
            return func(x, *args, **kwargs)
        dtype = next((arg for arg in (*args, kwargs.get("dtype")) if isinstance(arg, torch.dtype)), x.dtype)
        if is_device(named[0]) == self.placement.has(x):
            return func(x, dtype, copy=kwargs.get("copy", False))
        copy = torch.empty(x.shape, dtype=dtype)
        return (self.placement.put(copy) if is_device(named[0]) else copy).copy_(x)


def is_device(name: Any) -> bool:
    return isinstance(name, str | torch.device) and str(name).startswith("cuda")


class Operations(TorchDispatchMode):
    """Refuse operations on tensors of both memories; results of device tensors are device tensors."""

    def __init__(self, placement: Placement):
        super().__init__()
        self.placement = placement

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, torch.Tensor) and x.numel()]
        here = [x for x in tensors if self.placement.has(x)]
        there = [x for x in tensors if x.dim() and not self.placement.has(x)]
        name = func._schema.name
        if here and there and name not in COPIES:
            raise AssertionError(f"{name} of tensors on {DEVICE} and on the host: {[tuple(x.shape) for x in there]}")
        result = func(*args, **(kwargs or {}))
        if here and name != "aten::copy_":
            for x in tree_leaves(result):
                if isinstance(x, torch.Tensor):
                    self.placement.put(x)
        return result


class Memory(Device):
    """Host memory whose allocations count as device memory."""

    def __init__(self, arrays: list):
        self.noted = arrays

    def empty(self, count, dtype):
        array = super().empty(count, dtype)
        self.noted.append(array)
        return array


class Generator(torch.Generator):
    """A random number generator that accepts any device."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls)


class Event:
    """An event of a device, which is over at once."""

    def __init__(self, enable_timing):
        pass

    def record(self, stream):
        self.s = time.perf_counter()

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 1e3 * (end.s - self.s)


@contextlib.contextmanager
def pretending(monkeypatch) -> Iterator[Placement]:
    """Emulate the device "cuda"; collectives treat its memory as host memory."""
    placement, arrays = Placement(), []
    memory, own_empty, own_device, to_torch = Memory(arrays), Communicator.empty, views.device, views.to_torch

    def empty(self, shape, dtype="float32", device="cpu"):
        array = own_empty(self, shape, dtype)
        if is_device(device):
            arrays.append(array)
        return array

    def seen_by_torch(array):
        tensor = to_torch(array)
        return placement.put(tensor) if any(array is one for one in arrays) else tensor

    def flat_torch(tensor):
        with torch._C.DisableTorchFunction():
            bits = tensor.detach().view(-1)
            halves = bits.dtype == torch.bfloat16
            view = bits.view(torch.uint16).numpy().view(views.BFLOAT16) if halves else bits.numpy()
        return views.host(), view

    monkeypatch.setattr(Communicator, "empty", empty)
    monkeypatch.setattr("training.parallel.run.peak_rate", lambda *job: None)  # the device has no name, and no products
    monkeypatch.setattr(views, "device", lambda name: memory if is_device(name) else own_device(name))
    monkeypatch.setattr(views, "flat_torch", flat_torch)
    monkeypatch.setattr("parallelism.buffers.arena.to_torch", seen_by_torch)
    monkeypatch.setattr("training.parallel.run.own_device", lambda name, comm: name)
    run_backward = torch.autograd._engine_run_backward

    def backward(*args, **kwargs):
        with Names(placement):  # again, as `Tensor.backward` leaves torch-function modes
            return run_backward(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "_engine_run_backward", backward)
    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(clipping, "add_on_device", clipping.add_by_torch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: 0)
    with Names(placement), Operations(placement):
        yield placement
