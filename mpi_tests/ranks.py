"""A pytest plug-in that runs each test on many ranks and lets them all go on with one outcome.

`mpirun -n 8 python -m pytest --with-mpi --only-mpi mpi_tests` runs a test that takes `mpi_comm` on the
first 1, 2, 3, 4, 5, 7 and 8 ranks, or on as many as `@pytest.mark.sizes(2, 4)` says; every test runs on a
small size before any runs on a larger one. The other ranks set up no fixture and run no test body.

After setup, call and teardown the ranks agree: what fails on one rank fails on all, with that rank's report.
A test that goes on for `--rank-timeout` seconds, or for `--rank-grace` seconds after a rank has failed in it,
ends the job; before that every rank prints where it is.
"""

from __future__ import annotations

import faulthandler
import io
import math
import os
import sys
import threading
import time
import traceback
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mpi4py import MPI

SIZES = (1, 2, 3, 4, 5, 7, 8)
OUTCOMES = ("passed", "skipped", "failed")  # the last one that any rank has wins
VOTE, ALARM = 1, 2  # tags
ALARM_POLL_S = 0.5
LAST_WORDS_S = 2.0  # from a rank's last words to the end of the job; longer than ALARM_POLL_S


def pytest_addoption(parser):
    group = parser.getgroup("ranks")
    group.addoption("--rank-timeout", type=float, default=120.0, help="seconds that a test may take")
    group.addoption("--rank-grace", type=float, default=20.0, help="seconds it may go on after a failure")


@pytest.hookimpl(trylast=True)  # the terminal reporter must be there
def pytest_configure(config):
    config.addinivalue_line("markers", "sizes(*sizes): run on sub-communicators of these sizes")
    if config.getoption("with_mpi") or config.getoption("only_mpi"):
        config.pluginmanager.register(Ranks(config), "ranks")


def pytest_generate_tests(metafunc):
    if "mpi_comm" in metafunc.fixturenames:
        asked = metafunc.definition.get_closest_marker("sizes")
        ranks = metafunc.config.pluginmanager.get_plugin("ranks")
        sizes = asked.args if asked else [n for n in SIZES if ranks is None or n <= ranks.world.size]
        variants = [pytest.param(n, id=f"{n}-ranks", marks=pytest.mark.mpi(min_size=n)) for n in sizes]
        metafunc.parametrize("mpi_comm", variants, indirect=True)


@pytest.fixture(scope="session")
def mpi_comm(request) -> MPI.Intracomm:
    """The communicator of the ranks that run this variant of the test; a fixture of any scope may use it."""
    return request.config.pluginmanager.get_plugin("ranks").comms[request.param]


class Ranks:
    """The hooks of a run with ranks."""

    def __init__(self, config):
        self.config = config
        self.world = World(config.option.rank_timeout)
        self.comms: dict[int, MPI.Comm] = {}
        self.collect_errors: list[pytest.CollectReport] = []
        config.add_cleanup(self.world.close)
        if self.world.rank != 0:
            config.pluginmanager.unregister(name="terminalreporter")
            config.pluginmanager.register(pytest.TerminalReporter(config, io.StringIO()), "terminalreporter")

    def num_ranks(self, item):
        """Return how many ranks run `item`: all of them if it takes no `mpi_comm`."""
        params = item.callspec.params if hasattr(item, "callspec") else {}
        return params.get("mpi_comm", self.world.size)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self):
        self.world.watch("collection")

    def pytest_collectreport(self, report):
        if report.failed:
            self.collect_errors.append(report)

    @pytest.hookimpl(trylast=True)  # pytest's own sorts by fixture
    def pytest_collection_modifyitems(self, items):
        if self.config.getoption("only_mpi"):  # which pytest-mpi ignores beside --with-mpi
            self.config.hook.pytest_deselected(items=[i for i in items if not i.get_closest_marker("mpi")])
            items[:] = [i for i in items if i.get_closest_marker("mpi")]
        items.sort(key=self.num_ranks)

    def pytest_collection_finish(self, session):
        self.agree_on_collection(session.items)
        for num_ranks in sorted({self.num_ranks(item) for item in session.items}):
            self.comms[num_ranks] = self.world.comm.Split(self.world.rank < num_ranks)
        for item in session.items:
            if self.world.rank >= self.num_ranks(item):
                item.setup = item.runtest = lambda: None  # no fixtures, no test body

    def agree_on_collection(self, items):
        """Refuse to run if the ranks have not collected the same tests in the same order."""
        rank = self.world.rank
        own = [f"an error in {error.nodeid}" for error in self.collect_errors]
        own += [item.nodeid for item in items]
        _, expected = self.world.agree(rank == 0, own)
        pairs = zip_longest(own, expected, fillvalue="nothing")
        difference = next((f"{a} where rank 0 collected {b}" for a, b in pairs if a != b), None)
        complaint = [f"rank {rank} collected {difference}", *(e.longreprtext for e in self.collect_errors)]
        votes, complaint = self.world.agree(difference is not None, complaint)
        if any(votes):
            pytest.exit("\n".join(complaint), returncode=pytest.ExitCode.USAGE_ERROR)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item):
        self.world.watch(item.nodeid)

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # so that it sees what xfail makes of the outcome
    def pytest_runtest_makereport(self, item):
        return self.agree_on_report((yield), self.num_ranks(item))

    def agree_on_report(self, report, num_ranks):
        """Return the report of the first rank that failed, else of the first that skipped, else `report`."""
        hook, grace_s = self.config.hook, self.config.option.rank_grace
        # A rank outside has not run the test, whatever xfail makes of that.
        absent = report.when == "call" and self.world.rank >= num_ranks
        vote = OUTCOMES.index("passed" if absent else report.outcome)
        packed = hook.pytest_report_to_serializable(config=self.config, report=report)
        try:
            votes, packed = self.world.agree(vote, packed, patience_s=grace_s if vote else math.inf)
        except TimeoutError:
            self.world.sound_alarm(report, grace_s)
        if not any(votes):
            return report
        report = hook.pytest_report_from_serializable(config=self.config, data=packed)
        ranks = [rank for rank, vote in enumerate(votes) if OUTCOMES[vote] == report.outcome]
        where = f"{report.outcome} on ranks {ranks}; this is rank {ranks[0]}"
        if report.failed:
            report.sections.append(("ranks", where))
        elif not all(votes[:num_ranks]):
            report.outcome = "failed"
            report.longrepr = f"{where}, and others passed: {report.longreprtext}"
        return report

    def pytest_internalerror(self, excrepr):
        self.world.abort(f"internal error\n{excrepr}")


class World:
    """All ranks of the job: how they agree, and how one that is stuck is found."""

    def __init__(self, timeout_s):
        from mpi4py import MPI  # here, because a run without ranks does without MPI

        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise pytest.UsageError("the watchdog thread calls MPI, which needs MPI_THREAD_MULTIPLE")
        self.comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self.comm.rank, self.comm.size
        self.timeout_s = timeout_s
        # While pytest captures a test's output, only a duplicate of stderr reaches the terminal.
        self.stderr = os.fdopen(os.dup(2), "w")
        self.closing = threading.Event()
        self.watchdog = threading.Thread(target=self.guard, name="watchdog", daemon=True)
        self.watch("the start")
        self.watchdog.start()

    def close(self):
        """Stop the watchdog, before MPI ends."""
        self.closing.set()
        self.watchdog.join()
        faulthandler.cancel_dump_traceback_later()
        self.stderr.close()

    def agree(self, vote, words, patience_s=math.inf):
        """Return every rank's vote and the words of the first rank with the highest.

        Raises: TimeoutError if the others have not voted after `patience_s`.
        """
        deadline = time.monotonic() + patience_s
        if self.rank != 0:
            request = self.comm.isend((vote, words), 0, VOTE)
            verdict = self.receive(0, deadline)
            request.wait()
            return verdict
        ballots = [(vote, words), *(self.receive(source, deadline) for source in range(1, self.size))]
        votes = [vote for vote, _ in ballots]
        verdict = votes, ballots[votes.index(max(votes))][1]
        for request in [self.comm.isend(verdict, dest, VOTE) for dest in range(1, self.size)]:
            poll(request.Test)
        return verdict

    def receive(self, source, deadline):
        return poll(lambda: self.comm.improbe(source, VOTE), deadline).recv()

    def watch(self, place):
        """Give the rank `timeout_s` from now on to get to the next place."""
        self.place, self.deadline = place, time.monotonic() + self.timeout_s

    def guard(self):
        """End the job if this rank stays in one place too long, or if another rank sounds the alarm."""
        while not self.closing.is_set():
            # Put off each time, this goes off only if native code holds the GIL and this thread stands still.
            faulthandler.dump_traceback_later(self.timeout_s + 1, exit=True, file=self.stderr)
            self.closing.wait(ALARM_POLL_S)
            alarm = self.comm.improbe(tag=ALARM)
            if alarm or time.monotonic() > self.deadline:
                why = alarm.recv() if alarm else f"not over after {self.timeout_s:g} s"
                self.abort(f"{self.place}: {why}; here:\n{stacks()}")

    def sound_alarm(self, report, grace_s):
        """Print a report on which the others, stuck in the test, cannot agree; end the job."""
        alarm = f"rank {self.rank} {report.outcome} {grace_s:g} s ago"
        self.alarms = [self.comm.isend(alarm, p, ALARM) for p in range(self.size) if p != self.rank]
        self.abort(f"{report.nodeid}: {report.outcome}; the others go on\n{report.longreprtext}")

    def abort(self, words):
        """Print `words` under this rank's name, leave time for the others to do so, and end the job."""
        faulthandler.cancel_dump_traceback_later()
        time.sleep(0.02 * self.rank)  # what ranks print at one time comes out mixed
        print(f"\n==== rank {self.rank} of {self.size}: {words}", file=self.stderr, flush=True)
        time.sleep(LAST_WORDS_S)
        self.comm.Abort(1)


def poll(test, deadline=math.inf):
    """Return what `test` returns once that is true.

    A blocking MPI call would keep a core from the ranks that still work.

    Raises: TimeoutError at `deadline`.
    """
    pause_s = 1e-5
    while not (result := test()):
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 1e-3)
    return result


def stacks():
    """Return the Python stack of every thread but this one."""
    names = {t.ident: t.name for t in threading.enumerate() if t is not threading.current_thread()}
    frames = sys._current_frames().items()
    return "\n".join(f"thread {names[i]}:\n{stack(frame)}" for i, frame in frames if i in names)


def stack(frame):
    """Return the stack that ends with `frame`, less pytest's way to the test."""
    frames = traceback.extract_stack(frame)
    of_pytest = [not {"_pytest", "pluggy"}.isdisjoint(Path(f.filename).parts) for f in frames]
    start = max((i for i, skipped in enumerate(of_pytest, 1) if skipped), default=0)
    return "".join(traceback.format_list(frames[start:] or frames))
