"""Plans of schedules whose ranks access each other's memory, on the host or on devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from collectives.arrays.addresses import address_of
from collectives.arrays.device_memory import DeviceMemory
from collectives.runtime.backends import phases
from collectives.runtime.backends.bound import Bound
from collectives.runtime.backends.phases import ARRAY, OUT, Chunk
from collectives.runtime.call.call import Call
from collectives.runtime.call.operands import lent
from collectives.runtime.chooser import Choice
from collectives.runtime.comparator import Comparator
from collectives.runtime.context import Context
from collectives.runtime.plan import Plan
from collectives.schedule.moves import Round, in_parts

if TYPE_CHECKING:
    from collectives.runtime.backends.channel import Channel
    from collectives.runtime.backends.on_device import KernelCalls


class SharedMemoryBackend:
    """Programs of the host, which take any addresses of arrays, and compare calls at their first barrier."""

    def __init__(self, context: Context, comparator: Comparator):
        self.context, self.comparator = context, comparator

    def plan(self, call: Call, choice: Choice | None) -> Plan:
        assert choice is not None
        return direct_plan(self.context, call, choice)

    def bind(self, call: Call, choice: Choice | None) -> Bound:
        assert choice is not None
        plan = direct_plan(self.context, lent(call), choice, self.comparator.channel)
        return Bound(call, choice.row.name, lambda addresses, entry: plan, program=plan.only)


def direct_plan(context: Context, call: Call, choice: Choice, channel: Channel | KernelCalls | None = None) -> Plan:
    """Make a plan of a direct schedule, on a channel of its own or on one that it shares.  Collective."""
    o, (row, shared) = call.operands, choice
    dtype = np.dtype(np.uint8) if call.flat is None else call.flat.dtype
    reduction = phases.Reduction(call.kernel_op, dtype, call.size if call.op == "avg" else 1)
    chunks = chunks_of(ARRAY, o.source, o.inputs)
    if "out" in call.spec.takes:  # else the result is always `x`
        chunks += chunks_of(OUT, o.out, o.outputs)
    segmentation = phases.segmentation(row, call.facts.chunk_bytes, call.size, call.facts.on_host)
    rounds = row.rounds(call.rank, call.size, call.root, ())
    memory = o.source, o.out, None
    programs = program_binder(context, shared, caller=call.device)
    binding = call.binding if channel else 0
    program = programs.bind([rounds], memory, chunks, reduction, segmentation, channel, binding)
    keep = None if channel else (memory, program.windows())
    only = program if program.is_short else None
    return Plan(
        f"{call.collective} {row.name}", o.result, context.progress, call.device, [program], only=only, keep=keep
    )


def direct_parts(
    context: Context,
    schedule: Sequence[Round],
    memory: list[Any],
    chunks: list[Chunk],
    op: str,
    shared: DeviceMemory | None = None,
) -> Any:
    """Bind the direct parts of a schedule as one program, which pauses after each.  Collective."""
    dtype = memory[ARRAY].dtype
    parts = [[moves for _, moves in part] for direct, part in in_parts(schedule) if direct]
    segmentation = phases.whole(context.size * dtype.itemsize * max(chunk.length for chunk in chunks))
    probe = partial(context.mpi.Iprobe, MPI.ANY_SOURCE, MPI.ANY_TAG)  # advances outgoing messages
    reduction = phases.Reduction(op, dtype, divisor=1)
    return program_binder(context, shared, meanwhile=probe).bind(parts, memory, chunks, reduction, segmentation)


def program_binder(
    context: Context,
    shared: DeviceMemory | None,
    meanwhile: Callable[[], Any] | None = None,
    caller: Any = None,
) -> Any:
    """Return the binder that makes programs of direct schedules, for the host or for devices.

    `caller` is the device as the library of the call's arrays has it, whose current stream runs follow.
    """
    if shared:
        from collectives.runtime.backends.on_device import DeviceProgramBinder

        return DeviceProgramBinder(shared, caller or shared.device, context, meanwhile)
    from collectives.runtime.backends.shared_memory import ProgramBinder  # it imports the compiler

    return ProgramBinder(context, meanwhile)


def chunks_of(register: int, array: Any, views: Sequence[Any]) -> list[Chunk]:
    """Return an array's chunks, some of which may be None."""
    begin = address_of(array)
    return [
        Chunk(register, 0, 0) if view is None else Chunk(register, address_of(view) - begin, len(view))
        for view in views
    ]
