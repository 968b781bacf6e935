"""The last calls of a rank in a file, as PyTorch's flight recorder writes them: `torchfrtrace FOLDER` compares ranks.

The file has the collectives of the call log, back to the last run of a plan that was only counted, and the pending
messages between ranks.  Nothing is timed, as that would cost a small call more than the log does.  The analyzer
compares collectives, lengths, dtypes and states, but not roots, ops and algorithms.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

from mpi4py import MPI

from collectives.runtime.backends.point_to_point import PointToPoint, SendMessage
from collectives.runtime.progress import Progress
from collectives.runtime.reports.call_log import Calls, LoggedRun, Record, SourceLine, call_site_of

VERSION = "2.10"  # of the format
BACKEND = "nccl"  # a backend that every version of the analyzer knows
# The analyzer's names of calls whose lengths it compares as we do; all other calls are shown to it as barriers.
TYPES = {name: name for name in ("all_reduce", "all_to_all", "broadcast", "reduce", "gather", "scatter", "split")}
TYPES |= {"all_gather": "_all_gather_base", "reduce_scatter": "reduce_scatter_v", "empty": "new_window"}
TYPES |= {"scan": "_reduce_oop", "exscan": "_reduce_oop"}


class CallGroup(NamedTuple):
    """The ranks of a call, numbered in the original communicator."""

    name: str
    ranks: Sequence[int]


class TracedCall(NamedTuple):
    """A call in the analyzer's terms: `number` is that in its group, `kind` its type and peers."""

    group: CallGroup
    number: int
    kind: str
    name: str
    lengths: list[int]
    dtypes: list[str]
    is_over: bool
    call_sites: list[SourceLine]
    is_p2p: bool = False

    def fields(self, record_id: int, group_id: int) -> dict[str, Any]:
        """Return the fields of the format, None or 0 for those that are not recorded."""
        return {
            "record_id": record_id,
            "pg_id": group_id,
            "process_group": (self.group.name, "undefined"),  # name, description
            "collective_seq_id": self.number,  # by which the analyzer pairs messages, too
            "p2p_seq_id": self.number if self.is_p2p else 0,
            "op_id": self.number,
            "profiling_name": f"{BACKEND}:{self.kind}",
            "input_sizes": [self.lengths],
            "input_dtypes": self.dtypes,
            "output_sizes": [self.lengths],
            "output_dtypes": self.dtypes,
            "state": "completed" if self.is_over else "started",
            "retired": self.is_over,
            "is_p2p": self.is_p2p,
            "frames": [{"name": self.name, "filename": file, "line": line} for file, line in self.call_sites],
            "time_created_ns": 0,
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None,
            "timeout_ms": 0,
            "thread_id": "",
            "thread_name": "",
        }


class Recorder:
    """Writer of the calls of a communicator and its parts to `folder`, the same for all ranks; None for nowhere."""

    def __init__(self, rank: int, record: Record, progress: Progress, folder: Path | None):
        self.rank, self.record, self.progress = rank, record, progress
        self.folder = self.shown_folder = folder
        if folder:
            with suppress(FileNotFoundError):  # the working directory is gone
                self.folder = folder.absolute()
            write_on_signal(self)

    def remedy(self, is_complete: bool) -> str:
        """Return the command that compares the files, of all ranks or of some; empty where there are none."""
        option = "" if is_complete else "--allow-incomplete-ranks "
        return f"the last calls of each rank: torchfrtrace {option}{self.shown_folder}" if self.folder else ""

    def begins(self) -> dict[str, int]:
        """Return the first number that this rank knows of each communicator's calls, by label."""
        numbers: dict[str, int] = {}
        for run in self.record.without_gaps():
            numbers.setdefault(run.entry.calls.label, run.number)
        return {calls.label: calls.number + 1 for calls in list(self.record.communicators)} | numbers

    def write(self, begins: Mapping[str, int] | None = None) -> str:
        """Write the file, from the first calls that all ranks know, if agreed on; return the failure."""
        if not self.folder:
            return ""
        unfinished = self.folder / f".{self.rank}.unfinished"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            unfinished.write_bytes(pickle.dumps(self.trace(begins)))
            unfinished.replace(self.folder / f"rank_{self.rank}")
        except OSError as error:
            return f"rank {self.rank} cannot write its last calls to {self.folder}: {error.strerror}"
        return ""

    def trace(self, begins: Mapping[str, int] | None) -> dict[str, Any]:
        """Return the contents of the file.

        Without numbers to begin at, the analyzer drops calls by `record_id`, as if all ranks had made equally many.
        """
        runs = self.record.without_gaps()
        first_id = self.record.num_calls - len(runs)
        if begins is not None:
            runs = [run for run in runs if run.number >= begins.get(run.entry.calls.label, 0)]
            first_id = 0
        calls = [*map(traced_collective, runs), *traced_messages(self.progress)]
        groups = {group.name: group for group in map(group_of_calls, list(self.record.communicators))}
        groups |= {call.group.name: call.group for call in calls}
        ids = {name: number for number, name in enumerate(groups)}
        return {
            "version": VERSION,
            "comm_lib_version": MPI.Get_library_version(),
            "pg_config": {
                name: {"name": name, "desc": "undefined", "ranks": str(list(g.ranks))} for name, g in groups.items()
            },
            "pg_status": {
                str(ids[name]): status([call for call in calls if call.group.name == name]) for name in groups
            },
            "entries": [call.fields(first_id + i, ids[call.group.name]) for i, call in enumerate(calls)],
        }


def status(calls: Sequence[TracedCall]) -> dict[str, int]:
    """Return the numbers of the last calls of a group, -1 for none."""
    last = max((call.number for call in calls), default=-1)
    completed = max((call.number for call in calls if call.is_over), default=-1)
    return {
        "last_enqueued_collective": last,
        "last_started_collective": last,
        "last_completed_collective": completed,
    }


def group_of_calls(calls: Calls) -> CallGroup:
    return CallGroup(calls.label.removeprefix(" of ") or "all ranks", calls.members)


def traced_collective(run: LoggedRun) -> TracedCall:
    entry = run.entry
    name = entry.name.replace(":", ";")  # at which the analyzer splits
    return TracedCall(
        group=group_of_calls(entry.calls),
        number=run.number,
        kind=f"{TYPES.get(name.split()[0], 'barrier')} {name}",
        name=name,
        lengths=list(entry.lengths),
        dtypes=[] if entry.dtype is None else [str(entry.dtype)],
        is_over=not entry.under_way or run.number != entry.number,
        call_sites=[run.call_site],
    )


def traced_messages(progress: Progress) -> Iterator[TracedCall]:
    """Trace the pending messages between ranks: those of two ranks and a tag as calls of a group of two."""
    threads = {id(plan): thread for thread, plan, _ in list(progress.waits.values())}
    numbers: Counter[str] = Counter()
    for plan in list(progress.started):
        step = next(iter(plan.rounds), None)
        if isinstance(step, PointToPoint):
            group, kind = group_and_kind(step)
            numbers[group.name] += 1
            call_site = call_site_of(threads.get(id(plan), 0))
            yield TracedCall(
                group=group,
                number=numbers[group.name],
                kind=kind,
                name=plan.words,
                lengths=[step.memory.nbytes // step.dtype.itemsize],
                dtypes=[str(step.dtype)],
                is_over=False,
                call_sites=[call_site] if call_site else [],
                is_p2p=True,
            )


def group_and_kind(step: PointToPoint) -> tuple[CallGroup, str]:
    """Return the possible ranks of a message, and its type with its two ends, numbered among these."""
    calls = step.mailbox.calls
    own = calls.members[step.mailbox.rank]
    peer = None if step.peer == MPI.ANY_SOURCE else calls.members[step.peer]
    ranks = sorted(calls.members if peer is None else {own, peer})
    own_rank, peer_rank = ranks.index(own), -1 if peer is None else ranks.index(peer)
    kind = f"send {own_rank}->{peer_rank}" if isinstance(step, SendMessage) else f"recv {own_rank}<-{peer_rank}"
    between = "any ranks" if peer is None else f"ranks {' and '.join(map(str, ranks))}"
    return CallGroup(f"messages of {between} with tag {step.tag}{calls.label}", ranks), kind


class WriteOnSignal:
    """The process's handler of SIGUSR2: every recorder writes."""

    def __init__(self) -> None:
        self.recorders: WeakSet[Recorder] = WeakSet()

    def __call__(self, *_: Any) -> None:
        for recorder in list(self.recorders):
            words = recorder.write() or f"rank {recorder.rank} has written its last calls to {recorder.shown_folder}"
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{words}\n".encode())


def forget_recorders() -> None:
    """Have a forked child write no files of its rank."""
    if isinstance(handler := signal.getsignal(signal.SIGUSR2), WriteOnSignal):
        handler.recorders.clear()


os.register_at_fork(after_in_child=forget_recorders)


def write_on_signal(recorder: Recorder) -> None:
    """Make a recorder write on SIGUSR2, unless the program handles that signal."""
    if threading.current_thread() is not threading.main_thread():
        return
    handler = signal.getsignal(signal.SIGUSR2)
    if handler is signal.SIG_DFL:
        handler = WriteOnSignal()
        signal.signal(signal.SIGUSR2, handler)
    if isinstance(handler, WriteOnSignal):
        handler.recorders.add(recorder)
