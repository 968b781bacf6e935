"""Measured links: cached for a list of hosts, and used by `auto` there."""

import os
import re
import time
from types import SimpleNamespace

import pytest

from collectives.runtime.choose import links
from collectives.runtime.choose.links import CachedLinks, LinkKey
from collectives.schedule.network import Link
from mpi_tests.helpers.networks import NETWORK_HERE

KEY = LinkKey((("a", 2), ("b", 1)), "MPICH 5.0.2")


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("COLLECTIVES_LINKS", str(tmp_path / "kept"))
    return tmp_path / "kept"


def test_what_is_kept_is_found_by_hosts_slots_and_mpi(folder):
    assert not links.any_cached()
    assert links.save(CachedLinks(KEY, NETWORK_HERE)) == f"kept in {KEY.file}"
    assert links.any_cached()
    cached = links.parse(links.read(KEY.file))
    assert cached[:2] == (KEY, NETWORK_HERE)
    assert re.fullmatch(r"on \d{4}-\d\d-\d\d \d\d:\d\d UTC", cached.measured)
    for hosts, mpi in ((KEY.hosts[::-1], KEY.mpi), ((("a", 2), ("b", 2)), KEY.mpi), (KEY.hosts, "Open MPI")):
        assert links.read(LinkKey(hosts, mpi).file) == ""
    newer = CachedLinks(KEY, NETWORK_HERE._replace(nic=None))
    links.save(newer)
    assert links.load_latest()[:2] == newer[:2]
    assert [path.suffix for path in folder.iterdir()] == [".json"]


@pytest.mark.parametrize(
    "broken",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"version": 2}',
        '{"version": 1, "hosts": [1], "mpi": "x", "network": {}}',
        '{"version": 1, "hosts": [["a", "many"]], "mpi": "x", "network": {}}',
        '{"version": 1, "hosts": [["a", 1]], "mpi": "x", "network": {"within": 3}}',
    ],
)
def test_a_broken_file_counts_as_none_and_is_replaced(folder, broken):
    folder.mkdir()
    KEY.file.write_text(broken)
    assert links.parse(links.read(KEY.file)) is None
    assert links.load_latest() is None
    links.save(CachedLinks(KEY, NETWORK_HERE))
    assert links.parse(links.read(KEY.file)).network == NETWORK_HERE


BUSY = [
    ({"meet_s": 47e-6}, "a barrier of a node took 47 us"),
    ({"within": Link(216e-6, 1e-9)}, "a message in a node took 216 us"),
    ({"copy_s_per_byte": 1e-7}, "a rank copied 10 MB/s"),
    ({"gamma_s_per_byte": 1e-8}, "a rank reduced 100 MB/s"),
]


@pytest.mark.parametrize(("speeds", "why"), BUSY, ids=[why for _, why in BUSY])
def test_speeds_of_a_busy_machine_are_neither_kept_nor_believed(folder, monkeypatch, speeds, why):
    busy = CachedLinks(KEY, NETWORK_HERE._replace(**speeds))
    assert links.save(busy) == (
        f"not kept ({why}, as where others use the cores): measure again when the machine is quiet"
    )
    assert not links.any_cached()
    with monkeypatch.context() as before:
        before.setattr(links, "doubt", lambda network: "")  # earlier versions had no such check
        links.save(busy)
        assert links.load_latest()[:2] == busy[:2]
    assert links.load_latest() is None
    assert links.parse(links.read(KEY.file)) is None


APART = [
    ({"meet_s": 2e-6}, "rounds of a barrier took 0.5 to 2 us"),
    ({"within": Link(9e-6, 1e-9)}, "rounds of a message in a node took 3 to 9 us"),
    ({"copy_s_per_byte": 4e-10}, "rounds of copying a MB took 80 to 400 us"),
    ({"gamma_s_per_byte": 4e-10}, "rounds of reducing a MB took 50 to 400 us"),
]


@pytest.mark.parametrize(("speeds", "why"), APART, ids=[why for _, why in APART])
def test_a_measurement_counts_if_two_rounds_agree_with_the_least(speeds, why):
    slow = NETWORK_HERE._replace(**speeds)
    assert links.combine([slow, NETWORK_HERE, slow]) == (NETWORK_HERE, why)
    assert links.combine([NETWORK_HERE, slow, NETWORK_HERE]) == (NETWORK_HERE, "")
    assert links.combine([slow]) == (slow, links.doubt(slow))


def test_differences_of_rounds_are_their_median():
    least, middle, most = (NETWORK_HERE._replace(staged_s_per_byte=k, system=Link(k, 1 / k)) for k in (1e-15, 2, 3))
    network, why = links.combine([middle, most, least])
    assert (network.staged_s_per_byte, network.system, why) == (2, Link(2, 0.5), "")
    assert links.combine([least._replace(nic=None)] * 3)[0].nic is None


def test_the_rate_of_a_nodes_link_is_the_best_of_rounds_and_its_latency_their_median():
    """So that no lone message, whose rate is the best, too, is slower at its node's link than by itself."""
    rounds = [NETWORK_HERE._replace(nic=Link(*pair)) for pair in ((2e-6, 6e-9), (1e-15, 3e-9), (4e-6, 8e-9))]
    assert links.combine(rounds)[0].nic == Link(2e-6, 3e-9)


@pytest.mark.parametrize(("at_once", "nic"), [((6e-5, 1.6e-9), (1e-5, 4e-10)), ((3e-5, 8e-10), (None, 2e-10))])
def test_the_nodes_link_has_the_rate_of_all_pairs_at_once(monkeypatch, at_once, nic):
    from collectives.bench import constants

    alone = Link(3e-5, 8e-10)
    monkeypatch.setattr(constants, "link_of_pairs", lambda _, __, pairs, ___: Link(*at_once) if pairs[1:] else alone)
    expected = Link(nic[0] or constants.LEAST_S, nic[1])
    between, measured = constants.between_nodes(None, None, [range(4), range(4, 8)])
    assert (between, *measured) == (alone, pytest.approx(expected.alpha_s), pytest.approx(expected.beta_s_per_byte))


def test_a_busy_machine_is_said_in_one_line(folder, monkeypatch, capsys):
    from collectives.bench import constants

    rounds = iter([NETWORK_HERE._replace(meet_s=seconds) for seconds in (47e-6, 1e-6, 30e-6)] * 2)
    monkeypatch.setattr(constants, "speeds", lambda *arguments: next(rounds))
    for rank in (0, 1):
        names, topology = [*"ab"], SimpleNamespace(nodes=((0,), (1,)))
        comm = SimpleNamespace(rank=rank, host_names=lambda names=names: names, topology=topology)
        assert constants.measure(comm, 1, 1) == NETWORK_HERE._replace(meet_s=1e-6)
    assert capsys.readouterr().out == (
        "# links: not kept (rounds of a barrier took 1 to 47 us, as where others use the cores): "
        "measure again when the machine is quiet\n"
    )
    assert not links.any_cached()


def test_what_is_kept_is_shown_and_forgotten(folder):
    from collectives.bench.__main__ import links_report

    assert links_report("show") == "nothing is kept: auto uses default speeds"
    links.save(CachedLinks(KEY, NETWORK_HERE._replace(meet_s=2e-6)))
    os.utime(KEY.file, (time.time() - 36 * 3600,) * 2)
    lines = links_report("show").splitlines()
    assert lines[0] == f"{KEY.file}: 1.5 days old: 2 ranks on a, 1 ranks on b; MPICH 5.0.2"
    assert lines[2].split() == ["barrier", "of", "a", "node", "2", "0.5", "us"]
    assert lines[5].split() == ["message", "between", "nodes", "100", "30", "us"]
    KEY.file.write_text("{}")
    assert links_report("show").endswith("0.0 days old, not used: invalid, or measured on a busy machine")
    assert links_report("forget") == f"deleted {KEY.file}"
    assert not links.any_cached()
    assert links_report("forget") == "nothing is kept"


def test_a_folder_that_cannot_be_written_is_said(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("COLLECTIVES_LINKS", str(tmp_path / "file" / "folder"))
    assert links.save(CachedLinks(KEY, NETWORK_HERE)).startswith(f"not kept ({KEY.file}: ")
    assert not links.any_cached()
    assert links.read(KEY.file) == ""
    assert links.load_latest() is None


def test_nothing_is_kept_where_that_is_not_wanted(monkeypatch):
    monkeypatch.setenv("COLLECTIVES_LINKS", "0")
    assert KEY.file is None
    assert links.save(CachedLinks(KEY, NETWORK_HERE)) == "not kept (COLLECTIVES_LINKS=0)"
    assert not links.any_cached()
    assert links.load_latest() is None


def test_by_default_they_are_in_the_user_s_cache(monkeypatch):
    monkeypatch.delenv("COLLECTIVES_LINKS")
    monkeypatch.setenv("XDG_CACHE_HOME", "/home/me/cache")
    assert str(KEY.file.parent) == "/home/me/cache/handwritten-collectives"


def test_a_link_has_the_times_that_were_measured():
    from collectives.bench.constants import link

    alpha, beta = link(2e-5, 2e-5 + (1 << 22) * 8e-9, 1 << 22)
    assert (alpha, beta) == (2e-5, pytest.approx(8e-9))
    assert link(2e-5, 1e-5, 1 << 22).beta_s_per_byte > 0
