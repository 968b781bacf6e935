"""Children: what could crash or hang is done in a process of its own, with a time limit."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, Any, NamedTuple

from collectives.doctor.finding import one_line

TERMINATION_S = 5.0  # for mpirun to end its ranks
# What a launcher or scheduler tells its processes, and what of that a user may have set for Open MPI.
SET_BY_LAUNCHER = ("OMPI_", "OPAL_", "PMIX_", "PRTE_", "PMI_", "HYDI_", "HYDRA_", "MPI_LOCAL", "SLURM_", "PBS_", "LSB_")
SET_BY_USER = ("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_", "OMPI_ALLOW_RUN_AS_ROOT", "OPAL_PREFIX", "PMIX_PREFIX")


class Ended(NamedTuple):
    """How a child has ended, "" if well, and what it printed until then."""

    how: str
    output: str
    errors: str

    def __str__(self) -> str:
        last = one_line(self.errors)
        return f"{self.how} ({last})" if last else self.how

    @property
    def crashed(self) -> bool:
        return self.how.startswith("ended by signal")

    @property
    def timed_out(self) -> bool:
        return self.how.startswith("not over")

    def messages(self) -> list[dict[str, Any]]:
        """Its lines that are JSON objects; the MPI library, too, may print."""
        return [found for line in self.output.splitlines() if (found := parse(line)) is not None]


def parse(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def probe(name: str, *arguments: str) -> list[str]:
    """The command of a child: a function of probes.py."""
    return [sys.executable, "-m", "collectives.doctor.probes", name, *arguments]


def run(
    command: Sequence[str], limit_s: float, env: Mapping[str, str] | None = None, given: str = "", hears: bool = True
) -> Ended:
    """Run a child to its end, or to that of its time, with `given` as its input; unless `hears`, its errors are ours.

    What it writes goes to files, so that no grandchild that has survived it keeps us waiting for more.
    """
    with tempfile.TemporaryFile("w+") as source, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        source.write(given)
        source.seek(0)
        try:
            process = subprocess.Popen(
                command, stdin=source, stdout=output, stderr=errors if hears else None, env=env, close_fds=False
            )
        except OSError as error:
            return Ended(f"could not be started: {error}", "", "")
        return Ended(wait(process, limit_s), content(output), content(errors))


def content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def wait(process: subprocess.Popen, limit_s: float) -> str:
    """How a process has ended, made to if need be."""
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"not over after {limit_s:g} s"
    finally:
        end(process)
    if status < 0:
        return f"ended by signal {-status} ({signal.strsignal(-status)})"
    return f"ended with status {status}" if status else ""


def end(process: subprocess.Popen) -> None:
    """End a process, if it has not: mpirun ends its ranks when terminated, but not when killed."""
    for stop in (process.terminate, process.kill):
        if process.poll() is not None:
            return
        stop()
        try:
            process.wait(TERMINATION_S)
        except subprocess.TimeoutExpired:
            continue


def fresh_environment() -> dict[str, str]:
    """This process's environment less what launchers and schedulers set, so that a child is a job of its own here."""
    kept = [name for name in os.environ if name.startswith(SET_BY_USER) or not name.startswith(SET_BY_LAUNCHER)]
    return {name: os.environ[name] for name in kept}
