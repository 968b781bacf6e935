"""Plans of schedules of messages, which may have parts in shared memory within nodes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from collectives import algorithms
from collectives.algorithms import Access
from collectives.arrays.addresses import address_of
from collectives.runtime.backends.bound import Bound, PlansByAddress
from collectives.runtime.backends.direct import direct_parts
from collectives.runtime.backends.messages import SEGMENT_BYTES, RequestBinder, StagingBuffers
from collectives.runtime.backends.phases import ARRAY, OUT, SCRATCH, Chunk
from collectives.runtime.backends.vector import Vector, working_vector
from collectives.runtime.call.call import Call
from collectives.runtime.call.operands import call_on, lent, moved
from collectives.runtime.chooser import Choice
from collectives.runtime.comparator import Comparator
from collectives.runtime.context import Context
from collectives.runtime.plan import Plan, nothing
from collectives.schedule.moves import in_parts


class MessageBackend:
    """Schedules of messages, which MPI's persistent requests carry."""

    def __init__(self, context: Context, comparator: Comparator):
        self.context, self.comparator = context, comparator
        self.staging: dict[str, StagingBuffers] = {}  # of bound calls, which run one after the other, by device

    def plan(self, call: Call, choice: Choice | None, staging: StagingBuffers | None = None) -> Plan:
        """Make a plan for the arrays of a call, by default with staging buffers of its own.  Collective."""
        assert choice is not None
        return ScheduleBinder(self.context, choice, staging).plan(call, is_alone=True)

    def bind(self, call: Call, choice: Choice | None) -> Bound:
        assert choice is not None
        binder, here = ScheduleBinder(self.context, choice, self.staging_on(call)), lent(call)
        plans = PlansByAddress(self.context.progress, lambda addresses: binder.plan(moved(here, addresses)))
        return Bound(call, choice.row.name, plans, self.comparator.before_runs_of(call.binding))

    def staging_on(self, call: Call) -> StagingBuffers:
        return self.staging.setdefault(call.device.device_name, StagingBuffers(call.device))


# Algorithms of the ranks' agreement, on any topology.
BOOKKEEPING = {"all_reduce": "recursive_doubling", "all_gather": "bruck", "all_to_all": "pairwise"}


def bookkeeping(context: Context, collective: str, x: Any, **arguments: Any) -> Plan:
    """Make a plan for the library's own exchange of a few numbers.  Collective."""
    call = call_on(collective, context.rank, context.size, x, **arguments)
    choice = Choice(algorithms.find(collective, BOOKKEEPING[collective]))
    return ScheduleBinder(context, choice, segment_bytes=SEGMENT_BYTES).plan(call)


class ScheduleBinder:
    """Binder of a schedule of messages, which may have parts in shared memory within nodes, to several arrays in turn.

    All plans use the same tags, working memory and program for the parts in shared memory: only making the first one is
    collective, and only one of them can run at a time.
    """

    def __init__(
        self,
        context: Context,
        choice: Choice,
        staging: StagingBuffers | None = None,
        segment_bytes: int | None = None,  # the communicator's
    ):
        self.context, self.choice = context, choice
        self.staging, self.segment_bytes = staging, segment_bytes or context.segment_bytes
        self.first_tag = context.next_tags()
        self.memory: dict[str, Any] = {}  # by its use
        self.program: Any = None

    def working_memory(self, empty: Callable[[int, Any], Any], use: str, count: int, dtype: Any) -> Any:
        """Return working memory, which is allocated on first use."""
        if use not in self.memory:
            self.memory[use] = empty(count, dtype)
        return self.memory[use]

    def plan(self, call: Call, is_alone: bool = False) -> Plan:
        """Make a plan; one that `is_alone` keeps the memory alive in which other ranks access its arrays."""
        context, (row, shared) = self.context, self.choice
        in_nodes = row.access == Access.INTRA_NODE
        empty = partial(context.memory.empty, call.device) if in_nodes else call.device.empty
        allocate = partial(self.working_memory, empty)
        groups = context.topology.nodes if row.over_nodes else ()
        num_chunks = row.num_chunks(context.size, groups)
        working = working_vector(call, num_chunks, allocate, not in_nodes or call.facts.shared, is_shared=in_nodes)
        vector = working.vector
        options = call.device, call.op, self.segment_bytes, call.wire_dtype, self.staging
        requests = RequestBinder(context.mpi, self.first_tag, *options)
        schedule = row.rounds(context.rank, context.size, call.root, groups)
        num_shared = len(vector.chunks)
        vector.add_scratch(schedule, partial(self.working_memory, call.device.empty, "scratch"))
        prepare, program = nothing, None
        if in_nodes:
            memory, chunks = in_registers(vector, num_shared)
            self.program = program = self.program or direct_parts(
                context, schedule, memory, chunks, call.kernel_op, shared
            )
            if not shared:
                located = [tuple(map(of, memory[:SCRATCH])) for of in (address_of, context.windows.key_of)]
                prepare = partial(program.use, 0, *located)
        rounds: list[Any] = []
        for direct, part in in_parts(schedule):
            rounds += [program] if direct else [requests.bind(i, m, vector) for i, m in part if m]
        if call.wire_dtype is not None and working.reduced is not None:
            rounds.append(requests.rounding(len(schedule), working.reduced))
        divides = call.op == "avg" and context.size > 1
        return Plan(
            f"{call.collective} {row.name}",
            call.operands.result,
            context.progress,
            call.device,
            rounds,
            before=working.before,
            after=working.after,
            divide=(working.reduced, context.size) if divides and working.reduced is not None else None,
            prepare=prepare,
            keep=program.windows() if program and is_alone else None,
        )


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
