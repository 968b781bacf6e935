"""What ranks tell each other beside arrays: texts, and what JSON can hold."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collectives import Communicator


def gather_ints(comm: Communicator, number: int) -> list[int]:
    """Every rank's number.  Collective."""
    return comm.all_gather(np.array([number], np.int64)).tolist()


def gather_texts(comm: Communicator, text: str) -> list[str]:
    """Every rank's text.  Collective."""
    data = np.frombuffer(text.encode(), np.uint8)
    counts = gather_ints(comm, len(data))
    every = comm.all_gather(data, counts=counts)
    return [part.tobytes().decode() for part in np.split(every, np.cumsum(counts)[:-1])]


def broadcast_json(comm: Communicator, value: Any, root: int = 0) -> Any:
    """Return one rank's value, of what JSON can hold, on every rank.  Collective."""
    text = json.dumps(value).encode() if comm.rank == root else b""
    length = comm.broadcast(np.array([len(text)]), root)[0]
    letters = np.frombuffer(text or bytes(length), np.uint8).copy()
    return json.loads(comm.broadcast(letters, root).tobytes())
