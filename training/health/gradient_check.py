"""Checks of gradients that are added as integers, before the update.

By weighted sums, which add up as the gradients do: what a rank has computed, what it has added up, and what the ranks'
sum is.  A rank's first micro-batch is computed by the next replica, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from torch import Tensor

from parallelism.buffers.gradients import gradient_of, rounding_of
from parallelism.data.averaging import Averaging
from parallelism.mesh import Mesh
from parallelism.numerics.exact import weighted_sum
from parallelism.pipeline.pipeline_parallel import PipelineParallel
from parallelism.pipeline.stage import Batch
from training.reports.finding import HealthFinding, named_ranks, wrong_numbers

MODULUS = 1 << 64
Piece = tuple[str, int]  # a parameter's name, and the first of its flat elements that a rank owns


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
    def observing(self, first: Batch, weight: float | Tensor) -> Iterator[None]:
        """Observe a step's gradients in this context, given this rank's first micro-batch.  Collective."""
        every = self.mesh.dp.all_gather_object((first.to("cpu"), float(weight)))
        self.firsts = [(batch.to(self.pipeline.device), weight) for batch, weight in every]
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
        self.pipeline.replay(*self.firsts[(dp.rank - distance) % dp.size])
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
                    yield wrong_numbers("sum", [each.rank], words)
                    wrong = True
                    break
        for each in () if wrong else of_ranks:
            for (name, start), total in each.reduced.items():
                if (total - sum(other.summed.get((name, start), 0) for other in of_ranks)) % MODULUS:
                    words = f"rank {each.rank} has a gradient of {name} that is not the sum of all ranks"
                    yield wrong_numbers("message", [each.rank], words)
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
            yield wrong_numbers("gradient", numbers, f"{named_ranks(numbers)} {words}")
