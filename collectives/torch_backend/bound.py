"""A call bound to memory: small and scattered tensors by way of a buffer, long ones where they lie."""

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from collectives.arrays import dtype_of, to_torch
from collectives.communicator import Communicator
from collectives.plan import Plan
from collectives.torch_backend.call import Call, Tensors

STAGED_BYTES = 1 << 18  # above it a tensor's own memory is used, which is bound anew for each address
IN_PLACE = ("all_reduce", "broadcast", "reduce")


class Bound(NamedTuple):
    """A plan, and the pieces of its buffers that tensors are copied to and from."""

    plan: Plan
    number: int  # the same on all ranks
    digest: int
    given: Tensors
    taken: Tensors

    def run(self, call: Call, run: Callable[[Plan], Any]) -> None:
        for piece, tensor in zip(self.given, call.given, strict=False):
            piece.copy_(tensor.detach())
        run(self.plan)
        for piece, tensor in zip(self.taken, call.taken, strict=False):
            tensor.detach().copy_(piece)


def key(call: Call) -> tuple:
    """What calls must have in common to run as one bound call."""
    tensors = call.given + call.taken if call.given is not call.taken else call.given
    alone = len(call.given) <= 1 and len(call.taken) <= 1
    pieces = tuple([(t.shape, t.dtype, address(t) if alone else 0) for t in tensors])
    return call.collective, len(call.given), pieces, call.same, call.own


def address(tensor: torch.Tensor) -> int:
    """Of a tensor that is used where it lies; else 0."""
    if tensor.layout is not torch.strided:  # refused later
        return 0
    if tensor.is_cuda or (tensor.nbytes > STAGED_BYTES and tensor.is_contiguous()):
        return tensor.data_ptr()
    return 0


def bind(comm: Communicator, call: Call, number: int) -> Bound:
    """Collective."""
    arguments = dict(call.same + call.own)
    if call.collective == "barrier":
        return Bound(comm.plan("barrier"), number, call.digest, [], [])
    if call.collective in IN_PLACE:
        x, pieces = place(comm, call, call.given or call.taken)
        plan = comm.plan(call.collective, x, **arguments)
        return Bound(plan, number, call.digest, pieces if call.given else [], pieces if call.taken else [])
    x, given = place(comm, call, call.given)
    out, taken = place(comm, call, call.taken)
    return Bound(comm.plan(call.collective, x, out=out, **arguments), number, call.digest, given, taken)


def place(comm: Communicator, call: Call, tensors: Tensors) -> tuple[Any, Tensors]:
    """Tensors as the communicator's one array, and the pieces of it that they are copied to, if they are.

    Collective, as other ranks may need a buffer where this one needs none.
    """
    alone = len(call.given) <= 1 and len(call.taken) <= 1
    direct = not tensors or (alone and address(tensors[0]))
    dtype = tensors[0].dtype if tensors else torch.uint8
    counts = [t.numel() for t in tensors]
    buffer = comm.empty(0 if direct else sum(counts) * dtype.itemsize, "uint8")
    if direct:
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
