"""Draw, search and check pipeline schedules.  Neither MPI nor torch is needed.

python -m parallelism.pipeline.schedule draw --schedule 1f1b --stages 4 --micro_batches 8
python -m parallelism.pipeline.schedule draw --schedule zb_v --stages 4 --micro_batches 8 --message 0.2 --png zb_v.png
python -m parallelism.pipeline.schedule search --stages 4 --micro_batches 8 --virtual_stages 2 --memory 8 --out my.csv
python -m parallelism.pipeline.schedule check my.csv
"""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence

from collectives.job.settings import Parser, Range, positive
from collectives.schedule.draw import refuse, refuse_picture, save
from parallelism.pipeline.schedule import files, picture, registry
from parallelism.pipeline.schedule.actions import Schedule
from parallelism.pipeline.schedule.price import Costs, price
from parallelism.pipeline.schedule.search import keeps, limits_of, registered, search

STAGES, MICRO_BATCHES = 4, 8
SECONDS = Range(0, 10**9, unit="s")


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        flags = parser().parse_args(arguments)
        flags.act(flags)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename} can't be read ({error.strerror}): check the path", file=sys.stderr)
        return 2
    return 0


def parser() -> Parser:
    command = Parser("python -m parallelism.pipeline.schedule", __doc__)
    acts = command.add_subparsers(required=True, metavar="draw | search | check")
    draws = acts.add_parser("draw", help="draw a schedule, with its bubble and live activations")
    text = f"name of the schedule: {', '.join(registry.names())} (default: 1f1b)"
    draws.add_argument("--schedule", metavar="NAME", help=text)
    text = "read the schedule from a file instead: a line of actions for each rank"
    draws.add_argument("--file", metavar="FILE", help=text)
    searches = acts.add_parser("search", help="search a schedule for these times under a memory limit")
    text = "largest number of live activations, one number or one for each rank"
    searches.add_argument("--memory", type=positive, nargs="+", metavar="N", help=text)
    checks = acts.add_parser("check", help="prove schedules in files")
    checks.add_argument("files", nargs="+", metavar="FILE", help="file of a schedule: a line of actions for each rank")
    for each in (draws, searches):
        add_common_flags(each)
    for each, act in ((draws, draw), (searches, find), (checks, check)):
        each.set_defaults(act=act)
    return command


def add_common_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--stages", type=positive, metavar="P", help=f"number of pipeline ranks (default: {STAGES})")
    text = "stages on each rank (default: the fewest that the schedule takes; search: 1)"
    add("--virtual_stages", type=positive, metavar="V", help=text)
    add("--micro_batches", type=positive, metavar="M", help=f"number of micro-batches (default: {MICRO_BATCHES})")
    for name, default in Costs()._asdict().items():
        each = "pair of consecutive stages" if name == "message" else "stage"
        text = f"{name} time in seconds, one number or one for each {each} (default: {default:g})"
        add(f"--{name}", type=SECONDS.number, nargs="+", default=[default], metavar="S", help=text)
    add("--png", metavar="FILE", help="also draw a picture to this PNG file")
    add("--out", metavar="FILE", help="write the schedule to this file, as CSV if its suffix is .csv, else as text")


def draw(flags: argparse.Namespace) -> None:
    """Draw the schedule that the flags select, from the registry or a file."""
    refuse_outputs(flags)
    if flags.file:
        for name in ("schedule", "stages", "virtual_stages", "micro_batches"):
            if getattr(flags, name) is not None:
                raise ValueError(f"--{name} {getattr(flags, name)}: the file {flags.file} sets it; omit one of them")
        schedule = files.read(flags.file)
    else:
        shape = flags.stages or STAGES, flags.micro_batches or MICRO_BATCHES, flags.virtual_stages
        schedule = registry.make_schedule(flags.schedule or "1f1b", *shape)
    show(schedule, flags)


def refuse_outputs(flags: argparse.Namespace) -> None:
    """Check that the outputs can be written, before any work is lost."""
    if flags.png:
        refuse_picture(flags.png, "--png ")
    if flags.out:
        refuse(flags.out, "--out ")


def show(schedule: Schedule, flags: argparse.Namespace) -> None:
    """Print the grid, and write it to the outputs that the flags name."""
    grid = picture.planned(price(schedule, costs(flags)))
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else picture.MOST_COLUMNS
    print(picture.text(grid, columns, has_colors()))
    if flags.png:
        save(picture.figure([grid]), flags.png)
    if flags.out:
        files.write(schedule, flags.out)


def costs(flags: argparse.Namespace) -> Costs:
    return Costs(*(getattr(flags, name) for name in Costs._fields))


def has_colors() -> bool:
    """Return whether standard output is a terminal with colors that the user wants (no-color.org)."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("NO_COLOR")


def find(flags: argparse.Namespace) -> None:
    """Search, and compare the result with the known schedules."""
    refuse_outputs(flags)
    shape = flags.stages or STAGES, flags.micro_batches or MICRO_BATCHES, flags.virtual_stages or 1
    limits = limits_of(flags.memory, *shape)
    show(search(*shape, costs(flags), limits), flags)
    print("\nknown:")
    for schedule in registered(*shape):
        too_much = "" if keeps(schedule, limits) else ", above the limit"
        print(f"{picture.title(price(schedule, costs(flags)))}{too_much}")


def check(flags: argparse.Namespace) -> None:
    for path in flags.files:
        schedule = files.read(path)
        counts = f"{schedule.num_ranks} ranks, {schedule.num_stages} stages, {schedule.num_micro_batches} micro-batches"
        print(f"{path} holds: {counts}, live activations at most {picture.alive(schedule.peaks)}")


if __name__ == "__main__":
    sys.exit(main())
