"""Predict memory and time of a step for every layout, and list the best.  Neither MPI nor torch is needed.

python -m parallelism.planner --config configs/small.toml --hosts 8 --gpus 8
python -m parallelism.planner --n_layer 32 --n_embd 4096 --n_head 32 --block_size 4096 --dtype bfloat16 --hosts 2
python -m parallelism.planner --config configs/small.toml --fabric 100gbe --gpus 2 --measure --tp 1
mpirun -n 2 python -m parallelism.planner --config configs/small.toml --measure --cluster cluster.toml
python -m parallelism.planner --config configs/small.toml --cluster cluster.toml
"""

import sys
from collections.abc import Container, Sequence
from importlib import import_module

from collectives.job import environment
from collectives.job.progress_bar import progress_bar
from collectives.job.system import write
from parallelism.planner.flags import PlanRequest, as_flag, machine_of_cluster, parse_flags, parse_request, request
from parallelism.planner.page import PlannedJob, plan_page
from parallelism.planner.report import report
from parallelism.planner.scaling import numbers_of_ranks, scale_point, scaling_report
from parallelism.planner.search import PlannedLayout, nothing, search


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
        raise ValueError(nothing(what.job, result, what.machine, what.fixed))
    print("\n".join(report(what.job, what.machine, result)))
    words, points = f"{what.command} {command(result.best[0], what.written)}", []
    print(words, flush=True)
    if what.up_to:
        with progress_bar(numbers_of_ranks(what.up_to), "plans") as numbers:
            points = [scale_point(what.job, what.machine, what.fixed, ranks) for ranks in numbers]
        print("\n".join(scaling_report(points, what.job.global_batch_size * what.job.model.block_size)))
    if what.html:
        write(what.html, plan_page(PlannedJob(what.job, what.machine, result, points), what.words, words))


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
