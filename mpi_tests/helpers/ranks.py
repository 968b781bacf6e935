"""A pytest plug-in that runs each test on many ranks, with one outcome for all of them.

`mpirun -n 8 python -m pytest --with-mpi --only-mpi mpi_tests/with_ranks` runs a test that takes `mpi_comm` on the
first 1, 2, 3 and 5 ranks, or on the numbers given by `@pytest.mark.sizes(2, 4, proof=(8,))`, those of `proof` only in
`make proof`; smallest first in each file.  The other ranks set up no fixture and run no test body.

At the end of an item the ranks vote: an item that fails on one rank fails on all, with that rank's report.  They also
vote after the setup of a test with fixtures of its own, so that no rank enters a test without the others.
A test that runs for `--rank-timeout` seconds, or for `--rank-grace` seconds after a rank has failed in it, ends the
job; before that, every rank prints its stack.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import math
import os
import sys
import threading
import time
import traceback
import weakref
from array import array
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.runner import runtestprotocol

from collectives.job.launch import start_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

    from collectives import Communicator

IS_PROOF = bool(os.environ.get("EVERY_SIZE"))  # `make proof`
SIZES = (1, 2, 3, 4, 5, 6, 7, 8) if IS_PROOF else (1, 2, 3, 5)
OUTCOMES = ("passed", "skipped", "failed")  # in ascending order; the highest of all ranks wins
# Fixtures whose setup needs no vote.
ALIKE = {"mpi_comm", "comm", "request", "monkeypatch", "tmp_path", "tmp_path_factory", "capsys", "capfd"}
VOTE, ALARM = 1, 2  # message tags
ALARM_POLL_S = 0.5
COLLECTION_S = 600.0  # all ranks import all tests, even on few cores
MANY_OBJECTS = 10_000  # of the oldest generation, after which those that live are frozen
LAST_WORDS_S = 2.0  # between a rank's last output and the end of the job; longer than ALARM_POLL_S


def pytest_addoption(parser):
    group = parser.getgroup("ranks")
    group.addoption("--rank-timeout", type=float, default=120.0, help="time limit of a test in seconds")
    group.addoption(
        "--rank-grace", type=float, default=20.0, help="seconds that a test may run on after a rank has failed in it"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Give each rank its own base folder of `tmp_path`: in a shared one, ranks would delete each other's folders."""
    if config.getoption("with_mpi") or config.getoption("only_mpi"):
        own = TemporaryDirectory(prefix="rank-")
        config.option.basetemp = own.name
        config.add_cleanup(own.cleanup)


@pytest.hookimpl(trylast=True)  # after the terminal reporter is registered
def pytest_configure(config):
    config.addinivalue_line("markers", "sizes(*sizes, proof=()): run on sub-communicators of these sizes")
    if config.getoption("with_mpi") or config.getoption("only_mpi"):
        config.pluginmanager.register(Ranks(config), "ranks")


def pytest_generate_tests(metafunc):
    if "mpi_comm" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("sizes")
        ranks = metafunc.config.pluginmanager.get_plugin("ranks")
        sizes = sizes_of(marker) if marker else [n for n in SIZES if ranks is None or n <= ranks.world.size]
        variants = [pytest.param(n, id=f"{n}-ranks", marks=pytest.mark.mpi(min_size=n)) for n in sizes]
        metafunc.parametrize("mpi_comm", variants, indirect=True)


def sizes_of(marker):
    return sorted({*marker.args, *(marker.kwargs.get("proof", ()) if IS_PROOF else ())})


@pytest.fixture(scope="session")
def mpi_comm(request) -> MPI.Intracomm:
    """Return the communicator of the ranks that run this variant of the test; fixtures of any scope can use it."""
    return request.config.pluginmanager.get_plugin("ranks").comms[request.param]


@pytest.fixture
def comm(request, mpi_comm) -> Communicator:
    """Return the library's communicator of the test's ranks; tests of a session share it until one fails on it."""
    return request.config.pluginmanager.get_plugin("ranks").communicator(mpi_comm)


@pytest.fixture
def new_comm(mpi_comm) -> Iterator[Communicator]:
    """Yield a new communicator, for tests that the state of the session's one would disturb."""
    from collectives import Communicator  # here, because a run without ranks does without MPI

    comm = Communicator(mpi_comm)
    yield comm
    comm.free()


class OtherRankError(Exception):
    """The setup failed or skipped on another rank, but not on this one."""


class Ranks:
    """The hooks of a run with ranks."""

    def __init__(self, config):
        self.config = config
        self.world = World(config.option.rank_timeout)
        self.comms: dict[int, MPI.Comm] = {}
        self.communicators: dict[int, Communicator] = {}
        self.collect_errors: list[pytest.CollectReport] = []
        self.next_items: dict[pytest.Item, pytest.Item | None] = {}
        self.has_dropped = False  # whether a communicator was dropped
        self.leftovers: list[tuple] = []  # of communicators made by the test's body: the watchdog, MPI's communicators
        config.add_cleanup(self.close)
        if self.world.rank != 0:
            config.pluginmanager.unregister(name="terminalreporter")
            config.pluginmanager.register(pytest.TerminalReporter(config, io.StringIO()), "terminalreporter")

    def num_ranks(self, item):
        """Return the number of ranks that run `item`: all if it takes no `mpi_comm`."""
        params = item.callspec.params if hasattr(item, "callspec") else {}
        return params.get("mpi_comm", self.world.size)

    def is_member(self, item):
        return self.world.rank < self.num_ranks(item)

    def communicator(self, mpi_comm):
        """Return the session's communicator of these ranks with its call log reset as in a new one.  Collective."""
        from collectives import Communicator  # here, because a run without ranks does without MPI

        if mpi_comm.size not in self.communicators:
            self.communicators[mpi_comm.size] = Communicator(mpi_comm)
        comm = self.communicators[mpi_comm.size]
        comm.context.calls.number = 1  # its construction
        comm.context.calls.record.ring.clear()
        comm.context.calls.record.short.clear()
        return comm

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self):
        self.world.watch("collection", COLLECTION_S)

    def pytest_collectreport(self, report):
        if report.failed:
            self.collect_errors.append(report)

    @pytest.hookimpl(trylast=True)  # after pytest's own, which sorts by fixture
    def pytest_collection_modifyitems(self, items):
        if self.config.getoption("only_mpi"):  # pytest-mpi ignores it beside --with-mpi
            self.config.hook.pytest_deselected(items=[i for i in items if not i.get_closest_marker("mpi")])
            items[:] = [i for i in items if i.get_closest_marker("mpi")]
        items.sort(key=lambda item: (item.path, self.num_ranks(item)))

    def pytest_collection_finish(self, session):
        self.agree_on_collection(session.items)
        for num_ranks in sorted({self.num_ranks(item) for item in session.items}):
            self.comms[num_ranks] = self.world.comm.Split(self.world.rank < num_ranks)
        own = [item for item in session.items if self.is_member(item)]
        self.next_items = dict(zip_longest(own, own[1:]))

    def agree_on_collection(self, items):
        """Exit if the ranks have not collected the same tests in the same order."""
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
        if len(gc.get_objects(generation=2)) > MANY_OBJECTS:
            gc.collect()
            gc.freeze()  # modules and the like stay: tests that collect garbage need not scan them
        self.config.hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        self.leftovers = []
        if self.is_member(item):
            reports = runtestprotocol(item, log=False, nextitem=self.next_items[item])
        else:
            reports = []
            if self.votes_on_setup(item):
                self.world.highest(0)
        for report in self.agree_on_reports(reports, self.num_ranks(item)):
            self.config.hook.pytest_runtest_logreport(report=report)
        self.config.hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def votes_on_setup(self, item):
        return not ALIKE.issuperset(item.fixturenames)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item):
        """Set up the test on all ranks, or on none if the setup fails or skips on one."""
        if not self.votes_on_setup(item):
            return (yield)
        has_failed = True
        try:
            result = yield
            has_failed = False
        finally:
            elsewhere = self.world.highest(has_failed) and not has_failed
        if elsewhere:
            raise OtherRankError("the setup failed or skipped on another rank")
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem):
        """Record the communicators that the test makes under MPICH, which has only 2,048 per process."""
        if not self.world.is_mpich:
            return (yield)
        from collectives import Communicator

        use, leftovers = Communicator._use, []

        def recording_use(comm, context):
            use(comm, context)
            watchdog = weakref.ref(context.watchdog) if context.watchdog else lambda: None
            leftovers.append((watchdog, (context.mpi, context.mailbox.mpi)))

        Communicator._use = recording_use
        try:
            return (yield)
        finally:
            Communicator._use, self.leftovers = use, leftovers

    def free_leftovers(self):
        """Free the communicators that a test has not freed, after all ranks passed."""
        for find_watchdog, comms in self.leftovers:
            if watchdog := find_watchdog():
                watchdog.stop()
            for mpi in comms:
                if mpi:
                    mpi.Free()

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # to see the outcome after xfail's changes
    def pytest_runtest_makereport(self, item, call):
        report = yield
        report.is_own = not (call.excinfo and call.excinfo.errisinstance(OtherRankError))
        if report.failed and report.is_own:
            self.world.expect_end(report, self.config.option.rank_grace)
        return report

    def agree_on_reports(self, reports, num_ranks):
        """Return the reports of the first rank that failed, else of the first that skipped, else `reports`.

        A rank that does not run the item has no reports and votes "passed".
        """
        own = [report for report in reports if report.is_own]
        vote = max((OUTCOMES.index(report.outcome) for report in own), default=0)
        if not self.world.highest(vote):
            self.free_leftovers()
            return reports
        hook = self.config.hook
        packed = [hook.pytest_report_to_serializable(config=self.config, report=report) for report in reports]
        votes, packed = self.world.agree(vote, packed)
        reports = [hook.pytest_report_from_serializable(config=self.config, data=data) for data in packed]
        report = max(reports, key=lambda report: OUTCOMES.index(report.outcome))
        ranks = [rank for rank, vote in enumerate(votes) if OUTCOMES[vote] == report.outcome]
        where = f"{report.outcome} on ranks {ranks}; this is rank {ranks[0]}"
        if report.failed:
            report.sections.append(("ranks", where))
        elif not all(votes[:num_ranks]):
            report.outcome = "failed"
            report.longrepr = f"{where}, and others passed: {report.longreprtext}"
        if report.failed and (comm := self.communicators.pop(num_ranks, None)):
            self.has_dropped = True  # never freed: another rank may still be in one of its collectives
            if comm.context.watchdog:
                comm.context.watchdog.stop()
        return reports

    def close(self):
        """Free the session's communicators; if one was dropped, abort the job, as MPI_Finalize might hang."""
        for comm in self.communicators.values():
            comm.free()
        has_dropped = self.world.highest(int(self.has_dropped))
        self.world.close()
        if has_dropped:
            sys.stdout.flush()
            self.world.comm.Barrier()
            self.world.comm.Abort(1)

    def pytest_internalerror(self, excrepr):
        self.world.abort(f"internal error\n{excrepr}")


class World:
    """All ranks of the job: agreement between them, and a watchdog for stuck ranks."""

    def __init__(self, timeout_s):
        from mpi4py import MPI  # here, because a run without ranks does without MPI

        if not MPI.Is_initialized():  # in a fork of a server that has imported mpi4py
            start_mpi()
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise pytest.UsageError("the watchdog thread calls MPI, which needs MPI_THREAD_MULTIPLE")
        self.comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self.comm.rank, self.comm.size
        self.is_mpich = "MPICH" in MPI.Get_library_version()
        self.timeout_s = timeout_s
        # While pytest captures a test's output, only a duplicate of stderr reaches the terminal.
        self.stderr = os.fdopen(os.dup(2), "w")
        self.ballot, self.verdict = array("i", [0]), array("i", [0])
        self.closing = threading.Event()
        self.watchdog = threading.Thread(target=self.guard, name="watchdog", daemon=True)
        self.watch("the start")
        self.watchdog.start()

    def close(self):
        """Stop the watchdog before MPI_Finalize."""
        self.closing.set()
        self.watchdog.join()
        faulthandler.cancel_dump_traceback_later()
        self.stderr.close()

    def highest(self, vote):
        """Return the highest vote of all ranks."""
        from mpi4py import MPI

        self.ballot[0] = vote
        poll(self.comm.Iallreduce(self.ballot, self.verdict, MPI.MAX).Test)
        return self.verdict[0]

    def agree(self, vote, words):
        """Return all ranks' votes and the words of the first rank with the highest vote."""
        if self.rank != 0:
            request = self.comm.isend((vote, words), 0, VOTE)
            verdict = self.receive(0)
            request.wait()
            return verdict
        ballots = [(vote, words), *(self.receive(source) for source in range(1, self.size))]
        votes = [vote for vote, _ in ballots]
        verdict = votes, ballots[votes.index(max(votes))][1]
        for request in [self.comm.isend(verdict, dest, VOTE) for dest in range(1, self.size)]:
            poll(request.Test)
        return verdict

    def receive(self, source):
        return poll(lambda: self.comm.improbe(source, VOTE)).recv()

    def watch(self, phase, limit_s=None):
        """Restart the timer of this rank: it must reach the next phase within `limit_s`, by default `timeout_s`."""
        self.phase, self.failure = phase, None
        self.limit_s = limit_s or self.timeout_s
        self.deadline = time.monotonic() + self.limit_s

    def expect_end(self, report, grace_s):
        """Limit the rest of the item in which this rank has failed to `grace_s` on all ranks."""
        if not self.failure:
            self.failure = report, grace_s
            self.deadline = min(self.deadline, time.monotonic() + grace_s)

    def guard(self):
        """End the job if this rank stays in one phase too long, or if another rank sounds the alarm."""
        while not self.closing.is_set():
            # Postponed in each iteration, it fires only if native code holds the GIL and blocks this thread.
            faulthandler.dump_traceback_later(self.limit_s + 1, exit=True, file=self.stderr)
            self.closing.wait(ALARM_POLL_S)
            alarm, is_late = self.comm.improbe(tag=ALARM), time.monotonic() > self.deadline
            if is_late and self.failure:
                self.sound_alarm(*self.failure)
            if alarm or is_late:
                why = alarm.recv() if alarm else f"not finished after {self.limit_s:g} s"
                self.abort(f"{self.phase}: {why}; here:\n{stacks()}")

    def sound_alarm(self, report, grace_s):
        """Print this rank's report, which the others, stuck in the test, cannot receive; end the job."""
        alarm = f"rank {self.rank} {report.outcome} {grace_s:g} s ago"
        self.alarms = [self.comm.isend(alarm, p, ALARM) for p in range(self.size) if p != self.rank]
        self.abort(f"{report.nodeid}: {report.outcome}; other ranks are still in the test\n{report.longreprtext}")

    def abort(self, words):
        """Print `words` under this rank's name, leave the other ranks time to do so, and abort the job."""
        faulthandler.cancel_dump_traceback_later()
        time.sleep(0.02 * self.rank)  # concurrent output of several ranks would interleave
        print(f"\n==== rank {self.rank} of {self.size}: {words}", file=self.stderr, flush=True)
        time.sleep(LAST_WORDS_S)
        self.comm.Abort(1)


def poll(test, deadline=math.inf):
    """Call `test` until its result is true; return the result.

    A blocking MPI call would occupy a core that busy ranks need.

    Raises: TimeoutError at `deadline`.
    """
    begin_s = time.monotonic()
    while not (result := test()):
        now_s = time.monotonic()
        if now_s > deadline:
            raise TimeoutError
        time.sleep(min(max((now_s - begin_s) / 16, 1e-5), 1e-2))
    return result


def from_first(comm: MPI.Comm, make: Callable[[], Any]) -> Any:
    """Return on all ranks what `make()` returns on the first, to which the others leave their cores.  Collective."""
    value = make() if comm.rank == 0 else None
    poll(comm.Ibarrier().Test)
    return comm.bcast(value)


def stacks():
    """Return the Python stack of every thread but this one."""
    names = {t.ident: t.name for t in threading.enumerate() if t is not threading.current_thread()}
    frames = sys._current_frames().items()
    return "\n".join(f"thread {names[i]}:\n{stack(frame)}" for i, frame in frames if i in names)


def stack(frame):
    """Return the stack that ends with `frame`, without pytest's frames above the test."""
    frames = traceback.extract_stack(frame)
    of_pytest = [not {"_pytest", "pluggy"}.isdisjoint(Path(f.filename).parts) for f in frames]
    start = max((i for i, skipped in enumerate(of_pytest, 1) if skipped), default=0)
    return "".join(traceback.format_list(frames[start:] or frames))
