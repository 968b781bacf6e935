"""torch's store of keys and values, kept by rank 0 and reached by MPI's messages."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple

import torch.distributed as dist
from mpi4py import MPI

from collectives.job.launch import at_exit

REQUEST, FIRST_REPLY, NUM_REPLIES = 0, 1, 10_000  # tags
SHORTEST_SLEEP_S, LONGEST_SLEEP_S = 2e-5, 2e-3
BYE = "bye"
Base: Any = dist.Store  # declared with overloads, of which C++ calls one each


class StoreRequest(NamedTuple):
    """What a rank asks of the table, once all of `keys` are there, or not at all after `limit_s`."""

    operation: str
    arguments: tuple
    keys: tuple[str, ...]
    limit_s: float
    tag: int  # of the answer


class Waiting(NamedTuple):
    """A request whose keys are not all there."""

    source: int
    request: StoreRequest
    deadline_s: float


class Table:
    """The keys and values themselves."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.queues: dict[str, list[bytes]] = {}

    def has(self, keys: tuple[str, ...]) -> bool:
        return all(key in self.values for key in keys)

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, *keys: str) -> list[bytes]:
        return [self.values[key] for key in keys]

    def add(self, key: str, amount: int) -> int:
        total = int(self.values.get(key, b"0")) + amount
        self.values[key] = str(total).encode()
        return total

    def append(self, key: str, value: bytes) -> None:
        self.values[key] = self.values.get(key, b"") + value

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """As torch's own: an absent key is set only where nothing is expected; returns what is there then."""
        if self.values.get(key, b"") == expected:
            self.values[key] = desired
        return self.values.get(key, expected)

    def delete(self, key: str) -> bool:
        return self.values.pop(key, None) is not None

    def keys(self) -> list[str]:
        return list(self.values)


class Server(threading.Thread):
    """Rank 0's thread, which answers until every other rank has said goodbye.

    It is waited for at exit, before MPI is ended.
    """

    def __init__(self, comm: MPI.Comm):
        super().__init__(name="collectives store", daemon=True)
        at_exit(self.join)  # before MPI is ended, and after the store's own goodbye
        self.comm, self.table = comm, Table()
        self.waiting: list[Waiting] = []
        self.replies: list[MPI.Request] = []
        self.num_left, self.closed = 0, False
        self.start()

    def run(self) -> None:
        sleep_s = SHORTEST_SLEEP_S
        while self.num_left < self.comm.size - 1 or not self.closed:
            status = MPI.Status()
            message = self.comm.improbe(tag=REQUEST, status=status)
            if message:
                self.take(status.source, message.recv())
            self.answer_waiting()
            sleep_s = SHORTEST_SLEEP_S if message else min(2 * sleep_s, LONGEST_SLEEP_S)
            time.sleep(0 if message else sleep_s)
        MPI.Request.waitall(self.replies)
        self.comm.Disconnect()

    def take(self, source: int, request: StoreRequest) -> None:
        if request.operation == BYE:
            self.num_left += 1
        else:
            self.waiting.append(Waiting(source, request, time.monotonic() + request.limit_s))

    def answer_waiting(self) -> None:
        waiting, self.waiting = self.waiting, []
        for entry in waiting:
            if self.table.has(entry.request.keys):
                operation: Callable = getattr(self.table, entry.request.operation)
                self.reply(entry, operation(*entry.request.arguments))
            elif time.monotonic() > entry.deadline_s:
                self.reply(entry, [key for key in entry.request.keys if key not in self.table.values], failed=True)
            else:
                self.waiting.append(entry)

    def reply(self, entry: Waiting, answer: Any, failed: bool = False) -> None:
        self.replies = [request for request in self.replies if not request.Test()]
        self.replies.append(self.comm.isend((failed, answer), entry.source, entry.request.tag))


class MPIStore(Base):
    """A store among the ranks of an mpi4py communicator.  Making one is collective."""

    def __init__(self, mpi_comm: MPI.Comm, timeout: timedelta = timedelta(minutes=5)):
        super().__init__()
        self.comm = mpi_comm.Dup()
        self.limit_s = timeout.total_seconds()
        self._tags = count()
        self._closed = False
        self.server = Server(self.comm) if self.comm.rank == 0 else None
        at_exit(self.close)

    def ask(self, operation: str, *arguments: Any, keys: tuple[str, ...] = (), limit_s: float | None = None) -> Any:
        """Raises: DistStoreError where keys are still missing when time is up."""
        if self._closed:
            raise dist.DistStoreError("the store has been closed")
        tag = FIRST_REPLY + next(self._tags) % NUM_REPLIES
        request = StoreRequest(operation, arguments, tuple(keys), self.limit_s if limit_s is None else limit_s, tag)
        sent = self.comm.isend(request, 0, REQUEST)
        sleep_s = SHORTEST_SLEEP_S
        while not (message := self.comm.improbe(0, tag)):
            time.sleep(sleep_s)
            sleep_s = min(1.5 * sleep_s, LONGEST_SLEEP_S)
        failed, answer = message.recv()
        sent.wait()
        if failed:
            raise dist.DistStoreError(f"store: no {', '.join(answer)} after {request.limit_s:g} s")
        return answer

    def close(self) -> None:
        """Say that this rank asks no more; when all have, the store ends."""
        if self._closed:
            return
        self._closed = True
        if self.server:
            self.server.closed = True
        else:
            self.comm.send(StoreRequest(BYE, (), (), 0, 0), 0, REQUEST)
            self.comm.Disconnect()

    def set(self, key: str, value: str | bytes) -> None:
        self.ask("set", key, as_bytes(value))

    def get(self, key: str) -> bytes:
        return self.ask("get", key, keys=(key,))[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self.ask("get", *keys, keys=tuple(keys))

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return self.ask("add", key, amount)

    def append(self, key: str, value: str | bytes) -> None:
        self.ask("append", key, as_bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self.ask("compare_set", key, as_bytes(expected), as_bytes(desired))

    def delete_key(self, key: str) -> bool:
        return self.ask("delete", key)

    def list_keys(self) -> list[str]:
        return self.ask("keys")

    def num_keys(self) -> int:
        return len(self.list_keys())

    def check(self, keys: list[str]) -> bool:
        return self.ask("has", tuple(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit_s = self.limit_s if timeout is None else timeout.total_seconds()
        self.ask("get", keys=tuple(keys), limit_s=limit_s)

    def set_timeout(self, timeout: timedelta) -> None:
        self.limit_s = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self.limit_s)

    def has_extended_api(self) -> bool:
        return True

    deleteKey, getNumKeys, setTimeout = delete_key, num_keys, set_timeout  # noqa: N815  as C++ calls them


def as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
