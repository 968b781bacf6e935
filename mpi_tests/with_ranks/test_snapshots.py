"""Snapshots on several hosts, which are stood in for by groups of ranks that have a folder each."""

import errno
import random
import shutil
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch

import parallelism.checkpoint.snapshots as module
from collectives import InputError
from collectives.algorithms.groups import Topology
from parallelism.checkpoint import Extent, Snapshots, TensorShard

LENGTH = 1000
HOSTS = {1: [[0]], 2: [[0, 0], [0, 1]], 3: [[0, 1, 1]], 4: [[0, 0, 1, 1], [0, 1, 2, 2]]}  # by ranks


class Hosts:
    """Folders of hosts, and the snapshots of runs, one after the other."""

    def __init__(self, comm, folder, node_of):
        self.comm, self.folder, self.topology, self.runs = comm, folder, Topology.from_ids(node_of), []

    def run(self, comm=None):
        """Start a run on ranks, by default all, whose hosts must be the first ones."""
        comm = comm or self.comm
        topology = Topology(self.topology.node_of[: comm.size])
        self.runs.append(Snapshots(self.path(topology.node_of[comm.rank]), comm, topology))
        return self.runs[-1]

    def path(self, node):
        return self.folder / f"host{node}"

    def on_first(self, change, *arguments):
        """Change folders on the first rank, once all ranks have come."""
        self.comm.barrier()
        if self.comm.rank == 0:
            change(*arguments)
        self.comm.barrier()


@pytest.fixture
def each(comm):
    """Return a function that yields each of some placements of the ranks on hosts."""
    own = TemporaryDirectory() if comm.rank == 0 else None
    folder, runs = Path(comm.broadcast_object(own.name if own else "")), []

    def placements(fewest=1, most=9):
        for number, node_of in enumerate(HOSTS[comm.size]):
            if fewest <= len(set(node_of)) <= most:
                hosts = Hosts(comm, folder / str(number), node_of)
                yield hosts
                runs.extend(hosts.runs)

    yield placements
    for run in runs:
        run.release()
    comm.barrier()
    if own:
        own.cleanup()


def parts_of(comm, step, dtype=torch.float32):
    """Return a shard of a parameter and a replicated one; elements differ."""
    own = torch.arange(LENGTH) + LENGTH * comm.rank
    shard = Extent((LENGTH * comm.size,), LENGTH * comm.rank, LENGTH)
    return [
        TensorShard("shard", "parameter", shard, (own + step).to(dtype)),
        TensorShard("replica", "parameter", Extent((3,), 0, 3), torch.full((3,), float(step))),
    ]


def saved(snapshots, *steps):
    for step in steps:
        snapshots.save(step, parts_of(snapshots.comm, step), {"step": step})
        while not snapshots.poll():
            pass
    return snapshots


def check(snapshots, step, comm=None):
    """Load the newest snapshot, and compare what it holds with that of a step."""
    parts = parts_of(snapshots.comm, 0)
    path = snapshots.newest()
    assert path.name.endswith(f"-step-{step}")
    assert snapshots.load(parts, path, {"step": step}).step == step
    for part, expected in zip(parts, parts_of(snapshots.comm, step), strict=True):
        assert torch.equal(part.tensor, expected.tensor)


@pytest.mark.sizes(1, 2, 3, 4)
def test_the_last_two_are_kept_and_each_shard_is_on_two_hosts(comm, each):
    for hosts in each():
        saved(hosts.run(), 1, 2, 3).release()
        nodes = hosts.topology.nodes
        for node, ranks in enumerate(nodes):
            folders = sorted(path.name for path in hosts.path(node).glob("*-step-*"))
            assert folders == ["00002-step-2", "00003-step-3"]
            files = {path.name for path in (hosts.path(node) / "00003-step-3").iterdir()}
            assert files == {"index.json", *(f"rank-{rank}.safetensors" for rank in (*ranks, *nodes[node - 1]))}
        check(hosts.run(), 3)


@pytest.mark.sizes(2, 3, 4)
def test_a_host_comes_back_without_its_memory(comm, each):
    for hosts in each(fewest=2):
        run = saved(hosts.run(), 1, 2)
        for node in range(len(hosts.topology.nodes)):
            run.release()
            hosts.on_first(shutil.rmtree, hosts.path(node))
            run = hosts.run()
            check(run, 2 + node)
            run.numbers = count(3 + node)
            saved(run, 3 + node)


@pytest.mark.sizes(3, 4)
def test_the_ranks_of_one_host_are_left(comm, each):
    for hosts in each(fewest=2, most=2):
        saved(hosts.run(), 5).release()
        last = len(hosts.topology.nodes) - 1
        hosts.on_first(shutil.rmtree, hosts.path(last))
        left = comm.split(0 if hosts.topology.node_of[comm.rank] < last else None)
        if left:
            run = hosts.run(left)
            shard, replica = parts_of(comm, 0)
            whole = shard._replace(
                tensor=torch.zeros(LENGTH * comm.size), extent=Extent((LENGTH * comm.size,), 0, LENGTH * comm.size)
            )
            run.load([whole, replica], run.newest())
            np.testing.assert_array_equal(whole.tensor, np.arange(LENGTH * comm.size) + 5)


def flip(paths):
    """Flip a bit of files, if they are there."""
    for path in paths:
        if path.exists():
            content = bytearray(path.read_bytes())
            content[-5] ^= 1
            path.write_bytes(content)


@pytest.mark.sizes(2, 4)
def test_a_damaged_shard_is_taken_from_another_host(comm, each):
    for hosts in each(fewest=2):
        saved(hosts.run(), 1, 2).release()
        nodes = range(len(hosts.topology.nodes))
        shards = [hosts.path(node) / "00002-step-2" / "rank-0.safetensors" for node in nodes]
        hosts.on_first(flip, shards[:1])
        run = hosts.run()
        check(run, 2)  # from now on, whoever needed the shard has it
        run.release()
        hosts.on_first(flip, shards)
        check(hosts.run(), 1)


@pytest.mark.sizes(1)
def test_no_damage_is_accepted(comm, each):
    """A bit is flipped anywhere, or a file is cut off anywhere, 100 times."""
    draw = random.Random(0)
    for hosts in each():
        saved(hosts.run(), 1, 2).release()
        folder = hosts.path(0) / "00002-step-2"
        for _ in range(100):
            path = draw.choice(sorted(folder.iterdir()))
            content = path.read_bytes()
            at = draw.randrange(len(content))
            changed = content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :]
            path.write_bytes(draw.choice([content[:at], changed]))
            run = hosts.run()
            check(run, 1)
            run.release()
            path.write_bytes(content)
        check(hosts.run(), 2)


@pytest.mark.sizes(2, 4)
def test_one_index_is_enough_and_without_any_a_snapshot_is_none(comm, each):
    for hosts in each(fewest=2):
        saved(hosts.run(), 1, 2).release()
        for node in range(1, len(hosts.topology.nodes)):
            path = hosts.path(node) / "00002-step-2"
            hosts.on_first((path / "index.json").unlink)
            hosts.on_first(path.rename, path.with_name(path.name + ".unfinished"))
        first = hosts.path(0) / "00002-step-2"
        hosts.on_first((first / f"rank-{comm.size - 1}.safetensors").unlink)  # an unfinished folder has another one
        run = hosts.run()
        check(run, 2)
        run.release()
        for node in range(len(hosts.topology.nodes)):
            hosts.on_first((hosts.path(node) / "00002-step-2" / "index.json").write_text, '{"crc32":1,"index":{}}\n')
        check(hosts.run(), 1)


@pytest.mark.sizes(1, 2, 4)
def test_a_rank_that_is_not_finite_and_the_next_snapshot(comm, each):
    for hosts in each():
        run, parts = saved(hosts.run(), 1), parts_of(comm, 2)
        if comm.rank == comm.size - 1:
            parts[0].tensor[7] = torch.nan
        run.save(2, parts, {})
        with pytest.raises(InputError, match="parameter of shard is not finite"):
            run.wait()
        check(saved(run, 3), 3)


@pytest.mark.sizes(2, 4)
def test_a_host_without_memory_for_a_shard_and_the_next_snapshot(comm, each, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    for hosts in each(fewest=2):
        run = saved(hosts.run(), 1)
        with monkeypatch.context() as patch:
            if comm.rank == 0:
                patch.setattr(module.os, "posix_fallocate", fail)
            run.save(2, parts_of(comm, 2), {})
            with pytest.raises(InputError, match="No space left on device: free some space"):
                run.wait()
        check(saved(run, 3), 3)


@pytest.mark.sizes(1, 2)
def test_too_little_memory(comm, each, monkeypatch):
    for hosts in each(most=2):
        run, nbytes = hosts.run(), 4 * (LENGTH * comm.size + 3)  # of a host: every shard
        needed = f"3 of {nbytes:,} bytes need {3 * nbytes:,} bytes in .*omit --snapshot_interval"
        lock = hosts.path(hosts.topology.node_of[comm.rank]) / "lock"
        for free, words in ((3 * nbytes, ""), (3 * nbytes - 1, needed)):
            usage = shutil.disk_usage("/")._replace(free=free - lock.stat().st_size)
            monkeypatch.setattr(module.shutil, "disk_usage", lambda path, usage=usage: usage)
            with pytest.raises(InputError, match=words) if words else nullcontext():
                run.reserve(parts_of(comm, 0))


@pytest.mark.sizes(1, 2)
def test_a_run_that_ends_leaves_nothing(comm, each):
    for hosts in each():
        saved(hosts.run(), 1, 2).close()
        comm.barrier()
        assert not [*hosts.folder.iterdir()]
        run = hosts.run()
        assert run.newest() is None
        saved(run, 4).clear()
        comm.barrier()
        assert run.newest() is None
