"""The tuning file: its content, its effect on `auto`, and the messages for an invalid one."""

from pathlib import Path

import numpy as np
import pytest

from collectives.job.errors import InputError
from collectives.runtime.choose.auto import to_json
from mpi_tests.helpers.networks import TUNING


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.mark.sizes(1, 4)
def test_auto_follows_the_file_of_rank_0(comm, monkeypatch, tmp_path):
    """All ranks use rank 0's file, as launchers export few variables, and a file may exist on one machine only."""
    from collectives import Communicator

    other = write(tmp_path / "other.json", "not even JSON")
    monkeypatch.setenv("COLLECTIVES_TUNING", write(tmp_path / "t.json", to_json(TUNING)) if comm.rank == 0 else other)
    tuned = Communicator(comm.mpi)
    measured = comm.size == 4
    assert (tuned.plan("all_reduce", np.zeros(125)).name == "all_reduce binomial") == measured
    assert (tuned.plan("all_reduce", np.zeros(1 << 17)).name == "all_reduce double_tree") == measured
    assert (tuned.plan("all_reduce", tuned.empty(125)).name == "all_reduce ring") == measured or comm.size == 1
    assert tuned.plan("all_to_all", np.zeros(8), send_counts=[8 // comm.size] * comm.size).name != "all_to_all bruck"
    assert tuned.all_reduce(np.ones(3)).tolist() == [comm.size] * 3
    words = f"{'measured to be the fastest' if measured else 'not measured'} ({tmp_path / 't.json'})"
    assert comm.rank or tuned.explain("all_reduce", 1000).splitlines()[1].startswith(words)
    assert len(set(comm.mpi.allgather(tuned.explain("all_reduce", 1000)))) == 1
    pairs = tuned.split(comm.rank // 2)
    assert "by the cost model, with the speeds measured" in pairs.explain("all_reduce", 8)
    pairs.free()
    tuned.free()


@pytest.mark.sizes(1, 3)
def test_all_ranks_refuse_a_bad_file_in_the_same_words(comm, monkeypatch, tmp_path):
    from collectives import Communicator

    write(tmp_path / "bad.json", "{}")
    for name, words in (
        ("missing.json", "can't be read (No such file or directory)"),
        ("bad.json", "'version' is missing"),
    ):
        path = tmp_path / name
        monkeypatch.setenv("COLLECTIVES_TUNING", str(path))
        with pytest.raises(InputError) as caught:
            Communicator(comm.mpi)
        texts = comm.mpi.allgather(str(caught.value))
        assert texts == texts[:1] * comm.size
        assert comm.rank or f"COLLECTIVES_TUNING={path}: {words}: " in texts[0]


@pytest.mark.sizes(2)
def test_explain_refuses_what_is_no_collective(comm):
    with pytest.raises(ValueError, match="collective 'allreduce' is unknown: use one of all_reduce, "):
        comm.explain("allreduce", 8)
