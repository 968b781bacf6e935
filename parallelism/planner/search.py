"""Layout search: find the layouts that fit in memory, and the fastest of them."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from heapq import nsmallest
from typing import Any, NamedTuple

import numpy as np

from collectives.schedule.fabrics import in_nodes
from parallelism.planner.counts import param_counts
from parallelism.planner.division import Division, divisions
from parallelism.planner.layout import ParallelLayout, TrainingJob, check_layout, check_mesh, families, meshes
from parallelism.planner.memory import Memory, in_bytes, largest, memory, model_shards
from parallelism.planner.place import Machine, NodeGroups, RankPlacement
from parallelism.planner.ranges import RANKS
from parallelism.planner.step import StepModel, Time
from parallelism.planner.uses import refuse_unused

NEAREST = 3  # number of listed layouts that do not fit
SAVING = ("recompute",), ("zero_stage", "zero_group"), ("recompute", "zero_stage", "zero_group")  # memory
MORE = 4  # numbers of ranks that are tried where a model does not fit
TIE = 1e-5  # relative difference of times that counts as equal


class PlannedLayout(NamedTuple):
    """A layout with its predicted memory and step time.

    On hosts of different speeds, `numbers` are the micro-batches of each replica, and `layers` the blocks of each pp
    rank; empty if they are equal.
    """

    layout: ParallelLayout
    memory: Memory
    time: Time
    numbers: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[float, float, ParallelLayout]:
        """Sort key: the time to five digits, then the memory."""
        return float(f"{self.time.total:.5g}"), self.memory.total, self.layout


class ZeroVariants(NamedTuple):
    """Layouts that differ in ZeRO only, those of them that fit, their costs, and a lower bound of their step times."""

    least_s: float
    division: Division
    costs: np.ndarray
    fitting: list[tuple[ParallelLayout, Memory]]


class SearchResult(NamedTuple):
    best: list[PlannedLayout]  # the best of each mesh, fastest first
    fitting: int  # number of layouts that fit
    too_large: int
    nearest: list[tuple[ParallelLayout, Memory]]  # of the layouts that do not fit
    undivided: Counter[str]  # number of refused meshes, by reason


def search(
    job: TrainingJob, machine: Machine, fixed: Mapping[str, Any] = {}, number: int = 1, moves: bool = True
) -> SearchResult:
    """Return the best layouts of the best `number` meshes, among all layouts with the `fixed` values.

    On hosts of different speeds, `moves` allows unequal numbers of micro-batches.
    """
    candidates, undivided = [], Counter[str]()
    nearest: list[tuple[ParallelLayout, Memory]] = []
    fitting = too_large = 0
    for each, pairs in priced_memory(job, machine, fixed, moves, undivided):
        fits = [pair for pair in pairs if pair[1].fits]
        misses = [pair for pair in pairs if not pair[1].fits]
        fitting, too_large = fitting + len(fits), too_large + len(misses)
        nearest = nsmallest(NEAREST, [*nearest, *misses], key=lambda pair: pair[1].total / pair[1].limit)
        if fits:
            costs = each.setting.stage_costs()
            candidates.append(ZeroVariants(each.setting.least_s(costs), each, costs, fits))
    return SearchResult(fastest(candidates, number), fitting, too_large, nearest, undivided)


def priced_memory(
    job: TrainingJob, machine: Machine, fixed: Mapping[str, Any], moves: bool, undivided: Counter[str]
) -> Iterator[tuple[Division, list[tuple[ParallelLayout, Memory]]]]:
    """Yield each layout without ZeRO, and its ZeRO variants with their memory; count refused meshes by reason."""
    groups = NodeGroups(machine)
    for mesh in meshes(machine.world_size, fixed, job.model.num_experts):
        try:
            layouts = divided(job, mesh, fixed)
        except ValueError as error:
            undivided[str(error)] += 1
            continue
        placement = RankPlacement(mesh, machine, job.head_ranks(mesh.sp), groups)
        for layout in layouts:
            for each in divisions(job, layout, placement, moves):
                yield each, [*variants(each, layout, fixed)]


def divided(job: TrainingJob, mesh: ParallelLayout, fixed: Mapping[str, Any]) -> list[ParallelLayout]:
    """Return the layouts of a mesh, without ZeRO; raise ValueError with the first one's fault if all are impossible."""
    check_mesh(job, mesh)
    refuse_unused(job._asdict() | mesh._asdict(), job._field_defaults | mesh._field_defaults)
    layouts, faults = [], []
    for layout in families(job, mesh, fixed):
        try:
            check_layout(job, layout)
            layouts.append(layout)
        except ValueError as error:
            faults.append(error)
    if not layouts:
        raise faults[0] if faults else ValueError("schedule and virtual_stages are incompatible")
    return layouts


def variants(
    division: Division, layout: ParallelLayout, fixed: Mapping[str, Any]
) -> Iterator[tuple[ParallelLayout, Memory]]:
    """Yield a layout with each ZeRO variant, and the memory that ranks need."""
    setting, most = division.setting, max(division.numbers, default=layout.num_micro_batches)
    job, owners, limits = setting.job, setting.placement.owners, setting.placement.memory_bytes
    shards = model_shards(job, layout._replace(num_micro_batches=most), setting.cut_by)
    if len({*limits}) == 1:
        shards = largest(shards)
        limits = limits[: len(shards)]
    replicas, crosses = owners["all"][0].size, len(owners["all"][0].nodes) > 1
    possible = range(4 if replicas > 1 else 1) if "zero_stage" not in fixed else [fixed["zero_stage"]]
    stages = [stage for stage in possible if stage <= division.most_zero]
    groups = [group for group in owners if fixed.get("zero_group", group) == group]
    for stage in stages:
        for group in groups if stage else ["all"]:
            number = owners[group][0].size
            if not stage or group == fixed.get("zero_group", "all") or 1 < number < replicas:
                full = layout._replace(zero_stage=stage, zero_group=group)
                yield full, memory(job, full, shards, number, limits, crosses)


def fastest(candidates: list[ZeroVariants], number: int) -> list[PlannedLayout]:
    """Return the best layout of each of the best meshes; skip those whose lower bound exceeds the best times."""
    best: dict[RankPlacement, PlannedLayout] = {}  # of each mesh
    limit_s = math.inf
    for family in sorted(candidates, key=lambda family: family.least_s):
        if family.least_s > limit_s:
            break
        mesh = family.division.setting.placement
        for layout, rank_memory in family.fitting:
            incumbent = best.get(mesh)
            step = StepModel(family.division.of(layout), family.costs)
            if step.least_s() > min(limit_s, incumbent.time.total * (1 + TIE) if incumbent else math.inf):
                continue
            cut = step.cut.num_blocks if step.setting.cut_by else ()
            planned = PlannedLayout(layout, rank_memory, step.time(), family.division.numbers, tuple(cut))
            best[mesh] = min(incumbent or planned, planned, key=lambda planned: planned.key)
        if len(best) >= number:
            limit_s = sorted(planned.time.total for planned in best.values())[number - 1] * (1 + TIE)
    return sorted(best.values(), key=lambda planned: planned.key)[:number]


def best(job: TrainingJob, machine: Machine, fixed: Mapping[str, Any] = {}, moves: bool = True) -> PlannedLayout:
    """Return the best of all layouts with the `fixed` values; `moves` is that of `search`.

    Raises: ValueError if none fits, with the nearest ones, or if the model cannot be divided.
    """
    result = search(job, machine, fixed, moves=moves)
    if not result.best:
        raise ValueError(nothing(job, result, machine, fixed))
    return result.best[0]


def nothing(job: TrainingJob, result: SearchResult, machine: Machine, fixed: Mapping[str, Any]) -> str:
    """Describe why there is no layout, and what to do."""
    if not result.too_large:
        values = " and ".join(f"{name}={value}" for name, value in fixed.items())
        none = (
            f"none has {values}: use axes whose product divides the ranks, and for ep a divisor of dp and the experts"
        )
        why, number = result.undivided.most_common(1)[0] if result.undivided else (none, 0)
        others = f", and {result.undivided.total() - number} others" if result.undivided.total() > number else ""
        return f"no layout of {machine.world_size} ranks: {why}{others}"
    layout, rank_memory = result.nearest[0]
    return (
        f"none of {result.too_large} layouts of {machine.world_size} ranks fits into {in_bytes(rank_memory.limit)} "
        f"a rank; the nearest, {layout}, takes {rank_memory}: {remedy(job, machine, fixed)}"
    )


def remedy(job: TrainingJob, machine: Machine, fixed: Mapping[str, Any]) -> str:
    """Return what makes a layout fit: settings that are not fixed, or else the fewest nodes, by powers of two."""
    for names in SAVING:
        omitted = {name: fixed[name] for name in names if name in fixed}
        rest = {name: value for name, value in fixed.items() if name not in omitted}
        if omitted and (description := first_fitting(job, machine, rest)):
            return f"omit {' and '.join(f'{name}={value}' for name, value in omitted.items())}, as {description}"
    for ranks in numbers_of_more_ranks(job, machine):
        larger = machine._replace(nodes=in_nodes(ranks, len(machine.nodes[0])))
        if description := first_fitting(job, larger, fixed):
            return f"use {ranks} ranks, as {description}"
    return "use a smaller model or batch"


def numbers_of_more_ranks(job: TrainingJob, machine: Machine) -> list[int]:
    """Return the least numbers of ranks, by powers of two of nodes, whose memory together holds weights and gradients.

    There are none for hosts that differ.
    """
    if machine.hosts:
        return []
    length, precision = len(machine.nodes[0]), job.precision
    params = param_counts(job.model).stages(range(job.model.n_layer + 2))
    least = params * (precision.parameter + precision.gradient + precision.master) / machine.memory_bytes
    powers = (length << power for power in range((int(RANKS.most) // length).bit_length()))
    return [ranks for ranks in powers if ranks > machine.world_size and ranks >= least][:MORE]


def first_fitting(job: TrainingJob, machine: Machine, fixed: Mapping[str, Any]) -> str:
    """Describe a layout that fits, if there is any."""
    for _, pairs in priced_memory(job, machine, fixed, False, Counter()):
        for layout, rank_memory in pairs:
            if rank_memory.fits:
                return f"{layout} takes {in_bytes(rank_memory.total)}"
    return ""
