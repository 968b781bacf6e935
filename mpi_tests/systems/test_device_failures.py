"""CUDA errors on one rank, and devices that hang: the other ranks are notified, and no job hangs."""

import re

import pytest

from mpi_tests.helpers.cuda_on_host.load import SITE
from mpi_tests.helpers.launch import ROOT, launch

pytestmark = pytest.mark.shares_cores

BEGIN = """
import sys, time
import cupy, numpy
import collectives
from mpi_tests.helpers.cuda_on_host.load import load

comm, library = collectives.world(), load()
cupy.cuda.Device(comm.rank).use()
y = cupy.ones(1000, "float32")
"""
# Rank 1 catches its error, and makes no further call.
FAIL = """
algorithm, function = sys.argv[1:]
x = y if algorithm == "ring" else comm.empty(1000, "float32", device=f"cuda:{comm.rank}")
x[:] = 1
plan = comm.plan("all_reduce", x, algorithm=algorithm)
plan()
cupy.cuda.Device().synchronize()
if comm.rank == 1:
    library.standin_inject(function.encode(), 0, 719)
try:
    plan()
    cupy.cuda.Device().synchronize()
    comm.barrier()
    print("not told", flush=True)
except collectives.CommunicationError as error:
    print(f"rank {comm.rank}: {error}", flush=True)
if comm.rank == 1:
    time.sleep(60)
time.sleep(1)
comm.mpi.Abort(7)
"""
# A communicator with the default time limit compiles the kernels.
HANG = """
endless = cupy.RawKernel('extern "C" __global__ void endless(volatile int* x) { while (!*x) {} }', "endless")
endless((1,), (1,), (cupy.ones(1, "int32"),))
x = y if sys.argv[1] == "ring" else comm.empty(1000, "float32", device=f"cuda:{comm.rank}")
comm.plan("all_reduce", x, algorithm=sys.argv[1])()
comm.barrier()
limited = collectives.Communicator(comm.mpi, timeout_s=4)
x = y if sys.argv[1] == "ring" else limited.empty(1000, "float32", device=f"cuda:{comm.rank}")
plan = limited.plan("all_reduce", x, algorithm=sys.argv[1])
plan()
cupy.cuda.Device().synchronize()
if comm.rank == 1:
    endless((1,), (1,), (cupy.zeros(1, "int32"),))
plan()  # call
cupy.cuda.Device().synchronize()
"""


LAST = """
x = comm.empty(1000, "float32", device=f"cuda:{comm.rank}")
for op in ("sum", "max", "max" if comm.rank == 1 else "sum"):
    comm.all_reduce(x, op=op)  # call
if sys.argv[1] == "free":
    comm.free()
"""

ELSEWHERE = """
numbers = numpy.ones(9)
comm.all_reduce(comm.empty(1000, "float32", device=f"cuda:{comm.rank}"))
comm.all_reduce(numbers)
limited = collectives.Communicator(comm.mpi, timeout_s=4)
x = limited.empty(1000, "float32", device=f"cuda:{comm.rank}")
for _ in range(2):
    limited.all_reduce(x)
    limited.all_reduce(numbers)
limited.all_reduce(numbers if comm.rank == 1 else x)  # call
cupy.cuda.Device().synchronize()
"""


def run(body, *arguments, **env):
    env |= {"PYTHONPATH": f"{SITE}:{ROOT}", "CUDA_ON_HOST_DEVICES": "3", "COLLECTIVES_CUDA_AWARE": "0"}
    return launch(3, "python", "-c", BEGIN + body, *arguments, env=env, timeout=120)


@pytest.mark.parametrize(
    ("algorithm", "function"),
    [
        ("ring", "cudaMemcpyAsync"),
        pytest.param("ring", "cuLaunchKernel", marks=pytest.mark.proof),
        pytest.param("ring", "cudaEventRecord", marks=pytest.mark.proof),
        pytest.param("two_shot", "cuLaunchKernel", marks=pytest.mark.proof),
        ("two_shot", "cudaStreamWaitEvent"),
    ],
)
def test_the_others_hear_of_an_error_at_once(cuda, algorithm, function):
    """If the hosts wait for each other, all ranks raise an error that names the rank whose device failed."""
    result = run(FAIL, algorithm, function, COLLECTIVES_DEVICE_BARRIERS="0")
    lines = sorted(result.stdout.splitlines())
    assert [line[:7] for line in lines] == ["rank 0:", "rank 1:", "rank 2:"], result.stdout + result.stderr
    assert "cudaErrorLaunchFailure" in lines[1]
    for line in (lines[0], lines[2]):
        assert re.search(rf"rank 1 has failed in all_reduce {algorithm} #\d+ .*: cudaErrorLaunchFailure", line), line


def test_devices_that_wait_for_one_that_failed_end_the_job(cuda):
    result = run(FAIL, "two_shot", "cuLaunchKernel")
    assert result.returncode != 0
    assert "not told" not in result.stdout
    words = r"rank [02] cannot continue, as rank 1 has failed in all_reduce two_shot #\d+ .*: cudaErrorLaunchFailure"
    assert re.search(words, result.stderr), result.stderr


@pytest.mark.parametrize(
    ("algorithm", "barriers"),
    [("two_shot", "1"), *(pytest.param(each, "0", marks=pytest.mark.proof) for each in ("two_shot", "ring"))],
)
def test_a_device_that_does_not_end_is_named(cuda, algorithm, barriers):
    result = run(HANG, algorithm, COLLECTIVES_DEVICE_BARRIERS=barriers)
    assert result.returncode != 0
    assert "has waited for 4 s, the limit by COLLECTIVES_TIMEOUT_S" in result.stderr
    own = rf"rank 1 of 3 waits \d+ s in all_reduce {algorithm} #\d+ \(4000 bytes of float32, .*\), its device to finish"
    assert re.search(own, result.stderr), result.stderr


@pytest.mark.parametrize("end", ["free", pytest.param("exit", marks=pytest.mark.proof)])
def test_a_last_call_that_differs_does_not_pass_unheard(cuda, end):
    result = run(LAST, end)
    assert result.returncode != 0
    words = {
        "free": r"ranks disagree: rank 0 calls all_reduce.* op=sum.*, rank 1 calls all_reduce.* op=max",
        "exit": r"rank 0 calls all_reduce\(1000 elements, .* op=sum, .*\) #\d+ \(<string>:\d+\), other ranks call",
    }
    assert re.search(words[end], result.stderr), result.stderr


def test_a_host_that_waits_elsewhere_than_the_devices_is_named(cuda):
    """No kernel can detect it; the hosts' watchdog does."""
    result = run(ELSEWHERE)
    assert result.returncode != 0
    sides = r"all_reduce\(1000 elements, .*\) on ranks 0,2, all_reduce\(9 elements, .*\) on rank 1"
    assert re.search(rf"ranks disagree: call #\d+ is {sides}", result.stderr), result.stderr
