"""Communication between replicas in a step: gradients, and with ZeRO also parameters.

Source: those of `parallelism.data.averaging` and `parallelism.zero`, whose collectives are modelled.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from parallelism.numerics.precision import ITEMSIZES
from parallelism.planner.passes import FORWARD, INPUTS, WEIGHTS, ZERO, PassContext

Seconds = Callable[[float], float]  # of a number of parameters


class Replicas:
    """Times of the collectives of a layout's zero_stage, in seconds, for a number of parameters."""

    def __init__(self, setting: PassContext):
        self.setting, self.zero_stage = setting, setting.layout.zero_stage
        self.precision, self.params = setting.job.precision, setting.params
        self.gradient_bytes = self.precision.gradient  # on the wire
        if setting.job.grad_dtype and not setting.job.reproducible:
            self.gradient_bytes = ITEMSIZES[setting.job.grad_dtype]
        self.owners, self.across = setting.placement.owners[setting.layout.zero_group]

    def reduce_s(self, num_params: float) -> float:
        """Return the seconds to reduce gradients: to all ranks, or with ZeRO to their owners."""
        if self.zero_stage:
            return self.owners.seconds("reduce_scatter", num_params * self.gradient_bytes)
        return self.setting.placement.samples.seconds("all_reduce", num_params * self.gradient_bytes)

    def across_s(self, num_params: float) -> float:
        """Return the seconds to reduce gradients over owners of the same shards on other nodes."""
        return self.across.seconds("all_reduce", num_params / self.owners.size * self.gradient_bytes)

    def gather_s(self, num_params: float) -> float:
        """Return the seconds to gather parameters from their owners."""
        return self.owners.seconds("all_gather", num_params * self.precision.parameter)

    def with_reductions(self, costs: np.ndarray) -> np.ndarray:
        """Return the stages' passes with the exposed reductions of micro-batches and stage 3's gathers added."""
        if self.zero_stage < 2:
            return costs
        costs = costs.copy()
        for cost, layers in zip(costs, self.setting.cut.layers, strict=True):
            if self.setting.layout.pp > 1:
                cost[:, ZERO] += self.in_pipeline(cost, layers)
            elif self.zero_stage == 2:
                cost[INPUTS, ZERO] += self.exposed_in_s(cost, layers)
            else:
                forward_s, backward_s = self.by_blocks(cost, layers)
                cost[FORWARD, ZERO] += forward_s
                cost[INPUTS, ZERO] += backward_s
        return costs

    def in_pipeline(self, cost: np.ndarray, layers: range) -> np.ndarray:
        """Return the exposed seconds in a stage's passes: the excess of communication over computation.

        Layers are gathered for each pass except for weight gradients; gradients are reduced in the backward pass, or in
        its second part if it is split.
        """
        computing_s, each, rest = self.hiding_s(cost), self.params.block, self.params.beside_blocks(layers)
        number = self.params.blocks(layers)
        gather_s = (number * self.gather_s(each) + self.gather_s(rest)) * (self.zero_stage == 3)
        reduce_s = number * self.reduce_s(each) + self.reduce_s(rest)
        if self.setting.cut.splits:
            return np.maximum(0.0, (gather_s, gather_s, reduce_s) - computing_s)
        backward_s = computing_s[INPUTS] + computing_s[WEIGHTS]
        return np.array((max(0.0, gather_s - computing_s[FORWARD]), max(0.0, gather_s + reduce_s - backward_s), 0.0))

    def by_blocks(self, cost: np.ndarray, layers: range) -> tuple[float, float]:
        """Return the exposed seconds of stage 3, forward and backward: a block is gathered while another one computes.

        The first block of the backward pass is already gathered.
        """
        number, each, rest = self.params.blocks(layers), self.params.block, self.params.beside_blocks(layers)
        gather_s, both_s = self.gather_s(each), self.gather_s(each) + self.reduce_s(each)
        hiding_s = self.hiding_s(cost) / number
        forward_s, backward_s = hiding_s[FORWARD], hiding_s[INPUTS] + hiding_s[WEIGHTS]
        return (
            gather_s + (number - 1) * max(0.0, gather_s - forward_s) + self.gather_s(rest),
            both_s - gather_s + (number - 1) * max(0.0, both_s - backward_s) + self.reduce_s(rest),
        )

    def hiding_s(self, cost: np.ndarray) -> np.ndarray:
        """Return the seconds of each kind of pass during which communication proceeds."""
        return cost.sum(1) * self.setting.overlaps

    def exposed_in_s(self, cost: np.ndarray, layers: range) -> float:
        """Return the seconds by which bucketed reductions outlast a stage's backward pass."""
        ready = [*self.appearing(cost, layers)]
        bucket = self.setting.job.bucket_mb * 2**20 / self.precision.gradient
        return self.last_reduced_s(ready, bucket) - ready[-1][0]

    def last_reduced_s(self, ready: Sequence[tuple[float, float]], bucket: float) -> float:
        """Return the time at which the last bucket is reduced; gradients that do not overlap wait for the last ones."""
        if not self.setting.overlaps:
            ready = [(max(ready_s for ready_s, _ in ready), params) for _, params in ready]
        return last_reduced_s(ready, bucket, self.reduce_s)

    def appearing(self, cost: np.ndarray, layers: range) -> Iterator[tuple[float, float]]:
        """Yield the times at which a backward pass completes gradients, with their numbers: last norm, blocks, others.

        The gradients of a vocabulary that embedding and head have in common come last.
        """
        first, last = self.params.ends(layers)
        backward_s = float(cost[[INPUTS, WEIGHTS]].sum())
        head_s = float(self.setting.head()[[INPUTS, WEIGHTS]].sum()) if last else 0.0
        if last:
            yield head_s, self.params.beside_blocks(layers) - self.params.embedding * first
        blocks = self.params.blocks(layers)
        for number in range(1, blocks + 1):
            yield head_s + number * (backward_s - head_s) / blocks, self.params.block
        if first:
            yield backward_s, self.params.embedding


def last_reduced_s(ready: Iterable[tuple[float, float]], bucket: float, seconds: Seconds) -> float:
    """Return the time at which the last bucket is reduced, given the times and numbers of ready gradients.

    With a bucket of 0, gradients are reduced one by one.

    >>> last_reduced_s([(1.0, 10), (2.0, 10), (3.0, 10)], bucket=10, seconds=lambda params: params / 20)
    3.5
    >>> last_reduced_s([(1.0, 10), (2.0, 40), (3.0, 10)], bucket=0, seconds=lambda params: params / 20)
    4.5
    """
    free_s = waiting = ready_s = 0.0
    for ready_s, params in ready:
        waiting += params
        if waiting >= bucket:
            number = int(waiting // bucket) if bucket else 1
            free_s = max(free_s, ready_s) + number * seconds(waiting / number)
            waiting = 0.0
    return max(free_s, ready_s) + (seconds(waiting) if waiting else 0.0)
