"""Calls matched by their names: ranks may make them in different orders.

A submitted call is pending.  A rank that waits for one exchanges its pending calls with the other ranks, and all run
those that every rank has, in the order of the lowest rank.  So an asynchronous call begins when every rank waits for a
call or polls one, this one or another; `optimizer.py` reduces gradients during the backward pass.

The communicator's own `compare` does not serve here: it waits for all ranks and refuses calls that differ, while ranks
that make calls in different orders must learn each other's, and one that polls must not wait.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from collectives.horovod import tensor_calls
from collectives.job.errors import InputError, LoneInputError

if TYPE_CHECKING:
    from collectives.communicator import Communicator

NONAME = "noname."
DEFAULTS = ("None", "1.0")  # of arguments in which ranks agree
JOINABLE_KINDS = ("allreduce", "step", "barrier")
JOINABLE_OPS = ("sum", "avg")  # for which zeros are a valid contribution


class HorovodInternalError(InputError, RuntimeError):
    """A failed call, raised on every rank that waits for it."""


class TensorFacts(NamedTuple):
    """The facts of a tensor in which ranks must agree."""

    dtype: str
    shape: tuple[int, ...]
    device: str
    name: str = ""

    @classmethod
    def of(cls, x: Tensor, num_free: int = 0, name: str = "") -> Self:
        return cls(str(x.dtype).removeprefix("torch."), tuple(x.shape[num_free:]), x.device.type, name)

    def __str__(self) -> str:
        return f"{self.name and f'{self.name}: '}{self.dtype} {self.shape} on {self.device}"


class LoneInternalError(HorovodInternalError, LoneInputError):
    """A failed call of which other ranks do not know, by a join or in a process set: it ends the job."""


class Description(NamedTuple):
    """The facts of a call in which ranks must agree."""

    kind: str
    name: str
    tensors: tuple[TensorFacts, ...] = ()
    agree: tuple[tuple[str, Any], ...] = ()
    failure: str = ""  # why it is refused

    @property
    def key(self) -> str:
        return f"{self.kind}.{self.name}"

    def __str__(self) -> str:
        tensors = f"{len(self.tensors)} tensors" if len(self.tensors) > 1 else ", ".join(map(str, self.tensors))
        agree = "".join(f", {name}={value}" for name, value in self.agree if repr(value) not in DEFAULTS)
        return f"{self.kind} {self.name!r}{tensors and f' of {tensors}'}{agree}"

    def beside(self, other: Self) -> str:
        """Describe the call, of several tensors the first that differs from another's."""
        pairs = zip(self.tensors, other.tensors, strict=False)
        differing = next((own for own, theirs in pairs if own != theirs), None)
        return str(self if differing is None else self._replace(tensors=(differing,)))


class NamedCall:
    """A call, which is its own handle: `run` executes it once every rank has made it."""

    def __init__(self, calls: MatchedCalls, description: Description, run: Callable[[], Any]):
        self.calls, self.description, self.run = calls, description, run
        self.result: Any = None
        self.error: Exception | None = None
        self.is_over = False

    def end(self, failure: str, is_lone: bool) -> None:
        """Run it, unless there is a failure; `is_lone`: not all ranks of the job know of the failure."""
        try:
            if failure:
                raise InputError(failure)
            self.result = self.run()
        except InputError as error:
            self.error = (LoneInternalError if is_lone else HorovodInternalError)(str(error))
        self.is_over = True


class Position(NamedTuple):
    """A rank's message to the others when calls are matched."""

    waiting: dict[str, Description]  # by key
    awaited: Description | None  # the call that it waits for
    is_joined: bool


class MatchedCalls:
    """The pending calls among the ranks of `comm`; `is_part`: the job has more ranks."""

    def __init__(self, comm: Communicator, is_part: bool):
        self.comm, self.is_part = comm, is_part
        self.waiting: dict[str, NamedCall] = {}
        self.reducers: dict[str, Any] = {}  # of gradients, by the names of their steps
        self.is_joined, self.joined = False, list[int]()  # ranks in the order in which they have joined
        self._numbers: Counter[str] = Counter()  # of calls without a name
        self._facts = np.zeros(3, np.int64)
        self._compare = comm.plan("all_reduce", self._facts, op="max")
        self._met_with: dict[str, Description] | None = None  # calls with which matching has begun

    def free(self) -> None:
        """Free the reducers, the plan and the communicator, once all ranks do.  Collective."""
        self.join()
        for reducer in self.reducers.values():
            reducer.free()
        self._compare.free()
        self.comm.free()

    def name(self, kind: str) -> str:
        """Return the name of a call without one."""
        self._numbers[kind] += 1
        return f"{NONAME}{self._numbers[kind]}"

    def add(self, description: Description, run: Callable[[], Any] = lambda: None) -> NamedCall:
        """Add a pending call, to be matched with the others' of its name."""
        if description.key in self.waiting:
            kind, name = description[:2]
            raise ValueError(f"{kind} {name!r} has been called before, and not synchronized: give it another name")
        call = self.waiting[description.key] = NamedCall(self, description, run)
        return call

    def wait(self, call: NamedCall) -> Any:
        """Return a call's result.  Raises: HorovodInternalError on every rank if it fails."""
        while not call.is_over:
            self.match(call)
        if call.error is not None:
            raise call.error
        return call.result

    def poll(self, call: NamedCall) -> bool:
        """Begin to match calls, and finish if the other ranks have begun, too; return whether a call is complete."""
        if not call.is_over:
            if self._met_with is None:
                self._met_with = self.describe()
                self._compare.start()
            if self._compare.done():
                self.match(None)
        return call.is_over

    def join(self) -> int:
        """Take part in the others' calls, with zeros, until all ranks have joined; return the last that did."""
        if self._met_with is not None:
            self.match(None)
        self.is_joined = True
        while len(self.joined) < self.comm.size:
            self.match(None)
        last, self.joined, self.is_joined = self.joined[-1], [], False
        return last

    def match(self, awaited: NamedCall | None) -> None:
        """Run the calls that all ranks have made.  Collective."""
        positions = self.positions(awaited.description if awaited else None)
        self.joined += [r for r, each in enumerate(positions) if each.is_joined and r not in self.joined]
        active = {rank: each for rank, each in enumerate(positions) if not each.is_joined}
        if not active:
            return
        is_lone = self.is_part or bool(self.joined)
        first = next(iter(active.values()))
        common = [key for key in first.waiting if all(key in each.waiting for each in active.values())]
        for key in common:
            failure = refusal({rank: each.waiting[key] for rank, each in active.items()}, self.joined)
            if not self.is_joined:
                self.waiting.pop(key).end(failure, is_lone)
                continue
            description = first.waiting[key]
            self._numbers[description.kind] += description.name.startswith(NONAME)
            if not failure:
                self.join_in(description)
        if awaited and not common and all(each.awaited for each in active.values()):
            self.waiting.pop(awaited.description.key).end(stall(active), is_lone)

    def join_in(self, description: Description) -> None:
        """Contribute zeros to a call of others, for this rank, which has joined."""
        if description.kind == "step":
            self.reducers[description.name].join_in()
        elif description.kind == "allreduce":
            zeros = [torch.zeros(x.shape, dtype=getattr(torch, x.dtype), device=x.device) for x in description.tensors]
            tensor_calls.allreduce(self.comm, zeros, **dict(description.agree), in_place=True)

    def positions(self, awaited: Description | None) -> Sequence[Position]:
        """Return every rank's position; only this one's, after one small all-reduce, if all are equal."""
        waiting, self._met_with = self._met_with, None
        if waiting is None:
            waiting = self.describe()
            self._compare()
        else:
            self._compare.wait()
        highest, lowest, is_joined = self._facts.tolist()
        if highest == -lowest and not is_joined:
            return [Position(waiting, awaited, False)]
        own = Position({key: call.description for key, call in self.waiting.items()}, awaited, self.is_joined)
        return self.comm.all_gather_object(own)

    def describe(self) -> dict[str, Description]:
        """Return the pending calls, and set their digest as the numbers to be compared."""
        waiting = {key: call.description for key, call in self.waiting.items()}
        digest = int.from_bytes(hashlib.blake2b(repr(waiting).encode(), digest_size=7).digest(), "big")
        self._facts[:] = digest, -digest, self.is_joined
        return waiting


def refusal(sides: dict[int, Description], joined: Sequence[int]) -> str:
    """Return why a call with these descriptions of the ranks is refused, or nothing."""
    for rank, side in sides.items():
        if side.failure:
            return f"rank {rank}: {side.kind} {side.name!r}: {side.failure}"
    first_rank, first = next(iter(sides.items()))
    for rank, side in sides.items():
        if side != first:
            words = f"rank {first_rank} calls {first.beside(side)}, rank {rank} calls {side.beside(first)}"
            return f"ranks disagree: {words}; make the same call on every rank"
    op = dict(first.agree).get("op", "sum")
    if joined and (first.kind not in JOINABLE_KINDS or op not in JOINABLE_OPS):
        return f"{first}: rank {joined[0]} has joined, and zeros are no part of it: call join() after it on all ranks"
    return ""


def stall(positions: dict[int, Position]) -> str:
    """Report that ranks wait for calls, none of which all ranks have made."""
    (rank, own), *others = ((rank, each.awaited) for rank, each in positions.items())
    other_rank, other = next(other for other in others if other[1] != own)
    return f"ranks disagree: rank {rank} waits for {own}, rank {other_rank} for {other}; make both calls on all ranks"
