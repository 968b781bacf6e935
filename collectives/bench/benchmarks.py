"""The benchmarks, a row each: collectives, their non-blocking calls, and messages between ranks.

Messages are those of the OSU micro-benchmarks osu_latency, osu_bw, osu_bibw and osu_mbw_mr, and of nccl-tests'
sendrecv; non-blocking calls, as iall_reduce, are those of osu_iallreduce.
"""

from collections.abc import Callable
from typing import NamedTuple

from collectives.schedule.spec import COLLECTIVES, SOURCES, Chunks, Collective

Partners = tuple[int, int] | None  # the ranks that a rank sends to and receives from; None for a rank that is idle


def ring(rank: int, size: int) -> Partners:
    return (rank + 1) % size, (rank - 1) % size


def pairs(rank: int, size: int) -> Partners:
    """Return the same rank of the other half.

    >>> [pairs(rank, 5) for rank in range(5)]
    [(2, 2), (3, 3), (0, 0), (1, 1), None]
    """
    half = size // 2
    other = rank + half if rank < half else rank - half
    return (other, other) if rank < 2 * half else None


def pair(rank: int, size: int) -> Partners:
    """Return the other one of the first ranks of both halves.

    >>> [pair(rank, 4) for rank in range(4)]
    [(2, 2), None, (0, 0), None]
    """
    return pairs(rank, size) if rank in (0, size // 2) else None


class Pattern(NamedTuple):
    """What ranks send in a run: a window of messages at once or a single one, and whether partners send, too.

    Where they do not, they may reply, by the whole vector or by an element.  `num_links` carry messages at once.
    """

    partners: Callable[[int, int], Partners]
    is_windowed: bool
    both_ways: bool
    reply: str
    num_links: Callable[[int], int]  # of so many ranks, in nccl-tests' sense: a ring counts as one


class Benchmark(NamedTuple):
    """A row: the collective by which arrays are allocated; that of messages is none of the public ones."""

    name: str
    spec: Collective
    is_uneven: bool = False  # in units, chunk d of rank r is (d - r) mod p long
    overlaps: bool = False  # a non-blocking call, during which ranks compute
    messages: Pattern | None = None


MESSAGES = {
    # name: partners, whether there is a window, both ways, reply, links
    "sendrecv": Pattern(ring, False, True, "", lambda size: 1),
    "latency": Pattern(pair, False, False, "vector", lambda size: 1),
    "bandwidth": Pattern(pair, True, False, "element", lambda size: 1),
    "bidirectional": Pattern(pair, True, True, "", lambda size: 2),
    "message_rate": Pattern(pairs, True, False, "element", lambda size: size // 2),
}


def message_row(name: str, messages: Pattern) -> Benchmark:
    """Make a row in which every rank has a whole vector and gets one."""
    spec = Collective(name, Chunks.ALL, Chunks.ALL, SOURCES["nobody"], (), "", in_place=False)
    return Benchmark(name, spec, messages=messages)


ROWS = (
    *(Benchmark(name, spec) for name, spec in COLLECTIVES.items()),
    Benchmark("all_to_all_v", COLLECTIVES["all_to_all"], is_uneven=True),
    *(message_row(name, messages) for name, messages in MESSAGES.items()),
    *(Benchmark(f"i{name}", spec, overlaps=True) for name, spec in COLLECTIVES.items()),
)
BENCHMARKS = {row.name: row for row in ROWS}
GROUPS = {"all": [*COLLECTIVES], "overlap": [row.name for row in ROWS if row.overlaps]}
