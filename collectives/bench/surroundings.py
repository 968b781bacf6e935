"""Conditions of measurements: the machine, the libraries, and the version of this project."""

import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from collectives.arrays import views
from collectives.job import environment, system
from collectives.job.launch import library_name


def surroundings(comm: Any, device: str) -> dict[str, Any]:
    """Collect the conditions of a run of a communicator's ranks.  Collective."""
    from mpi4py import MPI  # after `world`, which reports remedies if it cannot be loaded

    gpu = ""
    if device == "cuda":
        runtime = views.device(device).xp.cuda.runtime
        gpu = runtime.getDeviceProperties(runtime.getDevice())["name"].decode()
    here = system.affinity(), environment.cores(), gpu
    binding, cores, gpus = zip(*comm.mpi.allgather(here), strict=True)
    return {
        "mpi": library_name(MPI),
        "python": sys.version.split()[0],
        **{name: version(name) for name in ("numpy", "mpi4py", "torch") if find_spec(name)},
        "hosts": comm.host_names(),
        "ranks": comm.size,
        "nodes": [len(node) for node in comm.topology.nodes],
        "cores": [cores[node[0]] for node in comm.topology.nodes],
        "binding": binding,
        "devices": list(filter(None, gpus)),
        "env": environment.variables(),
        "git": commit(),
    }


def commit() -> str | None:
    """Ask git for the commit of this project that runs, where it runs from a checkout."""
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None
