"""Run the steps of containers/Dockerfile without Docker, in a fresh Debian that debootstrap creates.

python -m mpi_tests.container

Then train for two steps on 2 ranks with the packages that the steps have installed.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from mpi_tests.helpers.debian import check_possible, make_root, run_inside
from mpi_tests.helpers.launch import ROOT

DOCKERFILE = ROOT / "containers" / "Dockerfile"
BUILD = ROOT / "build" / "container"
TRAIN = "mpirun -n 2 python -m training --config small --max_iters 2 --out_dir="


def instructions(text: str) -> list[tuple[str, str]]:
    r"""Return a Dockerfile's instructions, by name.

    >>> instructions("# Debian\nFROM debian:bookworm-slim\nRUN apt-get update\n")
    [('FROM', 'debian:bookworm-slim'), ('RUN', 'apt-get update')]
    """
    return re.findall(r"^([A-Z]+) (.+)$", text, re.MULTILINE)


def commands(text: str) -> Iterator[str]:
    """Yield the command of each RUN, in the environment and working directory set by earlier instructions."""
    before = ["umask 022"]
    for name, words in instructions(text):
        if name == "ENV":
            before.append(f"export {words}")
        elif name == "WORKDIR":
            before.append(f"mkdir -p {words} && cd {words}")
        elif name == "RUN":
            yield " && ".join([*before, words])
    yield " && ".join([*before, TRAIN])


def main() -> int:
    check_possible()
    text = DOCKERFILE.read_text()
    suite = dict(instructions(text))["FROM"].removeprefix("debian:").removesuffix("-slim")
    root, log = BUILD / suite, BUILD / "log"
    make_root(root, suite, [], dict(instructions(text))["COPY"].split()[1])
    Path(log).write_text("")
    for command in commands(text):
        if status := run_inside(root, "/", command, log):
            print(f"FAILED ({status}): {command}; see {log}")
            return 1
    print(f"{len([*commands(text)])} steps passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
