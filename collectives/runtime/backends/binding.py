"""Bind a collective that ranks agree on to memory: choose an algorithm, and make a plan of its schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import algorithms
from collectives.algorithms import Access, Algorithm
from collectives.arrays.device import host
from collectives.arrays.device_memory import DeviceMemory
from collectives.arrays.memory import probe_address, ranks_in, reads_processes
from collectives.arrays.views import address_of
from collectives.job.errors import InputError
from collectives.runtime.backends import phases
from collectives.runtime.backends.messages import SEGMENT_BYTES, RequestBinder, StagingBuffers, Vector
from collectives.runtime.backends.phases import ARRAY, OUT, SCRATCH, Chunk
from collectives.runtime.call.arguments import Arguments
from collectives.runtime.call.operands import CallFacts, Operands, Workspace, bind, operands_of
from collectives.runtime.choose import auto
from collectives.runtime.choose.auto import Tuning
from collectives.runtime.lazy import Lazy
from collectives.runtime.plan import MismatchError, Plan
from collectives.runtime.progress import Waitable
from collectives.schedule.cost import NETWORK, on_device
from collectives.schedule.moves import Round, in_parts
from collectives.schedule.spec import Chunks, spec_of

if TYPE_CHECKING:
    from collectives.runtime.backends.channel import Channel
    from collectives.runtime.backends.on_device import KernelCalls
    from collectives.runtime.context import Context


class Choice(NamedTuple):
    """The algorithm of a call, the facts that it is chosen by, and the shared device memory, if any."""

    row: Algorithm
    facts: CallFacts | None
    shared: DeviceMemory | None = None


class Binder:
    """Chooses algorithms for one communicator's calls, and binds them."""

    def __init__(self, context: Context):
        self.context, self.rank, self.size = context, context.rank, context.size
        self.agreement, self.progress, self.topology = context.agreement, context.progress, context.topology

    # --- choosing ---

    def choose(self, a: Arguments, algorithm: str, facts: CallFacts) -> Choice:
        """Choose the algorithm of that name, or by "auto" the best that the ranks' access allows.  Collective.

        Raises: InputError on every rank where it needs more memory access than the ranks have.
        """
        shared = None if facts.on_host else self.context.memory.on_devices(a.device)
        access = self.access(facts, shared)
        if algorithm == "auto":
            memory = "symmetric" if facts.symmetric else "ordinary"
            has_barriers, network = shared is not None and shared.has_barriers, self.context.tuning.network
            on_devices = [on_device(speeds, has_barriers) for speeds in (network, NETWORK)]
            tuning = None if facts.on_host else Tuning(on_devices[0], defaults=on_devices[1])
            equal = a.send_counts is None
            question = self.question(a.collective, facts.nbytes, access, memory, equal, a.suits, tuning)
            algorithm = auto.choose(question)
        row = algorithms.find(a.collective, algorithm)
        if row.access > access:
            raise InputError(f"{a.collective}: {self.out_of_reach(row, a, facts, shared)}")
        return Choice(row, facts, shared)

    def question(
        self,
        collective: str,
        nbytes: int,
        access: Access,
        memory: str,
        equal: bool = True,
        suits: Callable[[Algorithm], bool] = lambda row: True,
        tuning: Tuning | None = None,
    ) -> auto.Question:
        """Make the question for a choice among usable algorithms; `tuning` is that of devices for arrays on them."""
        rows = [row for row in algorithms.rows(collective, self.size, equal) if suits(row)]
        if self.topology.is_flat:  # no hierarchy
            rows = [row for row in rows if row.access != Access.INTRA_NODE]
        candidates = auto.usable(rows, access)
        return auto.Question(collective, nbytes, candidates, self.topology.nodes, tuning or self.context.tuning, memory)

    def explain(self, collective: str, nbytes: int) -> str:
        access = self.farthest(self.context.has_numba)
        memory = "ordinary" if spec_of(collective).gives is Chunks.NONE else "symmetric"
        return auto.explain(self.question(collective, nbytes, access, memory))

    def access(self, facts: CallFacts, shared: DeviceMemory | None) -> Access:
        """Return the access that the ranks have to each other's memory."""
        if not facts.on_host and shared is None:
            return Access.MESSAGES
        by_themselves = shared is not None and shared.has_barriers and len(self.topology.nodes) == 1
        if (farthest := self.farthest(self.context.has_numba or by_themselves)) < Access.STAGED:
            return farthest
        if facts.symmetric or not facts.nbytes or (facts.on_host and self.reads_processes):
            return Access.DIRECT
        return Access.STAGED

    def farthest(self, has_programs: bool) -> Access:
        """Return the widest access for which there are programs, of Numba or of devices."""
        if len(self.topology.nodes) == 1:
            return Access.DIRECT if has_programs else Access.MESSAGES
        return Access.INTRA_NODE if has_programs and self.topology.has_groups_in_nodes else Access.MESSAGES

    @Lazy
    def reads_processes(self) -> bool:
        """Find out whether every rank may read and write the others' memory through the system.  Collective."""
        rows = self.agreement.gather_rows(probe_address())
        return not any(self.agreement.highest([not reads_processes(rows.tolist())]))

    def out_of_reach(self, row: Algorithm, a: Arguments, facts: CallFacts, shared: DeviceMemory | None) -> str:
        if not facts.on_host and shared is None:
            why = "arrays in host memory, or devices whose memory the ranks may share"
        elif not self.context.has_numba:
            why = "Numba, which not all ranks have"
        elif row.access == Access.INTRA_NODE:
            why = "a node of several ranks"
        elif len(self.topology.nodes) > 1:
            why = f"ranks of one node, but there are {len(self.topology.nodes)} nodes"
        else:
            why = "arrays from comm.empty, as the system lets no process read another's memory"
        return f"algorithm {row.name!r} needs {why}: use {', '.join(a.able(self.access(facts, shared)))}"

    # --- binding ---

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

    @Lazy
    def world_ranks(self) -> list[int]:
        return ranks_in(MPI.COMM_WORLD, self.context.mpi)

    def programs(
        self, shared: DeviceMemory | None, meanwhile: Callable[[], Any] | None = None, caller: Any = None
    ) -> Any:
        """Return the binder that makes programs of direct schedules, for the host or for devices.

        `caller` is the device as the library of the call's arrays has it, whose current stream runs follow.
        """
        if shared:
            from collectives.runtime.backends.on_device import DeviceProgramBinder

            return DeviceProgramBinder(shared, caller or shared.device, self, meanwhile)
        from collectives.runtime.backends.shared_memory import ProgramBinder  # it imports the compiler

        return ProgramBinder(self, meanwhile)


# Algorithms of the ranks' agreement, on any topology.
BOOKKEEPING = {"all_reduce": "recursive_doubling", "all_gather": "bruck", "all_to_all": "pairwise"}


def bookkeeping(context: Context, a: Arguments) -> Plan:
    """Make a plan for the library's own exchange of a few numbers.  Collective."""
    choice = Choice(algorithms.find(a.collective, BOOKKEEPING[a.collective]), None)
    return MessageBinder(context, a.collective, choice, segment_bytes=SEGMENT_BYTES).plan(a, operands_of(a))


class KeyComparison(Plan):
    """A comparison of calls where not all ranks have Numba: an all-reduce of their keys.  Creating it is collective."""

    def __init__(self, context: Context):
        self.keys = np.zeros(2, np.int64)
        plan = bookkeeping(context, Arguments("all_reduce", context.rank, context.size, self.keys, op="max"))
        super().__init__("agreement", None, context.progress, host(), plan.rounds)
        plan.rounds = []  # which this plan frees
        self.key = 0

    def use(self, number: int, binding: int) -> None:
        self.key = binding << 32 | number if binding else 0

    def _run(self) -> Iterator[Waitable]:
        self.keys[:] = self.key, -self.key
        yield from super()._run()
        highest, negated = self.keys.tolist()
        if highest != -negated:
            raise MismatchError("ranks have bound different collectives")


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
        num_shared = len(binding.vector.places)
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
            places = [tuple(map(of, memory[:SCRATCH])) for of in (address_of, context.windows.key_of)]
            plan.prepare = partial(self.program.use, 0, *places)
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
    for nth, (array, begin, end) in enumerate(vector.places):
        register = SCRATCH
        if nth < num_shared:
            register = ARRAY if memory[ARRAY] is None or array is memory[ARRAY] else OUT
        memory[register] = array
        chunks.append(Chunk(register, begin * array.dtype.itemsize, end - begin))
    return memory, chunks


class DeviceBuffers:
    """Persistent memory of a device for the two arrays of a call: calls run one after the other on its stream.

    A pair that is too short is replaced by a longer one.
    """

    def __init__(self, context: Context):
        self.context = context
        self.pairs: dict[tuple[str, bool], tuple[Any, Any]] = {}

    def pair(self, a: Arguments, o: Operands, is_shared: bool) -> tuple[Any, Any]:
        """Return buffers as long as a call's arrays.  Collective where ranks are to share them."""
        nbytes = max(0 if view is None else view.nbytes for view in (a.flat, o.out))
        if is_shared:
            (nbytes,) = self.context.agreement.highest([nbytes])
        key = a.device.place, is_shared
        if key not in self.pairs or self.pairs[key][0].nbytes < nbytes:
            empty = partial(self.context.memory.empty, a.device) if is_shared else a.device.empty
            count = 1 << max(nbytes - 1, 0).bit_length()
            self.pairs[key] = empty(count, np.dtype(np.uint8)), empty(count, np.dtype(np.uint8))
        return self.pairs[key]


class BufferedPlan:
    """A plan on buffers, for calls whose arrays are anywhere on a device.

    `a` is a call without its caller's arrays; `bind` makes a plan for one.
    """

    def __init__(self, a: Arguments, buffers: tuple[Any, Any], bind: Callable[[Arguments], Plan]):
        self.call, self.buffers = a, buffers
        self.on_buffers = a.moved(tuple(map(address_of, buffers)))
        self.is_read, self.is_written = (of(a.rank, a.root) for of in (a.spec.reads, a.spec.writes))
        self.plan = bind(self.on_buffers)
        self.before, self.after, self.plan.only = self.plan.before, self.plan.after, None

    def on(self, place: tuple[int, ...]) -> Plan:
        """Return the plan for a call's arrays at two addresses."""
        (x, out), here = self.call.arrays_at(place), self.on_buffers
        result, source = (x, here.x) if out is None else (out, here.out)
        self.plan.before = [*([(here.x, x)] if self.is_read else []), *self.before]
        self.plan.after = [*self.after, *([(result, source)] if self.is_written else [])]
        return self.plan
