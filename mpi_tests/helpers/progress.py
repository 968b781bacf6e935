"""A pytest plug-in that prints a line for each test file, with the time left, and saves the duration of each item.

On a terminal, the last line counts the finished items.  The time left is estimated from the durations of the last run,
which pytest's cache keeps; in the first run, all items count alike.  Under xdist, a file's line is printed after the
last of its items.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from collectives.job import environment

SHOWN_EVERY_S = 1.0
CACHE = "seconds"  # folder in pytest's cache, with a file for each selection of tests


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # an xdist worker leaves reporting to the controller
        config.pluginmanager.register(Progress(config), "progress")


class Progress:
    """The hooks of the process that reports."""

    def __init__(self, config):
        self.config = config
        words = [*(Path(word).name for word in config.args), *config.option.markexpr.split()]
        self.name = "+".join(words).replace("::", ".")[:100]
        self.cache = getattr(config, "cache", None)  # None under -p no:cacheprovider
        self.last = self.cache.get(f"{CACHE}/{self.name}", {}) if self.cache else {}
        self.seconds: Counter[str] = Counter()
        self.outcomes: dict[str, Counter[str]] = {}  # by file
        self.items: list[str] = []
        self.left: Counter[str] = Counter()  # remaining items by file
        self.begin = time.monotonic()
        self.count_shown = 0.0  # time of the last count on the terminal

    def collect(self, items):
        self.items = items
        self.left = Counter(map(file_of, items))
        self.begin = time.monotonic()

    def pytest_collection_finish(self, session):
        if session.items:
            self.collect([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids):
        if not self.items:
            self.collect(ids)

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self):
        """Suppress the reporter's letters."""
        category, _, word = yield
        return category, "", word

    def pytest_runtest_logreport(self, report):
        file = file_of(report.nodeid)
        outcomes = self.outcomes.setdefault(file, Counter())
        if report.when == "call" or report.outcome != "passed":
            outcomes[report.outcome] += 1
        if report.failed:
            self.write(f"FAILED {report.nodeid}", red=True)
        self.seconds[report.nodeid] += report.duration
        if report.when == "teardown":
            self.left[file] -= 1
            if self.left[file] == 0:
                self.write(self.line(file, outcomes))
            self.show_count()

    def line(self, file, outcomes):
        counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
        took = sum(seconds for item, seconds in self.seconds.items() if file_of(item) == file)
        return f"{file:60} {counts:>24} {took:7.1f} s {minutes(self.time_left()):>8} left"

    def time_left(self):
        """Estimate the seconds left: those of the remaining items in the last run, scaled by this run's speed."""
        mean = sum(self.last.values()) / len(self.last) if self.last else 1.0
        expected = [(self.last.get(item, mean), item in self.seconds) for item in self.items]
        over = sum(seconds for seconds, is_over in expected if is_over)
        ahead = sum(seconds for seconds, is_over in expected if not is_over)
        return ahead * (time.monotonic() - self.begin) / over if over else 0.0

    def write(self, line, **markup):
        if reporter := self.config.pluginmanager.get_plugin("terminalreporter"):
            if self.on_terminal(reporter):
                self.rewrite(reporter, "")
            reporter.write_line(line, **markup)

    def rewrite(self, reporter, line):
        """Overwrite the last line, and let the next output overwrite this one."""
        reporter.rewrite(line, erase=True)
        reporter.rewrite("")

    def show_count(self):
        """Show the number of finished items in the terminal's last line, once a second, as a file may take minutes."""
        reporter, num_left = self.config.pluginmanager.get_plugin("terminalreporter"), self.left.total()
        is_due = time.monotonic() > self.count_shown + SHOWN_EVERY_S
        if reporter and self.on_terminal(reporter) and (is_due or not num_left):
            self.count_shown = time.monotonic()
            count = f"{len(self.items) - num_left} of {len(self.items)} tests, {minutes(self.time_left())} left"
            self.rewrite(reporter, count if num_left else "")

    def on_terminal(self, reporter):
        """Return whether the output is a user's terminal; mpirun may give a rank a pseudo-terminal in any case."""
        return environment.on_terminal() if environment.launched_size() > 1 else reporter.isatty

    def pytest_sessionfinish(self):
        if self.cache and self.seconds and is_whole(self.config):
            self.cache.set(f"{CACHE}/{self.name}", dict(self.seconds))


def file_of(item):
    return item.partition("::")[0]


def is_whole(config):
    """Return whether the command line deselects no item by -k, and this process writes the durations."""
    ranks = config.pluginmanager.get_plugin("ranks")
    return not config.option.keyword and (ranks is None or ranks.world.rank == 0)


def minutes(seconds):
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
