"""Decide whether MPI is given device memory: by its library's own answer, and by the doctor's trial.

A library that answers no, or cannot be asked, is never given any.  One that answers yes may still lack a driver or a
transport, and a wrong guess crashes the process: `python -m collectives.doctor` has two ranks exchange device memory in
a separate job, as mpirun may not work inside one, and keeps the result by host and library beside measured links.

Source: Open MPI, "MPIX_Query_cuda_support"; MPICH, "MPIX_GPU_query_support", whose GPU type 0 is CUDA.
"""

import ctypes
import json
import platform
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from collectives.job import environment, launch

DOCTOR = "python -m collectives.doctor"


class CudaAwareness(NamedTuple):
    """The decision whether MPI is given device memory, and the reason."""

    is_used: bool
    reason: str

    def __str__(self) -> str:
        way = "MPI is given device memory" if self.is_used else "MPI messages of device arrays are staged on the host"
        return f"{way}: {self.reason}"


def cuda_awareness() -> CudaAwareness:
    """Return the decision for this process: by the setting, or made once automatically."""
    stated = environment.mpi_reads_device_memory()
    return automatic() if stated is None else CudaAwareness(stated, f"COLLECTIVES_CUDA_AWARE={int(stated)}")


@cache
def automatic() -> CudaAwareness:
    """Decide without a setting; rank 0 prints the decision."""
    decision = decide(library(), supports_cuda(loaded_library()), load_trial(library()))
    if environment.launched_rank() == 0:
        print(decision, file=sys.stderr)
    return decision


def decide(name: str, supported: bool | None, failure: str | None) -> CudaAwareness:
    """Decide by a library's answer, and by the failure of the doctor's trial: "" for success, None without a trial."""
    if not supported:
        why = "does not say whether it reads device memory" if supported is None else "is built without CUDA"
        return CudaAwareness(False, f"{name} {why}")
    if failure is None:
        return CudaAwareness(False, f"{name} is built with CUDA, but untried on {platform.node()}: run {DOCTOR}")
    if failure:
        return CudaAwareness(False, f"{name} is built with CUDA, but failed on {platform.node()}: {failure}")
    return CudaAwareness(True, f"two ranks on {platform.node()} have exchanged some through {name}")


def library() -> str:
    return launch.library_name(launch.import_mpi())


def loaded_library() -> Path:
    """Return the file by which the functions of the MPI library are found: mpi4py's module, linked to it."""
    return Path(launch.import_mpi().__file__)


def supports_cuda(path: Path) -> bool | None:
    """Ask an MPI library whether it is built for CUDA; None for one that cannot be asked."""
    functions: Any = ctypes.CDLL(str(path))
    if hasattr(functions, "MPIX_Query_cuda_support"):
        return bool(functions.MPIX_Query_cuda_support())
    if hasattr(functions, "MPIX_GPU_query_support"):
        answer = ctypes.c_int(0)
        failed = functions.MPIX_GPU_query_support(0, ctypes.byref(answer))
        return bool(answer.value) and not failed
    return None


def trial_file(name: str) -> Path | None:
    """Return the file of this host and a library; None if results are not to be kept."""
    return environment.kept_file("device-memory", [platform.node(), name])


def load_trial(name: str) -> str | None:
    """Return the failure of the trial, "" for success; None if there was no trial."""
    path = trial_file(name)
    try:
        failure = json.loads(path.read_text())["failure"] if path else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return failure if isinstance(failure, str) else None


def save_trial(name: str, failure: str) -> str:
    """Save the failure of a trial, "" for success; return the path, or why it is not saved."""
    path = trial_file(name)
    if path is None:
        return "not kept (COLLECTIVES_LINKS=0): set COLLECTIVES_CUDA_AWARE=1 to use it"
    return environment.keep(path, {"host": platform.node(), "mpi": name, "failure": failure})
