"""What some ranks of a run hold, as if the others had died: the run goes on from it where it is the whole state."""

from contextlib import closing
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest

from collectives.job import environment
from mpi_tests.helpers.folders import shared_folder
from mpi_tests.helpers.trained import GLOBAL_BATCH, by_torch, config, on_first
from parallelism.checkpoint.folders import complete_checkpoints
from training.loop import step
from training.parallel.remains import Remains
from training.parallel.run import TrainingRun
from training.recovery import save_remains

STEP = 2
WHOLE = {
    "replicas": ({}, [3]),
    "half of the replicas of tp": ({"tp": 2}, [2, 3]),
    "half of the replicas of pp": ({"pp": 2, "num_micro_batches": 2}, [2, 3]),
    "sp": ({"sp": 2}, [1, 2]),
    "ZeRO within halves": ({"zero_stage": 1, "zero_group": "2"}, [0, 1]),
    "reproducible": ({"reproducible": True}, [1, 2, 3]),
}
LACKING = {
    "a half of each layer": ({"tp": 2}, [0, 2]),
    "a stage": ({"pp": 2, "num_micro_batches": 2}, [0, 2]),
    "a quarter of the states": ({"zero_stage": 1}, [0, 1, 2]),
}


@pytest.fixture
def folder(mpi_comm):
    with shared_folder(mpi_comm) as folder:
        yield folder


def settings_of(comm, folder, changes):
    inner = [changes.get(axis, 1) for axis in ("pp", "sp", "tp")]
    return config(comm.size // prod(inner), checkpoint_dir=str(folder / "checkpoints"), **changes)


def remains_of(comm, settings, monkeypatch):
    """Train for some steps, and return what this rank holds after each, though only the last one's is still there."""
    monkeypatch.setattr(environment, "survives_ranks", lambda: True)
    after = []
    with TrainingRun(settings, comm) as run, closing(run.inputs()) as inputs:
        assert run.saving.remains() == Remains()
        for number in range(1, STEP + 1):
            step(run, number, next(inputs))
            assert run.saving.remains() == Remains()
            run.saving.offer(number)
            after.append(run.saving.remains())
        shards = [shard._replace(tensor=shard.tensor.clone()) for shard in after[-1].shards]
    return [*after[:-1], after[-1]._replace(shards=shards)]


def steps_saved(comm, left, remains, settings):
    """Save what the ranks left hold; return the steps of the checkpoints that are there then."""
    if part := comm.split(0 if comm.rank in left else None):
        save_remains(remains, replace(settings, resume="auto"), part)
        part.free()
    comm.barrier()
    return [int(path.name.rpartition("-")[2]) for path in complete_checkpoints(Path(settings.checkpoint_dir))]


@pytest.mark.sizes(4)
@pytest.mark.parametrize("case", WHOLE)
def test_a_run_goes_on_from_the_last_step_of_ranks_that_hold_it(comm, folder, monkeypatch, case):
    changes, left = WHOLE[case]
    settings = settings_of(comm, folder, changes)
    remains = remains_of(comm, settings, monkeypatch)
    assert steps_saved(comm, left, remains[-1], settings) == [STEP]
    same = {name: getattr(settings, name) for name in ("micro_batch_size", "checkpoint_dir", "reproducible")}
    number = GLOBAL_BATCH // settings.micro_batch_size
    outcome = on_first(comm, num_micro_batches=number, resume="auto", **same)
    np.testing.assert_allclose(outcome.losses, by_torch(comm).losses[STEP:], rtol=1e-5)


@pytest.mark.sizes(4)
@pytest.mark.parametrize("case", LACKING)
def test_a_part_of_the_state_is_not_saved(comm, folder, monkeypatch, case):
    changes, left = LACKING[case]
    settings = settings_of(comm, folder, changes)
    remains = remains_of(comm, settings, monkeypatch)
    assert steps_saved(comm, left, remains[-1], settings) == []


@pytest.mark.sizes(4)
def test_the_newest_state_counts_and_a_rank_may_offer_none(comm, folder, monkeypatch):
    settings = settings_of(comm, folder, {})
    first, latest = remains_of(comm, settings, monkeypatch)
    assert steps_saved(comm, [1, 2, 3], {1: first, 2: Remains()}.get(comm.rank, latest), settings) == [STEP]


@pytest.mark.sizes(2)
def test_the_exponents_of_the_last_step_are_kept_once_those_of_the_next_are_chosen(comm, folder, monkeypatch):
    monkeypatch.setattr(environment, "survives_ranks", lambda: True)
    settings = settings_of(comm, folder, {"reproducible": True})
    with TrainingRun(settings, comm) as run, closing(run.inputs()) as inputs:
        step(run, 1, next(inputs))
        run.saving.offer(1)
        exact = run.pipeline.exact
        expected = exact.state()
        exact.exponents = exact.exponents + 1
        assert run.saving.remains().whole["exponents"] == expected


@pytest.mark.sizes(2)
def test_where_no_rank_holds_anything_nothing_is_saved(comm, folder):
    assert steps_saved(comm, [0, 1], Remains(), settings_of(comm, folder, {})) == []


@pytest.mark.sizes(2)
def test_replicas_that_differ_are_not_saved(comm, folder, monkeypatch, capsys):
    settings = settings_of(comm, folder, {})
    remains = remains_of(comm, settings, monkeypatch)[-1]
    remains.shards[0].tensor.view(-1)[0] += comm.rank
    assert steps_saved(comm, [0, 1], remains, settings) == []
    assert f"step {STEP} is not saved: parameter of " in capsys.readouterr().out
