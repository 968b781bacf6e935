"""All input from outside in one place: environment variables, and the launcher of this process."""

import hashlib
import json
import os
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from collectives.job.settings import Range
from collectives.job.system import write

T = TypeVar("T")
CORES, THREADS, BLOCKS, SECONDS = *[Range(1, 2**16)] * 3, Range(0, 10**8, unit="s")

# Variables that launchers set for a process they start: Open MPI's mpirun, MPICH's and Intel's Hydra, Slurm's srun.  A
# process that a batch script starts itself is not a rank: Slurm sets SLURM_NTASKS and a SLURM_PROCID of 0 for it, but
# no step.  PBS and LSF set the same variables for it as for ranks of their own launchers, so that theirs are not used.
SURVIVES = "OMPI_MCA_mpi_ft_enable"  # as `mpirun --with-ft ulfm` sets it
PROCESS = "self"  # in /proc: this process, or the one in whose place it is, where a server has forked it
LAUNCHED_SIZE = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
LAUNCHED_RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
LAUNCHERS = {"mpirun", "mpiexec", "mpiexec.hydra", "prterun", "orterun", "srun"}
LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def first_int(names: tuple[str, ...], default: int) -> int:
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()), default)


def launched_size() -> int:
    """Return the number of ranks according to the launcher; 1 without one."""
    return first_int(LAUNCHED_SIZE, 1)


def launched_by_srun() -> bool:
    """Return whether srun started this process itself, with no mpirun in between."""
    return "SLURM_STEP_NUM_TASKS" in os.environ and not {"OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS"} & set(os.environ)


def launched_rank() -> int:
    return first_int(LAUNCHED_RANK, 0)


def foreign_library() -> str | None:
    """Return the MPI library that the launcher cannot start: MPICH under Open MPI's mpirun, Open MPI under Hydra."""
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        return "MPICH"
    return "Open MPI" if "MPI_LOCALNRANKS" in os.environ else None


def survives_ranks() -> bool:
    """Return whether the job goes on without ranks that die: under Open MPI's `mpirun --with-ft ulfm`."""
    return os.environ.get(SURVIVES, "0") not in ("0", "false")


def whole(name: str, numbers: Range, remedy: str, is_list: bool = False) -> int | None:
    """Read a whole number, if it is set; of a list the first.

    Raises: ValueError for another value, with the remedy.
    """
    text = os.environ.get(name)
    if not text:
        return None
    try:
        return numbers.whole(text.partition(",")[0].strip() if is_list else text)
    except ArgumentTypeError as error:
        raise ValueError(f"{name}={error}: {remedy}") from None


def choice(name: str, values: Mapping[str, T], remedy: str) -> T:
    """Read one of several values, of which the first is the default.

    Raises: ValueError for another one, with the remedy.
    """
    text = os.environ.get(name) or next(iter(values))
    if text not in values:
        raise ValueError(f"{name}={text!r}: {remedy}")
    return values[text]


def number_or(read: Callable[[], T | None], default: T) -> T:
    """Return a setting; the default where it is not set, or invalid, which `refusal` reports."""
    try:
        return read() or default
    except ValueError:
        return default


# COLLECTIVES_CORES: this machine's cores for the job, where it shares them with other hosts.
stated_cores = partial(whole, "COLLECTIVES_CORES", CORES, "write a number of cores, or unset it")
# OMP_NUM_THREADS: threads of a rank; OpenMP has lists for nested ones.
stated_threads = partial(whole, "OMP_NUM_THREADS", THREADS, "write threads a rank, as in 1, or unset it", is_list=True)


def cores() -> int:
    """Count this machine's cores for the job."""
    return number_or(stated_cores, os.cpu_count() or 1)


def threads_per_rank() -> int:
    """Compute threads a rank may use: one by default, since a node usually has a rank for each core."""
    return number_or(stated_threads, 1)


def oversubscribed(local_ranks: int = 1) -> bool:
    """Return whether this machine runs more ranks than it has cores, so that waiting ranks must yield theirs."""
    return max(local_ranks, first_int(LOCAL_RANKS, 1)) > cores()


def before_mpi() -> None:
    """Set the variables that the MPI library and Numba read when they start.  Call before they do."""
    # Where colorama is installed, Numba has it write an escape sequence when the process ends.
    os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")
    if oversubscribed():
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if survives_ranks() and not (mpi and mpi.Is_initialized()):
        # Ranks would wait for the memory of a dead one on another host, or in a collective of Open MPI's own.
        # Source: https://github.com/open-mpi/ompi/issues/13915.
        os.environ.setdefault("OMPI_MCA_btl_tcp_flags", "send,inplace")
        os.environ.setdefault("OMPI_MCA_coll", "^han")


def lacks_for_survivors() -> str:
    """Return the settings without which Open MPI has started, and which ranks of several hosts need if some die."""
    if not survives_ranks():
        return ""
    flags = os.environ.get("OMPI_MCA_btl_tcp_flags", "").split(",")  # noqa: SIM112
    components = os.environ.get("OMPI_MCA_coll", "")  # noqa: SIM112
    puts = not any(flags) or not {"put", "get", "rdma"}.isdisjoint(flags)
    has_han = not components or components.startswith("^") != ("han" in components.lstrip("^").split(","))
    return " ".join(["OMPI_MCA_btl_tcp_flags=send,inplace"] * puts + ["OMPI_MCA_coll=^han"] * has_han)


def on_terminal() -> bool:
    """Return whether standard output is a terminal: the launcher's, as its ranks have pipes."""
    if not set(LAUNCHED_SIZE) & set(os.environ):
        return sys.stdout.isatty()
    process = Path("/proc", PROCESS)
    try:
        while (process / "comm").read_text().strip() not in LAUNCHERS:
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            process = Path("/proc", parent)
        return os.readlink(process / "fd" / "1").startswith("/dev/pts/")
    except OSError:  # the launcher is on another machine, or this one has no /proc
        return False


def fake_nodes() -> tuple[int, int] | None:
    """Read COLLECTIVES_FAKE_NODES=2x4: let ranks 0-3 and 4-7 of one machine play two nodes; the last may have fewer.

    Raises: ValueError for a value of another form.
    """
    text = os.environ.get("COLLECTIVES_FAKE_NODES")
    if not text:
        return None
    if not re.fullmatch(r"[1-9]\d{0,8}x[1-9]\d{0,8}", text, re.ASCII):
        raise ValueError(f"COLLECTIVES_FAKE_NODES={text!r}: write <nodes>x<ranks per node>, as in 2x4")
    nodes, _, ranks = text.partition("x")
    return int(nodes), int(ranks)


def tuning_file() -> Path | None:
    """Read COLLECTIVES_TUNING=tuning.json, which `python -m collectives.bench --tune` writes, or a network in TOML."""
    path = os.environ.get("COLLECTIVES_TUNING")
    return Path(path) if path else None


def cache_folder() -> Path:
    """Return our folder in the user's cache, in which no other user can write."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "handwritten-collectives")


def links_folder() -> Path | None:
    """Read COLLECTIVES_LINKS=folder: where measured links are kept, by default in the user's cache; 0: nowhere.

    `no_file` refuses a path that is not a folder.
    """
    text = os.environ.get("COLLECTIVES_LINKS")
    return None if text == "0" else Path(text or cache_folder())


def kept_file(kind: str, subject: Any) -> Path | None:
    """Return the file for the measurements of a subject; None if they are not to be kept."""
    folder = links_folder()
    digest = hashlib.blake2b(json.dumps(subject).encode(), digest_size=8).hexdigest()
    return folder / f"{kind}-{digest}.json" if folder else None


def keep(path: Path, data: Any) -> str:
    """Write JSON in one go; return its path, or why it is not written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, json.dumps(data, indent=1) + "\n")
    except OSError as error:
        return f"not kept ({path}: {error.strerror})"
    return f"kept in {path}"


def calls_folder() -> Path | None:
    """Read COLLECTIVES_CALLS=folder: where ranks that hang write their last calls, here by default; 0: nowhere."""
    text = os.environ.get("COLLECTIVES_CALLS") or "collectives-calls"
    return None if text == "0" else Path(text)


def heartbeat_folder() -> Path | None:
    """Read COLLECTIVES_HEARTBEAT=folder: where hosts write the step that they have begun; 0: nowhere, as by default."""
    text = os.environ.get("COLLECTIVES_HEARTBEAT") or "0"
    return None if text == "0" else Path(text)


def with_heartbeat(folder: Path) -> dict[str, str]:
    """Return the environment of a job whose hosts write to `folder`; Open MPI's mpirun hands on what a list names."""
    names = filter(None, (os.environ.get("OMPI_MCA_mca_base_env_list"), "COLLECTIVES_HEARTBEAT"))  # noqa: SIM112
    changes = {"COLLECTIVES_HEARTBEAT": str(folder), "OMPI_MCA_mca_base_env_list": ";".join(names)}
    return os.environ | changes


def writable_calls_folder() -> Path | None:
    """Read COLLECTIVES_CALLS, and check that the folder can be written, before ranks hang.

    The default need not be writable: a job that cannot write to its working directory loses only its last calls.

    Raises: ValueError for a folder that is named and cannot be written.
    """
    folder = no_file("COLLECTIVES_CALLS", calls_folder)
    if folder and os.environ.get("COLLECTIVES_CALLS"):
        path = os.path.abspath(folder)
        while not os.path.exists(path):  # the first existing parent, in which folders will be made
            path = os.path.dirname(path)
        if not (os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)):
            words = "cannot be written: name a folder that can be, or write 0 to keep nothing"
            raise ValueError(f"COLLECTIVES_CALLS={str(folder)!r} {words}")
    return folder


def no_file(name: str, read: Callable[[], Path | None]) -> Path | None:
    """Read the folder that a variable names.

    Raises: ValueError for an existing path that is not a folder.
    """
    folder = read()
    if folder and folder.exists() and not folder.is_dir():
        raise ValueError(f"{name}={str(folder)!r} is not a folder: name one, or write 0 to keep nothing")
    return folder


def kills_silent() -> bool:
    """Read COLLECTIVES_KILL_SILENT=1: kill ranks that do not answer at the limit, where the others go on without them.

    Raises: ValueError for another value, and where the job ends with a rank that dies, or there is no limit.
    """
    kills = choice("COLLECTIVES_KILL_SILENT", {"0": False, "1": True}, "write 1 to kill silent ranks, or 0")
    if kills and not survives_ranks():
        raise ValueError(
            "COLLECTIVES_KILL_SILENT=1: this job ends with a rank that dies: start it by mpirun --with-ft ulfm, of "
            "Open MPI 5, or unset it"
        )
    if kills and not timeout_s():
        raise ValueError("COLLECTIVES_KILL_SILENT=1 needs a limit, but COLLECTIVES_TIMEOUT_S is 0: set seconds")
    return kills


# COLLECTIVES_CHECK=1: ranks compare their calls; 0: they do not.
check = partial(choice, "COLLECTIVES_CHECK", {"1": True, "0": False}, "write 1, or 0 to compare nothing")


def timeout_s() -> float:
    """Read COLLECTIVES_TIMEOUT_S=30: how long a rank may wait for others before the job is ended; 0 for ever.

    Raises: ValueError for another value.
    """
    text = os.environ.get("COLLECTIVES_TIMEOUT_S") or "600"
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1
    if seconds not in SECONDS:
        words = f"write seconds, as in 600, or 0 for no limit (at most {SECONDS.most})"
        raise ValueError(f"COLLECTIVES_TIMEOUT_S={text!r}: {words}")
    return seconds


def start_limit_s() -> float:
    """Return the limit of MPI's start, 0 for none, as where a launcher ends the job with a rank that dies meanwhile."""
    try:
        return timeout_s() if survives_ranks() else 0.0
    except ValueError:  # which `refusal` reports
        return 0.0


YES_OR_NO: dict[str, bool | None] = {"1": True, "0": False}
# COLLECTIVES_CUDA_AWARE: 1, MPI is given device memory; 0, never; auto, None: `job.cuda_aware` decides.
CUDA_AWARE = "write 1 to give MPI device memory, 0 never to, or auto"
mpi_reads_device_memory = partial(choice, "COLLECTIVES_CUDA_AWARE", {"auto": None} | YES_OR_NO, CUDA_AWARE)
# COLLECTIVES_DEVICE_BARRIERS: 1, devices wait for each other in kernels; 0, hosts order their streams; not set, None:
# they wait where each rank of a node has a device of its own.
BARRIERS = "write 1 where ranks that share a device use MPS, or 0"
device_barriers = partial(choice, "COLLECTIVES_DEVICE_BARRIERS", {"": None} | YES_OR_NO, BARRIERS)
# COLLECTIVES_DEVICE_BLOCKS=16: the most blocks, of 256 threads, that a reduction takes on a device; None: not set.
device_blocks = partial(whole, "COLLECTIVES_DEVICE_BLOCKS", BLOCKS, "write a number of blocks, or unset it")
# COLLECTIVES_MPI4PY=report, of `python -m collectives.mpi4py`: print at exit which calls were ours.
MODES = {mode: mode for mode in ("", "report", "ours", "report,ours")}
mpi4py_mode = partial(choice, "COLLECTIVES_MPI4PY", MODES, "write report, or unset it")

# All of our variables, each with the function that reads it and refuses wrong values.
SETTINGS: dict[str, Callable[[], Any]] = {
    "COLLECTIVES_FAKE_NODES": fake_nodes,
    "COLLECTIVES_TUNING": tuning_file,
    "COLLECTIVES_CHECK": check,
    "COLLECTIVES_TIMEOUT_S": timeout_s,
    "COLLECTIVES_KILL_SILENT": kills_silent,
    "COLLECTIVES_CORES": stated_cores,
    "COLLECTIVES_LINKS": partial(no_file, "COLLECTIVES_LINKS", links_folder),
    "COLLECTIVES_CALLS": writable_calls_folder,
    "COLLECTIVES_HEARTBEAT": partial(no_file, "COLLECTIVES_HEARTBEAT", heartbeat_folder),
    "COLLECTIVES_CUDA_AWARE": mpi_reads_device_memory,
    "COLLECTIVES_DEVICE_BARRIERS": device_barriers,
    "COLLECTIVES_DEVICE_BLOCKS": device_blocks,
    "COLLECTIVES_MPI4PY": mpi4py_mode,
}


def refusal() -> str:
    """Return the fault of the first variable with an invalid value; empty for none."""
    readers: list[Callable[[], Any]] = [*SETTINGS.values(), stated_threads]
    try:
        for read in readers:
            read()
    except ValueError as error:
        return str(error)
    return ""


# Variables that Open MPI's mpirun sets itself, for every job.
MPIRUNS = ("OMPI_MCA_PREFIXES", "OMPI_MCA_cpu_type", "OMPI_MCA_initial_wdir", "OMPI_MCA_num_procs", "PRTE_LAUNCHED")


def variables() -> dict[str, str]:
    """Return the variables, set by a user or a batch script, that change how a job runs."""
    ours = ("COLLECTIVES_", "OMP_NUM_THREADS", "OMPI_MCA_", "PRTE_MCA_", "MPIR_")
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(ours) and name not in MPIRUNS}
