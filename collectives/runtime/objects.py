"""Python objects from rank to rank, as pickles in arrays of bytes.

Reading a pickle can run code: only the ranks of a job, which run one program, read each other's.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.runtime.arguments import check_rank

if TYPE_CHECKING:
    from collectives.communicator import Communicator


def pickled(value: Any) -> np.ndarray:
    """Return the bytes of a pickle.

    Raises: ValueError for objects that cannot be pickled.
    """
    try:
        return np.frombuffer(pickle.dumps(value, protocol=5), np.uint8).copy()
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"{type(value).__name__} cannot be pickled ({error}): pass what pickle takes") from None


def broadcast_object(comm: Communicator, value: Any, root: int) -> Any:
    with comm.agreed("broadcast_object"):
        check_rank("root", root, comm.size)
        data = pickled(value if comm.rank == root else None)
    (length,) = comm.broadcast(np.array([len(data)]), root).tolist()
    if comm.rank != root:
        data = np.empty(length, np.uint8)
    comm.broadcast(data, root)
    return value if comm.rank == root else pickle.loads(data.data)


def gather_object(comm: Communicator, value: Any, root: int | None) -> list[Any] | None:
    """Return the list of all ranks' values on the root, or on every rank for None."""
    with comm.agreed("gather_object"):
        if root is not None:
            check_rank("root", root, comm.size)
        data = pickled(value)
    counts = comm.all_gather(np.array([len(data)])).tolist()
    gathered = comm.all_gather(data, counts=counts) if root is None else comm.gather(data, root, counts=counts)
    if gathered is None:
        return None
    return [pickle.loads(part.data) for part in np.split(gathered, np.cumsum(counts)[:-1])]
