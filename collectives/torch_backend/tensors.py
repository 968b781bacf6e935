"""Tensors as the one array that a collective works on: as they lie, or packed one after the other."""

from collections.abc import Callable
from typing import Any

import torch

from collectives.communicator import Communicator
from collectives.runtime.plan import Plan
from collectives.runtime.resolve import OPTIONS
from collectives.torch_backend.call import Tensors, TorchCall

IN_PLACE = ("all_reduce", "broadcast", "reduce")
DEFAULTS = {"op": "sum", "root": 0, "wire_dtype": None, "reproducible": False, "algorithm": "auto"}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by itemsize
NUMBERS = "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128"
SENT = {getattr(torch, name) for name in NUMBERS.split() if hasattr(torch, name)}  # as what they are


def run(comm: Communicator, call: TorchCall, run_plan: Callable[[Plan], Any]) -> None:
    """Run a call of torch's on a communicator."""
    arguments = {**DEFAULTS, **dict(call.same), **dict(call.own)}
    options = tuple([arguments.get(name) for name in OPTIONS[call.collective]])
    note = f", {call.note}" if call.note else ""
    if call.collective in IN_PLACE:
        x, out = pack(call.given or call.taken, call.moves_only), None
        result = x
    else:
        x, out = pack(call.given, call.moves_only), pack(call.taken, call.moves_only, is_empty=True)
        result = out
    comm._resolver.run(call.collective, x, out, options, run_plan, note, call.place)
    if call.taken:
        unpack(result, call.taken)


def pack(tensors: Tensors, moves_only: bool, is_empty: bool = False) -> torch.Tensor | None:
    """Tensors as one that is contiguous: the one itself, or a new one with, unless it `is_empty`, what they hold."""
    if not tensors:
        return None
    first = tensors[0]
    if len(tensors) > 1 or not first.is_contiguous():
        if is_empty:
            first = first.new_empty(sum([t.numel() for t in tensors]))
        else:
            first = torch.cat([t.detach().reshape(-1) for t in tensors])
    if moves_only and first.dtype not in SENT:  # nobody but torch knows them: as integers of their length
        return first.detach().view(-1).view(INTEGERS[first.itemsize])
    return first


def unpack(packed: torch.Tensor | None, tensors: Tensors) -> None:
    """Copy the pieces of what was packed back into the tensors, unless they lie there."""
    if packed is None or packed.data_ptr() == tensors[0].data_ptr():
        return
    pieces = packed.detach().view(-1).view(tensors[0].dtype).split([t.numel() for t in tensors])
    for tensor, piece in zip(tensors, pieces, strict=True):
        tensor.detach().copy_(piece.view(tensor.shape))
