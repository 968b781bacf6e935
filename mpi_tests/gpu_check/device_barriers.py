"""Direct algorithms as single kernels with barriers between the ranks' devices, launched alone and in CUDA graphs.

python -m mpi_tests.gpu_check.device_barriers cuda

Kernels of ranks that share a device run in turns, by time slices: correct, but slow.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

import collectives
from collectives import algorithms
from collectives.algorithms import Access
from mpi_tests.gpu_check.child import CannotRunError
from mpi_tests.gpu_check.memories import fetched
from mpi_tests.gpu_check.rows import Row, Setting, verdict
from mpi_tests.gpu_check.started import program
from mpi_tests.helpers.reference import COLLECTIVES, expected, inputs, reduced

PER_RANK = 3000  # float32 elements
RUNS = 3
# The kernel ends when the host sets a flag: a host that waited for the kernel would deadlock.
HELD = 'extern "C" __global__ void held(volatile int* go) { while (!*go) {} }'


def check(setting: Setting) -> Iterator[Row]:
    if setting.is_small:
        raise CannotRunError("the kernels need a GPU")
    summary = program(setting, 2, "device_barriers", env={"COLLECTIVES_DEVICE_BARRIERS": "1"})
    text = f"{summary['algorithms']} algorithms, {len(summary['wrong'])} wrong"
    text += f"; {summary['launches']} launches in {summary['runs']} runs"
    text += "".join(f"; {name}" for name in summary["wrong"][:3])
    good = not summary["wrong"] and summary["launches"] == summary["runs"] > 0
    where = f"2 ranks on {summary['devices']} device{'s' * (summary['devices'] > 1)}"
    yield Row(f"device barriers, {where}", "equal to the host's, one launch a run", text, verdict(good))
    for name, graph in summary["graphs"].items():
        yield Row(f"CUDA graph of {name}, {where}", "equal to the host's", str(graph), verdict(graph == "equal"))


class Counted:
    """A kernel whose launches are counted."""

    def __init__(self, kernel: Any):
        self.kernel, self.num_launches = kernel, 0

    def __call__(self, *arguments: Any, **options: Any) -> None:
        self.num_launches += 1
        self.kernel(*arguments, **options)


class Ranks:
    """The collectives on this rank's device; all ranks agree on whether a result is wrong."""

    def __init__(self, comm: collectives.Communicator):
        import cupy

        self.comm, self.cupy, self.index = comm, cupy, comm.rank % cupy.cuda.runtime.getDeviceCount()
        cupy.cuda.Device(self.index).use()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.stream.use()
        self.held = cupy.RawKernel(HELD, "held")
        self.go = np.frombuffer(cupy.cuda.alloc_pinned_memory(4), np.int32, 1)

    def plan(self, collective: str, algorithm: str, xs: list[np.ndarray]) -> tuple[Any, Any]:
        x = self.comm.empty(xs[0].size, xs[0].dtype, device=f"cuda:{self.index}")
        x.set(xs[self.comm.rank], self.stream)
        plan = self.comm.plan(collective, x, algorithm=algorithm)
        plan.only.kernel.kernel = Counted(plan.only.kernel.kernel)
        return x, plan

    def differs(self, actual: Any, want: np.ndarray | None) -> bool:
        """Return whether any rank's result is wrong.  Collective."""
        own = actual is not None if want is None else not np.array_equal(fetched(actual), want)
        return bool(self.comm.all_reduce(np.array([own]), op="max")[0])

    def run(self, collective: str, algorithm: str) -> tuple[bool, int]:
        """Run a plan while the device is blocked; return whether its result is wrong, and the number of launches."""
        xs = inputs(self.comm.size, PER_RANK * self.comm.size)
        x, plan = self.plan(collective, algorithm, xs)
        for _ in range(RUNS):
            self.go[0] = 0
            x.set(xs[self.comm.rank], self.stream)
            self.held((1,), (1,), (np.uintp(self.go.ctypes.data),), stream=self.stream)
            actual = plan()
            self.go[0] = 1
            if self.differs(actual, expected(collective, xs, self.comm.rank)):
                return True, 0
        return False, plan.only.kernel.kernel.num_launches

    def graph(self, algorithm: str) -> str:
        """Launch a graph of two runs repeatedly; return "equal" if its results are correct."""
        xs = inputs(self.comm.size, PER_RANK)
        x, plan = self.plan("all_reduce", algorithm, xs)
        plan()
        self.stream.synchronize()
        self.stream.begin_capture()
        plan()
        plan()
        graph = self.stream.end_capture()
        for run in range(RUNS):
            x.set(xs[self.comm.rank] + np.float32(run), self.stream)
            graph.launch(self.stream)
            want = self.comm.size * reduced([values + np.float32(run) for values in xs], "sum")
            if self.differs(x, want):
                return f"launch {run} is wrong"
        return "equal"


def main() -> None:
    comm = collectives.world()
    ranks = Ranks(comm)
    direct = [row for row in algorithms.REGISTRY if row.access >= Access.STAGED and row.collective in COLLECTIVES]
    summary: dict[str, Any] = {"algorithms": len(direct), "runs": RUNS * len(direct), "launches": 0, "wrong": []}
    for row in direct:
        is_wrong, launches = ranks.run(row.collective, row.name)
        summary["launches"] += launches
        summary["wrong"] += [f"{row.collective} {row.name}"] * is_wrong
    summary["graphs"] = {name: ranks.graph(name) for name in ("one_shot", "two_shot_put")}
    summary["devices"] = min(comm.size, ranks.cupy.cuda.runtime.getDeviceCount())
    if comm.rank == 0:
        print(json.dumps(summary))


if __name__ == "__main__":
    main()
