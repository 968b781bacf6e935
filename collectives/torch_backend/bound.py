"""A call bound to memory: small and scattered tensors by way of a buffer, long ones where they lie."""

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from collectives.arrays import BFLOAT16, dtype_of, to_torch
from collectives.communicator import Communicator
from collectives.plan import Plan
from collectives.torch_backend.call import Call, Tensors

STAGED_BYTES = 1 << 18  # above it a tensor's own memory is used, which is bound anew for each address
IN_PLACE = ("all_reduce", "broadcast", "reduce")


class Bound(NamedTuple):
    """A plan, and the pieces of its buffers that tensors are copied to and from."""

    plan: Plan
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
    if tensor.is_cuda or (tensor.nbytes > STAGED_BYTES and tensor.is_contiguous()):
        return tensor.data_ptr()
    return 0


def bind(comm: Communicator, call: Call) -> Bound:
    """Collective."""
    given, pieces = place(comm, call, call.given)
    if call.collective in IN_PLACE:
        taken_pieces = pieces if call.taken else []
        if not call.given:
            given, taken_pieces = place(comm, call, call.taken)
        plan = comm.plan(call.collective, given, **dict(call.same + call.own))
        return Bound(plan, call.digest, pieces if call.given else [], taken_pieces)
    taken, taken_pieces = place(comm, call, call.taken)
    if call.collective == "barrier":
        return Bound(comm.plan("barrier"), call.digest, [], [])
    plan = comm.plan(call.collective, given, out=taken, **dict(call.same + call.own))
    return Bound(plan, call.digest, pieces, taken_pieces)


def place(comm: Communicator, call: Call, tensors: Tensors) -> tuple[Any, Tensors]:
    """Tensors as the communicator's one array, and the pieces of it that they are copied to, if they are."""
    if not tensors:
        return None, []
    alone = len(call.given) <= 1 and len(call.taken) <= 1
    if alone and address(tensors[0]):
        return view(tensors[0], call.moves_only), []
    counts = [t.numel() for t in tensors]
    dtype = np.dtype(np.uint8) if call.moves_only else dtype_of(str(tensors[0].dtype).removeprefix("torch."))
    itemsize = tensors[0].itemsize if call.moves_only else 1
    buffer = comm.empty(sum(counts) * itemsize, dtype)
    flat = to_torch(buffer)
    typed = flat.view(tensors[0].dtype) if call.moves_only else flat
    return buffer, [piece.view(t.shape) for piece, t in zip(typed.split(counts), tensors, strict=True)]


def view(tensor: torch.Tensor, as_bytes: bool) -> Any:
    """A tensor's memory as a flat array that does not keep it from being freed."""
    if tensor.is_cuda:
        flat = tensor.detach().view(-1)
        return flat.view(torch.uint8) if as_bytes else flat
    data = np.frombuffer((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()), np.uint8)
    if as_bytes:
        return data
    return data.view(BFLOAT16 if tensor.dtype == torch.bfloat16 else dtype_of(str(tensor.dtype).removeprefix("torch.")))
