"""Run every command with randomly drawn settings, valid, at a limit or absurd, for a given time.

python -m mpi_tests.fuzz_settings --seconds 60
python -m mpi_tests.fuzz_settings --seed 7 --only 1234    # repeat one case

Within 10 s, a command either runs, or prints one error line and exits with status 2; absurd settings it must refuse.
Most cases run in this process, one in `PROCESSES` runs in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, NamedTuple, get_type_hints
from unittest import mock

from collectives.algorithms.groups import Topology
from collectives.bench import __main__ as bench
from collectives.job import environment
from collectives.job.settings import Range, value_type
from collectives.schedule import fabrics, simulate
from mpi_tests.helpers.launch import ROOT
from mpi_tests.helpers.launch import environment as surroundings
from parallelism.planner import __main__ as planner
from parallelism.planner import flags as planning
from parallelism.planner.settings import parse
from training.settings.config import Config

LIMIT_S = 10.0
PROCESSES = 100  # one case in so many runs as a program
SMALL = {"n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 8, "max_iters": 1, "micro_batch_size": 1}
SMALL |= {"sample_tokens": 1, "val_fraction": 0.002, "out_dir": ""}
ABSURD = (
    "nan",
    "-nan",
    "inf",
    "-inf",
    "1e999",
    "-1",
    "9" * 40,
    "9" * 5000,
    "",
    " ",
    "x",
    "0y10",
    "1;5",
    "²",
    "None",
    "[]",
)
PATHS = ("", "no-such", "/dev/null", "/dev/null/x", "a" * 300, "/", "README.md", "README.md/no/file")
NAMES = ("", "foo", "Sum", "none ", "-", "0", "*")
PAIRS = ("within", "between", "nic")
COMMANDS = {
    "train.py": ["train.py"],
    "planner": ["-m", "parallelism.planner"],
    "bench": ["-m", "collectives.bench"],
    "simulate": ["-m", "collectives.schedule.simulate"],
    "environment": ["-c", "import collectives; collectives.world()"],
}


class Case(NamedTuple):
    """A command with its arguments, file and environment; it must refuse the settings in `absurd`."""

    command: str
    words: tuple[str, ...]
    file: str = ""  # settings in TOML
    variables: tuple[tuple[str, str], ...] = ()
    ranks: int = 1
    absurd: tuple[str, ...] = ()
    is_process: bool = False


class LateError(BaseException):
    """A case exceeds its time limit; a BaseException, so that no command catches it."""


class Draw(NamedTuple):
    """A setting's value as on a command line, and whether it must be refused."""

    text: str
    is_absurd: bool = False


def number(draws: random.Random, values: Range, is_whole: bool) -> Draw:
    """Draw a number: mostly small, sometimes at a limit, sometimes beyond it."""
    beyond = [str(values.least - 1), str(values.most + max(1, values.most)), *ABSURD]
    kind = draws.random()
    if kind < 0.15:
        return Draw(draws.choice(beyond), True)
    if kind < 0.35:
        end = values.most if "below" not in values.open else math.nextafter(values.most, 0)
        least = values.least if "above" not in values.open else values.least + (values.most - values.least) * 1e-6
        return Draw(str(draws.choice((end, int(least) if is_whole else least))))
    usual = [n for n in (0, 1, 2, 3, 4, 8) if n in values] or [(values.least + values.most) / 2]
    return Draw(str(draws.choice(usual)))


def field_draw(draws: random.Random, field: Any, hint: Any) -> Draw:
    kind = value_type(hint)
    if choices := field.metadata.get("choices"):
        choice = draws.choice(choices)
        return Draw(str(choice)) if draws.random() < 0.7 else Draw(draws.choice(NAMES) + "?", True)
    if kind in (int, float):
        return number(draws, field.metadata["range"], kind is int)
    if kind is bool:
        return Draw(draws.choice(("true", "false")))
    return Draw(draws.choice(PATHS)) if draws.random() < 0.8 else Draw("a\nb\x1b", True)


def settings(draws: random.Random, kind: type, base: dict[str, Any]) -> tuple[list[str], str, list[str]]:
    """Draw fields of a dataclass as flags or a TOML file; return both, and the fields with absurd values."""
    hints, in_file = get_type_hints(kind), draws.random() < 0.4
    subset = draws.sample(fields(kind), draws.randint(1, 4))  # type: ignore[arg-type]
    draw_by_name = {field.name: field_draw(draws, field, hints[field.name]) for field in subset}
    absurd = [f"{name}={draw.text!r:.40}" for name, draw in draw_by_name.items() if draw.is_absurd]
    lines, words = [], []
    for name, value in base.items():
        if name not in draw_by_name:
            words += [f"--{name}={value}"]
    for name, draw in draw_by_name.items():
        if in_file:
            lines.append(f"{name} = {toml(draw, value_type(hints[name]))}")
        elif value_type(hints[name]) is bool:
            words.append(f"--{name}" if draw.text == "true" else f"--no-{name}")
        else:
            words.append(f"--{name}={draw.text}")
    if in_file and draws.random() < 0.1:
        lines.append(
            draws.choice(("[model]\nn_layer = 2", "x = ", *["nothing = 1"] * (kind is Config), "n_layer = [[]]", "= 3"))
        )
        absurd.append(lines[-1])
    return words, "\n".join(lines), absurd


def toml(draw: Draw, kind: type) -> str:
    """Format a value for a TOML file: unquoted for a field of a number or boolean, unless it is blank."""
    if kind is list:
        return json.dumps([draw.text])
    return draw.text if kind is not str and draw.text.strip() else json.dumps(draw.text)


def train_case(draws: random.Random) -> Case:
    words, file, absurd = settings(draws, Config, SMALL)
    return Case("train.py", tuple(words), file, ranks=draws.randint(1, 8), absurd=tuple(absurd))


def planner_case(draws: random.Random) -> Case:
    words, file, absurd = settings(draws, planning.Settings, {"n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 8})
    own = {"hosts": planning.RANKS, "gpus": planning.RANKS, "number": Range(1, 1000), "tflops": planning.ranges.TFLOPS}
    own |= {"efficiency": planning.EFFICIENCIES, "spare": planning.SPARES, "least_pass": planning.MICROSECONDS}
    more, beyond = flags(draws, own, {"hosts", "gpus", "number"})
    network, too = network_flags(draws)
    return Case("planner", (*words, *more, *network), file, absurd=(*absurd, *beyond, *too))


def network_flags(draws: random.Random) -> tuple[list[str], list[str]]:
    words: list[str] = []
    absurd: list[str] = []
    if draws.random() < 0.2:
        pair = number(draws, fabrics.TIME, False), number(draws, fabrics.SPEED, False)
        if all(part.text and not part.text.startswith("-") for part in pair):  # it would be parsed as a flag otherwise
            words += [f"--{draws.choice(PAIRS)}", *(part.text for part in pair)]
            absurd += [part.text for part in pair if part.is_absurd]
    return words, absurd


def flags(draws: random.Random, ranges: dict[str, Range], whole: set[str]) -> tuple[list[str], list[str]]:
    words, absurd = [], []
    for name in draws.sample(sorted(ranges), draws.randint(0, min(3, len(ranges)))):
        draw = number(draws, ranges[name], name in whole)
        words.append(f"--{name}={draw.text}")
        absurd += [f"{name}={draw.text!r:.40}"] * draw.is_absurd
    return words, absurd


def simulate_case(draws: random.Random) -> Case:
    words, absurd = flags(draws, {"ranks": fabrics.RANKS, "factor": simulate.FACTOR}, {"ranks", "factor"})
    network, too = network_flags(draws)
    words += [f"--topology={draws.choice(('ndr', '2x2', '3x1', 'slingshot', 'pods'))}"] * (draws.random() < 0.3)
    if draws.random() < 0.2:
        words.append(f"--topology={draws.choice(('0x2', '9999999x9999999', 'x', '2x', '²x2', '-1x2', ''))}")
        absurd.append(words[-1])
    words += [f"--{draws.choice(('begin', 'end'))}={draws.choice(('8', '1K', '64M', '0', '1048576G'))}"]
    if draws.random() < 0.2:
        words.append(f"--end={draws.choice(('-1', 'x', '1T', '9' * 40 + 'G', ''))}")
        absurd.append(words[-1])
    return Case("simulate", (*words, *network), absurd=(*absurd, *too))


def bench_case(draws: random.Random) -> Case:
    runs = {"iters": bench.RUNS, "warmup_iters": bench.RUNS._replace(least=0), "check": bench.RUNS._replace(least=0)}
    runs |= {"agg_iters": bench.CALLS, "window_size": bench.CALLS}
    runs |= {"average": Range(0, 3), "blocking": Range(0, 3), "unalign": bench.ELEMENTS}
    own = {**runs, "factor": bench.FACTORS, "min-bw": bench.BANDWIDTHS}
    words, absurd = flags(draws, own, {*runs, "factor"})
    words += [f"--dtype={draws.choice(('float', 'half', 'double', 'int8'))}"] * (draws.random() < 0.3)
    words += [f"--{draws.choice(('json', 'html'))}={draws.choice(PATHS)}"] * (draws.random() < 0.2)
    for name, values in (("dtype", NAMES), ("op", NAMES), ("end", ("x", "-1", "9" * 40)), ("device", ("", "tpu"))):
        if draws.random() < 0.1:
            words.append(f"--{name}={draws.choice(values)}")
            absurd.append(words[-1])
    return Case("bench", ("-e=64", *words), ranks=draws.randint(1, 8), absurd=tuple(absurd))


def environment_case(draws: random.Random) -> Case:
    ranges = {
        "COLLECTIVES_CORES": environment.CORES,
        "OMP_NUM_THREADS": environment.THREADS,
        "COLLECTIVES_TIMEOUT_S": environment.SECONDS,
    }
    name = draws.choice([*ranges, "COLLECTIVES_CHECK", "COLLECTIVES_FAKE_NODES", "COLLECTIVES_LINKS"])
    if name in ranges:
        draw = number(draws, ranges[name], name != "COLLECTIVES_TIMEOUT_S")
    elif name == "COLLECTIVES_LINKS":
        draw = draws.choice((Draw("/dev/null", True), Draw("0"), Draw("no-such")))
    else:
        draw = draws.choice((Draw("x", True), Draw("-1", True), Draw("9" * 40 + "x1", True), Draw("")))
    is_absurd = draw.is_absurd and bool(draw.text)  # an empty variable counts as unset
    return Case("environment", (), variables=((name, draw.text),), absurd=(f"{name}={draw.text!r:.40}",) * is_absurd)


DRAWN: dict[str, Callable[[random.Random], Case]] = {
    "train.py": train_case,
    "planner": planner_case,
    "bench": bench_case,
    "simulate": simulate_case,
    "environment": environment_case,
}


def draw_case(seed: int, number: int) -> Case:
    """Draw the case of this number.

    >>> draw_case(1, 2) == draw_case(1, 2)
    True
    """
    draws = random.Random(f"{seed}-{number}")
    case = DRAWN[draws.choice(("train.py",) * 3 + tuple(DRAWN))](draws)
    is_short = case.absurd or not re.search(
        r"\d{4}|compile", " ".join((*case.words, case.file))
    )  # torch's takes minutes
    return case._replace(is_process=number % PROCESSES == PROCESSES - 1 and bool(is_short))


def in_process(case: Case, words: list[str]) -> None:
    """Run the command up to its computation, and that too where it is short.

    Raises: ValueError or OSError, which the command prints in one line; SystemExit if it has printed an error itself.
    """
    if case.command == "train.py":
        parse(Config, "", words).checked(Topology.from_ids([0] * case.ranks))
    elif case.command == "planner":
        what = planning.parse_request(words, "")
        model = what.job.model
        if what.machine.world_size <= 16 and model.n_layer <= 4 and what.job.global_batch_size <= 1024:
            exit_on_error(planner.main(words))
    elif case.command == "simulate":
        if simulate.parse(words).ranks <= 16:
            exit_on_error(simulate.main(words))
    elif case.command == "bench":
        with mock.patch.object(sys, "argv", ["bench", *words]):
            bench.refuse_unwritable(bench.parse(case.ranks))
    elif why := environment.refusal():
        raise ValueError(why)


def exit_on_error(status: int) -> None:
    if status:
        raise SystemExit(status)


def outcome(case: Case, limit_s: float) -> tuple[int, str]:
    """Return the command's exit status and its output."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(case.file)
        file.flush()
        words = [*case.words, *([f"--config={file.name}"] if case.file else [])]
        if case.is_process:
            return process_result([sys.executable, *COMMANDS[case.command], *words], dict(case.variables), limit_s)
        errors = io.StringIO()
        variables, silent = mock.patch.dict(os.environ, dict(case.variables)), contextlib.redirect_stdout(io.StringIO())
        with variables, silent, contextlib.redirect_stderr(errors), alarm(limit_s):
            try:
                in_process(case, words)
            except SystemExit as error:
                return int(error.code or 0), errors.getvalue()
            except (ValueError, OSError) as error:  # the errors that Communicator.agreed and the commands' main handle
                return 2, f"error: {error}\n"
        return 0, errors.getvalue()


def process_result(command: list[str], variables: dict[str, str], limit_s: float) -> tuple[int, str]:
    with tempfile.TemporaryDirectory() as folder:
        env = surroundings() | {"PYTHONPATH": str(ROOT), "COLLECTIVES_LINKS": folder} | variables
        result = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit_s, check=False
        )
    return result.returncode, result.stderr


@contextlib.contextmanager
def alarm(limit_s: float) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise LateError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def wrong(case: Case, limit_s: float = LIMIT_S) -> tuple[str, str]:
    """Return how a command mishandles a case, or "", and a label of the outcome."""
    begin = time.monotonic()
    try:
        status, errors = outcome(case, limit_s)
    except (subprocess.TimeoutExpired, LateError):
        return f"not finished after {limit_s:g} s", ""
    except Exception as error:
        return f"a traceback: {type(error).__name__}: {error}", ""
    if time.monotonic() - begin > limit_s:
        return f"not finished after {limit_s:g} s", ""
    if status == 0:
        return (f"takes {', '.join(case.absurd)}" if case.absurd else ""), "ran"
    lines = errors.splitlines()
    if status != 2 or len(lines) != 1 or not lines[0].startswith("error: ") or len(lines[0]) < 20:
        return f"ends with status {status} and says {errors[-1000:]!r}", ""
    return "", "refused"


def main() -> None:
    parser = argparse.ArgumentParser("python -m mpi_tests.fuzz_settings", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, help="number of cases, in place of --seconds")
    parser.add_argument("--only", type=int, help="run the case of this number only")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="time limit of a case in seconds")
    args = parser.parse_args()
    deadline, counts = time.monotonic() + args.seconds, Counter[str]()
    for number in itertools.count(args.only or 0):
        case = draw_case(args.seed, number)
        why, label = wrong(case, args.limit)
        if why:
            again = shlex.join(["python", "-m", "mpi_tests.fuzz_settings", f"--seed={args.seed}", f"--only={number}"])
            sys.exit(f"case {number} of --seed {args.seed}: {case.command} {why}: {case}\nagain: {again}")
        counts[f"{case.command} {label}"] += 1
        last = args.only is not None or (number + 1 == args.cases if args.cases else time.monotonic() > deadline)
        if last:
            break
    parts = ", ".join(f"{what} {times}" for what, times in sorted(counts.items()))
    print(f"{counts.total()} cases of --seed {args.seed}: {parts}")


if __name__ == "__main__":
    main()
