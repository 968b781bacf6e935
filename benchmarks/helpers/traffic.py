"""A communicator that uses messages only, which can be counted, or suppressed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import collectives
from collectives import algorithms
from collectives.schedule.moves import Recv, RecvReduce, Send

BY_MESSAGES = {
    "all_reduce": "ring",
    "reduce_scatter": "ring",
    "all_gather": "ring",
    "gather": "binomial",
    "broadcast": "binomial",
}


class Traffic(NamedTuple):
    """Bytes that a rank sends and receives, and bytes sent out of its group."""

    through: float = 0
    beyond: float = 0

    def plus(self, other: "Traffic") -> "Traffic":
        return Traffic(self.through + other.through, self.beyond + other.beyond)


class MessageCommunicator:
    """Communicator by messages; `traffic` counts the runs of its plans, by their schedules."""

    def __init__(self, comm: collectives.Communicator):
        self.comm = comm
        self.group = next(group for group in comm.topology.nodes if comm.rank in group)
        self.traffic, self.is_silent = Traffic(), False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)

    def plan(self, collective: str, x: Any, **arguments: Any) -> collectives.Plan:
        algorithm = arguments.setdefault("algorithm", BY_MESSAGES[collective])
        plan = self.comm.plan(collective, x, **arguments)
        gathers = collective in ("gather", "all_gather")
        counts = arguments.get("counts") or [len(x) if gathers else len(x) / self.comm.size] * self.comm.size
        traffic, begin = self.traffic_of(collective, algorithm, counts, x.itemsize), plan.begin

        def count_and_begin() -> None:
            if not self.is_silent:
                self.traffic = self.traffic.plus(traffic)
                begin()

        plan.begin = count_and_begin  # type: ignore[method-assign]
        return plan

    def broadcast(self, x: Any, root: int = 0) -> Any:
        return self.comm.broadcast(x, root, algorithm=BY_MESSAGES["broadcast"])

    def traffic_of(self, collective: str, algorithm: str, counts: list[float], itemsize: int) -> Traffic:
        """Return the traffic of one run with these chunk sizes in elements."""
        row, traffic = algorithms.find(collective, algorithm), Traffic()
        for moves in row.rounds(self.comm.rank, self.comm.size, 0, self.comm.topology.nodes):
            for move in moves:
                if isinstance(move, Send | Recv | RecvReduce):
                    nbytes = itemsize * sum(counts[chunk % len(counts)] for chunk in move.run)
                    is_out = isinstance(move, Send) and move.to not in self.group
                    traffic = traffic.plus(Traffic(nbytes, nbytes * is_out))
        return traffic

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Let plans return at once, without moving data, in this context."""
        self.is_silent = True
        yield
        self.is_silent = False
