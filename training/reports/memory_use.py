"""Memory of a rank by kind: what it holds between steps, and the most that a step adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from parallelism.data.replica import Replica
from parallelism.step.optimizer import Optimizer
from training.reports.rank_table import Row, rank_table

MemoryUse = Mapping[str, int]  # bytes by kind


def memory_use(replica: Replica, optimizer: Optimizer, added: int, held: int) -> MemoryUse:
    """Return this rank's bytes by kind; `added` are the most that torch allocates in a step, `held` the process's peak.

    Activations include other working memory of a step; communication is symmetric memory other than the parameters and
    gradients; a process, or on a GPU torch, also holds libraries and what it has freed.
    """
    arrays, windows = replica.arrays, replica.ranks.every.context.windows
    weights = replica.masters.weights
    states = [each for state in optimizer.state.values() for each in state.values()]
    in_windows = sum(each.nbytes for each in arrays if each.numel() and windows.key_at(each.data_ptr()))
    return {
        "parameters": arrays[0].nbytes,
        "gradients": arrays[1].nbytes,
        "optimizer states": sum(each.nbytes for each in [*states, *([] if weights is None else [weights])]),
        "activations, peak": added,
        "communication": sum(window.nbytes for window in windows.present) - in_windows,
        "in all, peak": held,
    }


def memory_table(uses: Sequence[MemoryUse]) -> list[str]:
    """Return the lines of a table of the ranks' memory, in MiB."""
    rows = [Row(kind, [use[kind] / 2**20 for use in uses]) for kind in (uses[0] if uses else ())]
    return rank_table("memory in the profiled steps: MiB", rows) if rows else []
