"""How ranks find out that they do not ask for the same, before any of them waits for the others in vain."""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from collectives.arguments import Arguments
from collectives.errors import InputError
from collectives.plan import Plan

NUM_CLAIMS = 8


class Agreement:
    """Compares what the ranks of a communicator say, by one all-reduce of a few integers while they agree."""

    def __init__(self, rank: int, size: int, bind_plan: Callable[[Arguments], Plan]):
        self.rank, self.size, self.bind_plan = rank, size, bind_plan
        self.digest = np.zeros(2 + NUM_CLAIMS, np.int64)
        self.extremes = bind_plan(Arguments("all_reduce", rank, size, self.digest, op="max"))

    def check(self, said: str, failure: str, claims: Sequence[int] = ()) -> list[int]:
        """Raise InputError on all ranks where one has a failure, or not all have said the same.  Collective.

        Returns the elementwise maximum of the ranks' `claims`, of which there may be up to `NUM_CLAIMS`.
        """
        text = f"!{failure}" if failure else said
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
        self.digest[:] = digest, -digest, *claims, *[0] * (NUM_CLAIMS - len(claims))
        highest, lowest, *highest_claims = self.extremes().tolist()
        if highest != -lowest:
            raise InputError(disagreement(self.gather_texts(text)))
        if failure:
            raise InputError(failure)
        return highest_claims[: len(claims)]

    def highest(self, mine: list[int]) -> list[int]:
        """The elementwise maximum of every rank's integers, of which all have as many.  Collective."""
        values = np.array(mine, np.int64)
        return self.bind_plan(Arguments("all_reduce", self.rank, self.size, values, op="max"))().tolist()

    def gather_rows(self, mine: list[int]) -> np.ndarray:
        """Every rank's integers, a row each; all have as many.  Collective."""
        data = np.array(mine, np.int64)
        return self.bind_plan(Arguments("all_gather", self.rank, self.size, data))().reshape(self.size, -1)

    def gather_ints(self, mine: int) -> list[int]:
        """Every rank's integer, by rank.  Collective."""
        every = np.zeros(self.size, np.int64)
        every[self.rank] = mine
        return self.bind_plan(Arguments("all_reduce", self.rank, self.size, every))().tolist()

    def gather_texts(self, mine: str) -> list[str]:
        data = np.frombuffer(mine.encode(), np.uint8)
        lengths = self.gather_ints(len(data))
        every = self.bind_plan(Arguments("all_gather", self.rank, self.size, data, counts=lengths))()
        return [part.tobytes().decode() for part in np.split(every, np.cumsum(lengths)[:-1])]

    def free(self) -> None:
        self.extremes.free()


def disagreement(texts: list[str]) -> str:
    """One line for what the ranks said that is not the same: failures first, then the two sides."""
    failed = {rank: text[1:] for rank, text in enumerate(texts) if text.startswith("!")}
    if failed:
        rank, text = next(iter(failed.items()))
        others = f" (and {len(failed) - 1} more failed)" if len(failed) > 1 else ""
        return f"rank {rank}: {text}{others}"
    other = next(rank for rank, text in enumerate(texts) if text != texts[0])
    return f"ranks disagree: rank 0 calls {texts[0]}, rank {other} calls {texts[other]}; call the same on all ranks"
