import sys

from collectives.runtime.reports.call_log import (
    LENGTH,
    PROGRAMS,
    Calls,
    LogEntry,
    Record,
    SourceLine,
    call_site_of,
    caller,
    show_last,
)
from mpi_tests.helpers.launch import ROOT


def lines_of(record):
    return [f"{run.entry.name} #{run.number}{run.entry.calls.label}" for run in record.runs()]


def ran_the_short_way(call, times):
    """Count calls as a plan's fast path does."""
    for _ in range(times):
        call.number = call.calls.number = call.calls.number + 1


def test_the_last_calls_are_kept_with_where_they_were_made():
    record = Record()
    calls = Calls(record, "", range(2))
    for _ in range(LENGTH + 3):
        with LogEntry(calls, "barrier") as call:
            assert call.under_way
        line = sys._getframe().f_lineno - 2
    assert not call.under_way
    assert calls.number == LENGTH + 3
    runs = record.runs()
    assert [run.number for run in runs] == list(range(4, LENGTH + 4))
    assert {run.call_site for run in runs} == {(__file__, line)}
    assert show_last(runs, most=2) == f"barrier #4-#{LENGTH + 3} ({SourceLine(__file__, line)})"


def test_runs_that_are_only_counted_appear_where_they_belong():
    record = Record()
    world = Calls(record, "", range(4))
    LogEntry(world, "split").enter()
    part = world.part(1, [2, 3])
    assert part.members == [2, 3]
    plan, other = LogEntry(world, "all_reduce one_shot"), LogEntry(part, "barrier direct")
    record.expect_short_runs(plan)
    record.expect_short_runs(other)
    assert lines_of(record) == ["split #1"]
    ran_the_short_way(plan, 5)
    LogEntry(world, "broadcast").enter()
    LogEntry(part, "barrier").enter()
    ran_the_short_way(other, 2)
    of_part = " of split(color=1) #1"
    last = [f"barrier #1{of_part}", f"barrier direct #3{of_part}"]
    assert lines_of(record) == ["split #1", "all_reduce one_shot #6", "broadcast #7", *last]
    for _ in range(LENGTH):
        plan.enter()
    ran_the_short_way(plan, 9)
    first, last = 7 + 1, 7 + LENGTH + 9
    of_world = [run for run in record.runs() if run.entry.calls is world]
    assert show_last(of_world, most=1).startswith(f"all_reduce one_shot #{first}-#{last} (")
    del plan, other, of_world
    record.ring.clear()
    assert lines_of(record) == []


def entered_from(path):
    """Return the logged caller of a collective that a function of the file `path` calls."""
    code = compile("def enter():\n    return caller(sys._getframe())", str(path), "exec")
    names = {"caller": caller, "sys": sys}
    exec(code, names)
    return names["enter"]()


def test_no_file_of_the_library_is_the_caller():
    """This holds wherever the library is installed; the package's programs count as callers like a user's."""
    package = ROOT / "collectives"
    programs = [package / name for name in PROGRAMS]
    assert all((path / "__main__.py").exists() for path in programs)
    files = list(package.rglob("*.py"))
    assert len({path.parent for path in files}) > 4
    for path in files:
        file, line = SourceLine.of(entered_from(path))
        if any(path.is_relative_to(program) for program in programs):
            assert (file, line) == (str(path), 2)
        else:
            assert file == __file__, path


def test_places():
    assert SourceLine.of(caller(sys._getframe())) == (__file__, sys._getframe().f_lineno)
    assert str(SourceLine("/elsewhere/a.py", 3)) == "/elsewhere/a.py:3"
    assert call_site_of(0) is None
