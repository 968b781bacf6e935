"""Invalid settings: all ranks of a run raise together, before they compute or write anything."""

from pathlib import Path

import numpy as np
import pytest

from collectives import InputError
from mpi_tests.helpers.folders import shared_folder
from training.parallel.run import TrainingRun
from training.settings.config import Config
from training.settings.layout import planned

pytestmark = pytest.mark.sizes(2, 3)

SMALL = {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 8}
INSIDE_A_FILE = f"{__file__}/out"


def refusal(comm, begin, **settings):
    """Return the error message that all ranks raise; check that the communicator works afterwards."""
    with pytest.raises(InputError) as caught:
        begin(Config(**{"out_dir": "", **SMALL, **settings}), comm)
    texts = comm.mpi.allgather(str(caught.value))
    assert texts == texts[:1] * comm.size
    assert comm.all_reduce(np.ones(3)).tolist() == [comm.size] * 3
    return texts[0]


@pytest.fixture
def folder(mpi_comm):
    with shared_folder(mpi_comm) as folder:
        yield folder


def test_by_every_rank(comm, folder):
    """without_ranks/test_refusals.py tests all messages."""
    out_dir = str(folder / "out")
    words = refusal(comm, TrainingRun, tp=comm.size, out_dir=out_dir)
    assert words.startswith(f"n_head=1 is not divisible by tp={comm.size}: ")
    assert refusal(comm, TrainingRun, device="tpu", out_dir=out_dir).startswith("device 'tpu' is unknown")
    assert not Path(out_dir).exists()


def test_by_the_last_rank_alone(comm, folder):
    last, out_dir = comm.size - 1, str(folder / "out")
    data = ["no-such-file.txt"] if comm.rank == last else []
    for begin in (TrainingRun, planned):
        words = refusal(comm, begin, data=data, out_dir=out_dir)
        assert words == f"rank {last}: no-such-file.txt: no such file; check the path"
    assert not Path(out_dir).exists()


def test_by_the_planner_which_keeps_what_the_settings_say(comm):
    words = refusal(comm, planned, tp=5)
    assert words.startswith(f"rank 0: no layout of {comm.size} ranks: none has tp=5: use axes whose product divides")


def test_a_file_in_place_of_the_folder_of_checkpoints(comm):
    words = refusal(comm, TrainingRun, checkpoint_dir=__file__)
    assert words == f"rank 0: checkpoint_dir {__file__} can't be written (not a folder): pass another --checkpoint_dir"


def test_snapshots_without_a_folder_in_memory(comm, tmp_path):
    folder = comm.broadcast_object(str(tmp_path))
    missing = f"{folder}/missing"
    words = refusal(comm, TrainingRun, checkpoint_dir=folder, snapshot_interval=2, snapshot_dir=missing)
    assert f"snapshot_dir={missing} is not a folder on " in words
    assert words.endswith(": pass one in memory, or omit snapshot_interval")
    words = refusal(comm, TrainingRun, snapshot_interval=2)
    assert "snapshot_interval=2" in words
    assert "set checkpoint_dir" in words


def test_by_rank_0_which_writes(comm):
    words = refusal(comm, TrainingRun, out_dir=INSIDE_A_FILE)
    assert words.startswith(f"rank 0: out_dir {INSIDE_A_FILE} can't be written (Not a directory)")
