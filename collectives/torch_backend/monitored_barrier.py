"""A barrier that says who has not come, in gloo's words, which programs may look for."""

import time
from datetime import timedelta

import torch.distributed as dist

LONGEST_WAIT_S = 1e6


def wait(store: dist.Store, rank: int, size: int, prefix: str, limit_s: float, name_all: bool) -> None:
    """Wait for all ranks by way of the store, where rank 0 says who has not come.

    Raises: DistBackendError on rank 0 with the first rank that is missing, or, asked for, all; and on the others.
    """
    if rank == 0:
        failure = wait_for_others(store, size, prefix, limit_s, name_all)
    else:
        failure = report(store, rank, prefix, limit_s)
    if failure:
        raise dist.DistBackendError(failure)


def wait_for_others(store: dist.Store, size: int, prefix: str, limit_s: float, name_all: bool) -> str:
    """Do rank 0's part; returns what went wrong."""
    deadline_s = time.monotonic() + limit_s
    late = [r for r in range(1, size) if awaited(store, f"{prefix}: {r}", deadline_s - time.monotonic()) is None]
    missing = ", ".join(map(str, late if name_all else late[:1]))
    who = f"[Rank 0]: Rank{'s' * name_all} {missing} failed to pass"
    failure = f"{who} monitoredBarrier in {1e3 * limit_s:g} ms" if missing else ""
    if failure and limit_s <= 0:
        failure = f"[Rank 0]: Rank 0 timed out in monitoredBarrier after {1e3 * limit_s:g} ms"
    store.set(f"{prefix}: over", failure)
    return failure


def report(store: dist.Store, rank: int, prefix: str, limit_s: float) -> str:
    """Do another rank's part; returns what went wrong."""
    store.set(f"{prefix}: {rank}", "")
    over = awaited(store, f"{prefix}: over", 2 * limit_s)
    why = f"nothing came from it within {2 * limit_s:g} s" if over is None else over.decode()
    came = f"Rank {rank} successfully reached monitoredBarrier"
    return f"{came}, but received errors while waiting for send/recv from rank 0: {why}" if why else ""


def awaited(store: dist.Store, key: str, limit_s: float) -> bytes | None:
    """Return what the store has under a key, once it has; None where it has nothing in time."""
    try:
        store.wait([key], timedelta(seconds=min(max(limit_s, 1e-3), LONGEST_WAIT_S)))
    except dist.DistStoreError:
        return None
    return store.get(key)
