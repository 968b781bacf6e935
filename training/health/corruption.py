"""Checks for wrong numbers: a bit that memory, a core or a message has changed, with its rank and its parameter.

Weights and states are compared with what they were after the step before, and between replicas.  Gradients, if they are
added as integers, are checked before the update, by weighted sums, which add up as the gradients do: what a rank has
computed, what it has added up, and what the ranks' sum is.  Its first micro-batch is computed by the next replica, too.
"""

from __future__ import annotations

import os
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from torch import Tensor

import collectives
from collectives import InputError
from parallelism.buffers.gradients import gradient_of, rounding_of
from parallelism.checkpoint import TensorShard
from parallelism.checkpoint.checkpoints import identity
from parallelism.checkpoint.hashes import bits_of
from parallelism.data.averaging import Averaging
from parallelism.mesh import Mesh
from parallelism.numerics.exact import weighted_sum
from parallelism.pipeline.pipeline_parallel import PipelineParallel
from parallelism.pipeline.stage import Batch
from training.reports.finding import HealthChange, HealthFinding, named_ranks
from training.settings.fields import LEAVE_OUT, REDO

MODULUS = 1 << 64
Piece = tuple[str, int]  # a parameter's name, and the first of its flat elements that a rank owns


class StateCheck:
    """Compares weights and optimizer states, `state()`, with what they were, and between the ranks that hold them."""

    def __init__(self, comm: collectives.Communicator, state: Callable[[], Iterator[TensorShard]]):
        self.comm, self.state = comm, state
        self.before: dict[int, tuple] = {}

    def remember(self) -> None:
        """Keep the sums of all tensors as they are now."""
        self.before = self._sums()

    def findings(self) -> list[HealthFinding]:
        """Return what has changed since `remember`, or else differs between ranks.  Collective."""
        own, before, self.before = self._sums(), self.before, {}
        changed = [self._name(own[key]) for key in own if key in before and own[key] != before[key]]
        of_ranks = self.comm.all_gather_object((changed, own))
        if any(changed for changed, _ in of_ranks):
            return [
                finding("memory", [rank], f"{changed[0]} has changed on rank {rank} since the last step")
                for rank, (changed, _) in enumerate(of_ranks)
                if changed
            ]
        return [*different([own for _, own in of_ranks])]

    def _sums(self) -> dict[int, tuple]:
        parts = {identity(part): part for part in self.state()}
        return {key: (part.kind, part.name, weighted_sum(bits_of(part))) for key, part in parts.items()}

    @staticmethod
    def _name(sums: tuple) -> str:
        return f"{sums[0]} of {sums[1]}"


def different(of_ranks: Sequence[dict[int, tuple]]) -> Iterator[HealthFinding]:
    """Yield the first tensor in which a rank differs from the most others that hold it, or from the only other one."""
    holders: dict[int, dict[tuple, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, sums in enumerate(of_ranks):
        for key, value in sums.items():
            holders[key][value].append(rank)
    named: set[tuple[int, ...]] = set()
    for values in holders.values():
        if len(values) == 1:
            continue
        *few, most = sorted(values.values(), key=len)
        wrong = tuple(sorted(rank for ranks in few for rank in ranks))
        name = StateCheck._name(next(iter(values)))
        words = f"{name} on {named_ranks(wrong)} differs from that on {named_ranks(most)}"
        if len(most) == len(few[-1]):
            wrong = tuple(sorted(rank for ranks in values.values() for rank in ranks))
            words = f"{name} differs between {named_ranks(wrong)}"
        if wrong not in named:
            named.add(wrong)
            yield finding("replica", wrong, words)


class GradientSums(NamedTuple):
    """Weighted sums of a rank's gradients, by parameter or by piece of one."""

    rank: int
    coords: tuple[int, int]  # in dp and sp
    added: dict[str, int]  # as computed, of all micro-batches
    first: dict[str, int]  # of its first micro-batch
    replayed: dict[str, int]  # of another rank's first micro-batch
    summed: dict[Piece, int]  # as accumulated
    reduced: dict[Piece, int]  # of the sum over ranks


class GradientCheck:
    """Checks the gradients of steps in the context `observing()`.  Construction is collective."""

    def __init__(self, pipeline: PipelineParallel, mesh: Mesh):
        assert isinstance(pipeline.replica, Averaging)
        self.pipeline, self.mesh, self.replica = pipeline, mesh, pipeline.replica
        self.own, self.ranks = self.replica.own, self.replica.ranks.every
        spans, self.names = self.ranks.all_gather_object(self.replica.masters.spans), self.own.trained()
        self.spans = {name: sorted({(s[name].start, s[name].stop) for s in spans if name in s}) for name in self.names}
        self.replaying = False
        self._clear()

    def _clear(self) -> None:
        self.added, self.first, self.replayed = Counter[str](), Counter[str](), Counter[str]()
        self.summed: dict[Piece, int] = {}
        self.reduced: dict[Piece, int] = {}

    @contextmanager
    def observing(self, batches: Sequence[Batch], weight: float | Tensor) -> Iterator[None]:
        """Observe a step's gradients in this context.  Collective."""
        firsts = self.mesh.dp.all_gather_object(batches[0].to("cpu"))
        self.firsts, self.weight = [batch.to(self.pipeline.device) for batch in firsts], weight
        roundings = {name: rounding_of(self.own.params[name]) for name in self.names}
        for name, rounding in roundings.items():
            rounding.observe = partial(self._computed, name)
        self.pipeline.rehearse, self.replica.observe = self._rehearse, self._complete
        self.own.tied.observe = partial(self._reduced, self.own.tied.across)
        try:
            yield
        finally:
            for rounding in roundings.values():
                rounding.observe = None
            self.pipeline.rehearse = self.replica.observe = self.own.tied.observe = None

    def _computed(self, name: str, integers: Tensor) -> None:
        assert self.pipeline.now
        total = weighted_sum(integers)
        if self.replaying:
            self.replayed[name] += total
            return
        self.added[name] += total
        if self.pipeline.now.micro_batch == 0:
            self.first[name] += total

    def _rehearse(self) -> None:
        self._clear()
        self._replay(1)

    def _replay(self, distance: int) -> None:
        """Compute the first micro-batch of the replica that is so many ranks before this one."""
        self.replayed.clear()
        dp = self.mesh.dp
        self.replaying = True
        self.pipeline.replay(self.firsts[(dp.rank - distance) % dp.size], self.weight)
        self.replaying = False

    def _complete(self, param: Tensor) -> None:
        name, total = self.own.names[param], gradient_of(param)
        assert total is not None
        for start, stop in self.spans[name]:
            self.summed[name, start] = weighted_sum(total.view(-1)[start:stop], start)

    def _reduced(self, names: Iterable[str]) -> None:
        """Take the sums over ranks of this rank's pieces of parameters, unless they are taken."""
        masters = self.replica.masters
        for name in names:
            if name in masters.params and (piece := (name, masters.spans[name].start)) not in self.reduced:
                total = gradient_of(masters.params[name])
                assert total is not None
                self.reduced[piece] = weighted_sum(total.view(-1), piece[1])

    def findings(self) -> list[HealthFinding]:
        """Return what is wrong with the gradients of the step before, which are void if anything is.  Collective.

        Those that are not finite, or do not fit, have no integers to compare: the step's own verdict names them.
        """
        assert self.pipeline.exact
        if self.pipeline.exact.quanta.isnan().any():
            return []
        self._reduced(self.names)
        of_ranks = self._exchange()
        wrong = [*self._wrong_sums(of_ranks)]
        suspects = [] if wrong else [*self._suspects(of_ranks)]
        if any(self.mesh.comm.all_gather_object(bool(suspects))):
            self._replay(2)
            wrong += self._decided(suspects, self._exchange())
        every = [each for group in self.mesh.comm.all_gather_object(wrong) for each in group]
        return [*dict.fromkeys(every)]

    def _exchange(self) -> list[GradientSums]:
        coords = self.mesh.coords
        sums = dict(self.added), dict(self.first), dict(self.replayed), self.summed
        own = GradientSums(self.mesh.comm.rank, (coords["dp"], coords["sp"]), *sums, self.reduced)
        return self.ranks.all_gather_object(own)

    def _wrong_sums(self, of_ranks: Sequence[GradientSums]) -> Iterator[HealthFinding]:
        """Yield for each rank the first gradient that it has added up wrongly, else that has been reduced wrongly."""
        wrong = False
        for each in of_ranks:
            for name in self.names:
                pieces = [each.summed.get((name, start), 0) for start, _ in self.spans[name]]
                if (sum(pieces) - each.added.get(name, 0)) % MODULUS:
                    words = f"rank {each.rank} has a sum of gradients of {name} that is not that of its micro-batches"
                    yield finding("sum", [each.rank], words)
                    wrong = True
                    break
        for each in () if wrong else of_ranks:
            for (name, start), total in each.reduced.items():
                if (total - sum(other.summed.get((name, start), 0) for other in of_ranks)) % MODULUS:
                    words = f"rank {each.rank} has a gradient of {name} that is not the sum of all ranks"
                    yield finding("message", [each.rank], words)
                    break

    def _suspects(self, of_ranks: Sequence[GradientSums]) -> Iterator[tuple[str, GradientSums, GradientSums]]:
        """Yield the first parameter of which a rank and the next replica have computed different gradients."""
        for each, following in self._pairs(of_ranks, 1):
            for name in self.names:
                if (each.first.get(name, 0) - following.replayed.get(name, 0)) % MODULUS:
                    yield name, each, following
                    break

    def _pairs(self, of_ranks: Iterable[GradientSums], distance: int) -> Iterator[tuple[GradientSums, GradientSums]]:
        by_coords = {each.coords: each for each in of_ranks}
        for (dp, sp), each in by_coords.items():
            yield each, by_coords[(dp + distance) % self.mesh.dp.size, sp]

    def _decided(
        self, suspects: Iterable[tuple[str, GradientSums, GradientSums]], of_ranks: Sequence[GradientSums]
    ) -> Iterator[HealthFinding]:
        """Yield which of two ranks is wrong, by a third computation: of a third replica, or of the first one again."""
        third = {each.rank: other for each, other in self._pairs(of_ranks, 2)}
        for name, each, following in suspects:
            decides = third[each.rank]
            value = decides.replayed.get(name, 0)
            wrong, right = [each, following], []
            if not (value - following.replayed.get(name, 0)) % MODULUS:
                wrong, right = [each], [following, decides]
            elif not (value - each.first.get(name, 0)) % MODULUS:
                wrong, right = [following], [each, decides]
            numbers, others = (sorted({part.rank for part in parts}) for parts in (wrong, right))
            words = f"computes another gradient of {name} for a micro-batch than {named_ranks(others)}"
            if numbers == [decides.rank]:
                words = f"computes another gradient of {name} for a micro-batch than {named_ranks([following.rank])}"
                words += ", and than itself once more"
            if not right:
                words = f"compute different gradients of {name} for a micro-batch"
            yield finding("gradient", numbers, f"{named_ranks(numbers)} {words}")


class CorruptionCheck:
    """Checks a run's numbers each `interval` steps, and acts on wrong ones as `action` says.

    "stop" ends the run; "redo" computes a step again, once, if it was in its gradients; "leave_out" has the rank leave
    a job that continues without ranks that die.  A run that cannot continue ends by InputError on every rank.
    Construction is collective.
    """

    def __init__(
        self,
        interval: int,
        action: str,
        mesh: Mesh,
        pipeline: PipelineParallel,
        state: Callable[[], Iterator[TensorShard]],
    ):
        self.interval, self.action, self.comm, self.pipeline = interval, action, mesh.comm, pipeline
        self.state = StateCheck(mesh.comm, state)
        has_sums = pipeline.exact and isinstance(pipeline.replica, Averaging)
        self.gradients = GradientCheck(pipeline, mesh) if has_sums and mesh.dp.size > 1 else None
        self.changes: list[HealthChange] = []  # that nobody has taken
        if mesh.dp.size == 1:
            print("checks: only whether memory keeps its weights and states, as dp=1 has no replicas", flush=True)
        elif not has_sums:
            words = "not of gradients: these need --reproducible with --zero_stage 0 or 1"
            print(f"checks: of weights and states, {words}", flush=True)

    def is_due(self, step: int) -> bool:
        return step % self.interval == 0

    def step(self, step: int, batches: Sequence[Batch], weights: Sequence[float] | Sequence[Tensor]) -> None:
        """Run a step's passes, with checks if these are due.  Collective."""
        if not self.is_due(step):
            self.pipeline.step(batches, weights)
            return
        if wrong := self.state.findings():
            self._act(step, wrong)
        if not self.gradients:
            self.pipeline.step(batches, weights)
            return
        exact = self.pipeline.exact
        assert exact
        exponents, before = exact.exponents, wrong
        for attempt in range(2):
            with self.gradients.observing(batches, weights[0]):
                self.pipeline.step(batches, weights)
                wrong = self.gradients.findings()
            if not wrong:
                break
            if attempt or self.action != REDO:
                self._act(step, wrong)
            self.pipeline.zero_grad()
            exact.exponents, before = exponents, wrong
        for each in before:
            self.changes += [HealthChange(step, each, begins) for begins in (True, False)]

    def after(self, step: int) -> None:
        """Keep what the weights and states are after a step, if the next one checks them."""
        if self.is_due(step + 1):
            self.state.remember()

    def news(self) -> list[HealthChange]:
        """Return what has been found since the last call."""
        self.changes, changes = [], self.changes
        return changes

    def _act(self, step: int, wrong: Sequence[HealthFinding]) -> None:
        """End the run, or this rank if it alone is to be left out."""
        words = "; ".join(each.words for each in wrong)
        leaving = {each.ranks for each in wrong if each.kind != "replica"}
        if self.action == LEAVE_OUT and len(leaving) == len(wrong) == 1 and len(ranks := next(iter(leaving))) == 1:
            print(f"step {step}: {words}: the job leaves it out", flush=True)
            self.comm.barrier()
            if self.comm.rank == ranks[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            while True:
                self.comm.barrier()  # until it raises, as the rank is dead
        remedy = "have its host checked, and resume from a checkpoint"
        if any(each.kind == "replica" for each in wrong):
            remedy += f" of step {step - self.interval} or before, when they were equal"
        raise InputError(f"step {step}: {words}: {remedy}")


def finding(kind: str, ranks: Sequence[int], words: str) -> HealthFinding:
    return HealthFinding(kind, tuple(ranks), words, "the step has been computed again")
