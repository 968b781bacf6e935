"""Step time: the passes by the pipeline schedule, the reduction of gradients, and the update."""

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from models.flops import muon_flops
from parallelism.pipeline.schedule import registry
from parallelism.pipeline.schedule.price import EQUAL, Costs, play, rules
from parallelism.planner import counts
from parallelism.planner.counts import precision_of
from parallelism.planner.memory import rank_matrices, rank_params, stages, steady
from parallelism.planner.passes import FORWARD, INPUTS, WEIGHTS, PassContext
from parallelism.planner.replicas import Replicas, one_by_one_s


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
        self.setting, self.cut, self.replicas = setting, stages(setting.job, setting.layout), Replicas(setting)
        self.costs = self.replicas.added_to(costs)
        self.params = rank_params(setting.job, setting.layout)
        most, zero_stage = max(self.params), setting.layout.zero_stage
        self.after_s = self.replicas.across_s(most) + self.undivided_s() + self.tied_s()
        if zero_stage in (1, 2):
            self.after_s += self.replicas.gather_s(most)
        if zero_stage > 1 and setting.layout.pp > 1:
            self.after_s += self.replicas.last_s()
        matrices = max(rank_matrices(setting.job, setting.layout))
        self.update_s = update_s(setting, most, matrices, self.replicas.owners.size if zero_stage else 1)
        if setting.job.optimizer == "muon":
            self.update_s += muon_s(setting, matrices)

    @property
    def reduces_at_end(self) -> bool:
        """Whether gradients are reduced in the last micro-batch only."""
        return self.setting.layout.zero_stage < 2

    def undivided_s(self) -> float:
        """Return the seconds to average ZeRO's shards of non-expert parameters over ep; 0 without ZeRO."""
        model, (tp, ep) = self.setting.job.model, self.replicas.split
        each = counts.expert_params(model, tp, ep)
        blocks = [sum(map(len, self.cut.of(rank))) for rank in range(len(self.params))]
        most = max(params - number * each for params, number in zip(self.params, blocks, strict=True))
        return self.replicas.undivided_s(most)

    def tied_s(self) -> float:
        """Return the seconds to sum the vocabulary's gradients, if the first and last stages are on different ranks."""
        if self.cut.of_rank[0][-1] == self.setting.layout.num_stages - 1:
            return 0.0
        vocabulary = counts.vocabulary_params(self.setting.job.model, self.setting.layout.tp)
        return self.setting.place.ends.seconds("all_reduce", vocabulary * self.replicas.gradient_bytes)

    def time(self) -> Time:
        number = self.setting.layout.num_micro_batches
        busy = max((number * self.costs[list(own)].sum((0, 1)) for own in self.cut.of_rank), key=np.sum)
        span_s, shown_s = self.pipeline() if self.setting.layout.pp > 1 else self.alone()
        bubble_s = max(0.0, span_s - float(busy.sum()))
        return Time(*map(float, busy), bubble_s, shown_s + self.after_s, self.update_s)  # type: ignore[call-arg]

    def least_s(self) -> float:
        """Return a lower bound that needs no schedule: gradients follow the forward passes."""
        bound_s = least_s(self.setting, self.costs)
        if self.reduces_at_end:
            for own, params in zip(self.cut.of_rank, self.params, strict=True):
                forward_s = self.setting.layout.num_micro_batches * float(self.costs[list(own), FORWARD].sum())
                bound_s = max(bound_s, forward_s + self.replicas.reduce_s(params))
        return bound_s + self.after_s + self.update_s

    def alone(self) -> tuple[float, float]:
        """Return the seconds of an undivided model's passes, and of the exposed reductions after them."""
        cost = self.costs[0]
        span_s = self.setting.layout.num_micro_batches * float(cost.sum())
        if not self.reduces_at_end:
            return span_s, 0.0
        return span_s, self.replicas.shown_in_s(cost, self.cut.layers[0])

    def pipeline(self) -> tuple[float, float]:
        """Return the seconds of a pipeline's passes, and of the exposed reductions after them.

        A stage's gradients are reduced after its last pass, while its rank continues with other stages.
        """
        layout, model = self.setting.layout, self.setting.job.model
        kinds = [tuple(self.costs[:, kind].sum(1).tolist()) for kind in (FORWARD, INPUTS, WEIGHTS)]
        costs = Costs(*kinds, tuple(messages_s(self.setting)))  # type: ignore[call-arg]
        few, rounds = steady(layout.pp, layout.num_micro_batches)
        first_s, ends = played(layout.schedule, layout.pp, few, layout.virtual_stages, costs)
        more_s = (
            rounds and played(layout.schedule, layout.pp, few + layout.pp, layout.virtual_stages, costs)[0] - first_s
        )
        exposed_s = 0.0
        if self.reduces_at_end:
            for own in self.cut.of_rank:
                layers = [self.cut.layers[stage] for stage in own]
                params = [counts.stage_params(model, layout.tp, layout.ep, part) for part in layers]
                ready = sorted(zip([ends[stage] for stage in own], params, strict=True))
                exposed_s = max(exposed_s, one_by_one_s(ready, self.replicas.reduce_s) - first_s)
        return first_s + rounds * more_s, exposed_s


class NumberedSchedule(NamedTuple):
    """A schedule with numbered actions, and each stage's last action."""

    home: dict[int, int]
    orders: list[list[int]]
    last: list[int]


@lru_cache(maxsize=256)
def numbered(schedule: str, pp: int, num_micro_batches: int, virtual_stages: int) -> NumberedSchedule:
    instance = registry.make(schedule, pp, num_micro_batches, virtual_stages)
    number = rules(instance.home, num_micro_batches, EQUAL).number
    last = {action.stage: number(action) for order in instance.orders for action in order}
    orders = [list(map(number, order)) for order in instance.orders]
    return NumberedSchedule(instance.home, orders, [last[s] for s in range(instance.num_stages)])


@lru_cache(maxsize=1 << 12)
def played(
    schedule: str, pp: int, num_micro_batches: int, virtual_stages: int, costs: Costs
) -> tuple[float, list[float]]:
    """Return a schedule's duration in seconds, and the end of each stage's last pass."""
    instance = numbered(schedule, pp, num_micro_batches, virtual_stages)
    graph = rules(instance.home, num_micro_batches, costs)
    begin_s, span_s = play(instance.orders, graph)
    return span_s, [begin_s[number] + graph.takes_s[number] for number in instance.last]


def least_s(setting: PassContext, costs: np.ndarray) -> float:
    """Return a lower bound in seconds: each rank's passes, forward passes before them, and backward passes after.

    With split backward passes, a rank computes weight gradients while it waits for the last backward passes.
    """
    cut = stages(setting.job, setting.layout)
    kinds = costs.sum(2)
    backward = (kinds[:, INPUTS] + kinds[:, WEIGHTS]) * (not cut.splits)
    before, after = ([0.0, *accumulate(passes.tolist())] for passes in (kinds[:, FORWARD], backward))
    number = setting.layout.num_micro_batches
    return max(number * float(kinds[list(own)].sum()) + before[own[0]] + after[own[0]] for own in cut.of_rank)


def update_s(setting: PassContext, params: int, matrices: int, owners: int) -> float:
    """Return the seconds of the update, at copy speed: it reads and writes weights and states, and reads gradients."""
    precision = precision_of(setting.job)
    states = counts.state_elements(setting.job.optimizer, params, matrices) * precision.state
    weights = params * (precision.parameter + precision.master)
    touched = 2 * (states + weights) + params * precision.gradient
    return touched / owners / 2 * setting.place.network.copy_s_per_byte


def muon_s(setting: PassContext, matrices: int) -> float:
    """Return Muon's seconds: each matrix of a block is sent to one rank, orthogonalized there, and sent back."""
    model, ranks, ep = setting.job.model, setting.place.matrices, setting.layout.ep
    each = counts.block_matrices(model, setting.layout.tp, ep)
    nbytes = matrices / setting.place.replicas.size * precision_of(setting.job).state
    products_s = matrices / each * muon_flops(model, ep) / ranks.size / setting.flops_per_s
    return 2 * ranks.seconds("all_to_all", nbytes) + products_s


def messages_s(setting: PassContext) -> list[float]:
    """Return the seconds of a message from each stage to the next."""
    home = {stage: rank for rank, own in enumerate(stages(setting.job, setting.layout).of_rank) for stage in own}
    nbytes = setting.activation_bytes / counts.between_tp(setting.layout)
    return [
        setting.place.to_stage(home[stage], home[stage + 1]).seconds(nbytes) if home[stage] != home[stage + 1] else 0.0
        for stage in range(len(home) - 1)
    ]
