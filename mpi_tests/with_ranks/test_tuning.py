"""The tuning file: its content, its effect on `auto`, and the messages for an invalid one."""

import platform
from pathlib import Path

import numpy as np
import pytest

from collectives.graphs import read_links
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
    name = tuned.plan("all_reduce", np.zeros(1 << 17)).name.partition("/")[0]
    assert (name == "all_reduce double_tree") == measured
    assert (tuned.plan("all_reduce", tuned.empty(125)).name == "all_reduce ring") == measured or comm.size == 1
    assert tuned.plan("all_to_all", np.zeros(8), send_counts=[8 // comm.size] * comm.size).name != "all_to_all bruck"
    assert tuned.all_reduce(np.ones(3)).tolist() == [comm.size] * 3
    words = f"{'measured to be the fastest' if measured else 'not measured'} ({tmp_path / 't.json'})"
    assert comm.rank or tuned.explain("all_reduce", 1000).splitlines()[1].startswith(words)
    assert len(set(comm.mpi.allgather(tuned.explain("all_reduce", 1000)))) == 1
    pairs = tuned.split(comm.rank // 2)
    assert "by the cost model, with the speeds of that file" in pairs.explain("all_reduce", 8)
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


LEVELS = """
[[levels]]
size = 2
latency_us = 1
gb_per_s = 10
[[levels]]
size = 2
latency_us = 1000
gb_per_s = 0.01
"""
HOSTS = """
switches = ["switch"]
[[host]]
name = "{}"
ranks = 2
gb_per_s = 10
us = 1
[[host]]
name = "{}"
ranks = 2
gb_per_s = 10
us = 1
[[link]]
between = [["{}", "switch"], ["{}", "switch"]]
gb_per_s = 0.01
us = 500
"""


@pytest.mark.sizes(4)
def test_auto_follows_a_network(mpi_comm, monkeypatch, tmp_path):
    """With 1,000 us between two nodes, an algorithm that passes there once is the best."""
    from collectives import Communicator

    name = platform.node()
    hosts = HOSTS.format(*[f"{name}-1", f"{name}-2"] * 2)
    monkeypatch.setenv("COLLECTIVES_FAKE_NODES", "2x2")
    for text in (LEVELS, hosts):
        monkeypatch.setenv("COLLECTIVES_TUNING", write(tmp_path / "network.toml", text))
        comm = Communicator(mpi_comm)
        lines = comm.explain("all_reduce", 8).splitlines()
        assert mpi_comm.rank or lines[1].startswith(f"not measured ({tmp_path / 'network.toml'}); by the cost model")
        assert 1000 <= float(lines[2].split()[0]) < 1100
        assert comm.all_reduce(np.ones(3)).tolist() == [4] * 3
        comm.free()


@pytest.mark.sizes(4)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            LEVELS.replace("size = 2", "size = 4", 1),
            "it has nodes of 4, 4 ranks, but the job of 2, 2: measure ",
        ),
        (HOSTS.format("a", "b", "a", "b"), "it has the hosts a, b, but the job "),
        (LEVELS.replace("latency_us = 1\n", ""), "level 1: latency_us=nothing must be a number from 0 to "),
        ("levels", "is not TOML ("),
        (HOSTS.format("a", "b", "a", "a"), "link 'a' to 'switch' is there twice: add up their gb_per_s in one"),
    ],
)
def test_all_ranks_refuse_another_jobs_network(mpi_comm, monkeypatch, tmp_path, text, words):
    from collectives import Communicator

    monkeypatch.setenv("COLLECTIVES_FAKE_NODES", "2x2")
    monkeypatch.setenv("COLLECTIVES_TUNING", write(tmp_path / "network.toml", text))
    with pytest.raises(InputError) as caught:
        Communicator(mpi_comm)
    texts = mpi_comm.allgather(str(caught.value))
    assert texts == texts[:1] * 4
    assert words in texts[0]


@pytest.mark.sizes(4)
def test_links_between_hosts_are_measured(mpi_comm, monkeypatch, tmp_path, capfd):
    """The file describes the job that measured it, which then follows it."""
    from collectives import Communicator
    from collectives.bench import host_links

    path = mpi_comm.bcast(tmp_path / "links.toml")
    monkeypatch.setenv("COLLECTIVES_FAKE_NODES", "2x2")
    comm = Communicator(mpi_comm)
    host_links.main(comm, path)
    comm.free()
    graph = read_links(path)
    assert graph.names[:4] == tuple(f"{platform.node()}-{node}.{rank}" for node in (1, 2) for rank in (0, 1))
    assert graph.switches[-1] == "switch1"
    monkeypatch.setenv("COLLECTIVES_TUNING", str(path))
    tuned = Communicator(mpi_comm)
    assert f"not measured ({path})" in tuned.explain("broadcast", 1 << 20)
    tuned.free()
    monkeypatch.delenv("COLLECTIVES_TUNING")
    monkeypatch.setenv("COLLECTIVES_FAKE_NODES", "1x4")
    alone = Communicator(mpi_comm)
    with pytest.raises(InputError, match="the job's one host has no links: start ranks on several hosts"):
        host_links.main(alone, path)
    alone.free()


@pytest.mark.sizes(4)
def test_a_pause_of_a_host_makes_no_link_slow(mpi_comm, monkeypatch):
    """The first time that two hosts are measured takes ten times as long; what is slow twice is."""
    from collectives import Communicator
    from collectives.bench import host_links

    monkeypatch.setenv("COLLECTIVES_FAKE_NODES", "4x1")
    comm, measured = Communicator(mpi_comm), []

    def exchanges(comm, rounds):
        measured.append([pair for pairs in rounds for pair in pairs])
        rates = np.zeros((4, 4))
        for a, b in measured[-1]:
            is_slow = (a, b) == (1, 2) or ((a, b) == (0, 3) and len(measured) == 1)
            rates[[a, b], [b, a]] = 0.1 if is_slow else 1.0
        return np.where(rates, 10 / np.maximum(rates, 0.1), 0), rates

    monkeypatch.setattr(host_links, "exchanges", exchanges)
    graph, slow = host_links.measure(comm, list("abcd"))
    comm.free()
    assert sorted(measured[1]) == [(0, 3), (1, 2)]
    assert slow == ["b and c: 0.1 GB/s, 10% of their ports', which no switch explains"]
    assert all(link.gb_per_s == 1 for link in graph.links)


@pytest.mark.sizes(2)
def test_explain_refuses_what_is_no_collective(comm):
    with pytest.raises(ValueError, match="collective 'allreduce' is unknown: use one of all_reduce, "):
        comm.explain("allreduce", 8)
