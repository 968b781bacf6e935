"""Measured links: cached for a list of hosts, and used by `auto` there."""

from types import SimpleNamespace

import pytest

from collectives.runtime.choose import links
from collectives.runtime.choose.links import CachedLinks, LinkKey
from collectives.schedule.cost import Link
from mpi_tests.helpers.networks import NETWORK_HERE

PLACE = LinkKey((("a", 2), ("b", 1)), "MPICH 5.0.2")


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("COLLECTIVES_LINKS", str(tmp_path / "kept"))
    return tmp_path / "kept"


def test_what_is_kept_is_found_by_hosts_slots_and_mpi(folder):
    assert not links.any_cached()
    assert links.save(CachedLinks(PLACE, NETWORK_HERE)) == f"kept in {PLACE.file}"
    assert links.any_cached()
    assert links.parse(links.read(PLACE.file)) == CachedLinks(PLACE, NETWORK_HERE)
    for hosts, mpi in ((PLACE.hosts[::-1], PLACE.mpi), ((("a", 2), ("b", 2)), PLACE.mpi), (PLACE.hosts, "Open MPI")):
        assert links.read(LinkKey(hosts, mpi).file) == ""
    newer = CachedLinks(PLACE, NETWORK_HERE._replace(nic=None))
    links.save(newer)
    assert links.load_latest() == newer
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
    PLACE.file.write_text(broken)
    assert links.parse(links.read(PLACE.file)) is None
    assert links.load_latest() is None
    links.save(CachedLinks(PLACE, NETWORK_HERE))
    assert links.parse(links.read(PLACE.file)).network == NETWORK_HERE


BUSY = [
    ({"meet_s": 0.041}, "a meeting in a node took 41 ms"),
    ({"within": Link(0.0021, 1e-9)}, "a message in a node took 2.1 ms"),
    ({"copy_s_per_byte": 1e-7}, "a rank copied 10 MB/s"),
    ({"gamma_s_per_byte": 1e-8}, "a rank reduced 100 MB/s"),
]


@pytest.mark.parametrize(("speeds", "why"), BUSY, ids=[why for _, why in BUSY])
def test_speeds_of_a_busy_machine_are_neither_kept_nor_believed(folder, monkeypatch, speeds, why):
    busy = CachedLinks(PLACE, NETWORK_HERE._replace(**speeds))
    assert links.save(busy) == (
        f"not kept ({why}, as where others use the cores): measure again when the machine is quiet"
    )
    assert not links.any_cached()
    with monkeypatch.context() as before:
        before.setattr(links, "doubt", lambda network: "")  # earlier versions had no such check
        links.save(busy)
        assert links.load_latest() == busy
    assert links.load_latest() is None
    assert links.parse(links.read(PLACE.file)) is None


def test_a_busy_machine_is_said_in_one_line(monkeypatch, capsys):
    from collectives.bench import constants

    busy, where = NETWORK_HERE._replace(meet_s=0.041), "not kept (a meeting in a node took 41 ms)"
    monkeypatch.setattr(constants, "speeds", lambda *arguments: busy)
    monkeypatch.setattr(constants, "save", lambda *arguments: where)
    for rank in (0, 1):
        assert constants.measure(SimpleNamespace(rank=rank), 1, 1) == busy
    assert capsys.readouterr().out == f"# links: {where}\n"


def test_a_folder_that_cannot_be_written_is_said(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("COLLECTIVES_LINKS", str(tmp_path / "file" / "folder"))
    assert links.save(CachedLinks(PLACE, NETWORK_HERE)).startswith(f"not kept ({PLACE.file}: ")
    assert not links.any_cached()
    assert links.read(PLACE.file) == ""
    assert links.load_latest() is None


def test_nothing_is_kept_where_that_is_not_wanted(monkeypatch):
    monkeypatch.setenv("COLLECTIVES_LINKS", "0")
    assert PLACE.file is None
    assert links.save(CachedLinks(PLACE, NETWORK_HERE)) == "not kept (COLLECTIVES_LINKS=0)"
    assert not links.any_cached()
    assert links.load_latest() is None


def test_by_default_they_are_in_the_user_s_cache(monkeypatch):
    monkeypatch.delenv("COLLECTIVES_LINKS")
    monkeypatch.setenv("XDG_CACHE_HOME", "/home/me/cache")
    assert str(PLACE.file.parent) == "/home/me/cache/handwritten-collectives"


def test_a_link_has_the_times_that_were_measured():
    from collectives.bench.constants import link

    alpha, beta = link(2e-5, 2e-5 + (1 << 22) * 8e-9, 1 << 22)
    assert (alpha, beta) == (2e-5, pytest.approx(8e-9))
    assert link(2e-5, 1e-5, 1 << 22).beta_s_per_byte > 0
