"""The choice of an algorithm for a call, among those that the ranks' access to each other's memory allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from collectives import algorithms
from collectives.algorithms import Access, Algorithm
from collectives.arrays.device_memory import DeviceMemory
from collectives.arrays.memory import probe_address, reads_processes
from collectives.job.errors import InputError
from collectives.runtime.call.call import Call, CallFacts
from collectives.runtime.choose import auto
from collectives.runtime.choose.auto import Tuning
from collectives.runtime.context import Context
from collectives.runtime.lazy import Lazy
from collectives.schedule.cost import NETWORK, on_device
from collectives.schedule.spec import Chunks, spec_of


class Choice(NamedTuple):
    """The algorithm of a call, and the shared device memory, if any."""

    row: Algorithm
    shared: DeviceMemory | None = None


class Chooser:
    """The chooser of one communicator's algorithms."""

    def __init__(self, context: Context):
        self.context, self.size = context, context.size
        self.agreement, self.topology = context.agreement, context.topology

    def choose(self, call: Call) -> Choice:
        """Choose the algorithm that an agreed call names, or by "auto" the best that the ranks' access allows.

        Collective.

        Raises: InputError on every rank where it needs more memory access than the ranks have.
        """
        facts, algorithm = call.facts, call.algorithm
        shared = None if facts.on_host else self.context.memory.on_devices(call.device)
        access = self.access(facts, shared)
        if algorithm == "auto":
            memory = "symmetric" if facts.symmetric else "ordinary"
            has_barriers, network = shared is not None and shared.has_barriers, self.context.tuning.network
            on_devices = [on_device(speeds, has_barriers) for speeds in (network, NETWORK)]
            tuning = None if facts.on_host else Tuning(on_devices[0], defaults=on_devices[1])
            equal = call.send_counts is None
            question = self.question(call.collective, facts.nbytes, access, memory, equal, call.suits, tuning)
            algorithm = auto.choose(question)
        row = algorithms.find(call.collective, algorithm)
        if row.access > access:
            raise InputError(f"{call.collective}: {self.out_of_reach(row, call, shared)}")
        return Choice(row, shared)

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

    def out_of_reach(self, row: Algorithm, call: Call, shared: DeviceMemory | None) -> str:
        if not call.facts.on_host and shared is None:
            why = "arrays in host memory, or devices whose memory the ranks may share"
        elif not self.context.has_numba:
            why = "Numba, which not all ranks have"
        elif row.access == Access.INTRA_NODE:
            why = "a node of several ranks"
        elif len(self.topology.nodes) > 1:
            why = f"ranks of one node, but there are {len(self.topology.nodes)} nodes"
        else:
            why = "arrays from comm.empty, as the system lets no process read another's memory"
        return f"algorithm {row.name!r} needs {why}: use {', '.join(call.able(self.access(call.facts, shared)))}"
