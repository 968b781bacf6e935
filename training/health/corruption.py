"""Checks for wrong numbers: a bit that memory, a core or a message has changed, with its rank and its parameter.

Weights and states are compared with what they were after the step before, and between replicas; gradients, if they are
added as integers, as `gradient_check` describes.
"""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from torch import Tensor

import collectives
from collectives import InputError
from parallelism.checkpoint import TensorShard
from parallelism.checkpoint.checkpoints import identity
from parallelism.checkpoint.hashes import bits_of
from parallelism.data.averaging import Averaging
from parallelism.mesh import Mesh
from parallelism.numerics.exact import weighted_sum
from parallelism.pipeline.pipeline_parallel import PipelineParallel
from parallelism.pipeline.stage import Batch
from training.health.gradient_check import GradientCheck
from training.reports.finding import HealthChange, HealthFinding, named_ranks, wrong_numbers


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
        changed = [name_of(own[key]) for key in own if key in before and own[key] != before[key]]
        of_ranks = self.comm.all_gather_object((changed, own))
        if any(changed for changed, _ in of_ranks):
            return [
                wrong_numbers("memory", [rank], f"{changed[0]} has changed on rank {rank} since the last step")
                for rank, (changed, _) in enumerate(of_ranks)
                if changed
            ]
        return [*different([own for _, own in of_ranks])]

    def _sums(self) -> dict[int, tuple]:
        parts = {identity(part): part for part in self.state()}
        return {key: (part.kind, part.name, weighted_sum(bits_of(part))) for key, part in parts.items()}


def name_of(sums: tuple) -> str:
    return f"{sums[0]} of {sums[1]}"


def different(of_ranks: Sequence[dict[int, tuple]]) -> Iterator[HealthFinding]:
    """Yield for each set of ranks the first tensor that differs there from most others that hold it.

    Where as many ranks agree on another one, all that hold it are named.
    """
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
        name = name_of(next(iter(values)))
        words = f"{name} on {named_ranks(wrong)} differs from that on {named_ranks(most)}"
        if len(most) == len(few[-1]):
            wrong = tuple(sorted(rank for ranks in values.values() for rank in ranks))
            words = f"{name} differs between {named_ranks(wrong)}"
        if wrong not in named:
            named.add(wrong)
            yield wrong_numbers("replica", wrong, words)


class CorruptionCheck:
    """Checks a run's numbers each `interval` steps, and ends it by InputError on every rank if they are wrong.

    With `redo`, a step whose gradients are wrong is first computed again, once.  With `leave_out`, a rank that alone is
    wrong leaves a job that continues without ranks that die.  Construction is collective.
    """

    def __init__(
        self,
        interval: int,
        mesh: Mesh,
        pipeline: PipelineParallel,
        state: Callable[[], Iterator[TensorShard]],
        redo: bool = False,
        leave_out: bool = False,
    ):
        self.interval, self.comm, self.pipeline = interval, mesh.comm, pipeline
        self.redo, self.leave_out = redo, leave_out
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
        if self.gradients:
            self._checked_passes(self.gradients, step, batches, weights)
        else:
            self.pipeline.step(batches, weights)

    def _checked_passes(
        self,
        check: GradientCheck,
        step: int,
        batches: Sequence[Batch],
        weights: Sequence[float] | Sequence[Tensor],
    ) -> None:
        exact, voided = self.pipeline.exact, list[HealthFinding]()
        assert exact
        exponents = exact.exponents
        while True:
            with check.observing(batches[0], weights[0]):
                self.pipeline.step(batches, weights)
                wrong = check.findings()
            if not wrong:
                break
            if voided or not self.redo:
                self._act(step, wrong)
            self.pipeline.zero_grad()
            exact.exponents, voided = exponents, wrong
        for each in voided:
            self.changes += [HealthChange(step, each, begins) for begins in (True, False)]

    def after(self, step: int) -> None:
        """Keep what the weights and states are after a step, if the next one checks them."""
        if self.is_due(step + 1):
            self.state.remember()

    def news(self) -> list[HealthChange]:
        """Return what has been found since the last call."""
        self.changes, changes = [], self.changes
        return changes

    def _act(self, step: int, wrong: Sequence[HealthFinding]) -> NoReturn:
        """End the run, or only the rank that alone is wrong, if it is to be left out."""
        words = "; ".join(each.words for each in wrong)
        leaving = {each.ranks for each in wrong if each.kind != "replica"}
        if self.leave_out and len(leaving) == len(wrong) == 1 and len(ranks := next(iter(leaving))) == 1:
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
