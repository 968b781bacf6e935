"""Errors of one rank while it binds a call: the others raise within seconds, and name the rank and the reason."""

import re

import pytest

from mpi_tests.helpers.cuda_on_host.load import SITE
from mpi_tests.helpers.launch import ROOT, launch

pytestmark = pytest.mark.shares_cores

BEGIN = """
import sys, time
import numpy as np
import collectives

comm, way = collectives.world(), sys.argv[1]
"""
ON_HOST = """
from collectives.runtime.backends import shared_memory as owner

x = np.ones(1000, "float32")
name, error = "compile_for", RuntimeError("no compiler here")
comm.barrier()
"""
ON_DEVICE = """
import cupy
from collectives.arrays import cuda, cuda_kernels

device = comm.rank if sys.argv[2] == "each" else 0
cupy.cuda.Device(device).use()
x = comm.empty(1000, "float32", device=f"cuda:{device}")
x[:] = 1
name, owner, error = {
    "kernel": ("kernel", cuda_kernels, cupy.cuda.compiler.CompileException("no such op\\nline 2", "", "", ())),
    "memory": ("empty", cuda.Cuda, cupy.cuda.memory.OutOfMemoryError(4096, 0)),
    "window": ("open_memory", cuda.Cuda, RuntimeError("no address space")),
}[sys.argv[3]]
if name == "empty":
    x = cupy.ones(1000, "float32")
if name == "open_memory":
    x = cupy.ones(1 << 20, "float32")
"""
CALL = """
def refuse(*given, **named):
    raise error

if comm.rank == 1:
    setattr(owner, name, refuse)
try:
    if way == "call":
        comm.all_reduce(x)  # here
    elif way == "plan":
        comm.plan("all_reduce", x)  # here
    elif way == "started":
        comm.all_reduce(x, blocking=False).wait()  # here
    comm.barrier(algorithm="dissemination")
    print("not told", flush=True)
except (collectives.CommunicationError, collectives.InputError) as error:
    print(f"{comm.rank}: {type(error).__name__}: {error}", flush=True)
time.sleep(1)
comm.mpi.Abort(7)
"""


def outputs(body, *arguments, **env):
    """Return the output line of each of three ranks."""
    env |= {"PYTHONPATH": f"{SITE}:{ROOT}", "CUDA_ON_HOST_DEVICES": "3", "COLLECTIVES_CUDA_AWARE": "0"}
    result = launch(3, "python", "-c", BEGIN + body + CALL, *arguments, env=env, timeout=60)
    lines = sorted(result.stdout.splitlines())
    assert [line[:3] for line in lines] == ["0: ", "1: ", "2: "], result.stdout + result.stderr
    return [line[3:] for line in lines]


def check_told(lines, words):
    for rank, line in enumerate(lines):
        who = "" if rank == 1 else r".*rank 1 has failed in "
        assert re.fullmatch(rf"CommunicationError: {who}.*#\d+ \(4000 bytes of float32, <string>:\d+\): {words}", line)


@pytest.mark.parametrize("way", ["call", "plan", pytest.param("started", marks=pytest.mark.proof)])
def test_programs_that_one_rank_cannot_compile(way):
    check_told(outputs(ON_HOST, way), "RuntimeError: no compiler here")


@pytest.mark.parametrize("way", ["call", pytest.param("plan", marks=pytest.mark.proof)])
def test_kernels_that_one_rank_cannot_compile(cuda, way):
    check_told(outputs(ON_DEVICE, way, "each", "kernel"), "CompileException: no such op line 2")


def test_buffers_that_one_rank_has_no_memory_for(cuda):
    words = "OutOfMemoryError: Out of memory allocating 4,096 bytes.*"
    check_told(outputs(ON_DEVICE, "call", "one", "memory", COLLECTIVES_FAKE_NODES="3x1"), words)


def test_a_window_that_one_rank_cannot_open(cuda):
    lines = outputs(ON_DEVICE, "call", "each", "window")
    assert set(lines) == {"InputError: no 4 MiB of device memory that ranks share: rank 1: no address space"}


WITHOUT_KERNELS = """
import os, sys
if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) in sys.argv[1]:
    os.environ["NUMBA_DISABLE_JIT"] = "1"
import numpy as np
import collectives

comm, x = collectives.world(), np.ones(1000)
comm.all_reduce(x)
with comm.split(0) as part:
    part.all_reduce(x, blocking=False).wait()
print(x[0], comm.plan("all_reduce", x).name, flush=True)
"""


@pytest.mark.parametrize(("ranks", "first"), [("1", 1), ("01", 0)])
def test_ranks_that_cannot_use_numba(ranks, first):
    result = launch(2, "python", "-c", WITHOUT_KERNELS, ranks)
    assert (result.returncode, result.stdout) == (0, "4.0 all_reduce recursive_doubling\n" * 2), result.stderr
    words = "has no compiled kernels, and all data go by messages (NUMBA_DISABLE_JIT is set: unset it)"
    assert result.stderr == f"collectives: rank {first} {words}\n"
