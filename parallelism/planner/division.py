"""Division of unequal hosts: the micro-batches of each replica, and the replica for which a step waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from parallelism.data.load import ReplicaSeconds, numbers_by_time
from parallelism.planner.layout import ParallelLayout, TrainingJob
from parallelism.planner.passes import PassContext
from parallelism.planner.place import RankPlacement


class Division(NamedTuple):
    """The slowest replica's passes, with its number of micro-batches; `numbers` are those of all, if unequal."""

    setting: PassContext
    numbers: tuple[int, ...] = ()

    @property
    def most_zero(self) -> int:
        """The last ZeRO stage that allows these numbers."""
        return 2 if self.numbers else 3

    def of(self, layout: ParallelLayout) -> PassContext:
        """Return the passes in a layout that differs in ZeRO only."""
        number = self.setting.layout.num_micro_batches
        return self.setting._replace(layout=layout._replace(num_micro_batches=number))


def divisions(job: TrainingJob, layout: ParallelLayout, placement: RankPlacement, moves: bool) -> Iterator[Division]:
    """Yield ways in which replicas can share a step: equal numbers of micro-batches, or if these move, by speed."""
    setting = PassContext(job, layout, placement)
    speeds = {*placement.speeds}
    if len(speeds) == 1:
        yield Division(setting._replace(speeds=speeds.pop()))
        return
    yield slowest(setting, [layout.num_micro_batches] * layout.dp)
    if moves and can_move(job, layout):
        exact = setting._replace(job=job._replace(reproducible=True))
        numbers = numbers_by_time(replica_seconds(exact), layout.dp * layout.num_micro_batches)
        if len({*numbers}) > 1:
            yield slowest(exact, numbers)._replace(numbers=tuple(numbers))


def can_move(job: TrainingJob, layout: ParallelLayout) -> bool:
    """Return whether train.py's `--balance_load` can move micro-batches between replicas of one rank or pipeline."""
    is_plain = layout.tp == layout.sp == layout.ep == layout.virtual_stages == 1
    return is_plain and layout.num_micro_batches > 1 and not job.grad_dtype


def replica_seconds(setting: PassContext) -> list[ReplicaSeconds]:
    """Return the time of a micro-batch on each replica's busiest rank, and of the rest of a pipeline's step."""
    of_speeds = {}
    for speeds in {*setting.placement.speeds}:
        own = setting._replace(speeds=speeds, layout=setting.layout._replace(num_micro_batches=1))
        costs = own.stage_costs()
        each_s = max(float(costs[list(stages)].sum()) for stages in own.cut.of_rank)
        of_speeds[speeds] = ReplicaSeconds(each_s, own.least_s(costs) - each_s)
    return [of_speeds[speeds] for speeds in setting.placement.speeds]


def slowest(setting: PassContext, numbers: Sequence[int]) -> Division:
    """Return the replica that takes longest, of those with these numbers of micro-batches."""
    each = []
    for speeds, number in {*zip(setting.placement.speeds, numbers, strict=True)}:
        own = setting._replace(speeds=speeds, layout=setting.layout._replace(num_micro_batches=number))
        each.append(own)
    return Division(max(each, key=lambda own: (own.least_s(own.stage_costs()), own.speeds)))
