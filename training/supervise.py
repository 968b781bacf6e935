"""Start a training job, and start it again from its newest checkpoint when it fails.

python -m training.supervise -- mpirun -n 2 python -m training --checkpoint_dir saved --checkpoint_interval 100
python -m training.supervise --silence_s 300 --max_failures 5 -- mpirun -n 2 python -m training --checkpoint_dir saved
python -m training.supervise --spares 1 -- mpirun --hostfile hosts.txt -n 16 python -m training --checkpoint_dir saved

The next start skips hosts of a hostfile that cannot be reached, and has them again once they can.
SIGTERM, SIGINT and SIGUSR1 go to the job, which is then not started again.  The exit status is the job's.
"""

from __future__ import annotations

import json
import shlex
import signal
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

from collectives.job.settings import Parser, Range, positive
from parallelism.checkpoint.folders import INDEX, MEMORY, complete_checkpoints, number_of, snapshot_folder
from training.supervision.command import HOSTFILES, LAYOUT, RANKS, position_of, replaced, value_of, without
from training.supervision.hosts import REMOTE_SHELL, Hosts, divided, is_here, ranks_on, read_hosts
from training.supervision.job import Job

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SECONDS, SPARES = Range(0, 10**8, unit="s"), Range(0, 10**6)
EXAMPLE = "python -m training.supervise -- mpirun -n 2 python -m training --checkpoint_dir saved"


def main() -> int:
    try:
        flags, command = parse(sys.argv[1:])
        hosts = find_hosts(command, flags)
        checkpoints = Path(value_of(command, "checkpoint_dir") or "")
        with own_folder(checkpoints) as folder:
            return Supervisor(flags, command, hosts, checkpoints, Path(folder)).run()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def parse(words: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Return the flags, and the job's command.

    Raises: ValueError for flags that are unknown or invalid, and a command that could not be started again.
    """
    end = words.index("--") if "--" in words else len(words)
    own, command = words[:end], [*words[end + 1 :]]
    parser = make_parser()
    if not command and {*own}.isdisjoint({"-h", "--help", "--version"}):
        raise ValueError(f"no command after --: write it as in {EXAMPLE}")
    flags = parser.parse_args(own)
    if not value_of(command, "checkpoint_dir"):
        raise ValueError(f"the command has no --checkpoint_dir, from which a job resumes: add it, as in {EXAMPLE}")
    if (resume := value_of(command, "resume")) not in (None, "auto"):
        remedy = "pass --resume auto, or run the job alone up to its next checkpoint"
        raise ValueError(f"--resume {resume} goes back to one checkpoint at each start: {remedy}")
    return flags, command


def make_parser() -> Parser:
    parser = Parser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--silence_s",
        type=SECONDS.number,
        default=0,
        help="seconds without a new step after which a job counts as failed, more than a step, a validation and the "
        "run's end take; 0: no limit (default: %(default)s)",
    )
    parser.add_argument(
        "--start_s",
        type=SECONDS.number,
        default=0,
        help="seconds without a first step after which a job counts as failed; 0: no limit (default: %(default)s)",
    )
    parser.add_argument(
        "--max_failures",
        type=positive,
        default=3,
        help="failures without progress beyond a step after which the supervisor ends (default: %(default)s)",
    )
    parser.add_argument(
        "--spares",
        type=SPARES.whole,
        default=0,
        help="number of hosts at the end of the hostfile that replace lost ones (default: %(default)s)",
    )
    parser.add_argument(
        "--remote_shell",
        type=shlex.split,
        default=REMOTE_SHELL,
        help="command that runs another one on a host, to see whether the host can be reached (default: %(default)s)",
    )
    return parser


def own_folder(checkpoints: Path) -> tempfile.TemporaryDirectory[str]:
    """Return a folder that all hosts see, beside the checkpoints: for the job's steps, and for a hostfile.

    Raises: ValueError if it cannot be written.
    """
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix="supervised-", dir=checkpoints, ignore_cleanup_errors=True)
    except OSError as error:
        why = f"can't be written ({error.strerror}): pass another --checkpoint_dir"
        raise ValueError(f"checkpoint_dir {checkpoints} {why}") from None


def find_hosts(command: Sequence[str], flags: Namespace) -> Hosts | None:
    """Return the hosts of the command's hostfile, if it has one; where none of them answers, they are not checked.

    Raises: ValueError for a hostfile that cannot be read, or has too few hosts for the spares.
    """
    position = position_of(command, HOSTFILES)
    lines = read_hosts(command[position]) if position else {}
    if flags.spares >= max(1, len(lines)):
        leave = (
            f"the {len(lines)} hosts of {command[position]} leave" if position else "a command without a hostfile has"
        )
        raise ValueError(f"spares={flags.spares}: {leave} none: use fewer spares, or a hostfile with more hosts")
    if not position:
        return None
    hosts = Hosts(lines, len(lines) - flags.spares, flags.remote_shell)
    others = [host for host in lines if not is_here(host)]
    if others and {*others}.isdisjoint(hosts._replace(number=len(lines)).usable()):
        why = f"none of {', '.join(others)} answers to {shlex.join(flags.remote_shell)}"
        if flags.spares:
            raise ValueError(f"spares={flags.spares}: {why}: pass a --remote_shell by which they can be reached")
        print(f"supervise: {why}: hosts are not checked", flush=True)
        return hosts._replace(remote_shell=())
    return hosts


class Supervisor:
    """Starts a job until it succeeds, a signal arrives, or it has failed too often without progress."""

    def __init__(self, flags: Namespace, command: Sequence[str], hosts: Hosts | None, checkpoints: Path, folder: Path):
        self.flags, self.command, self.hosts, self.folder = flags, command, hosts, folder
        self.folders = [checkpoints]
        if (value_of(command, "snapshot_interval") or "0") != "0":
            memory = Path(value_of(command, "snapshot_dir") or MEMORY)
            self.folders.append(snapshot_folder(memory, checkpoints))
        self.older = {*self.all_checkpoints()}
        self.job: Job | None = None
        self.received = 0
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self.hand_on)

    def hand_on(self, number: int, frame: Any = None) -> None:
        """Send a signal to the job, which ends by it."""
        self.received = number
        if self.job:
            self.job.process.send_signal(number)

    def run(self) -> int:
        """Run the job to its end; return the exit status."""
        failures, reached, error = 0, -1, ""
        for start in count(1):
            words = self.words()
            if self.received:  # between two jobs: the first has left a checkpoint, or there is nothing to lose
                return 0 if self.received == signal.SIGUSR1 else 128 + self.received
            self.job = job = Job(words, self.folder / f"start{start}", is_quiet=failures > 0)
            if self.received:
                self.hand_on(self.received)
            why = job.watch(self.flags.start_s, self.flags.silence_s, reached)
            if not why and job.succeeded:
                job.close()
                return 0
            status = job.end()
            failures = 1 if job.step > reached else failures + 1
            reached = max(reached, job.step)
            before, error = error, why or job.error()
            if error != before:
                job.show()
            where = f"in step {job.step}" if job.step else "before its first step"
            if self.received:
                return status or 1
            if failures == self.flags.max_failures:
                break
            how = why or f"status {status}"
            print(f"supervise: the job has failed {where}, with {how}: start {start + 1} follows", flush=True)
        where = f"without progress beyond step {reached}" if reached else "before its first step"
        print(f"error: the job has failed {failures} times {where}, with status {status}: {error}", file=sys.stderr)
        return status or 1

    def all_checkpoints(self) -> list[Path]:
        """Return the checkpoints, and the snapshots in this host's memory, in order."""
        return sorted(chain(*map(complete_checkpoints, self.folders)), key=number_of)

    def words(self) -> list[str]:
        """Return the command of the next start, which resumes where it can, on hosts that can be reached."""
        words, checkpoints = [*self.command], self.all_checkpoints()
        if value_of(words, "resume") is None:
            checkpoints = [path for path in checkpoints if path not in self.older]
            words += ["--resume", "auto"] if checkpoints else []
        if not self.hosts:
            return words
        names, file = self.hosts.usable(), self.folder / "hosts"
        if names != [*self.hosts.lines]:
            file.write_text(self.hosts.text(names))
            words = replaced(words, HOSTFILES, file.resolve())
        if names != self.hosts.first:
            print(f"supervise: the next start is on {', '.join(names) or 'no host'}", flush=True)
        return on_fewer_ranks(words, self.hosts, names, newest_values(checkpoints))


def on_fewer_ranks(words: Sequence[str], hosts: Hosts, names: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """Return the command for some hosts: with fewer slots, on fewer ranks, in the planner's layout.

    `values` are those of the checkpoint from which it resumes, whose global batch stays.

    Raises: ValueError if no host is left, or the global batch is not known.
    """
    slots, all_slots, position = hosts.slots(names), hosts.slots(hosts.first), position_of(words, RANKS)
    num_ranks = int(words[position]) if position and words[position].isdigit() else all_slots
    number = ranks_on(slots, all_slots, num_ranks)
    if number == num_ranks:
        return [*words]
    if not number:
        raise ValueError(f"none of the hosts {', '.join(hosts.lines)} can be reached: start again when one is back")
    batch = value_of(words, "global_batch_size") or values.get("batch_size")
    if not str(batch).isdigit():
        why = f"{number} of {num_ranks} ranks are left, and no checkpoint has the global batch yet"
        raise ValueError(f"{why}: pass --global_batch_size, which fewer ranks keep")
    number = divided(number, int(batch or 0), values.get("n_layer", 1))
    print(f"supervise: {number} of {num_ranks} ranks, and --layout auto in place of the command's layout", flush=True)
    if position is None:
        flag = position_of(words, HOSTFILES) or 0
        words = [*words[: flag - 1], RANKS[0], "", *words[flag - 1 :]]
    words = replaced(without(words, LAYOUT), RANKS, number)
    return [*words, "--layout", "auto", "--global_batch_size", str(batch)]


def newest_values(checkpoints: Sequence[Path]) -> dict[str, Any]:
    """Return what the index of the newest checkpoint has besides shards; of none, and of a damaged index, nothing."""
    try:
        return dict(json.loads((checkpoints[-1] / INDEX).read_text())["index"]["whole"])
    except (IndexError, KeyError, OSError, TypeError, ValueError):
        return {}


if __name__ == "__main__":
    sys.exit(main())
