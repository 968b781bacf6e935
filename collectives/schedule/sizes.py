"""Sizes on command lines: 64K, and from one to another."""

import re
from argparse import ArgumentTypeError

MOST_BYTES = 1 << 50
SUFFIXES = {"": 0, "K": 10, "M": 20, "G": 30}


def num_bytes(text: str) -> int:
    """A size, with K, M or G for 2^10, 2^20 or 2^30.

    >>> num_bytes("8"), num_bytes("64K")
    (8, 65536)
    """
    match = re.fullmatch(r"(\d{1,20})([KMG]?)", text, re.ASCII)
    nbytes = int(match[1]) << SUFFIXES[match[2]] if match else MOST_BYTES + 1
    if nbytes > MOST_BYTES:
        raise ArgumentTypeError(f"{text!r} is no size: write one like 8, 64K, 1M or 1G, at most {MOST_BYTES >> 30}G")
    return nbytes


def size_in_words(nbytes: int) -> str:
    """A size as `num_bytes` takes it.

    >>> [size_in_words(nbytes) for nbytes in (8, 65536, 3 << 20)]
    ['8', '64K', '3M']
    """
    for suffix, shift in reversed(SUFFIXES.items()):
        if nbytes and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift}{suffix}"
    return str(nbytes)


def ladder(begin: int, end: int, factor: int) -> tuple[int, ...]:
    """From `begin` to `end`, each `factor` times the one before.

    >>> ladder(8, 1000, 4)
    (8, 32, 128, 512)
    """
    sizes = [begin]
    while 0 < sizes[-1] * factor <= end:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)
