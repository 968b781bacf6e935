"""How long a step takes: its passes by the pipeline's schedule, gradients between replicas, the update."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from parallelism.pipeline_schedule import registry
from parallelism.pipeline_schedule.price import Costs, price
from parallelism.planner import counts, passes
from parallelism.planner.counts import precision_of
from parallelism.planner.memory import stages, steady
from parallelism.planner.passes import FORWARD, INPUTS, WEIGHTS, Setting
from parallelism.planner.replicas import Replicas, shown_s


class Time(NamedTuple):
    """Seconds of a step on its busiest rank: computing, communication that shows, waiting in the pipeline, the update.

    `zero` is the communication of ZeRO within passes, `dp` that of gradients and parameters after them.
    """

    compute: float
    tp: float
    sp: float
    zero: float
    bubble: float
    dp: float
    update: float

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def exposed(self) -> float:
        return self.tp + self.sp + self.zero + self.dp


def time(setting: Setting, costs: np.ndarray, copy_s_per_byte: float) -> Time:
    """Of a layout whose stages' passes, without ZeRO, are `costs`."""
    layout, model, cut = setting.layout, setting.job.model, stages(setting.job, setting.layout)
    replicas, costs = Replicas(setting), costs.copy()
    replicas.add_to(costs)
    most = max(counts.rank_params(model, layout.tp, cut.of(rank)) for rank in range(layout.pp))
    if layout.pp == 1:
        span_s = layout.num_micro_batches * float(costs.sum())
        dp_s = gradients_s(setting, costs[0], replicas)
    else:
        span_s, dp_s = pipeline_s(setting, costs, replicas)
    busy = max((layout.num_micro_batches * costs[list(own)].sum((0, 1)) for own in cut.of_rank), key=np.sum)
    dp_s += replicas.across_s(most)
    if layout.zero_stage in (1, 2):
        dp_s += replicas.gather_s(most)
    share = most / replicas.owners.size if layout.zero_stage else most
    return Time(*map(float, busy), span_s - float(busy.sum()), dp_s, update_s(setting, share, copy_s_per_byte))


def update_s(setting: Setting, num_params: float, copy_s_per_byte: float) -> float:
    """Weights and states are read and written, gradients read; a copy reads and writes a byte."""
    precision = precision_of(setting.job)
    touched = 2 * precision.states + 2 * precision.parameter + precision.gradient
    return num_params * touched / 2 * copy_s_per_byte


def gradients_s(setting: Setting, cost: np.ndarray, replicas: Replicas) -> float:
    """What shows of reductions during the last backward pass of a model that is not cut."""
    if setting.layout.zero_stage >= 2:
        return 0.0
    ready = [*appearing(setting, cost)]
    return shown_s(ready, replicas.bucket_params, replicas.reduce_s) - ready[-1][0]


def appearing(setting: Setting, cost: np.ndarray) -> Iterator[tuple[float, float]]:
    """When gradients are ready in a backward pass, and of how many parameters: the head's and norm's, blocks', others'.

    Those of the vocabulary, which the embedding has, too, come last.
    """
    model, tp = setting.job.model, setting.layout.tp
    backward_s = float(cost[[INPUTS, WEIGHTS]].sum())
    head_s = float(passes.head(setting)[[INPUTS, WEIGHTS]].sum())
    block_s = (backward_s - head_s) / model.n_layer
    yield head_s, counts.norm_params(model)
    for number in range(1, model.n_layer + 1):
        yield head_s + number * block_s, counts.block_params(model, tp)
    yield backward_s, counts.embedding_params(model, tp)


def pipeline_s(setting: Setting, costs: np.ndarray, replicas: Replicas) -> tuple[float, float]:
    """How long the passes of a pipeline take, and how much longer it takes until its gradients are reduced.

    A stage's are, after its last pass, while its rank goes on with others; those of tied parameters in the end.
    """
    layout, model, cut = setting.layout, setting.job.model, stages(setting.job, setting.layout)
    kinds = costs.sum(2)
    prices = Costs(*(kinds[:, kind].tolist() for kind in (FORWARD, INPUTS, WEIGHTS)), messages_s(setting))
    few, rounds = steady(layout.pp, layout.num_micro_batches)
    made = (registry.make(layout.schedule, layout.pp, m, layout.virtual_stages) for m in (few, few + layout.pp))
    first = price(next(made), prices)
    span_s = first.span_s + (rounds * (price(next(made), prices).span_s - first.span_s) if rounds else 0.0)
    tied_s = setting.place.ends.seconds(
        "all_reduce", counts.vocabulary_params(model, layout.tp) * replicas.precision.gradient
    )
    if layout.zero_stage >= 2:
        return span_s, tied_s
    ends = {action.stage: end for action, end in sorted(first.end_s.items(), key=lambda pair: pair[1])}
    done_s = max(
        shown_s(
            sorted((ends[stage], counts.stage_params(model, layout.tp, cut.layers[stage])) for stage in own),
            1,
            replicas.reduce_s,
        )
        for own in cut.of_rank
    )
    return span_s, max(0.0, done_s - first.span_s) + tied_s


def messages_s(setting: Setting) -> list[float]:
    """From each stage to the next."""
    home = {stage: rank for rank, own in enumerate(stages(setting.job, setting.layout).of_rank) for stage in own}
    nbytes = setting.activation_bytes / counts.between_tp(setting.layout)
    return [
        setting.place.to_stage(home[stage], home[stage + 1]).seconds(nbytes) if home[stage] != home[stage + 1] else 0.0
        for stage in range(len(home) - 1)
    ]


def least_s(setting: Setting, costs: np.ndarray) -> float:
    """A bound that no schedule beats: each rank's passes, the forward passes that come before, and backward ones after.

    Where weights' parts are put off, a rank does those while it would wait for the last backward passes.
    """
    cut = stages(setting.job, setting.layout)
    kinds = costs.sum(2)
    backward = kinds[:, INPUTS] + kinds[:, WEIGHTS]
    before = [0.0, *accumulate(kinds[:, FORWARD].tolist())]
    after = [0.0, *accumulate(backward.tolist())] if not cut.splits else [0.0] * (len(kinds) + 1)
    return max(
        setting.layout.num_micro_batches * float(kinds[list(own)].sum()) + before[own[0]] + after[own[0]]
        for own in cut.of_rank
    )


def least_with_replicas_s(setting: Setting, costs: np.ndarray, passes_s: float) -> float:
    """A bound for a layout with ZeRO, given one for its passes: gradients come after the first forward pass."""
    layout, cut = setting.layout, stages(setting.job, setting.layout)
    replicas, model = Replicas(setting), setting.job.model
    if layout.zero_stage >= 2:
        return passes_s
    ranks = [
        float(costs[list(cut.of_rank[rank]), FORWARD].sum()) * layout.num_micro_batches
        + replicas.reduce_s(counts.rank_params(model, layout.tp, cut.of(rank)))
        for rank in range(layout.pp)
    ]
    return max(passes_s, *ranks)
