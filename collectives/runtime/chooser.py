"""The choice of an algorithm for a call, among those that the ranks' access to each other's memory allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from collectives import algorithms
from collectives.algorithms import Access, Algorithm, variants
from collectives.algorithms.own import ProvedRounds, is_own
from collectives.algorithms.own_proof import Proved, prove
from collectives.arrays.device_memory import DeviceMemory
from collectives.arrays.memory import probe_address, reads_processes
from collectives.job.errors import InputError
from collectives.runtime.backends.vector import chunk_lengths
from collectives.runtime.call.call import Call, CallFacts
from collectives.runtime.choose import auto
from collectives.runtime.choose.auto import Tuning
from collectives.runtime.context import Context
from collectives.runtime.lazy import Lazy
from collectives.schedule.network import NETWORK, on_device
from collectives.schedule.spec import Chunks, spec_of

MOST_PROVED = 256  # schedules of the program's own that are kept


class Choice(NamedTuple):
    """The algorithm of a call, and the shared device memory, if any."""

    row: Algorithm
    shared: DeviceMemory | None = None


class Chooser:
    """The chooser of one communicator's algorithms."""

    def __init__(self, context: Context):
        self.context, self.size = context, context.size
        self.agreement, self.topology = context.agreement, context.topology
        self.proved: dict[tuple[Algorithm, int], Proved] = {}  # schedules of the program's own, by root

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
            own = [row for row in question.candidates if is_own(row)]
            able = [row for row in own if not self.unable(row, self.proof(row, call), call, access, shared)]
            candidates = tuple(row for row in question.candidates if row not in own or row in able)
            question = question._replace(candidates=candidates)
            algorithm = self.agreed(call, lambda: auto.choose(question)) if own else auto.choose(question)
        row = algorithms.find(call.collective, algorithm)
        if is_own(row):
            return Choice(self.proved_row(row, call, access, shared), shared)
        if row.access > access:
            raise InputError(f"{call.collective}: {self.out_of_reach(row, call, shared)}")
        if variants.is_open(row):
            row, _ = auto.best_variant(row, facts.nbytes, self.topology.nodes, self.context.tuning.network)
        return Choice(row, shared)

    def proved_row(self, row: Algorithm, call: Call, access: Access, shared: DeviceMemory | None) -> Algorithm:
        """Return the row of a schedule of the program's own, with the rounds that were proved for this rank.

        Collective.  Raises: InputError on every rank where it is wrong, differs, or cannot do the call.
        """
        proof = self.proof(row, call)
        if variants.is_open(row):
            nbytes, network, opened = call.facts.nbytes, self.context.tuning.network, row
            name = self.agreed(call, lambda: auto.best_variant(opened, nbytes, self.topology.nodes, network)[0].name)
            row = row.cut_into(int(name.rpartition("/")[2]))
            proof = self.proof(row, call)
        if why := self.unable(row, proof, call, access, shared):
            raise InputError(f"{call.collective}: {why}")
        return row._replace(access=proof.access, schedule=ProvedRounds(proof.rounds))

    def proof(self, row: Algorithm, call: Call) -> Proved:
        """Prove a schedule of the program's own for a call, once, and compare it between ranks.  Collective.

        Raises: InputError on every rank where it is wrong on one, or differs.
        """
        row = row.cut_into(1) if variants.is_open(row) else row
        key, failure, digest = (row, call.root), "", ""
        try:
            if key not in self.proved:
                if len(self.proved) == MOST_PROVED:
                    self.proved.clear()
                self.proved[key] = prove(row, self.size, call.root or 0, self.topology.nodes, self.context.rank)
            digest = self.proved[key].digest
        except ValueError as error:
            failure = f"{call.collective}: {error}"
        self.agreement.check(f"{call.collective} with algorithm {row.name} of rounds {digest}", failure)
        return self.proved[key]

    def unable(self, row: Algorithm, proof: Proved, call: Call, access: Access, shared: DeviceMemory | None) -> str:
        """Return why a schedule that is right cannot do a call, or nothing."""
        row = row._replace(access=proof.access)
        num_chunks = row.num_chunks(self.size, self.topology.nodes)
        if row.access > access:
            return self.out_of_reach(row, call, shared)
        if not call.suits(row):
            return f"algorithm {row.name!r} cannot do {', '.join(call.demands)}: use {', '.join(call.able(access))}"
        if not proof.aligned and len(set(chunk_lengths(call, num_chunks))) > 1:
            needs = "moves chunks to others' places, and so needs chunks of one length"
            return f"algorithm {row.name!r} {needs}: pass a multiple of {num_chunks} elements"
        return ""

    def agreed(self, call: Call, choose: Callable[[], str]) -> str:
        """Return a choice for which schedules of the program's own were called, the same on all ranks.  Collective."""
        name = failure = ""
        try:
            name = choose()
        except ValueError as error:
            failure = f"{call.collective}: {error}"
        self.agreement.check(f"{call.collective} with algorithm {name}", failure)
        return name

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
            rows = [row for row in rows if not row.over_nodes]
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
