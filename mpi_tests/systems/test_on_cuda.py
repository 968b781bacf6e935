"""Complete programs on CuPy arrays, on devices that mpi_tests.helpers.cuda_on_host emulates."""

import json
import re
import time

import pytest

from mpi_tests.gpu_check import device_barriers, every_collective, kernels
from mpi_tests.gpu_check.rows import Setting
from mpi_tests.helpers import gpu_kernels
from mpi_tests.helpers.cuda_on_host.load import SITE
from mpi_tests.helpers.launch import ROOT, launch

pytestmark = pytest.mark.shares_cores

ON_CUDA = ("python", "-m", "mpi_tests.helpers.cuda_on_host")


def on_ranks(ranks, *command, **env):
    result = launch(ranks, *ON_CUDA, *command, env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("devices", [pytest.param("1", marks=pytest.mark.proof), "2"])
def test_every_collective_as_the_check_of_a_gpu_does(cuda, devices):
    output = on_ranks(2, "mpi_tests.gpu_check.every_collective", "cuda", 150, 30, CUDA_ON_HOST_DEVICES=devices)
    summary = json.loads(output.splitlines()[-1])
    assert summary["cases"] == 30
    assert summary["all"] > 1000
    assert summary["wrong"] == []


def test_the_rows_of_the_kernels(cuda, monkeypatch):
    monkeypatch.setattr(gpu_kernels, "NBYTES", 1 << 12)
    first, *speeds = kernels.check(Setting("cuda", time.monotonic() + 8))
    assert first.verdict == "passed"
    assert " reductions, as on the host" in first.measured
    assert len(speeds) == 2


@pytest.mark.parametrize("devices", [pytest.param("1", marks=pytest.mark.proof), "2"])
def test_the_rows_of_device_barriers(cuda, monkeypatch, devices):
    monkeypatch.setenv("PYTHONPATH", f"{SITE}:{ROOT}")
    monkeypatch.setenv("CUDA_ON_HOST_DEVICES", devices)
    first, *graphs = device_barriers.check(Setting("cuda", time.monotonic() + 60))
    assert first.verdict == "passed", first
    num_runs = re.fullmatch(r"(\d+) algorithms, 0 wrong; (\d+) launches in (\d+) runs", first.measured).groups()
    assert int(num_runs[0]) * 3 == int(num_runs[1]) == int(num_runs[2]) > 0
    assert [row.measured for row in graphs] == ["equal", "equal"]
    assert first.check.endswith("2 ranks on 1 device" if devices == "1" else "2 ranks on 2 devices")


def test_the_rows_of_collectives_both_ways(cuda, monkeypatch):
    """An MPI that claims to be built with CUDA receives device memory, too; otherwise the row gives the reason."""
    calls = []

    def program(setting, size, name, limit_s, env):
        way = env["COLLECTIVES_CUDA_AWARE"]
        calls.append((size, way))
        return {"cases": 1, "all": 1, "memories": "own", "wrong": ["x"] * int(way), "refused": []}

    monkeypatch.setattr(every_collective, "program", program)
    *_, last = every_collective.check(Setting("cuda", time.monotonic() + 60))
    assert (last.verdict, calls[-1]) == ("skipped", (8, "0"))
    assert last.measured.endswith("is built without CUDA")
    monkeypatch.setattr(every_collective.cuda_aware, "supports_cuda", lambda path: True)
    *_, last = every_collective.check(Setting("cuda", time.monotonic() + 60))
    assert (last.verdict, calls[-1]) == ("failed", (2, "1"))


def test_the_bench(cuda):
    words = ("all_reduce", "--device", "cuda", "--memory", "symmetric", "-b", "1K", "-e", "16K", "-n", "3", "-w", "1")
    output = on_ranks(2, "collectives.bench", *words)
    rows = [line.split() for line in output.splitlines() if line.strip()[:1].isdigit()]
    assert [len(row) for row in rows] == [14] * 3, output  # 3 sizes, in place and out of place
    assert "# Wrong elements    : 0 OK" in output


SUM = """
import cupy, collectives
comm = collectives.world()
x = comm.empty(999, "float32", device="cuda")
x[:] = comm.rank + 1
comm.all_reduce(x)
y = comm.all_to_all(x)
print(float(x[0]), flush=True)
"""


def test_a_process_frees_no_memory_that_others_have_open_when_it_ends(cuda):
    result = launch(3, "python", "-c", SUM, env={"PYTHONPATH": f"{SITE}:{ROOT}"})
    assert (result.returncode, result.stdout.split()) == (0, ["6.0"] * 3)
    assert "CUDA on the host" not in result.stderr


FAULT = """
import sys, cupy, collectives
comm, algorithm, way = collectives.world(), *sys.argv[1:]
x = comm.empty(1000, "float32", device="cuda")
x[:] = 1
plan = comm.plan("all_reduce", x, algorithm=algorithm)
plan()
if comm.rank == 1:
    cupy.cuda.runtime.memsetAsync(64, 0, 8, 0)
plan() if way == "now" else plan.start().wait()
print(float(x.sum()))
comm.barrier()
"""


@pytest.mark.parametrize(("algorithm", "way"), [("ring", "now"), ("two_shot", "in the background")])
def test_an_error_of_a_device_ends_the_job(cuda, algorithm, way):
    result = launch(3, "python", "-c", FAULT, algorithm, way, env={"PYTHONPATH": f"{SITE}:{ROOT}"}, timeout=60)
    assert result.returncode != 0
    assert "rank 1 of 3 failed and ends the job:" in result.stderr
    assert "cudaErrorIllegalAddress" in result.stderr


WITHOUT_NUMBA = """
import sys
from collectives.job import environment
if sys.argv[1] == "all" or environment.launched_rank() == 1:
    sys.modules["numba"] = None
import cupy, numpy, collectives
from collectives.runtime.backends.on_device import KernelProgram
comm = collectives.world()
cupy.cuda.Device(comm.rank).use()
for x in comm.empty(999, "float32", device=f"cuda:{comm.rank}"), cupy.empty(999, "float32"), comm.empty(999, "float32"):
    for value in (1, 2):
        x[:] = value * (comm.rank + 1)
        comm.all_reduce(x)
        assert (x == 3 * value).all(), (type(x), value)
    y = comm.all_reduce(x, blocking=False).wait()
    assert (x == 12).all()
    plan = comm.plan("all_reduce", x)
    on_device = isinstance(x, cupy.ndarray) and isinstance(plan.rounds[0], KernelProgram)
    print(type(x).__module__, plan.name, on_device, flush=True)
try:
    comm.all_reduce(numpy.ones(3), algorithm="two_shot")
except collectives.InputError as error:
    print(error, flush=True)
try:
    comm.all_reduce(x if comm.rank else x[:5])
except collectives.InputError as error:
    assert "ranks disagree" in str(error)
"""


@pytest.mark.parametrize("ranks", ["all", "one"])
def test_devices_wait_for_each_other_without_numba(cuda, ranks):
    """Device arrays are reduced by kernels; host arrays travel in messages on all ranks if one lacks Numba."""
    env = {"PYTHONPATH": f"{SITE}:{ROOT}", "CUDA_ON_HOST_DEVICES": "2", "COLLECTIVES_CUDA_AWARE": "0"}
    result = launch(2, "python", "-c", WITHOUT_NUMBA, ranks, env=env)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert sum(line.startswith("cupy") and line.endswith("True") for line in lines) == 4, result.stdout
    assert sum("needs Numba, which not all ranks have" in line for line in lines) == 2, result.stdout


def test_the_doctor_on_ranks(cuda):
    output = on_ranks(2, "collectives.doctor")
    assert "device 0: CUDA on the host" in output
