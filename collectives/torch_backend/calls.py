"""A collective as torch requests it, run as a communicator's call on one array, or as several."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from types import FrameType
from typing import Any

import torch

from collectives.arrays import ops
from collectives.arrays.packing import Packing, pack_tensors
from collectives.communicator import Communicator
from collectives.runtime.call.call import Call
from collectives.runtime.plan import Plan
from collectives.schedule.spec import COLLECTIVES, DEFAULTS, Collective, options_of
from collectives.torch_backend.work import Runs

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by itemsize
OUR_DTYPES = {getattr(torch, str(dtype)) for dtype in ops.DTYPES if hasattr(torch, str(dtype))}  # of the communicator
LIBRARIES = tuple(os.path.dirname(file) + os.sep for file in (__file__, str(torch.__file__)))
Tensors = list[torch.Tensor]


@dataclass(slots=True)
class TorchCall:
    """A collective on two vectors in pieces: this rank's input, and the memory of its result."""

    collective: str
    inputs: Tensors
    outputs: Tensors
    options: tuple  # as `options_of` returns them
    call_site: tuple[str, int]  # source line of the call
    note: str = ""  # ", " and further facts in which ranks must agree
    failure: str = ""  # why it is refused

    def __str__(self) -> str:
        tensors = self.inputs or self.outputs
        words = [f"{sum(t.numel() for t in tensors)} elements", str(tensors[0].dtype)] if tensors else []
        options = zip(self.spec.options, self.options, strict=True)
        words += [f"{name}={value}" for name, value in options if value != DEFAULTS.get(name)]
        return f"{self.collective}({', '.join(words)})"

    @property
    def spec(self) -> Collective:
        return COLLECTIVES[self.collective]

    def refusal(self) -> str:
        """Return why it is refused, or nothing."""
        if self.failure:
            return self.failure
        tensors = self.inputs if self.inputs is self.outputs else self.inputs + self.outputs
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                return f"{self.collective}: tensor of layout {tensor.layout}: pass tensor.to_dense()"
        if any(t.dtype is not tensors[0].dtype or t.device != tensors[0].device for t in tensors[1:]):
            kinds = sorted({f"{t.dtype} on {t.device}" for t in tensors})
            return f"{self.collective}: tensors of {' and '.join(kinds)}: pass tensors of one dtype on one device"
        return ""

    def run(self, comm: Communicator, run: Runs, at_once: bool) -> None:
        """Run it, once all ranks have agreed on it; `run` and `at_once` are as in `Dispatcher.run`."""
        if refusal := self.refusal():
            comm.dispatcher.refuse(self.collective, refusal, run, self.call_site)
        x, out, result = self.gather()
        comm.dispatcher.run(self.collective, x, out, self.options, run, self.note, self.call_site, at_once)
        if self.outputs:
            result.store()

    def begin(self, comm: Communicator) -> Plan | None:
        """Begin it, if that needs no wait for other ranks, and no work after it."""
        if self.refusal() or len(self.outputs) > 1:  # also of sparse rows, whose contiguity torch 2.6 does not check
            return None
        if not all(t.is_contiguous() and t.dtype in OUR_DTYPES for t in self.outputs):
            return None
        x, out, _ = self.gather()
        request = Call.of(self.collective, x, out, self.options, note=self.note, call_site=self.call_site)
        return comm.starter.begin_bound(request)

    def gather(self) -> tuple[Any, Any, Packing]:
        """Gather its input; return the arrays of the communicator's call, and that of its result."""
        if self.spec.in_place:
            both = pack(self.inputs or self.outputs, self.spec)
            both.load()
            return both.array, None, both
        sent, result = pack(self.inputs, self.spec), pack(self.outputs, self.spec)
        sent.load()
        return sent.array, result.array, result


def pack(tensors: Tensors, spec: Collective) -> Packing:
    """Return tensors as a contiguous one; if they are only moved, those of torch's own dtypes as integers."""
    packing = pack_tensors(tensors) if tensors else Packing(None)
    if not tensors or spec.reduces or tensors[0].dtype in OUR_DTYPES:
        return packing
    return packing._replace(array=packing.array.detach().view(-1).view(INTEGERS[tensors[0].itemsize]))


def caller(frame: FrameType) -> tuple[str, int]:
    """Return the innermost source line, from a frame on, that is outside torch and this package."""
    while is_library(frame.f_code.co_filename) and frame.f_back:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


@lru_cache(1024)
def is_library(file: str) -> bool:
    return file.startswith(LIBRARIES)


Execute = Callable[[TorchCall], None]


def sum_products(call: TorchCall, factor: Any, execute: Execute) -> None:
    """Sum the ranks' inputs, each times a factor of its own; inputs stay unchanged."""
    if (dtype := call.inputs[0].dtype) not in OUR_DTYPES or not dtype.is_floating_point:
        call.failure = f"op PREMUL_SUM of {dtype}: only floats are multiplied, so use SUM, or cast"
    inputs = [(tensor.detach() * factor).to(tensor.dtype) for tensor in call.inputs]
    outputs = call.outputs if call.collective == "reduce_scatter" else inputs[: len(call.outputs)]
    execute(replace(call, inputs=inputs, outputs=outputs))
    for target, source in zip(call.outputs, outputs, strict=True):
        if target is not source:
            target.detach().copy_(source)


def sum_sparse(tensor: torch.Tensor, op: Any, size: int, call_site: tuple[str, int], execute: Execute) -> None:
    """Sum sparse tensors of coordinates: every rank gets all indices and values, and adds them in rank order."""
    failure = "" if op == op.SUM else f"op {op.name} of a sparse tensor: use SUM, or pass tensor.to_dense()"
    own = tensor.detach().coalesce()
    num_rows = torch.empty(size, dtype=torch.int64)
    note = f", sparse {tuple(tensor.shape)} of {tensor.dtype} in {tensor.sparse_dim()} dimensions"
    own_rows, options = [torch.tensor([own._nnz()])], options_of("all_gather")
    execute(TorchCall("all_gather", own_rows, [num_rows], options, call_site, note, failure))

    def gather_rows(rows: torch.Tensor) -> torch.Tensor:
        """Gather every rank's rows, of which there is one for each non-zero."""
        result = rows.new_empty(int(num_rows.sum()), *rows.shape[1:])
        counts = tuple(count * rows.shape[1:].numel() for count in num_rows.tolist())
        execute(TorchCall("all_gather", [rows], [result], options_of("all_gather", counts=counts), call_site))
        return result

    indices, values = gather_rows(own.indices().t()).t(), gather_rows(own.values())
    result = torch.sparse_coo_tensor(indices, values, tensor.shape, check_invariants=False)
    with torch.no_grad():  # instead of detach(), whose indices would not be the tensor's
        tensor.copy_(result.coalesce())
