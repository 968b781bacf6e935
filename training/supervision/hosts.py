"""The hosts of a hostfile: which of them can be reached, and how many ranks they take."""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import gcd
from pathlib import Path
from typing import NamedTuple

REMOTE_SHELL = "ssh -o BatchMode=yes -o ConnectTimeout=10"
PATIENCE_S = 30.0  # for a host to answer
SLOTS = re.compile(r"\S+:(\d+)|.*\bslots\s*=\s*(\d+)")  # as MPICH and as Open MPI write them


class Hosts(NamedTuple):
    """A hostfile's lines by host, in order, and how many hosts a job gets: the rest are spares.

    `remote_shell` runs a command on a host, to see whether it can be reached; without one, every host is taken to be.
    """

    lines: Mapping[str, Sequence[str]]
    number: int
    remote_shell: Sequence[str] = ()

    @property
    def first(self) -> list[str]:
        """The hosts that a job gets if all can be reached."""
        return [*self.lines][: self.number]

    def usable(self) -> list[str]:
        """Return the first hosts that can be reached, spares included, as many as a job gets."""
        others = [host for host in self.lines if self.remote_shell and not is_here(host)]
        with ThreadPoolExecutor(max(1, len(others))) as pool:
            answers = dict(zip(others, pool.map(self._answers, others), strict=True))
        return [host for host in self.lines if answers.get(host, True)][: self.number]

    def _answers(self, host: str) -> bool:
        command = [*self.remote_shell, host, "true"]
        try:
            ended = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE_S, check=False
            )
            return ended.returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False

    def slots(self, hosts: Iterable[str]) -> int:
        return sum(slots_of(line) for host in hosts for line in self.lines[host])

    def text(self, hosts: Iterable[str]) -> str:
        """Return a hostfile of some of the hosts."""
        return "".join(f"{line}\n" for host in hosts for line in self.lines[host])


def read_hosts(path: str) -> dict[str, list[str]]:
    """Read the lines of a hostfile by host; in those of batch systems, a host has a line for each slot.

    Raises: ValueError for a file that cannot be read, or that names no host.
    """
    try:
        lines = [line.partition("#")[0].strip() for line in Path(path).read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"hostfile {path}: {getattr(error, 'strerror', 'not text')}: pass another") from None
    hosts: dict[str, list[str]] = {}
    for line in filter(None, lines):
        hosts.setdefault(re.split(r"[\s:]", line)[0], []).append(line)
    if not hosts:
        raise ValueError(f"hostfile {path}: names no host: pass another")
    return hosts


def slots_of(line: str) -> int:
    """Return the slots of a line of a hostfile.

    >>> slots_of("node1 slots=8"), slots_of("node1:4"), slots_of("node1")
    (8, 4, 1)
    """
    match = SLOTS.match(line)
    return int(match[1] or match[2]) if match else 1


def is_here(host: str) -> bool:
    return host in ("localhost", "127.0.0.1") or host.partition(".")[0] == platform.node().partition(".")[0]


def ranks_on(slots: int, all_slots: int, num_ranks: int) -> int:
    """Return the number of ranks that go on `slots` of the slots on which there were `num_ranks`.

    More ranks than slots stay as many times more.

    >>> ranks_on(6, 8, 8), ranks_on(6, 8, 4), ranks_on(1, 2, 8)
    (6, 4, 4)
    """
    return min(num_ranks, max(slots, num_ranks * slots // all_slots))


def divided(num_ranks: int, batch: int, blocks: int) -> int:
    """Return the largest number of ranks, up to `num_ranks`, that has a layout: dp divides the batch, pp the rest.

    >>> divided(6, 64, 4), divided(7, 64, 4), divided(3, 64, 1)
    (6, 6, 2)
    """
    return next(n for n in range(num_ranks, 0, -1) if n // gcd(n, batch) <= blocks)
