"""A barrier that says who has not come."""

import time
from datetime import timedelta

import torch.distributed as dist

LONGEST_WAIT_S = 1e6


def meet(store: dist.Store, rank: int, size: int, turn: str, limit_s: float, name_all: bool) -> None:
    """A barrier by way of the store, where rank 0 says who has not come.

    Raises: DistBackendError on rank 0 with the first rank that is missing, or, asked for, all; and on the others.
    """
    if rank > 0:
        store.set(f"{turn}: {rank}", "")
        over = awaited(store, f"{turn}: over", 2 * limit_s)
        missing = "0" if over is None else over.decode()
    else:
        deadline_s = time.monotonic() + limit_s
        others = range(1, size)
        late = [r for r in others if awaited(store, f"{turn}: {r}", deadline_s - time.monotonic()) is None]
        missing = ", ".join(map(str, late if name_all else late[:1]))
        store.set(f"{turn}: over", missing)
    if missing:
        raise dist.DistBackendError(f"monitored_barrier: ranks {missing} have not come within {limit_s:g} s")


def awaited(store: dist.Store, key: str, limit_s: float) -> bytes | None:
    """What the store has under a key, once it has; None where it has nothing in time."""
    try:
        store.wait([key], timedelta(seconds=min(max(limit_s, 1e-3), LONGEST_WAIT_S)))
    except dist.DistStoreError:
        return None
    return store.get(key)
