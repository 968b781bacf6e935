"""Which algorithm `auto` stands for."""

from collections.abc import Sequence

from collectives.algorithms import Algorithm, Reach

SMALL_BYTES = 1 << 14
ONCE_BYTES = 1 << 16  # below this, a call without a plan goes by messages: more costs more to bind than it saves


def choose(collective: str, nbytes: int, size: int, usable: Sequence[Algorithm], once: bool) -> str:
    rows = {row.name: row for row in usable}
    if size > 1 and not (once and nbytes < ONCE_BYTES):
        small = [name for name, row in rows.items() if row.reach == Reach.STAGES]
        large = [name for name, row in rows.items() if row.reach == Reach.ARRAYS]
        if small and nbytes <= SMALL_BYTES:
            return small[0]
        if large or small:
            return [*large, *reversed(small)][0]
    if nbytes <= SMALL_BYTES and "recursive_doubling" in rows and collective == "all_reduce":
        return "recursive_doubling"
    return next(name for name, row in rows.items() if row.reach == Reach.MESSAGES)
