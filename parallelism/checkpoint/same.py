"""What must be as it was when a run goes on, such as the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import numpy as np

BLOCK, MOST_BLOCKS = 1 << 22, 64  # tokens that are looked at


def fingerprint(ids: Any) -> str:
    """What tells a sequence of tokens from another: their number, type, and a sum of them, or of some if they are many.

    >>> fingerprint(np.arange(3, dtype=np.uint16))
    '3 of uint16 with CRC-32 3b48a444'
    """
    step = max(1, len(ids) // (BLOCK * MOST_BLOCKS)) * BLOCK
    crc, dtype = 0, np.asarray(ids[:1]).dtype
    for start in range(0, len(ids), step):
        crc = crc32(np.ascontiguousarray(ids[start : start + BLOCK]).data, crc)
    return f"{len(ids)} of {dtype} with CRC-32 {crc:08x}"


def check_same(path: Any, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise ValueError for the first value that is another in the checkpoint at `path`, with both."""
    for name, value in here.items():
        if there.get(name) != value:
            raise ValueError(f"{path}: {name} was {there.get(name)}, but is {value}: resume with the same")
