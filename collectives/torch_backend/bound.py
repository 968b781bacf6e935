"""A call bound to memory: tensors by way of a buffer, or where they lie if they are long and stay there."""

import ctypes
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from collectives.arrays import dtype_of, to_torch
from collectives.communicator import Communicator
from collectives.plan import Plan
from collectives.torch_backend.call import Call, Tensors

STAGED_BYTES = 1 << 18  # above it a tensor that lies where the one before did is used there
DIRECT_BYTES = 1 << 24  # above it any tensor is: a buffer would take as much again
MOST_PLACES = 8  # bound of calls of one kind
IN_PLACE = ("all_reduce", "broadcast", "reduce")
Place = tuple[int, ...]


class Bound(NamedTuple):
    """A plan, and the pieces of its buffers that tensors are copied to and from."""

    plan: Plan
    number: int  # the same on all ranks
    given: Tensors
    taken: Tensors

    def run(self, call: Call, run: Callable[[Plan], Any]) -> None:
        for piece, tensor in zip(self.given, call.given, strict=False):
            piece.copy_(tensor.detach())
        run(self.plan)
        for piece, tensor in zip(self.taken, call.taken, strict=False):
            tensor.detach().copy_(piece)


def kind(call: Call) -> tuple:
    """What calls must have in common to run as one bound call, if their tensors go by way of a buffer."""
    tensors = call.given + call.taken if call.given is not call.taken else call.given
    pieces = tuple([(t.shape, t.dtype, t.layout, t.device) for t in tensors])
    return call.collective, len(call.given), pieces, call.same, call.own, call.note


@dataclass
class Bindings:
    """Those of one kind: by way of a buffer, and where tensors lie."""

    digest: int
    staged: Bound | None = None
    direct: OrderedDict[Place, Bound] = field(default_factory=OrderedDict)
    latest: Place = ()

    def moves(self, call: Call, place: Place) -> bool:
        """Whether a call had better go by way of a buffer, for what this rank knows."""
        tensors, before = call.given + call.taken, self.latest
        self.latest = place
        if any(t.is_cuda for t in tensors):
            return False
        nbytes = max((t.numel() * t.itemsize for t in tensors), default=0)
        return len(place) < len(tensors) or nbytes <= (STAGED_BYTES if place == before else DIRECT_BYTES)

    def keep(self, made: Bound, place: Place, direct: bool) -> None:
        if not direct:
            self.staged = made
            return
        self.direct[place] = made
        if len(self.direct) > MOST_PLACES:
            self.direct.popitem(last=False)


def place_of(call: Call) -> Place:
    """Where the tensors of a call lie; nothing if they are several that are one vector."""
    if len(call.given) > 1 or len(call.taken) > 1:
        return ()
    return tuple([address(t) for t in call.given + call.taken])


def address(tensor: torch.Tensor) -> int:
    """Of a tensor that can be used where it lies; else 0."""
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        return 0
    return tensor.data_ptr()


def bind(comm: Communicator, call: Call, number: int, direct: bool) -> Bound:
    """By way of buffers, or where it can where tensors lie.  Collective."""
    arguments = dict(call.same + call.own)
    if call.collective == "barrier":
        return Bound(comm.plan("barrier"), number, [], [])
    if call.collective in IN_PLACE:
        x, pieces = lay(comm, call, call.given or call.taken, direct)
        plan = comm.plan(call.collective, x, **arguments)
        return Bound(plan, number, pieces if call.given else [], pieces if call.taken else [])
    x, given = lay(comm, call, call.given, direct)
    out, taken = lay(comm, call, call.taken, direct)
    return Bound(comm.plan(call.collective, x, out=out, **arguments), number, given, taken)


def lay(comm: Communicator, call: Call, tensors: Tensors, direct: bool) -> tuple[Any, Tensors]:
    """Tensors as the communicator's one array, and the pieces of it that they are copied to, if they are.

    Collective, as other ranks may need a buffer where this one needs none.
    """
    there = not tensors or (direct and any(place_of(call)) and address(tensors[0]) != 0)
    dtype = tensors[0].dtype if tensors else torch.uint8
    counts = [t.numel() for t in tensors]
    buffer = comm.empty(0 if there else sum(counts) * dtype.itemsize, "uint8")
    if there:
        return (view(tensors[0], call.moves_only) if tensors else None), []
    pieces = to_torch(buffer).view(dtype).split(counts)
    return as_array(buffer, dtype, call.moves_only), [p.view(t.shape) for p, t in zip(pieces, tensors, strict=True)]


def view(tensor: torch.Tensor, as_bytes: bool) -> Any:
    """A tensor's memory as a flat array that does not keep it from being freed."""
    if tensor.is_cuda:
        flat = tensor.detach().view(-1)
        return flat.view(torch.uint8) if as_bytes else flat
    address = ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_uint8))
    data = np.ctypeslib.as_array(address, (tensor.nbytes,)) if tensor.nbytes else np.empty(0, np.uint8)
    return as_array(data, tensor.dtype, as_bytes)


def as_array(data: np.ndarray, dtype: torch.dtype, as_bytes: bool) -> np.ndarray:
    """Bytes as what they are numbers of, where that matters."""
    return data if as_bytes else data.view(dtype_of(str(dtype).removeprefix("torch.")))
