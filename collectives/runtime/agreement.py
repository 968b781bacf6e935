"""Detect mismatched calls before any rank waits for the others in vain."""

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from collectives.job.errors import InputError
from collectives.runtime.plan import Plan
from collectives.runtime.reports.call_log import LogEntry

NUM_FACTS = 9
MOST_PLANS = 32  # kept for later exchanges
LATE = "arrays lie in symmetric memory at one address on some ranks, and not on others: pass the same on all"


class Side(NamedTuple):
    """A rank's description, its call's number, if compared, and its source line, which may differ."""

    description: str
    number: str
    call_site: str

    def __str__(self) -> str:
        return f"{self.description} #{self.number} ({self.call_site})" if self.number else self.description


class Agreement:
    """Comparison of the descriptions of a communicator's ranks: one all-reduce of a few integers while they agree."""

    def __init__(self, size: int, bind_plan: Callable[..., Plan]):
        self.size, self.bind_plan = size, bind_plan  # the latter of a collective's name, an array and arguments
        self.plans: dict[tuple[str, int], tuple[np.ndarray, Plan]] = {}  # with their input, by the call

    def check(
        self,
        description: str,
        failure: str,
        facts: Sequence[int] = (),
        entry: LogEntry | None = None,
        late: LogEntry | None = None,
    ) -> list[int]:
        """Raise InputError on all ranks if one has a failure, or their descriptions differ.  Collective.

        With an `entry` of the call log, its number is compared, too.  Returns the elementwise maximum of the ranks'
        `facts`, up to `NUM_FACTS` integers.  `late` is an earlier call, if devices have found a mismatch in it: this
        rank then describes that one.
        """
        if late:
            description, failure, entry = late.description, "", late
            late.calls.number = late.number  # later ones have not been run
        number = str(entry.number) if entry else ""
        text = f"!{failure}" if failure else f"{description}#{number}"
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
        padding = [0] * (NUM_FACTS - len(facts))  # so that ranks whose calls have other facts compare as many integers
        highest, lowest, is_late, *highest_facts = self.highest([digest, -digest, late is not None, *facts, *padding])
        if highest != -lowest:
            line = str(entry.latest().call_site) if entry else ""
            mine = Side(f"!{failure}" if failure else description, number, line)
            sides = [Side(*text.split("\0")) for text in self.gather_texts("\0".join(mine))]
            if entry:  # then the ranks' numbers of calls are equal again
                entry.calls.number += max(int(side.number or 0) for side in sides) - entry.number
            raise InputError(disagreement(sides))
        if failure:
            raise InputError(failure)
        if is_late:
            raise InputError(f"{description} #{number}: {LATE}")
        return highest_facts[: len(facts)]

    def highest(self, mine: list[int]) -> list[int]:
        """Return the elementwise maximum of every rank's integers, of which all have as many.  Collective."""
        return self.run("all_reduce", mine, op="max").tolist()

    def gather_rows(self, mine: list[int]) -> np.ndarray:
        """Return every rank's integers, a row each; all have as many.  Collective."""
        return self.run("all_gather", mine).reshape(self.size, -1)

    def gather_ints(self, mine: int) -> list[int]:
        """Return every rank's integer, by rank.  Collective."""
        return self.run("all_gather", [mine]).tolist()

    def gather_texts(self, mine: str) -> list[str]:
        data = np.frombuffer(mine.encode(), np.uint8)
        lengths = self.gather_ints(len(data))
        every = self.bind_plan("all_gather", data, counts=lengths)()
        return [part.tobytes().decode() for part in np.split(every, np.cumsum(lengths)[:-1])]

    def exchange(self, mine: Sequence[int]) -> list[int]:
        """Return, from each rank, the integer that it has for this one.  Collective."""
        return self.run("all_to_all", mine).tolist()

    def run(self, collective: str, mine: Sequence[int], **arguments: str) -> np.ndarray:
        """Run a collective on integers by the plan of an earlier one of as many, if it is kept; return a new array."""
        key = collective, len(mine)  # each collective is always called with the same arguments
        if key not in self.plans:
            if len(self.plans) == MOST_PLANS:
                self.plans.pop(next(iter(self.plans)))[1].free()
            buffer = np.empty(len(mine), np.int64)
            self.plans[key] = buffer, self.bind_plan(collective, buffer, **arguments)
        buffer, plan = self.plans[key]
        buffer[:] = mine
        return plan().copy()

    def free(self) -> None:
        for _, plan in self.plans.values():
            plan.free()
        self.plans.clear()
        del self.bind_plan  # which refers to the communicator's parts, as these to this one


def disagreement(sides: list[Side]) -> str:
    """Format the disagreement of ranks in one line: failures first, then the two sides."""
    failed = {rank: side.description[1:] for rank, side in enumerate(sides) if side.description.startswith("!")}
    if failed:
        rank, text = next(iter(failed.items()))
        others = f" (and {len(failed) - 1} more failed)" if len(failed) > 1 else ""
        return f"rank {rank}: {text}{others}"
    first = sides[0]
    rank = next(rank for rank, side in enumerate(sides) if side[:2] != first[:2])
    words = f"ranks disagree: rank 0 calls {first}, rank {rank} calls {sides[rank]}"
    if first.description != sides[rank].description:
        return f"{words}; make the same call on every rank"
    ahead = int(sides[rank].number) - int(first.number)
    behind = 0 if ahead > 0 else rank
    return f"{words}: rank {behind} skipped {abs(ahead)} earlier; make the same sequence of calls on every rank"
