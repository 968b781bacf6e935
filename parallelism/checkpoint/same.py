"""What must be as it was when a run goes on, such as the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import numpy as np


def fingerprint(ids: np.ndarray) -> str:
    """What tells a file of tokens from another.

    >>> fingerprint(np.arange(3, dtype=np.uint16))
    '3 of uint16 with CRC-32 3b48a444'
    """
    return f"{ids.size} of {ids.dtype} with CRC-32 {crc32(np.ascontiguousarray(ids).data):08x}"


def check_same(path: Any, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise ValueError for the first value that is another in the checkpoint at `path`, with both."""
    for name, value in here.items():
        if there.get(name) != value:
            raise ValueError(f"{path}: {name} was {there.get(name)}, but is {value}: resume with the same")
