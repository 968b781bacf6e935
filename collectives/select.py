"""What `algorithm="auto"` means."""

from collectives.algorithms import names

# Below this, an all-reduce's time is its rounds, and recursive doubling has the fewest; above, its bytes.
LATENCY_BOUND_BYTES = 16384


def choose(collective: str, nbytes: int, size: int) -> str:
    """The algorithm for a collective of `nbytes` a rank on `size` ranks.

    >>> choose("all_reduce", 1024, 8), choose("all_reduce", 1 << 20, 8)
    ('recursive_doubling', 'ring')
    """
    if collective == "all_reduce" and nbytes <= LATENCY_BOUND_BYTES:
        return "recursive_doubling"
    return names(collective)[0]
