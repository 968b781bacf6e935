"""A plan in words: the best layouts, what their steps' time is spent on, and what does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from parallelism.planner.flops import layer_flops
from parallelism.planner.layout import ParallelLayout, TrainingJob
from parallelism.planner.memory import in_bytes, in_unit
from parallelism.planner.place import Machine
from parallelism.planner.search import PlannedLayout, SearchResult
from parallelism.planner.step import Time

REASONS = 3  # listed for refused meshes
LOSS = 0.001  # part of a step from which a loss is listed
SECONDS = {" s": 1.0, " ms": 1e-3, " us": 1e-6}
THOUSANDS = {"G": 1e9, "M": 1e6, "k": 1e3, "": 1.0}
HEADING = f"{'step':>10} {'tokens/s':>9} {'MFU':>6} {'a rank':>9} {'bubble':>7} {'comm':>6}  {'bound by':<8}  layout"
TIMES = {
    "compute": "computing",
    "tp": "sums between tp ranks",
    "sp": "exchanges between sp ranks",
    "ep": "exchanges of tokens between ep ranks",
    "zero": "ZeRO's exchanges within passes",
    "bubble": "waiting in the pipeline",
    "dp": "gradients and parameters between replicas",
    "update": "the update",
}


def report(job: TrainingJob, machine: Machine, result: SearchResult) -> Iterator[str]:
    model = job.model
    tokens = job.global_batch_size * model.block_size
    numbers = f"{result.fitting} layouts fit, {result.too_large} don't"
    yield f"{job.global_batch_size} samples, {tokens} tokens a step; {numbers}"
    yield ""
    yield HEADING
    for planned in result.best:
        yield row(planned, tokens, utilization(job, machine, planned.time.total))
    yield ""
    first = result.best[0]
    yield f"the first holds {first.memory}"
    yield f"of its step, {limits(first.time)}"
    yield from unequal(job, machine, first)
    for planned in result.best[1:]:
        yield f"{mesh_words(planned.layout)}: {slower(planned, first)}"
    yield from misfits(machine, result)


def unequal(job: TrainingJob, machine: Machine, planned: PlannedLayout) -> Iterator[str]:
    """Describe the shares of hosts that differ, and what a step loses beside the sum of their speeds."""
    if not machine.hosts:
        return
    if planned.numbers:
        yield f"micro-batches of its dp ranks: {in_runs(planned.numbers)}"
    if planned.layers:
        yield f"blocks of its pp ranks: {in_runs(planned.layers)}"
    fraction = step_flops(job) / machine.sum_of_speeds / planned.time.total
    lost = {name: part / planned.time.total for name, part in planned.time._asdict().items() if name != "compute"}
    lost["unequal shares"] = 1 - fraction - sum(lost.values())
    parts = sorted(((part, name) for name, part in lost.items() if part >= LOSS), reverse=True)
    words = ", ".join(f"{name} {part:.1%}" for part, name in parts)
    yield f"it computes at {fraction:.1%} of the sum of the hosts' speeds" + (f"; lost: {words}" if words else "")


def in_runs(numbers: Sequence[int]) -> str:
    """Format numbers, equal neighbours together.

    >>> in_runs([5, 4, 4, 4, 2])
    '5, 3 x 4, 2'
    """
    runs = [(number, len([*equal])) for number, equal in groupby(numbers)]
    return ", ".join(f"{length} x {number}" if length > 1 else str(number) for number, length in runs)


def step_flops(job: TrainingJob) -> float:
    """Return the floating-point operations of a step, of which the forward pass is a third."""
    return 3.0 * sum(layer_flops(job.model)) * job.model.block_size * job.global_batch_size


def utilization(job: TrainingJob, machine: Machine, seconds: float) -> float:
    """Return MFU: the model's operations in a step as a fraction of what the ranks' peaks allow in its time.

    Attention counts as if nothing were masked, and no operation twice.  Without a roofline, the peak is the speed that
    was measured, or assumed, in products.
    """
    peak = machine.roofline.flops_per_s * machine.world_size if machine.roofline else machine.sum_of_speeds
    return step_flops(job) / (peak * seconds)


def limits(time: Time) -> str:
    """Describe what a step's time is spent on, the largest part first.

    >>> limits(Time(compute=0.8, tp=0.1, sp=0, ep=0, zero=0, bubble=0.09, dp=0.0, update=0.01))
    'computing takes 80.0%, sums between tp ranks 10.0%, waiting in the pipeline 9.0%, the update 1.0%'
    """
    parts = sorted(((part / time.total, TIMES[name]) for name, part in time._asdict().items()), reverse=True)
    (most, what), *others = [part for part in parts if part[0] >= LOSS]
    return ", ".join([f"{what} takes {most:.1%}", *(f"{words} {part:.1%}" for part, words in others)])


def row(planned: PlannedLayout, tokens: int, mfu: float) -> str:
    time, rate = planned.time, in_unit(tokens / planned.time.total, THOUSANDS)
    bound = max(time._fields, key=lambda part: getattr(time, part))  # the part that takes longest
    return (
        f"{in_unit(time.total, SECONDS):>10} {rate:>9} {mfu:>6.1%} {in_bytes(planned.memory.total):>9} "
        f"{time.bubble / time.total:>7.1%} {time.exposed / time.total:>6.1%}  {bound:<8}  {planned.layout}"
    )


def slower(planned: PlannedLayout, first: PlannedLayout) -> str:
    """Describe the parts of a step that take longer than in the first layout."""
    more = {name: part - getattr(first.time, name) for name, part in planned.time._asdict().items()}
    name, part = max(more.items(), key=lambda part: part[1])
    if planned.time.total <= first.time.total:
        return "as fast"
    return f"{planned.time.total / first.time.total - 1:.1%} slower: {in_unit(part, SECONDS)} more for {TIMES[name]}"


def misfits(machine: Machine, result: SearchResult) -> Iterator[str]:
    if result.nearest:
        yield f"of those that don't fit into {in_bytes(machine.memory_bytes)}, the nearest:"
    for layout, memory in result.nearest:
        yield f"  {layout}: {memory}"
    if result.undivided:
        yield f"{result.undivided.total()} meshes can't be:"
    for why, number in result.undivided.most_common(REASONS):
        yield f"  {number}: {why}"


def mesh_words(layout: ParallelLayout) -> str:
    experts = f" ep {layout.ep}" if layout.ep > 1 else ""
    return f"dp {layout.dp} pp {layout.pp} sp {layout.sp} tp {layout.tp}{experts}"
