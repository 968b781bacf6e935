"""Order of a collective after long work on the caller's stream, and of work on another stream after it.

python -m mpi_tests.gpu_check.stream_order cuda
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

import collectives
from mpi_tests.gpu_check.memories import knows
from mpi_tests.gpu_check.rows import Row, Setting, verdict
from mpi_tests.gpu_check.started import program

NAME = "stream order"
COUNT = 1 << 16
ROUNDS = 5
WORK, TIMES = 1 << 26, 50  # float32 elements, and passes over them: tens of milliseconds


def check(setting: Setting) -> list[Row]:
    size = 2
    wrong = program(setting, size, "stream_order")
    text = "; ".join(f"{who}: {number} of {ROUNDS} wrong" for who, number in wrong.items())
    return [Row(f"{NAME}, {size} ranks", "sums of what is there last", text, verdict(not any(wrong.values())))]


class Library:
    """An array library of the caller with its streams and events; on the CPU it has none."""

    def __init__(self, device: str):
        self.device = device
        self.work: Any = self.zeros(1 if device == "cpu" else WORK)

    def zeros(self, count: int) -> Any:
        return np.zeros(count, np.float32)

    def keep_busy(self) -> None:
        for _ in range(TIMES):
            self.work += 1

    @contextmanager
    def on_a_stream(self) -> Iterator[Callable[[], None]]:
        """Make a new stream current; yield a function that makes the next such stream wait for this one's work."""
        yield lambda: None

    def on_host(self, x: Any) -> np.ndarray:
        return np.array(x)


class Torch(Library):
    def zeros(self, count: int) -> Any:
        return torch.zeros(count, device=self.device)

    @contextmanager
    def on_a_stream(self) -> Iterator[Callable[[], None]]:
        if self.device == "cpu":
            yield lambda: None
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield lambda: torch.cuda.default_stream().wait_stream(stream)

    def on_host(self, x: Any) -> np.ndarray:
        return x.cpu().numpy().copy()


class CuPy(Library):
    def zeros(self, count: int) -> Any:
        import cupy

        return cupy.zeros(count, np.float32)

    @contextmanager
    def on_a_stream(self) -> Iterator[Callable[[], None]]:
        import cupy

        stream = cupy.cuda.Stream(non_blocking=True)
        stream.wait_event(cupy.cuda.get_current_stream().record())
        with stream:
            yield lambda: cupy.cuda.Stream.null.wait_event(stream.record())

    def on_host(self, x: Any) -> np.ndarray:
        import cupy

        cupy.cuda.Stream.null.synchronize()
        return cupy.asnumpy(x)


def libraries(device: str) -> dict[str, Library]:
    own = {"numpy": Library(device)} if device == "cpu" else {"cupy": CuPy(device)}
    return {**own, **({"torch": Torch(device)} if knows(device) else {})}


def num_wrong(comm: collectives.Communicator, library: Library) -> int:
    """Return the number of rounds whose sums differ from those of a busy stream's final values.  Collective."""
    x, wrong = library.zeros(COUNT), 0
    plan = comm.plan("all_reduce", x)
    for turn in range(ROUNDS):
        with library.on_a_stream() as join:
            library.keep_busy()
            x[:] = comm.rank + turn
            plan()
            join()
        with library.on_a_stream() as join:
            y = x * 2
            join()
        want = 2 * sum(rank + turn for rank in range(comm.size))
        wrong += int(not (library.on_host(y) == want).all())
    return int(comm.all_reduce(np.array([wrong]), op="max")[0])


def main() -> None:
    comm = collectives.world()
    wrong = {name: num_wrong(comm, library) for name, library in libraries(sys.argv[1]).items()}
    if comm.rank == 0:
        print(json.dumps(wrong))


if __name__ == "__main__":
    main()
