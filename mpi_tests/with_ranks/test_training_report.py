"""Reports of runs: their points are the run's records, and the kinds of a step's time add up to the whole."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from collectives import Communicator
from collectives.runtime.plan import Plan
from collectives.runtime.started import StartedCall
from mpi_tests.helpers.folders import shared_folder
from mpi_tests.helpers.pages import Page, check_charts
from mpi_tests.helpers.trained import check_same, on
from parallelism.buffers import tensor_collectives, transfer
from parallelism.mesh import AXES
from parallelism.pipeline import layer_times
from parallelism.step import events
from training.parallel.run import TrainingRun
from training.reports import profile
from training.reports.profile import KINDS

LAYOUTS = {
    "dp": {},
    "ZeRO 3": {"zero_stage": 3},
    "tp 2, pp 2": {"tp": 2, "pp": 2, "num_micro_batches": 2},
    "sp 2": {"sp": 2},
    "ep 2": {"num_experts": 4, "ep": 2},
}
STEPS = 6


@pytest.fixture
def folder(mpi_comm):
    with shared_folder(mpi_comm) as folder:
        yield folder


def page_in(folder):
    return Page(Path(folder, "report.html").read_text())


@pytest.fixture
def profilers(monkeypatch):
    """Record the profilers of a test's runs."""
    instances, close = [], TrainingRun.close

    def keeping(run):
        instances.append(run.profiler)
        close(run)

    monkeypatch.setattr(TrainingRun, "close", keeping)
    return instances


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.sizes(4)
def test_the_kinds_of_a_step_are_all_of_it(comm, folder, profilers, layout):
    outcome = on(comm, report=f"{folder}/report.html", max_iters=STEPS, **layout)
    steps = profilers[0].steps
    if comm.rank:
        assert steps == []
        return
    assert [(step.iteration, step.rank) for step in steps] == [(i, r) for i in (4, 5, 6) for r in range(comm.size)]
    for step in steps:
        assert set(step.seconds) == {*KINDS}
        assert sum(step.seconds.values()) == pytest.approx(step.step_s)
        assert min(step.seconds.values()) > -1e-6, step  # no time counts twice
        assert step.seconds["forward"] > 0
        assert step.seconds["backward"] > 0
        assert step.seconds["optimizer"] > 0
        axes = {axis for axis in AXES if layout.get(axis, 1) > 1} | ({"ep"} if "ep" in layout else set())
        assert all(step.seconds[axis] > 0 for axis in axes - {"pp", "dp"})
        assert all(step.seconds[axis] == 0 for axis in {"tp", "ep"} - axes)
        assert (step.seconds["bubble"] > 0) == ("pp" in layout)
    page = page_in(folder)
    logged = {record["iter"]: record["comm_ms"] for record in outcome.records if "loss" in record}
    listed = {row["step"]: row["comm, ms"] for row in page.tables["records"]}
    for row in page.tables["steps"]:
        waits = sum(value for name, value in row.items() if "exposed" in name or name == "pipeline bubble")
        assert row["comm, ms"] == pytest.approx(waits, rel=1e-3)
        if row["rank"] == 0:
            assert row["comm, ms"] == pytest.approx(logged[row["step"]], rel=1e-3)
            assert row["comm, ms"] == pytest.approx(listed[row["step"]], rel=1e-3)
    check_charts(page)
    assert [row["loss"] for row in page.tables["records"]] == pytest.approx(outcome.losses, rel=1e-5)
    assert ("pipeline" in page.tables) == ("pp" in layout)


@pytest.mark.parametrize("interval", [0, 2])
@pytest.mark.sizes(1, 2)
def test_the_log_has_tables_of_the_last_steps(comm, capsys, interval):
    on(comm, max_iters=5, times_interval=interval)
    printed = capsys.readouterr().out
    first, *others = [(2, 5)] if interval == 0 else [(2, 2), (3, 4), (5, 5)]
    headings = re.findall(r"^time of steps? (\d)(?: to (\d))?: ms", printed, re.MULTILINE)
    assert [(int(a), int(b or a)) for a, b in headings] == ([first, *others] if comm.rank == 0 else [])
    tables = re.findall(r"^time of .*\n((?:  .*\n)+)", printed, re.MULTILINE)
    for table in tables:
        rows = {line[:20].strip(): float(line[20:].split()[0]) for line in table.splitlines()}
        step = rows.pop("step")
        assert sum(rows.values()) == pytest.approx(step, abs=0.05 * (len(rows) + 1))
        assert rows["forward"] > 0 < rows["backward"]


ALL_AXES = {
    **LAYOUTS,
    "dp, accumulated": {"num_micro_batches": 2},
    "sequence-parallel": {"tp": 2, "sp": 2, "sequence_parallel": True, "sp_mode": "ulysses", "n_head": 4},
    "pp 2, ZeRO 3": {"pp": 2, "zero_stage": 3, "num_micro_batches": 3},
    "ZeRO 1 and 2 in groups": {"zero_stage": 2, "zero_group": "2", "grad_clip": 0.0},
    "muon": {"optimizer": "muon", "tp": 2},
    "16 bits": {"dtype": "float16", "master_weights": True, "zero_stage": 1},
}


@pytest.fixture
def waits(monkeypatch):
    """Let time pass only in waits for other ranks: a second in each."""
    now = [0.0]

    def waiting(cls, name):
        method = getattr(cls, name)

        def tick(*arguments, **more):
            now[0] += 1
            return method(*arguments, **more)

        monkeypatch.setattr(cls, name, tick)

    for cls in (Plan, StartedCall):
        waiting(cls, "wait")
    waiting(Plan, "__call__")
    for name in ("all_reduce", "all_gather", "barrier", "broadcast", "broadcast_object", "all_gather_object"):
        waiting(Communicator, name)
    for module in (tensor_collectives, transfer, events, layer_times, profile):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0], thread_time=lambda: now[0]))
    return now


@pytest.mark.parametrize("layout", ALL_AXES.values(), ids=ALL_AXES)
@pytest.mark.sizes(4)
def test_every_wait_of_a_step_counts_once(comm, waits, layout):
    """The first step also exchanges the shapes of activations."""
    records = [record for record in on(comm, **layout).records if "loss" in record][1:]
    assert len(records) == 3
    for record in records:
        assert record["compute_ms"] == 0
        assert record["comm_ms"] > 0


@pytest.mark.sizes(2)
def test_a_report_changes_no_result_and_a_pipeline_s_has_all_actions(comm, folder):
    layout = {"pp": 2, "num_micro_batches": 3}
    check_same(on(comm, report=f"{folder}/report.html", **layout), on(comm, **layout))
    if comm.rank == 0:
        rows = page_in(folder).tables["pipeline"]
        for timeline in ("predicted", "happened"):
            own = [row for row in rows if row["timeline"] == timeline and row["kind"] != "wait"]
            actions = [(row["rank"], row["what"]) for row in own]
            assert sorted(actions) == sorted((rank, f"{kind}{i}") for rank in (0, 1) for kind in "FB" for i in range(3))
