"""Predict memory and time of a step for every layout, and list the best.  Neither MPI nor torch is needed.

python -m parallelism.planner --config configs/small.toml --hosts 8 --gpus 8
python -m parallelism.planner --n_layer 32 --n_embd 4096 --n_head 32 --block_size 4096 --dtype bfloat16 --hosts 2
python -m parallelism.planner --config configs/small.toml --fabric 100gbe --gpus 2 --measure --tp 1
"""

import sys
from collections.abc import Container, Iterator, Sequence

from parallelism.planner.flags import as_flag, parse_request
from parallelism.planner.layout import ParallelLayout, TrainingJob
from parallelism.planner.memory import in_bytes, in_unit
from parallelism.planner.place import Machine
from parallelism.planner.search import PlannedLayout, SearchResult, nothing, search

REASONS = 3  # listed for refused meshes
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
        what = parse_request(arguments, __doc__)
        print("\n".join(what.words), flush=True)
        result = search(what.job, what.machine, what.fixed, what.number)
        if not result.best:
            raise ValueError(nothing(result, what.machine, what.fixed))
        print("\n".join(report(what.job, what.machine, result)))
        print(what.command, command(result.best[0].layout, what.written))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def report(job: TrainingJob, machine: Machine, result: SearchResult) -> Iterator[str]:
    model = job.model
    tokens = job.global_batch_size * model.block_size
    numbers = f"{result.fitting} layouts fit, {result.too_large} don't"
    yield f"{job.global_batch_size} samples, {tokens} tokens a step; {numbers}"
    yield ""
    yield f"{'step':>10} {'tokens/s':>9} {'a rank':>9} {'bubble':>7} {'comm':>6}  {'bound by':<8}  layout"
    for planned in result.best:
        yield row(planned, tokens)
    yield ""
    first = result.best[0]
    yield f"the first holds {first.memory}"
    for planned in result.best[1:]:
        yield f"{mesh_words(planned.layout)}: {slower(planned, first)}"
    yield from misfits(machine, result)


def row(planned: PlannedLayout, tokens: int) -> str:
    time, rate = planned.time, in_unit(tokens / planned.time.total, THOUSANDS)
    bound = max(time._fields, key=lambda part: getattr(time, part))  # the part that takes longest
    return (
        f"{in_unit(time.total, SECONDS):>10} {rate:>9} {in_bytes(planned.memory.total):>9} "
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


def command(layout: ParallelLayout, file_names: Container[str] = ()) -> str:
    """Return a layout as train.py's flags; defaults appear only for `file_names`, the settings of a file."""
    words = []
    for name, value in layout._asdict().items():
        is_default = value is False or (name, value) == ("ep", 1)
        if name in file_names or not (is_default or (layout.pp == 1 and name in ("schedule", "virtual_stages"))):
            words.append(as_flag(name, value))
    return " ".join(words)


if __name__ == "__main__":
    sys.exit(main())
