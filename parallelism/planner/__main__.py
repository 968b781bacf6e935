"""Predict memory and time of a step for every layout, and list the best.  Neither MPI nor torch is needed.

python -m parallelism.planner --config configs/small.toml --hosts 8 --gpus 8
python -m parallelism.planner --n_layer 32 --n_embd 4096 --n_head 32 --block_size 4096 --dtype bfloat16 --hosts 2
python -m parallelism.planner --config configs/small.toml --fabric 100gbe --gpus 2 --measure --tp 1
mpirun -n 2 python -m parallelism.planner --config configs/small.toml --measure --cluster cluster.toml
python -m parallelism.planner --config configs/small.toml --cluster cluster.toml
"""

import sys
from collections.abc import Container, Iterator, Sequence
from importlib import import_module
from itertools import groupby

from collectives.job import environment
from parallelism.planner.flags import PlanRequest, as_flag, machine_of_cluster, parse_flags, parse_request, request
from parallelism.planner.flops import layer_flops
from parallelism.planner.layout import ParallelLayout, TrainingJob
from parallelism.planner.memory import in_bytes, in_unit
from parallelism.planner.place import Machine
from parallelism.planner.search import PlannedLayout, SearchResult, nothing, search
from parallelism.planner.step import Time

REASONS = 3  # listed for refused meshes
LOSS = 0.001  # part of a step from which a loss is listed
SECONDS = {" s": 1.0, " ms": 1e-3, " us": 1e-6}
THOUSANDS = {"G": 1e9, "M": 1e6, "k": 1e3, "": 1.0}
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


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        if environment.launched_size() == 1 and not parse_flags(arguments, __doc__).measures_ranks:
            plan(parse_request(arguments, __doc__))
            return 0
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    plan_on_ranks(arguments)
    return 0


def plan(what: PlanRequest) -> None:
    """Print a plan; raise ValueError if there is none."""
    print("\n".join(what.words), flush=True)
    result = search(what.job, what.machine, what.fixed, what.number)
    if not result.best:
        raise ValueError(nothing(result, what.machine, what.fixed))
    print("\n".join(report(what.job, what.machine, result)))
    print(what.command, command(result.best[0], what.written))


def plan_on_ranks(arguments: Sequence[str] | None) -> None:
    """Measure the ranks of an MPI job, write the cluster file, and plan for them on rank 0.  Collective."""
    ranks = import_module("parallelism.planner.ranks")  # which needs MPI and torch, as no other module here does
    comm = ranks.start()
    with comm.agreed("planner"):
        parsed = parse_flags(arguments, __doc__)
        path = parsed.flags.cluster
        if not parsed.measures_ranks:
            raise ValueError(f"{comm.size} ranks plan nothing: pass --measure --cluster FILE, or start without mpirun")
        if not path.absolute().parent.is_dir():
            raise ValueError(f"--cluster {path}: there is no folder {path.parent}, so make it first")
    cluster = ranks.measured_cluster(comm, parsed.job(comm.size), parsed.flags.device or "cpu")
    with comm.agreed("planner"):
        if comm.rank == 0:
            path.write_text(str(cluster), encoding="utf-8")
            plan(request(parsed, *machine_of_cluster(parsed.flags, cluster)))


def report(job: TrainingJob, machine: Machine, result: SearchResult) -> Iterator[str]:
    model = job.model
    tokens = job.global_batch_size * model.block_size
    numbers = f"{result.fitting} layouts fit, {result.too_large} don't"
    yield f"{job.global_batch_size} samples, {tokens} tokens a step; {numbers}"
    yield ""
    yield f"{'step':>10} {'tokens/s':>9} {'MFU':>6} {'a rank':>9} {'bubble':>7} {'comm':>6}  {'bound by':<8}  layout"
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


def command(planned: PlannedLayout, file_names: Container[str] = ()) -> str:
    """Return a layout as train.py's flags; defaults appear only for `file_names`, the settings of a file."""
    layout, words = planned.layout, []
    for name, value in layout._asdict().items():
        is_default = value is False or (name, value) == ("ep", 1)
        if name in file_names or not (is_default or (layout.pp == 1 and name in ("schedule", "virtual_stages"))):
            words.append(as_flag(name, value))
    if planned.numbers:
        words.append("--reproducible --balance_load")
    if planned.layers:
        words.append("--balance measured")
    return " ".join(words)


if __name__ == "__main__":
    sys.exit(main())
