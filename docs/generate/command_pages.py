"""Pages of command lines by topic, from each program's parser; what several programs share is explained once."""

import html
import json
import multiprocessing
import os
import re
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import print_options

ROOT = Path(__file__).resolve().parents[2]
FORKS, LIMIT_S = multiprocessing.get_context("forkserver"), 300  # for a program's help


class Topic(NamedTuple):
    """A page, and the programs on it."""

    name: str
    purpose: str
    programs: tuple[str, ...]


TOPICS = (
    Topic(
        "run",
        "start another library's program on the collectives, or a job on hosts that one machine emulates",
        ("-m collectives.mpi4py", "-m collectives.torch", "-m mpi_tests.rig run"),
    ),
    Topic(
        "train",
        "prepare data, train, start again what fails, continue a text, merge an adapter, evaluate on tasks",
        (
            *("train.py", "-m training.supervise", "-m training.prepare", "sample.py", "-m training.merge"),
            "-m training.evaluate",
        ),
    ),
    Topic("measure", "time collectives, messages and overlap, and tune `auto`", ("-m collectives.bench",)),
    Topic(
        "plan",
        "predict layouts, collectives and pipelines, on machines of any size",
        (
            "-m parallelism.planner",
            "-m collectives.schedule.simulate",
            "-m collectives.graphs",
            "-m parallelism.pipeline.schedule draw",
            "-m parallelism.pipeline.schedule search",
            "-m parallelism.pipeline.schedule check",
        ),
    ),
    Topic(
        "look",
        "reports of runs and of benchmarks, what differs in two runs, the page that steps through schedules, exercises",
        (
            "-m training.report",
            "-m training.compare",
            "-m collectives.bench.html",
            "-m teaching.page",
            "-m teaching.exercise",
        ),
    ),
    Topic("repair", "check an installation, a machine or a GPU", ("-m collectives.doctor", "-m mpi_tests.gpu_check")),
)
# Headings among the options of a program that has many, each before the option that is named.
HEADINGS = {
    "train.py": {
        "--config": "Data and output",
        "--model": "Model",
        "--micro_batch_size": "Batches and steps",
        "--log_interval": "Logs",
        "--optimizer": "Optimizer",
        "--dtype": "Precision",
        "--init_from": "Weights and device",
        "--layout": "Layout over ranks",
        "--checkpoint_dir": "Checkpoints",
        "--peak_tflops": "At the end",
    },
    "-m collectives.bench": {
        "--begin": "Sizes and runs",
        "--blocking": "Times",
        "--check": "Arrays",
        "--peers": "Beside other libraries",
        "--report_timestamps": "Output",
        "--nthreads": "Flags of nccl-tests that have one value here",
    },
    "-m parallelism.planner": {
        "--config": "Machine and output",
        "--vocab_size": "Model",
        "--optimizer": "Optimizer and precision",
        "--global_batch_size": "Batches",
        "--dp": "Layouts that are considered",
    },
}
OF_ALL = ("--help", "--version")
PAGE = """# {title}

To {purpose}. What works on several ranks is started by `mpirun -n N`; [all topics](../commands.md).
"""
INDEX = """# Command lines

Written from each program's parser when the site is built. Flags take dashes and underscores alike, `--help` prints
what is here, and `--version` prints the version. Wrong arguments end a program with a line that names the remedy, and
status 2.
"""


class Option(NamedTuple):
    """A flag, or an argument by its position, which has no flags."""

    flags: tuple[str, ...]
    values: str
    choices: tuple[str, ...]
    help: str

    @property
    def name(self) -> str:
        return next(
            (flag for flag in self.flags if flag.startswith("--")), self.flags[0] if self.flags else self.values
        )


class Program(NamedTuple):
    """What a program says of itself; without options, in the words of its usage alone."""

    command: str
    description: str
    options: tuple[Option, ...]

    @property
    def title(self) -> str:
        return f"python {self.command}"

    @property
    def anchor(self) -> str:
        return re.sub(r"\W+", "-", self.command.removeprefix("-m "))


def pages() -> dict[str, str]:
    """Return the pages by their paths below docs/."""
    sys.path.append(str(Path(__file__).parent))  # from which MkDocs has imported this module, as its processes do
    FORKS.set_forkserver_preload(["torch", "mpi4py", "numba"])  # once, as most programs import them
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        commands = [command for topic in TOPICS for command in topic.programs]
        programs = dict(zip(commands, pool.map(read, commands), strict=True))
    explained: dict[Option, str] = {}  # the address of each option's explanation, which its later programs refer to
    texts = {f"reference/commands/{topic.name}.md": page(topic, programs, explained) for topic in TOPICS}
    return {"reference/commands.md": "\n".join(index(programs)), **texts}


def read(command: str) -> Program:
    """Run a program up to its help, in a process of its own.

    Raises: RuntimeError if it fails, with what it printed.
    """
    with tempfile.NamedTemporaryFile() as file:
        process = FORKS.Process(target=print_to, args=(file.name, command.split()))
        process.start()
        process.join(LIMIT_S)
        process.kill()  # if it still runs
        process.join()
        text = Path(file.name).read_text()
    if process.exitcode:
        raise RuntimeError(f"python {command} --help ends with {process.exitcode}: {text}")
    if text.startswith("usage: "):  # it has no parser of its own
        return Program(command, text, ())
    printed: dict[str, Any] = json.loads(text)
    options = (
        Option(tuple(option["flags"]), option["values"], tuple(option["choices"]), option["help"])
        for option in printed["options"]
    )
    return Program(command, printed["description"], tuple(each for each in options if each.name not in OF_ALL))


def print_to(path: str, words: list[str]) -> None:
    """Run a program with a file as its output."""
    output = os.open(path, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    print_options.run(words)


def index(programs: dict[str, Program]) -> Iterator[str]:
    yield INDEX
    yield "| topic | programs |\n|---|---|"
    for topic in TOPICS:
        links = (
            f"[`{programs[command].title}`](commands/{topic.name}.md#{programs[command].anchor})"
            for command in topic.programs
        )
        yield f"| [{topic.name.capitalize()}](commands/{topic.name}.md): {topic.purpose} | {'<br>'.join(links)} |"


def page(topic: Topic, programs: dict[str, Program], explained: dict[Option, str]) -> str:
    text = PAGE.format(title=topic.name.capitalize(), purpose=topic.purpose)
    return "\n".join(
        [text, *(line for command in topic.programs for line in section(topic, programs[command], explained))]
    )


def section(topic: Topic, program: Program, explained: dict[Option, str]) -> Iterator[str]:
    """Write a program's description and options, of which those that others have, too, are links."""
    yield f"## {program.title} {{ #{program.anchor} }}\n"
    if script := SCRIPTS.get(program.command):
        yield f"Installed as `{script}`, too.\n"
    yield described(program.description)
    headings = dict(HEADINGS.get(program.command, {}))
    elsewhere: list[str] = []
    for each in program.options:
        if heading := headings.pop(each.name, ""):
            yield f"### {heading} {{ #{program.anchor}-{slug(heading)} }}\n"
        if each in explained:
            elsewhere.append(f"[`{each.name}`]({explained[each]})")
            continue
        anchor = f"{program.anchor}-{slug(each.name)}"
        explained[each] = f"{topic.name}.md#{anchor}"
        yield from definition(each, anchor)
    if headings:
        raise RuntimeError(f"python {program.command} has no option {', '.join(headings)}, where headings begin")
    if elsewhere:
        yield f"Explained with another program: {', '.join(elsewhere)}.\n"


def definition(option: Option, anchor: str) -> Iterator[str]:
    flags = ", ".join(f"`{flag}`" for flag in option.flags)
    values = f"`{option.values}`" if option.values else ""
    yield f'<span id="{anchor}"></span>{" ".join(filter(None, (flags, values)))}'
    choices = f"one of {', '.join(f'`{choice}`' for choice in option.choices)}" if option.choices else ""
    yield f":   {'; '.join(filter(None, (escaped(option.help), choices)))}\n"


def slug(text: str) -> str:
    return re.sub(r"\W+", "-", text.lower()).strip("-")


def escaped(text: str) -> str:
    return re.sub(r"([*\[\]])", r"\\\1", html.escape(text, quote=False))


def described(description: str) -> str:
    """Fence the commands and the usage in a description, and leave the rest as it is.

    >>> print(described("Do it.\\n\\n    python do.py  # now\\n\\nThen rest."))
    Do it.
    <BLANKLINE>
    ```text
    python do.py  # now
    ```
    <BLANKLINE>
    Then rest.
    <BLANKLINE>
    """
    lines = [line.strip() for line in description.strip().splitlines()]
    text: list[str] = []
    for is_command, block in groupby(lines, lambda line: re.match(r"(python|mpirun|usage:) ", line) is not None):
        opening, closing = (["```text"], ["```"]) if is_command else ([], [])
        text += [*opening, *block, *closing]
    return "\n".join(text) + "\n"


def scripts() -> dict[str, str]:
    """Return the names under which programs are installed."""
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    return {f"-m {entry.partition(':')[0].removesuffix('.__main__')}": name for name, entry in entries.items()}


SCRIPTS = scripts()
