"""Plans of schedules: of messages, of direct access to other ranks' memory, and of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from collectives import algorithms
from collectives.algorithms import Access
from collectives.arrays.addresses import address_of
from collectives.arrays.device_memory import DeviceMemory
from collectives.runtime.backends import phases
from collectives.runtime.backends.messages import SEGMENT_BYTES, RequestBinder, StagingBuffers, Vector
from collectives.runtime.backends.phases import ARRAY, OUT, SCRATCH, Chunk
from collectives.runtime.call.arguments import Arguments
from collectives.runtime.call.operands import Operands, Workspace, bind, operands_of
from collectives.runtime.chooser import Choice
from collectives.runtime.context import Context
from collectives.runtime.plan import Plan
from collectives.schedule.moves import Round, in_parts

if TYPE_CHECKING:
    from collectives.runtime.backends.channel import Channel
    from collectives.runtime.backends.on_device import KernelCalls


class Binder:
    """Makes plans of schedules on one communicator."""

    def __init__(self, context: Context):
        self.context, self.rank, self.size = context, context.rank, context.size
        self.progress = context.progress

    def plan(self, a: Arguments, o: Operands, choice: Choice, staging: StagingBuffers | None = None) -> Plan:
        """Make a plan for these arrays.  Collective."""
        if choice.row.access >= Access.STAGED:
            return self.direct(a, o, choice)
        messages = MessageBinder(self.context, a.collective, choice, self, staging)
        plan = messages.plan(a, o)
        plan.keep = messages.program and messages.program.windows()
        return plan

    def direct(
        self, a: Arguments, o: Operands, choice: Choice, channel: Channel | KernelCalls | None = None, binding: int = 0
    ) -> Plan:
        """Make a plan of a direct schedule, on a channel of its own or on one that it shares.  Collective."""
        row, facts, shared = choice
        assert facts is not None
        dtype = np.dtype(np.uint8) if a.flat is None else a.flat.dtype
        reduction = phases.Reduction(a.kernel_op, dtype, self.size if a.op == "avg" else 1)
        chunks = chunks_of(ARRAY, o.source, o.inputs)
        if "out" in a.spec.takes:  # else the result is always `x`
            chunks += chunks_of(OUT, o.out, o.outputs)
        segmentation = phases.segmentation(row, facts.chunk_bytes, self.size, facts.on_host)
        rounds = row.rounds(self.rank, self.size, a.root, ())
        memory = o.source, o.out, None
        programs = self.programs(shared, caller=a.device)
        bound = programs.bind([rounds], memory, chunks, reduction, segmentation, channel, binding)
        only = bound if bound.is_short else None
        plan = Plan(f"{a.collective} {row.name}", o.result, self.progress, a.device, [bound], only=only)
        if channel is None:
            plan.keep = memory, bound.windows()
        return plan

    def direct_parts(
        self,
        schedule: Sequence[Round],
        memory: list[Any],
        chunks: list[Chunk],
        op: str,
        shared: DeviceMemory | None = None,
    ) -> Any:
        """Bind the direct parts of a schedule as one program, which pauses after each.  Collective."""
        dtype = memory[ARRAY].dtype
        parts = [[moves for _, moves in part] for direct, part in in_parts(schedule) if direct]
        segmentation = phases.whole(self.size * dtype.itemsize * max(chunk.length for chunk in chunks))
        probe = partial(self.context.mpi.Iprobe, MPI.ANY_SOURCE, MPI.ANY_TAG)  # advances outgoing messages
        reduction = phases.Reduction(op, dtype, divisor=1)
        programs = self.programs(shared, meanwhile=probe)
        return programs.bind(parts, memory, chunks, reduction, segmentation)

    def programs(
        self, shared: DeviceMemory | None, meanwhile: Callable[[], Any] | None = None, caller: Any = None
    ) -> Any:
        """Return the binder that makes programs of direct schedules, for the host or for devices.

        `caller` is the device as the library of the call's arrays has it, whose current stream runs follow.
        """
        if shared:
            from collectives.runtime.backends.on_device import DeviceProgramBinder

            return DeviceProgramBinder(shared, caller or shared.device, self.context, meanwhile)
        from collectives.runtime.backends.shared_memory import ProgramBinder  # it imports the compiler

        return ProgramBinder(self.context, meanwhile)


# Algorithms of the ranks' agreement, on any topology.
BOOKKEEPING = {"all_reduce": "recursive_doubling", "all_gather": "bruck", "all_to_all": "pairwise"}


def bookkeeping(context: Context, a: Arguments) -> Plan:
    """Make a plan for the library's own exchange of a few numbers.  Collective."""
    choice = Choice(algorithms.find(a.collective, BOOKKEEPING[a.collective]), None)
    return MessageBinder(context, a.collective, choice, segment_bytes=SEGMENT_BYTES).plan(a, operands_of(a))


class MessageBinder:
    """Binds a schedule of messages, which may have parts in shared memory within nodes, to different arrays in turn.

    All bindings use the same tags, working memory and program for the parts in shared memory: only the first binding is
    collective, and only one of them can run at a time.
    """

    def __init__(
        self,
        context: Context,
        collective: str,
        choice: Choice,
        binder: Binder | None = None,
        staging: StagingBuffers | None = None,
        segment_bytes: int | None = None,  # the communicator's
    ):
        self.context, self.collective, self.choice, self.binder = context, collective, choice, binder
        self.staging, self.segment_bytes = staging, segment_bytes or context.segment_bytes
        self.first_tag = context.next_tags()
        self.memory: dict[str, Any] = {}  # by its use
        self.program: Any = None

    def working_memory(self, empty: Callable[[int, Any], Any], use: str, count: int, dtype: Any) -> Any:
        """Return working memory, which is allocated on first use."""
        if use not in self.memory:
            self.memory[use] = empty(count, dtype)
        return self.memory[use]

    def plan(self, a: Arguments, o: Operands) -> Plan:
        context, (row, facts, shared) = self.context, self.choice
        in_nodes = row.access == Access.INTRA_NODE
        empty = partial(context.memory.empty, a.device) if in_nodes else a.device.empty
        allocate = partial(self.working_memory, empty)
        space = Workspace(facts is None or facts.shared or not in_nodes, allocate, is_shared=in_nodes)
        binding = bind(a, o, space)
        options = a.device, a.op, self.segment_bytes, a.wire_dtype, self.staging
        requests = RequestBinder(context.mpi, self.first_tag, *options)
        groups = context.topology.nodes if row.over_nodes else ()
        schedule = row.rounds(context.rank, context.size, a.root, groups)
        num_shared = len(binding.vector.chunks)
        binding.vector.add_scratch(schedule, partial(self.working_memory, a.device.empty, "scratch"))
        memory, chunks = in_registers(binding.vector, num_shared) if in_nodes else ([], [])
        if in_nodes and self.program is None:
            assert self.binder is not None
            self.program = self.binder.direct_parts(schedule, memory, chunks, a.kernel_op, shared)
        rounds: list[Any] = []
        for direct, part in in_parts(schedule):
            rounds += [self.program] if direct else [requests.bind(i, m, binding.vector) for i, m in part if m]
        if a.wire_dtype is not None and binding.reduced is not None:
            rounds.append(requests.rounding(len(schedule), binding.reduced))
        plan = Plan(f"{self.collective} {row.name}", binding.result, context.progress, a.device, rounds)
        plan.before, plan.after = binding.before, binding.after
        if a.op == "avg" and binding.reduced is not None:
            plan.divide = binding.reduced, context.size
        if in_nodes and not shared:
            located = [tuple(map(of, memory[:SCRATCH])) for of in (address_of, context.windows.key_of)]
            plan.prepare = partial(self.program.use, 0, *located)
        return plan


def chunks_of(register: int, array: Any, views: Sequence[Any]) -> list[Chunk]:
    """Return an array's chunks, some of which may be None."""
    begin = address_of(array)
    return [
        Chunk(register, 0, 0) if view is None else Chunk(register, address_of(view) - begin, len(view))
        for view in views
    ]


def in_registers(vector: Vector, num_shared: int) -> tuple[list[Any], list[Chunk]]:
    """Return a vector's arrays by register, and its chunks; no other rank accesses those from `num_shared` on."""
    memory: list[Any] = [None, None, None]
    chunks = []
    for nth, (array, begin, end) in enumerate(vector.chunks):
        register = SCRATCH
        if nth < num_shared:
            register = ARRAY if memory[ARRAY] is None or array is memory[ARRAY] else OUT
        memory[register] = array
        chunks.append(Chunk(register, begin * array.dtype.itemsize, end - begin))
    return memory, chunks
