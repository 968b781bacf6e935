"""What ranks that have the same parameters send each other in a step: gradients, and with ZeRO parameters, too.

Source: as of `parallelism.data_parallel`, `reduction` and `zero`, whose collectives these are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from parallelism.planner import counts
from parallelism.planner.counts import precision_of
from parallelism.planner.memory import stages
from parallelism.planner.passes import FORWARD, INPUTS, WEIGHTS, ZERO, Setting

Seconds = Callable[[float], float]  # of so many bytes


class Replicas:
    """The collectives of a layout's zero_stage, in seconds for a number of parameters."""

    def __init__(self, setting: Setting):
        self.setting, self.zero_stage = setting, setting.layout.zero_stage
        self.precision = precision_of(setting.job)
        self.owners, self.across = setting.place.owners[setting.layout.zero_group]

    def reduce_s(self, num_params: float) -> float:
        """Gradients to all, or to their owners."""
        collective = "reduce_scatter" if self.zero_stage else "all_reduce"
        return self.owners.seconds(collective, num_params * self.precision.gradient)

    def across_s(self, num_params: float) -> float:
        """Gradients, between owners of the same in other nodes."""
        return self.across.seconds("all_reduce", num_params / self.owners.size * self.precision.gradient)

    def gather_s(self, num_params: float) -> float:
        """Parameters, from their owners."""
        return self.owners.seconds("all_gather", num_params * self.precision.parameter) if self.zero_stage else 0.0

    @property
    def bucket_params(self) -> float:
        return self.setting.job.bucket_mb * 2**20 / self.precision.gradient

    def added_to(self, costs: np.ndarray) -> np.ndarray:
        """To stages' passes: what shows of reductions of each micro-batch's gradients, and of stage 3's gathering.

        A block's are under way while the next one computes.
        """
        if self.zero_stage < 2:
            return costs
        job, tp = self.setting.job, self.setting.layout.tp
        costs, each = costs.copy(), counts.block_params(job.model, tp)
        gather_s = self.gather_s(each) if self.zero_stage == 3 else 0.0
        reduce_s = self.reduce_s(each)
        for cost, layers in zip(costs, stages(job, self.setting.layout).layers, strict=True):
            rest = counts.stage_params(job.model, tp, layers) - len(layers) * each
            forward_s, backward_s = cost[FORWARD].sum() / len(layers), cost[[INPUTS, WEIGHTS]].sum() / len(layers)
            hidden = len(layers) - 1
            cost[INPUTS, ZERO] += hidden * max(0.0, gather_s + reduce_s - backward_s) + gather_s + reduce_s
            cost[INPUTS, ZERO] += self.reduce_s(rest)
            if self.zero_stage == 3:
                cost[FORWARD, ZERO] += hidden * max(0.0, gather_s - forward_s) + gather_s + self.gather_s(rest)
        return costs


def shown_s(ready: Iterable[tuple[float, float]], bucket: float, seconds: Seconds) -> float:
    """When the last bucket has been reduced, of gradients that are ready at some time: (seconds, parameters).

    >>> shown_s([(1.0, 10), (2.0, 10), (3.0, 10)], bucket=10, seconds=lambda params: params / 20)
    3.5
    """
    free_s = waiting = 0.0
    last = 0.0
    for ready_s, params in ready:
        waiting, last = waiting + params, ready_s
        if waiting >= bucket:
            number = int(waiting // bucket)
            free_s = max(free_s, ready_s) + number * seconds(waiting / number)
            waiting = 0.0
    return max(free_s, last) + (seconds(waiting) if waiting else 0.0)
