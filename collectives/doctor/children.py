"""Children of the doctor: what could crash or hang is done in a process of its own, with a time limit."""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

TERMINATION_S = 5.0  # for mpirun to end its ranks
# Programs of children.
BARRIER = "import collectives; comm = collectives.world(); comm.barrier(); print('size', comm.size, flush=True)"
COMPILE = (
    "from collectives.runtime import kernels; kernels.njit(lambda x: x + 1)(1); print(kernels.run.stats.cache_path)"
)
SUM_ON_GPUS = """
import cupy
for index in range(cupy.cuda.runtime.getDeviceCount()):
    with cupy.cuda.Device(index):
        name = cupy.cuda.runtime.getDeviceProperties(index)["name"].decode()
        assert int(cupy.arange(5).sum()) == 10, f"wrong sums on device {index}: {name}"
        print(f"device {index}: {name}", flush=True)
"""


class Ended(NamedTuple):
    """How a child has ended, "" if well, and what it printed until then."""

    how: str
    output: str
    errors: str

    def __str__(self) -> str:
        last = one_line(self.errors)
        return f"{self.how} ({last})" if last else self.how


def one_line(text: str) -> str:
    """Shorten what a failed program has printed to the exception of its first traceback, or else its first words.

    >>> one_line("----\\nTraceback (most recent call last):\\n  File\\nKeyError: 3\\n----\\nExit code: 1\\n")
    'KeyError: 3'
    """
    _, traceback, after = text.partition("Traceback (")
    lines = [line for line in (after if traceback else text).splitlines() if any(map(str.isalpha, line))]
    words = [line for line in lines[bool(traceback) :] if not line.startswith(" ")]
    return (words or lines or [""])[0].strip()


def run(program: str, limit_s: float, launcher: Sequence[str] = ()) -> Ended:
    """Run a program of Python to its end, or to that of its time.

    What it writes goes to files, so that no grandchild that has survived it keeps us waiting for more.
    """
    words = [*launcher, sys.executable, "-c", program]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)
        except OSError as error:
            return Ended(f"could not be started: {error}", "", "")
        how = wait(process, limit_s)
        for file in (output, errors):
            file.seek(0)
        return Ended(how, *(file.read().decode(errors="replace") for file in (output, errors)))


def wait(process: subprocess.Popen, limit_s: float) -> str:
    """Wait for a process, end it if need be, and say how it has ended."""
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
