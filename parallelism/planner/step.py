"""Step time: the passes by the pipeline schedule, the reduction of gradients, and the update."""

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from parallelism.pipeline.schedule import registry
from parallelism.pipeline.schedule.price import EQUAL, Costs, play, rules
from parallelism.planner.counts import between_tp, state_elements
from parallelism.planner.flops import muon_flops
from parallelism.planner.memory import rank_params, steady
from parallelism.planner.passes import FORWARD, INPUTS, WEIGHTS, PassContext
from parallelism.planner.replicas import Replicas


class Time(NamedTuple):
    """Seconds of a step on its busiest rank: computation, exposed communication, pipeline bubble, and update.

    `ep` is the exchange of tokens between experts' ranks, `zero` ZeRO's communication within passes, and `dp` the
    communication of gradients and parameters after them.
    """

    compute: float
    tp: float
    sp: float
    ep: float
    zero: float
    bubble: float
    dp: float
    update: float

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def exposed(self) -> float:
        """Exposed communication in seconds, except for messages between stages, which are part of the bubble."""
        return self.tp + self.sp + self.ep + self.zero + self.dp


class StepModel:
    """A step of a layout, given the `costs` of its stages' passes without ZeRO."""

    def __init__(self, setting: PassContext, costs: np.ndarray):
        self.setting, self.cut, self.replicas = setting, setting.cut, Replicas(setting)
        self.costs = self.replicas.with_reductions(costs)
        self.params = rank_params(setting.job, setting.layout, setting.cut_by)
        most, zero_stage = max(self.params), setting.layout.zero_stage
        self.reduces_at_end = zero_stage < 2  # gradients, in the last micro-batch only
        self.after_s = self.replicas.across_s(most) + self.non_experts_s() + self.tied_s()
        if zero_stage in (1, 2):
            self.after_s += self.replicas.gather_s(most)
        if zero_stage > 1 and setting.layout.pp > 1:
            self.after_s += self.replicas.reduce_s(setting.params.layer(range(2)))  # left after the passes
        num_blocks = max(self.cut.num_blocks)
        self.update_s = self.copies_s(most, num_blocks)
        if setting.job.optimizer == "muon":
            self.update_s += self.muon_s(num_blocks)
        self.update_s /= min(map(min, setting.placement.speeds))

    def non_experts_s(self) -> float:
        """Return the seconds to average ZeRO's shards of non-expert parameters over ep; 0 without ZeRO."""
        if not self.setting.layout.zero_stage:
            return 0.0
        experts = self.setting.params.experts
        most = max(params - n * experts for params, n in zip(self.params, self.cut.num_blocks, strict=True))
        nbytes = most / self.replicas.owners.size * self.replicas.gradient_bytes
        return self.setting.placement.ep.seconds("all_reduce", nbytes)

    def tied_s(self) -> float:
        """Return the seconds to sum the vocabulary's gradients, if the first and last stages are on different ranks."""
        if self.cut.of_rank[0][-1] == self.setting.layout.num_stages - 1:
            return 0.0
        nbytes = self.setting.params.vocabulary * self.replicas.gradient_bytes
        return self.setting.placement.ends.seconds("all_reduce", nbytes)

    def copies_s(self, params: int, num_blocks: int) -> float:
        """Return the seconds to read and write weights and states, and to read gradients, at copy speed or longer."""
        setting, precision = self.setting, self.setting.job.precision
        states = state_elements(setting.job.optimizer, params, num_blocks * setting.params.matrices) * precision.state
        weights = params * (precision.parameter + precision.master)
        nbytes = (states + weights) + params * precision.gradient / 2
        seconds = max(setting.copy_s(nbytes), params * setting.placement.machine.update_s)
        return seconds / (self.replicas.owners.size if setting.layout.zero_stage else 1)

    def muon_s(self, num_blocks: int) -> float:
        """Return Muon's seconds: each matrix of a block is sent to one rank, orthogonalized there, and sent back."""
        setting, ranks = self.setting, self.setting.placement.matrices
        elements = num_blocks * setting.params.matrices / setting.placement.replicas.size
        flops = num_blocks * muon_flops(setting.job.model, setting.layout.ep) / ranks.size
        products_s = flops / setting.placement.machine.flops_per_s
        return 2 * ranks.seconds("all_to_all", elements * setting.job.precision.state) + products_s

    def time(self) -> Time:
        number = self.setting.layout.num_micro_batches
        busy = max((number * self.costs[list(own)].sum((0, 1)) for own in self.cut.of_rank), key=np.sum)
        span_s, exposed_s = self.pipeline() if self.setting.layout.pp > 1 else self.alone()
        bubble_s = max(0.0, span_s - float(busy.sum()))
        return Time(*map(float, busy), bubble_s, exposed_s + self.after_s, self.update_s)  # type: ignore[call-arg]

    def least_s(self) -> float:
        """Return a lower bound that needs no schedule: gradients follow the forward passes."""
        bound_s = self.setting.least_s(self.costs)
        if self.reduces_at_end:
            for own, params in zip(self.cut.of_rank, self.params, strict=True):
                forward_s = self.setting.layout.num_micro_batches * float(self.costs[list(own), FORWARD].sum())
                bound_s = max(bound_s, forward_s + self.replicas.reduce_s(params))
        return bound_s + self.after_s + self.update_s

    def alone(self) -> tuple[float, float]:
        """Return the seconds of an undivided model's passes, and of the exposed reductions after them."""
        cost = self.costs[0]
        span_s = self.setting.layout.num_micro_batches * float(cost.sum())
        return span_s, self.replicas.exposed_in_s(cost, self.cut.layers[0]) if self.reduces_at_end else 0.0

    def pipeline(self) -> tuple[float, float]:
        """Return the seconds of a pipeline's passes, and of the exposed reductions after them.

        A stage's gradients are reduced after its last pass, while its rank continues with other stages.
        """
        layout, params = self.setting.layout, self.setting.params
        kinds = [tuple(self.costs[:, kind].sum(1).tolist()) for kind in (FORWARD, INPUTS, WEIGHTS)]
        costs = Costs(*kinds, tuple(self.messages_s()))  # type: ignore[call-arg]
        few, rounds = steady(layout.pp, layout.num_micro_batches)
        first_s, ends = schedule_times(layout.schedule, layout.pp, few, layout.virtual_stages, costs)
        exposed_s = more_s = 0.0
        if rounds:
            more_s = (
                schedule_times(layout.schedule, layout.pp, few + layout.pp, layout.virtual_stages, costs)[0] - first_s
            )
        if self.reduces_at_end:
            for own in self.cut.of_rank:
                ready = sorted((ends[stage], params.stages(self.cut.layers[stage])) for stage in own)
                exposed_s = max(exposed_s, self.replicas.last_reduced_s(ready, 0) - first_s)
        return first_s + rounds * more_s, exposed_s

    def messages_s(self) -> list[float]:
        """Return the seconds of a message from each stage to the next."""
        home = {stage: rank for rank, own in enumerate(self.cut.of_rank) for stage in own}
        nbytes = self.setting.activation_bytes / between_tp(self.setting.layout)
        pairs = pairwise(home[stage] for stage in range(len(home)))
        return [self.setting.placement.to_stage(*pair).seconds(nbytes) if len({*pair}) > 1 else 0.0 for pair in pairs]


NumberedOrders = tuple[
    dict[int, int], list[list[int]], list[int]
]  # each stage's rank, ranks' actions, stages' last actions


@lru_cache(maxsize=256)
def numbered_orders(schedule: str, pp: int, num_micro_batches: int, virtual_stages: int) -> NumberedOrders:
    instance = registry.make_schedule(schedule, pp, num_micro_batches, virtual_stages)
    number = rules(instance.home, num_micro_batches, EQUAL).number
    last = {action.stage: number(action) for order in instance.orders for action in order}
    orders = [list(map(number, order)) for order in instance.orders]
    return instance.home, orders, [last[stage] for stage in range(instance.num_stages)]


@lru_cache(maxsize=1 << 12)
def schedule_times(
    schedule: str, pp: int, num_micro_batches: int, virtual_stages: int, costs: Costs
) -> tuple[float, list[float]]:
    """Return a schedule's duration in seconds, and the end of each stage's last pass."""
    home, orders, last = numbered_orders(schedule, pp, num_micro_batches, virtual_stages)
    graph = rules(home, num_micro_batches, costs)
    begin_s, span_s = play(orders, graph)
    return span_s, [begin_s[number] + graph.takes_s[number] for number in last]
