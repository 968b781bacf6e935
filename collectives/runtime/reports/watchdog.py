"""The watchdog: if ranks are deadlocked, it prints where each of them is, and aborts the job.

Every rank has a thread that checks twice a second how long its rank has been waiting, and whether another asks.  A
rank that has waited too long asks all others, prints their answers, and aborts.  The threads exchange messages of their
own, independently of their ranks, which may be blocked in MPI or in the caller's code; a rank that is stopped, or whose
code keeps Python's lock, does not answer.  When a rank has ended its program, its thread still answers until all ranks
have ended, as MPI would wait for them anyway; and a rank that waits for one whose program has ended ends the job.  A
rank that dies ends the job; or if the job is to go on without it, the threads end their ranks' waits by an error, and,
with COLLECTIVES_KILL_SILENT, kill ranks that do not answer in place of the job.
When Ctrl-C has ended one rank's program, its thread has that of rank 0 interrupt its rank, too, which ends the job.
"""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mpi4py import MPI

from collectives.job import environment
from collectives.job.backoff import Backoff
from collectives.job.launch import dead_ranks, kill_process
from collectives.runtime.progress import Advanceable, Progress, Wait
from collectives.runtime.reports.call_log import LoggedRun, call_site_of, error_site_of, show_last
from collectives.runtime.reports.recorder import Recorder
from collectives.schedule.moves import name_ranks

POLL_S = 0.5
DEATHS_POLL_S = 0.1  # where the job goes on without ranks that die
ANSWER_S = 5.0  # to wait for the others' answers
GRACE_S = 3.0  # from the end of a rank's program until it tells ranks that have not ended theirs
LAST_WORDS_S = 0.5  # for output to get through, before the job is aborted
ASK = None  # a message that is not an answer
MOST_REPORTED = 16  # calls, which others compare
MOST_SHOWN = 3  # of a rank's last collectives, repeated runs counted once


class WriteCalls(NamedTuple):
    """A message to all ranks: to write their last calls, of each communicator from a number on, by label."""

    begins: dict[str, int]


class Written(NamedTuple):
    """The answer to `WriteCalls`: the failure, if any."""

    failure: str


class DeviceFailure(NamedTuple):
    """A message to all ranks: the error of the sender's device."""

    words: str


class Awaited(NamedTuple):
    """The call that a rank waits in; `members` are the ranks that must make it."""

    title: str
    label: str
    number: int
    members: Sequence[int]


class Report(NamedTuple):
    """A rank's position in words; the number of its calls on each communicator, by label; and its last ones."""

    words: str
    numbers: dict[str, int]
    descriptions: dict[tuple[str, int], str]  # of its calls, by label and number
    awaited: Awaited | None
    begins: dict[str, int]  # the first calls that its recorder knows, by label


class ProgramEnd(NamedTuple):
    """A message to all ranks: the sender has ended its program, by an error if `failed`, and others have not."""

    report: Report
    failed: bool


class RankProcess(NamedTuple):
    """The process of a rank, on a node, and the time at which it started, in ticks."""

    node: int
    process: int
    started: int


class Kill(NamedTuple):
    """A message to a rank on the same node as one that does not answer: to kill that one, for the others to go on."""

    silent: RankProcess


class Interrupt(NamedTuple):
    """A message to rank 0: Ctrl-C has ended the sender's program."""


Message = Interrupt | Kill | Report | WriteCalls | Written | DeviceFailure | ProgramEnd | None


class Watchdog:
    """The thread of one rank.  `tag` is reserved for it on `comm`; `progress` has the waits.

    Ranks that do not answer are killed if `processes` has those of all ranks.
    """

    processes: Sequence[RankProcess] = ()

    def __init__(self, comm: MPI.Comm, tag: int, recorder: Recorder, progress: Progress, timeout_s: float):
        self.comm, self.tag, self.recorder, self.timeout_s = comm, tag, recorder, timeout_s
        self.record = recorder.record
        self.progress, self.waits = progress, progress.waits
        progress.tell = self.tell
        self.rank, self.size = comm.rank, comm.size
        self.alone = MPI.Query_thread() < MPI.THREAD_MULTIPLE  # this thread may not call MPI
        self.survives_ranks = environment.survives_ranks() and not self.alone
        self.poll_s = min(DEATHS_POLL_S if self.survives_ranks else POLL_S, timeout_s / 4)
        self.clock_s, self.looked = 0.0, time.monotonic()
        self.since: dict[int, float] = {}  # the time at which each wait was first seen
        self.device_since: dict[tuple[int, int], float] = {}  # the same for the latest run of each plan on a device
        self.failed_s = math.inf  # the time of another rank's report that its device failed
        self.ended: dict[int, ProgramEnd] = {}  # other ranks that have
        self.interrupt_s, self.interrupted = math.inf, -1  # when this rank's program was, and on rank 0 which other's
        self.state: Any = None
        self.changed_s = 0.0  # the time at which the state was last seen to change
        self.patient_until_s = 0.0
        self.sent: list[MPI.Request] = []
        self.killed: set[RankProcess] = set()
        self.lock, self.stopped = threading.Lock(), False
        # Not a daemon: Python waits for it when the program has ended, before MPI is ended.
        self.thread = threading.Thread(target=self.guard, name="collectives watchdog")
        self.thread.start()

    def stop(self) -> None:
        """Return once the thread does not use the communicator any more; it ends soon after."""
        with self.lock:
            self.stopped = True

    def guard(self) -> None:
        main = threading.main_thread()
        try:
            while main.is_alive():
                main.join(self.poll_s)
                with self.lock:
                    if self.stopped or MPI.Is_finalized():
                        return
                    self.look()
                    if self.survives_ranks and (deaths := dead_ranks(self.comm)):
                        self.give_up(deaths)
                        return
            if not self.alone and self.timeout_s < math.inf:  # else it looks for deaths only
                self.leave()
        except MPI.Exception as error:
            # Ranks that poll shared memory would wait for ever.
            what = dead_ranks(self.comm) or "MPI has failed"
            if self.survives_ranks:
                self.give_up(f"{what} ({error})")
            else:
                self.last_words(f"rank {self.rank}: {what} ({error}); this ends the job")

    def give_up(self, deaths: str) -> None:
        """Have all waits of this rank end, in a job that goes on without ranks that die, and write its last calls."""
        self.recorder.write(None)
        self.progress.failure = deaths

    def look(self) -> None:
        """Answer ranks that ask, and sound the alarm, if it is time."""
        self.tell_time()
        for source, message in self.incoming():
            self.take(source, message)
        self.look_for_interrupts()
        if self.clock_s > self.failed_s + ANSWER_S and (self.waits or self.on_device(self.failed_s)):
            self.last_words(f"rank {self.rank} cannot continue, as {self.progress.failure}; this ends the job")
        # Lower ranks first, so that not all of them ask: each alarm reaches the others within a poll.
        limit_s = self.timeout_s + POLL_S * self.rank.bit_length()
        overdue: set[Any] = {number for number, at in self.since.items() if self.clock_s - at >= limit_s}
        overdue |= self.on_device(self.clock_s - limit_s).keys()
        if self.clock_s < self.patient_until_s:
            return
        if overdue:
            limit = f"{self.timeout_s:g} s, the limit by COLLECTIVES_TIMEOUT_S or timeout_s"
            unasked = "; the others cannot be asked, since MPI was not started with THREAD_MULTIPLE" * self.alone
            self.sound(overdue, True, f"rank {self.rank} has waited for {limit}{unasked}")
        elif hopeless := self.hopeless():
            self.sound(hopeless, False, f"rank {self.rank} waits for a rank that has ended its program")

    def look_for_interrupts(self) -> None:
        """Tell rank 0 if Ctrl-C has ended this rank's program; on rank 0, end the job if it cannot be interrupted.

        Where mpirun interrupts all ranks, rank 0 gets the time for its own interrupt to arrive.
        """
        if self.rank and isinstance(last_error(), KeyboardInterrupt) and not self.alone:
            self.interrupt_s = min(self.interrupt_s, self.clock_s)
            if self.interrupted < 0 and self.clock_s > self.interrupt_s + 2 * POLL_S:
                self.interrupted = self.rank
                self.send(Interrupt(), 0)
        elif self.clock_s > self.interrupt_s + ANSWER_S and not is_interrupted():
            self.last_words(f"rank {self.interrupted} was interrupted, and rank 0 does not end; this ends the job")

    def interrupt(self, rank: int) -> None:
        """Interrupt rank 0, as another rank was, unless it is already: it may be writing its files."""
        main = threading.main_thread()
        if not main.is_alive():
            self.last_words(f"rank {rank} was interrupted; this ends the job")
        elif self.interrupted < 0 and not is_interrupted():
            self.interrupted, self.interrupt_s = rank, self.clock_s
            print(f"rank {rank} was interrupted: rank 0 ends the job", file=sys.__stderr__, flush=True)
            signal.pthread_kill(main.ident or 0, signal.SIGINT)

    def hopeless(self) -> set[Any]:
        """Return the longest wait, if nothing will end it: a rank has ended its program without making that call.

        A wait for a message, which another rank may still send, counts once a rank has failed.
        """
        longest = min(self.since, default=None)
        if not self.ended or longest is None or self.clock_s - self.since[longest] < 2 * POLL_S:
            return set()
        awaited = self.report().awaited
        if awaited is None:
            return {longest} if any(ended.failed for ended in self.ended.values()) else set()
        there = self.ended.keys() & awaited.members
        late = [rank for rank in there if self.ended[rank].report.numbers.get(awaited.label, 0) < awaited.number]
        return {longest} if late else set()

    def tell_time(self) -> None:
        """Update the times of waits and changes; time in which this process was stopped does not count."""
        now = time.monotonic()
        self.clock_s += min(now - self.looked, 2 * POLL_S)
        self.looked = now
        self.since = {number: self.since.get(number, self.clock_s) for number in list(self.waits)}
        plans = [plan for reference in self.progress.on_devices.valuerefs() if (plan := reference())]
        runs = [(id(plan), plan.device_run[0]) for plan in plans]
        self.device_since = {run: self.device_since.get(run, self.clock_s) for run in runs if run[1]}
        numbers = [calls.number for calls in list(self.record.communicators)]
        state = numbers, [call.under_way for call, _, _ in list(self.record.ring)[-1:]]
        if state != self.state:
            self.state, self.changed_s = state, self.clock_s

    def on_device(self, until_s: float = math.inf) -> dict[tuple[int, int], Advanceable]:
        """Return the plans whose latest run was seen by a time and is not finished on its device.

        Other plans are not queried: a thread that queries a device ends the capture of a graph.
        """
        unfinished = {}
        for run in [run for run, at in self.device_since.items() if at <= until_s]:
            plan = self.progress.on_devices.get(run[0])
            if plan and (event := plan.device_run[1]) is not None and not plan.device.is_done(event):
                unfinished[run] = plan
            else:
                self.device_since[run] = math.inf
        return unfinished

    def take(self, source: int, message: Message) -> None:
        """Handle a message that is not an answer."""
        if message is ASK:
            self.answer(source)
        elif isinstance(message, WriteCalls):
            self.send(Written(self.recorder.write(message.begins)), source)
        elif isinstance(message, DeviceFailure) and not self.progress.failure:
            self.progress.failure, self.failed_s = f"rank {source} has failed in {message.words}", self.clock_s
        elif isinstance(message, ProgramEnd):
            self.ended[source] = message
        elif isinstance(message, Interrupt):
            self.interrupt(source)
        elif isinstance(message, Kill):
            kill_process(message.silent.process, message.silent.started)

    def tell(self, words: str) -> None:
        """Tell all other ranks, from any thread, that this rank's device has failed."""
        with self.lock:
            for rank in range(self.size) if not (self.alone or self.stopped) else ():
                if rank != self.rank:
                    self.send(DeviceFailure(words), rank)

    def incoming(self) -> Iterator[tuple[int, Message]]:
        status = MPI.Status()
        while not self.alone and (message := self.comm.improbe(tag=self.tag, status=status)):
            yield status.source, message.recv()

    def send(self, message: Message, dest: int) -> None:
        self.sent = [request for request in self.sent if not request.Test()]
        self.sent.append(self.comm.isend(message, dest, self.tag))

    def answer(self, source: int) -> None:
        """Send this rank's report, and leave it to the other rank to end the job."""
        self.patient_until_s = self.clock_s + 3 * ANSWER_S
        self.send(self.report(), source)

    def report(self) -> Report:
        longest = min(list(self.waits), default=-1)
        wait = self.waits.get(longest)
        since_s, main = self.since.get(longest, self.clock_s), threading.main_thread()
        if wait is None and (late := self.on_device()):
            run = min(late, key=self.device_since.__getitem__)
            since_s, wait = self.device_since[run], (main.ident or 0, late[run], "")
        waited_s, quiet_s = self.clock_s - since_s, self.clock_s - self.changed_s
        return report_of(self.recorder, wait and Wait(*wait), waited_s, quiet_s, main)

    def sound(self, overdue: set[int], is_late: bool, reason: str) -> None:
        """Ask all ranks, print the reason and their answers, and abort the job, or kill ranks that do not answer.

        Do not if the overdue waits end while answers arrive or just after, or if a lower rank asks, too.
        """
        reports: dict[int, Report] = {}
        others = [rank for rank in range(self.size) if rank != self.rank and not self.alone]
        for rank in others:
            self.send(ASK, rank)
        deadline = time.monotonic() + ANSWER_S
        while len(reports) < len(others) and time.monotonic() < deadline:
            self.tell_time()
            for source, message in self.incoming():
                if isinstance(message, Report):
                    reports[source] = message
                    continue
                self.take(source, message)
                if message is ASK and source < self.rank:
                    return
            time.sleep(0.01)
        time.sleep(POLL_S)  # a rank that could not answer before may only now be about to come
        self.tell_time()
        if overdue & (self.since.keys() | self.on_device().keys()):
            self.end({**reports, self.rank: self.report()}, reason, is_late)

    def end(self, reports: dict[int, Report], reason: str, is_late: bool) -> None:
        """Print the reason and the reports, and abort the job; if ranks are late, perhaps kill those instead."""
        words = account(reports, [self.rank] if self.alone else range(self.size), self.size)
        if is_late and self.kill_silent(reports):
            print(f"{reason}; ranks that do not answer are killed:\n{words}", file=sys.stderr, flush=True)
            return
        begins = common_begins(reports.values())
        others = self.have_written(begins, {rank for rank in reports if rank != self.rank})
        self.last_words(f"{reason}; this ends the job:\n{words}", begins, others)

    def kill_silent(self, reports: dict[int, Report]) -> bool:
        """Have those that do not answer killed by ranks of their nodes, and return True.

        Return False, and kill none, if this is not to be, all answer, or one has no such rank, or was killed before.
        """
        if not self.processes or self.alone:
            return False
        by_node = {self.processes[rank].node: rank for rank in reports}
        silent = {self.processes[rank] for rank in range(self.size) if rank not in reports}
        if not silent or silent & self.killed or not all(each.node in by_node for each in silent):
            return False
        self.killed |= silent
        for each in silent:
            if by_node[each.node] == self.rank:
                kill_process(each.process, each.started)
            else:
                self.send(Kill(each), by_node[each.node])
        return True

    def have_written(self, begins: dict[str, int], others: set[int]) -> dict[int, str]:
        """Tell other ranks to write their last calls; return the failures by rank, of those that have tried."""
        for rank in others:
            self.send(WriteCalls(begins), rank)
        failures: dict[int, str] = {}
        deadline = time.monotonic() + ANSWER_S
        while failures.keys() != others and time.monotonic() < deadline:
            failures |= {source: m.failure for source, m in self.incoming() if isinstance(m, Written)}
            time.sleep(0.01)
        return failures

    def last_words(
        self, words: str, begins: Mapping[str, int] | None = None, others: Mapping[int, str] | None = None
    ) -> None:
        """Write the last calls, print the words and where the calls are written, and abort the job."""
        failures = {**(others or {}), self.rank: self.recorder.write(begins)}
        failure = next(filter(None, failures.values()), "")
        remedy = failure or self.recorder.remedy(len(failures) == self.size)
        try:  # if another rank has ended mpirun before, nobody reads this, and Abort may return
            print(words, remedy, sep="\n", file=sys.stderr, flush=True)
            time.sleep(LAST_WORDS_S)
            if not self.alone:
                self.comm.Abort(1)
        finally:
            os._exit(1)

    def leave(self) -> None:
        """Answer until every rank has ended its program; tell those that take long that this one has."""
        all_left = self.comm.Ibarrier()
        backoff, silent_until_s, ended = Backoff(POLL_S / 10), self.clock_s + GRACE_S, None
        while not all_left.Test():
            self.tell_time()
            if self.clock_s > silent_until_s and ended is None:
                ended = ProgramEnd(self.report(), last_error() is not None)
                for rank in range(self.size):
                    if rank != self.rank:
                        self.send(ended, rank)
            for source, message in self.incoming():
                self.take(source, message)
            backoff.sleep()


def report_of(recorder: Recorder, wait: Wait | None, waited_s: float, quiet_s: float, main: threading.Thread) -> Report:
    """Report on this rank, from any of its threads: its wait, or for how long it has made no call."""
    runs = recorder.record.runs()[-MOST_REPORTED:]
    numbers = {calls.label: calls.number for calls in list(recorder.record.communicators)}
    descriptions = {(run.entry.calls.label, run.number): run.entry.description for run in runs}
    awaited = None
    if wait is None:
        words = no_wait_words(runs, quiet_s, main)
    elif wait.words:
        words = f"waits {waited_s:.0f} s in {wait.words} ({call_site_of(wait.thread)}){before(runs)}"
    else:
        assert wait.plan is not None
        run = wait.plan.entry.latest() if wait.plan.entry else runs[-1]
        agreeing = "" if wait.plan.entry else ", where the ranks agree on it"  # by a plan of the library's own
        earlier = runs[: runs.index(run)] if run in runs else runs
        words = f"waits {waited_s:.0f} s in {run}{agreeing}, {wait.plan.awaits()}{before(earlier)}"
        calls = run.entry.calls
        title = f"{run.entry.name} #{run.number}{calls.label}"
        awaited = Awaited(title, calls.label, run.number, list(calls.members))
    return Report(words, numbers, descriptions, awaited, recorder.begins())


def common_begins(reports: Iterable[Report]) -> dict[str, int]:
    """Return the first calls that all ranks know, by label, or an earlier one in which a rank waits."""
    begins: dict[str, int] = {}
    for report in reports:
        begins |= {label: max(number, begins.get(label, 0)) for label, number in report.begins.items()}
    for awaited in filter(None, (report.awaited for report in reports)):
        begins[awaited.label] = min(awaited.number, begins.get(awaited.label, 0))
    return begins


def no_wait_words(runs: Sequence[LoggedRun], quiet_s: float, main: threading.Thread) -> str:
    where = f"is not in a collective, but at {call_site_of(main.ident or 0)}" if main.is_alive() else how_ended()
    if not runs:
        return f"{where}; it has called none"
    event = "started" if runs[-1].entry.under_way else "ended"
    return f"{where}; its last: {runs[-1]}, {event} {quiet_s:.0f} s ago{before(runs[:-1])}"


def how_ended() -> str:
    """Say that this rank's program has ended, and by which error, as its excepthook may have left that to rank 0."""
    if (error := last_error()) is None:
        return "has ended its program"
    site = error_site_of(error)
    return f"has ended its program by {type(error).__name__}{f' at {site}' if site else ''} ({error})"


def is_interrupted() -> bool:
    """Return whether this rank handles an interrupt, as while it leaves its blocks, or was ended by one."""
    main = threading.main_thread().ident
    active: Any = sys._current_exceptions().get(main or 0)
    error = active[1] if isinstance(active, tuple) else active  # until Python 3.11, its type, itself and its traceback
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return isinstance(error or last_error(), KeyboardInterrupt)


def last_error() -> BaseException | None:
    """Return the error that nobody has caught, which has ended the program."""
    return getattr(sys, "last_value", None)


def before(runs: Sequence[LoggedRun]) -> str:
    return f"; before: {show_last(runs, MOST_SHOWN)}" if runs else ""


def account(reports: Mapping[int, Report], polled: Iterable[int], size: int) -> str:
    """Format the reports of the ranks that were asked, and the conclusions, a line each."""
    silent = "does not answer: it is stopped, has died, or is in code that lets no other thread run"
    lines = [f"rank {rank} of {size} {reports[rank].words if rank in reports else silent}" for rank in polled]
    for awaited in dict.fromkeys((r.awaited.label, r.awaited.number) for _, r in sorted(reports.items()) if r.awaited):
        lines += verdict(reports, *awaited)
    return "\n".join(lines)


def verdict(reports: Mapping[int, Report], label: str, number: int) -> list[str]:
    """Name the ranks that should be in a call and are not, or are in another one."""
    awaited = next(r.awaited for _, r in sorted(reports.items()) if r.awaited and r.awaited[1:3] == (label, number))
    late = [r for r in awaited.members if r in reports and reports[r].numbers.get(label, 0) < number]
    silent = [r for r in awaited.members if r not in reports]
    lines = [f"not arrived at {awaited.title}: {name_ranks(late)}"] if late else []
    lines += [f"perhaps not arrived at {awaited.title}: {name_ranks(silent)}"] if silent else []
    calls: dict[str, list[int]] = {}
    for rank in awaited.members:
        if rank in reports and (description := reports[rank].descriptions.get((label, number))):
            calls.setdefault(description, []).append(rank)
    if len(calls) > 1:
        sides = ", ".join(f"{description} on {name_ranks(callers)}" for description, callers in calls.items())
        lines.append(f"ranks disagree: call #{number}{label} is {sides}")
    return lines
