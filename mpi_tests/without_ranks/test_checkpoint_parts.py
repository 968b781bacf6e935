"""Checkpoints without ranks: one layout reads another one's checkpoint bit for bit; errors name any damage."""

import contextlib
import errno
import fcntl
import itertools
import json
import math
import os
import random
import re
import shutil
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np
import pytest
import torch

from mpi_tests.helpers.played import ALONE
from parallelism.checkpoint import (
    Checkpoint,
    CheckpointLoader,
    Extent,
    TensorShard,
    fingerprint,
    shards,
    state_parts,
)
from parallelism.checkpoint.checkpoints import commit, identity, keep_last, looks_whole, writers
from parallelism.checkpoint.extent import LocalShard, intersection
from parallelism.checkpoint.folders import UNFINISHED, Lock, complete_checkpoints, next_number, remove_unfinished
from parallelism.checkpoint.hashes import combined, part_sums
from parallelism.checkpoint.reading import Index, check_same, sealed
from parallelism.checkpoint.shards import ShardReader, write_shard
from parallelism.placement import Shard

# Shapes in the whole model, and their split over tensor-parallel ranks.
MODEL = {
    "wte.weight": ((29, 6), Shard(0, 29, padded=True)),
    "h.0.qkv.weight": ((32, 6), Shard(0, 32, pieces=(4, 2, 2))),
    "h.0.qkv.bias": ((32,), Shard(0, 32, pieces=(4, 2, 2))),
    "h.0.proj.weight": ((6, 16), Shard(1, 16)),
    "h.0.proj.bias": ((6,), None),
    "h.1.conv.weight": ((3, 8, 5), Shard(1, 8, pieces=(1, 1))),
    "h.1.norm.weight": ((7,), None),
    "h.1.table": ((3, 5, 2), Shard(1, 5, padded=True)),
}
STAGES = {1: [[*MODEL]], 2: [[*MODEL][:5], ["wte.weight", *[*MODEL][5:]]]}  # the last stage copies the first's
GAP = 3  # elements between parameters in an arena


class Layout(NamedTuple):
    tp: int
    pp: int
    zero: int
    dp: int = 1


LAYOUTS = [Layout(*sizes) for sizes in itertools.product((1, 2, 4), (1, 2), (1, 2, 3, 8))]
LAYOUTS += [Layout(2, 1, 2, dp=3), Layout(1, 1, 1, dp=4)]


def whole(name, kind):
    generator = torch.Generator().manual_seed(crc32(f"{kind} of {name}".encode()))
    shape = () if kind == "step" else MODEL[name][0]
    return torch.randn(shape, generator=generator, dtype=torch.float64 if kind == "exp_avg" else torch.float32)


def shard_of(name, kind, rank, size):
    split = MODEL[name][1] if size > 1 else None
    return split.local(whole(name, kind), rank, size) if split else whole(name, kind)


def arena_parts(parts, slices, kind, flat, begin):
    """Yield each parameter's part of `flat`, which has an arena's elements from `begin` on, for these slices."""
    for name, whole_span in slices.items():
        low, high = max(whole_span.start, begin), min(whole_span.stop, begin + flat.numel())
        if low < high:
            span = slice(low - whole_span.start, high - whole_span.start)
            yield parts[name].within(span, flat[low - begin : high - begin], kind)


class Rank:
    """One rank's state: a range of the arena with its stage's parameters, or parts of them, and a step of each."""

    def __init__(self, layout, tp_rank, stage, zero_rank, fill):
        parts, slices, end = {}, {}, 0
        self.copies = {"wte.weight"} if stage else set()  # all stages shard tied parameters alike: only one writes them
        for name in STAGES[layout.pp][stage]:
            local = shard_of(name, "parameter", tp_rank, layout.tp)
            shards = (LocalShard(MODEL[name][1], tp_rank, layout.tp),) if layout.tp > 1 and MODEL[name][1] else ()
            extent = Extent(MODEL[name][0], 0, local.numel(), shards)
            parts[name] = TensorShard(name, "parameter", extent, local)
            slices[name] = slice(end, end + local.numel())
            end += local.numel() + GAP
        begin, stop = (end * n // layout.zero for n in (zero_rank, zero_rank + 1))
        self.expected = [part for name in parts for part in state_parts(parts[name], {"step": whole(name, "step")})]
        for kind in ("parameter", "exp_avg"):
            arena = torch.zeros(end, dtype=whole("wte.weight", kind).dtype)
            for name, span in slices.items():
                arena[span] = shard_of(name, kind, tp_rank, layout.tp).flatten()
            self.expected += arena_parts(parts, slices, kind, arena[begin:stop], begin)
        self.parts = [
            part._replace(tensor=part.tensor.clone() if fill else torch.full_like(part.tensor, math.nan))
            for part in self.expected
        ]

    def check(self):
        for part, expected in zip(self.parts, self.expected, strict=True):
            assert torch.equal(part.tensor, expected.tensor), str(part)


def ranks_of(layout, fill=True):
    coords = itertools.product(range(layout.dp), range(layout.tp), range(layout.pp), range(layout.zero))
    return [Rank(layout, tp_rank, stage, zero_rank, fill) for _, tp_rank, stage, zero_rank in coords]


def save(directory, ranks, number=1, step=10):
    """Save for all ranks like `Checkpoints.save`."""
    offers = [{identity(part): part for part in rank.parts if part.name not in rank.copies} for rank in ranks]
    sizes = [{key: part.tensor.nbytes for key, part in offer.items()} for offer in offers]
    folder = directory / f"{number:05}-step-{step}{UNFINISHED}"
    folder.mkdir()
    entries = []
    for rank, keys in enumerate(writers(sizes)):
        copies = [(offers[rank][key], offers[rank][key].compact()) for key in keys]
        entries.append(write_shard(folder / f"rank-{rank}.safetensors", copies))
    return commit(folder, Index(step, {"lr": 0.1}, [entry for entry in entries if entry.pieces]))


@pytest.fixture(autouse=True)
def synced(monkeypatch):
    """Use small blocks, and replace fsync; return the names of the files that would be synced."""
    monkeypatch.setattr(shards, "BLOCK_BYTES", 64)
    synced = []
    monkeypatch.setattr(os, "fsync", lambda opened: synced.append(os.readlink(f"/proc/self/fd/{opened}")))
    return synced


def test_all_is_on_the_disk_before_it_is_valid(tmp_path, synced, monkeypatch):
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: synced.append("replace") or replace(old, new))
    path = save(tmp_path, ranks_of(Layout(1, 1, 2)))
    shards, last = [f"{path}{UNFINISHED}/rank-{rank}.safetensors" for rank in range(2)], f"{path}{UNFINISHED}"
    assert synced == [*shards, f"{last}/index.json", last, "replace", str(tmp_path)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_one_layout_writes_others_read(tmp_path, layout):
    path = save(tmp_path, ranks_of(layout))
    checkpoint = Checkpoint(path)
    for other in [layout, *random.Random(str(layout)).sample(LAYOUTS, 2)]:
        for rank in ranks_of(other, fill=False):
            checkpoint.check(rank.parts)
            checkpoint.fill(rank.parts)
            rank.check()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_hash_is_the_same_in_every_layout(layout):
    hashes = [
        combined(
            {identity(part): part_sums(part) for part in rank.parts if part.name not in rank.copies} for rank in ranks
        )
        for ranks in (ranks_of(Layout(1, 1, 1)), ranks_of(layout))
    ]
    assert hashes[0] == hashes[1]


def test_each_element_is_stored_once_and_no_padding(tmp_path):
    for number, layout in enumerate(LAYOUTS):
        checkpoint = Checkpoint(save(tmp_path, ranks_of(layout), number))
        stored = sum(piece.nbytes for pieces in checkpoint.pieces.values() for _, piece in pieces)
        assert stored == sum(whole(name, kind).nbytes for name in MODEL for kind in ("parameter", "exp_avg", "step"))


def test_others_may_read_it_who_may_read_the_folder(tmp_path):
    path = save(tmp_path, ranks_of(Layout(1, 1, 1)))
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {path.stat().st_mode & 0o666}


def test_copies_are_written_by_all_who_have_them(tmp_path):
    checkpoint = Checkpoint(save(tmp_path, ranks_of(Layout(1, 1, 1, dp=4))))
    sizes = [sum(piece.nbytes for piece in reader.entry.pieces) for reader in checkpoint.readers]
    assert len(sizes) == 4
    assert max(sizes) < 0.4 * sum(sizes)


def test_a_rank_reads_what_it_needs(tmp_path, monkeypatch):
    """A rank reads only the blocks that contain its parts."""
    checkpoint = Checkpoint(save(tmp_path, ranks_of(Layout(1, 1, 1))))
    read = []
    get_block = ShardReader.block
    monkeypatch.setattr(
        ShardReader,
        "block",
        lambda self, piece, number: read.append((piece.key, number)) or get_block(self, piece, number),
    )
    every = sum(len(piece.checksums) for pieces in checkpoint.pieces.values() for _, piece in pieces)
    for rank in ranks_of(Layout(1, 1, 8), fill=False):
        read.clear()
        checkpoint.fill(rank.parts)
        steps = sum(part.kind == "step" for part in rank.parts)
        assert steps < len(set(read)) <= steps + (every - steps) / 8 + 2 * len(rank.parts)
        assert len(set(read)) < every / 2


def test_runs_are_where_the_elements_are():
    for shape, split in MODEL.values():
        for size, draw in itertools.product((1, 2, 4), range(5)):
            shard = split if size > 1 else None
            numbers = torch.arange(1, math.prod(shape) + 1).view(shape)  # 0 is padding
            for rank in range(size):
                local = (shard.local(numbers, rank, size) if shard else numbers).flatten()
                begin, end = sorted(random.Random(draw).choices(range(local.numel() + 1), k=2))
                extent = Extent(shape, begin, end - begin, (LocalShard(shard, rank, size),) if shard else ())
                global_index = {here + i: there + i for here, there, n in extent.runs().tolist() for i in range(n)}
                expected = {i: int(n) - 1 for i, n in enumerate(local[begin:end]) if n}
                assert global_index == expected


@pytest.mark.parametrize(
    "shards",
    [
        [(Shard(0, 6), 3), (Shard(1, 8, pieces=(2, 1, 1)), 2)],  # experts, and within each its columns
        [(Shard(2, 5, padded=True), 2), (Shard(0, 6, pieces=(2, 1)), 2)],
        [(Shard(1, 8, pieces=(1, 1)), 2), (Shard(1, 4), 2)],  # of one dim, the second within the first's shards
        [(Shard(1, 8), 2), (Shard(1, 4, padded=True), 3), (Shard(2, 5, padded=True), 4)],
    ],
)
def test_runs_of_shards_along_several_axes(shards):
    numbers = torch.arange(1, 6 * 8 * 5 + 1).view(6, 8, 5)  # 0 is padding
    for coords in itertools.product(*(range(size) for _, size in shards)):
        local = numbers
        for (shard, size), rank in zip(shards, coords, strict=True):
            local = shard.local(local, rank, size)
        owned = tuple(LocalShard(shard, rank, size) for (shard, size), rank in zip(shards, coords, strict=True))
        extent = Extent((6, 8, 5), 3, local.numel() - 5, owned)
        global_index = {here + i: there + i for here, there, n in extent.runs().tolist() for i in range(n)}
        assert global_index == {i: int(n) - 1 for i, n in enumerate(local.flatten()[3:-2]) if n}


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(
        OSError, match=f"{tmp_path}/lock: can't be locked \\(No locks available\\): choose a file system"
    ):
        Lock(tmp_path)


def test_what_two_have_in_common():
    shape, split = (6, 8), Shard(1, 8, pieces=(1, 1))
    a, b = Extent(shape, 5, 11, (LocalShard(split, 1, 2),)), Extent(shape, 3, 30)
    indices = [{there + i: here + i for here, there, n in e.runs().tolist() for i in range(n)} for e in (a, b)]
    common = {(x + i, y + i) for x, y, n in intersection(a.runs(), b.runs()).tolist() for i in range(n)}
    assert common == {(indices[0][at], indices[1][at]) for at in indices[0].keys() & indices[1].keys()}
    assert len(common) == 11
    assert len(intersection(a.runs(), Extent(shape, 0, 0).runs())) == 0


class TestBadInput:
    def wrong(self, tmp_path, **changes):
        path = next(iter(complete_checkpoints(tmp_path)), None) or save(tmp_path, ranks_of(Layout(1, 1, 1)))
        checkpoint = Checkpoint(path)
        part = TensorShard("h.1.norm.weight", "parameter", Extent((7,), 0, 7), torch.zeros(7))._replace(**changes)
        with pytest.raises(ValueError) as raised:  # noqa: PT011 - the test looks at the words
            checkpoint.check([part])
        return str(raised.value).replace(str(tmp_path), "")

    def test_another_model(self, tmp_path):
        assert self.wrong(tmp_path, name="h.2.norm.weight") == (
            "/00001-step-10 has no parameter of h.2.norm.weight: it is of another model, of 8 parameters"
        )

    def test_another_optimizer(self, tmp_path):
        assert self.wrong(tmp_path, kind="momentum_buffer") == (
            "/00001-step-10 has no momentum_buffer of h.1.norm.weight: it has exp_avg, parameter, step"
        )

    def test_another_shape(self, tmp_path):
        assert self.wrong(tmp_path, extent=Extent((9,), 0, 7)) == (
            "/00001-step-10: parameter of h.1.norm.weight is (7,) of torch.float32, but here (9,) of torch.float32"
        )

    def test_another_dtype(self, tmp_path):
        assert "is (7,) of torch.float32, but here (7,) of torch.bfloat16" in self.wrong(
            tmp_path, tensor=torch.zeros(7, dtype=torch.bfloat16)
        )

    def test_a_layout_that_cannot_hold_it(self, tmp_path):
        extent = Extent((7,), 0, 4, (LocalShard(Shard(0, 7), 0, 2),))
        assert "h.1.norm.weight: dim 0 of 7 can't be split as" in self.wrong(tmp_path, extent=extent)
        assert "a tensor with gaps between" in self.wrong(tmp_path, tensor=torch.zeros(14)[::2])
        assert "a tensor of 7 elements for 4" in self.wrong(tmp_path, extent=Extent((7,), 0, 4))


def test_another_format(tmp_path):
    path = save(tmp_path, ranks_of(Layout(1, 1, 1))) / "index.json"
    path.write_text(sealed(Index.unsealed(path.read_text())._replace(format=3)._asdict()))
    with pytest.raises(ValueError, match=re.escape(f"{path}: of format 3, but this program reads 2")):
        Checkpoint(path.parent)


def test_another_data_file():
    tokens = np.arange(1000, dtype=np.uint16)
    assert fingerprint(tokens) != fingerprint(np.roll(tokens, 1))
    with pytest.raises(ValueError, match="out: data was 3 of uint16, but is 4 of uint16"):
        check_same("out", {"data": "3 of uint16", "seed": 1}, {"seed": 1, "data": "4 of uint16"})


class TestDamage:
    @pytest.fixture
    def path(self, tmp_path):
        return save(tmp_path, ranks_of(Layout(2, 1, 2)))

    def test_a_flipped_byte_anywhere_is_named(self, path):
        Checkpoint(path).verify()
        for file in path.iterdir():
            content = file.read_bytes()
            for index in [*range(0, len(content), 97), len(content) - 1]:
                flipped = bytes([content[index] ^ 1 << index % 8])
                file.write_bytes(content[:index] + flipped + content[index + 1 :])
                with pytest.raises(ValueError, match=f"{file}: .*not what was written|{file}: "):
                    Checkpoint(path).verify()
            file.write_bytes(content)
        Checkpoint(path).verify()

    def test_a_flipped_byte_is_not_loaded(self, path):
        rank = Rank(Layout(1, 1, 1), 0, 0, 0, fill=False)
        file = path / "rank-2.safetensors"
        content = file.read_bytes()
        file.write_bytes(content[:-5] + bytes([content[-5] ^ 4]) + content[-4:])
        with pytest.raises(ValueError, match=f"{file}: .* is not what was written, by the checksum of block"):
            Checkpoint(path).fill(rank.parts)

    def test_a_missing_shard(self, path):
        (path / "rank-1.safetensors").unlink()
        with pytest.raises(ValueError, match=r"rank-1.safetensors: missing"):
            Checkpoint(path).verify()

    def test_a_truncated_shard(self, path):
        file = path / "rank-3.safetensors"
        nbytes = file.stat().st_size
        os.truncate(file, nbytes - 1)
        with pytest.raises(ValueError, match=rf"rank-3.safetensors: of {nbytes - 1} bytes, but {nbytes} were written"):
            Checkpoint(path).verify()

    @pytest.mark.parametrize("content", [None, "", "{}", "[]", '{"index": 3}', '{"crc32":1,"index":{}}\n'])
    def test_an_index_that_is_none(self, path, content):
        index = path / "index.json"
        index.unlink() if content is None else index.write_text(content)
        with pytest.raises(ValueError, match=r"index\.json: "):
            Checkpoint(path)


def test_the_newest_whole_one(tmp_path, capsys):
    """Of several checkpoints, three are broken; each of them is skipped with a message."""
    ranks = ranks_of(Layout(1, 1, 2))
    paths = [save(tmp_path, ranks, number, step) for number, step in enumerate((10, 30, 20, 25, 40), 8)]
    (tmp_path / "00014-step-50.unfinished").mkdir()
    assert complete_checkpoints(tmp_path) == paths  # the newest is the last one written, not that of the highest step
    (paths[4] / "index.json").unlink()
    (paths[3] / "rank-0.safetensors").unlink()
    os.truncate(paths[2] / "rank-1.safetensors", 100)
    assert CheckpointLoader(tmp_path, ALONE).newest() == paths[1]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1] for line in lines] == [
        str(paths[4] / "index.json"),
        str(paths[3] / "rank-0.safetensors"),
        str(paths[2] / "rank-1.safetensors"),
    ]
    for path in paths[:2]:
        shutil.rmtree(path)
    assert CheckpointLoader(tmp_path, ALONE).newest() is None


class CrashError(Exception):
    pass


class Disk:
    """A disk that fails after a number of changes."""

    CALLS = ((os, "fsync"), (os, "replace"), (os, "unlink"), (os, "rmdir"), (Path, "write_text"), (shards, "save_file"))

    def __init__(self, patch, changes):
        self.left = changes
        for module, name in self.CALLS:
            patch.setattr(module, name, self.limited(getattr(module, name)))

    def limited(self, call):
        def limited(*arguments, **more):
            self.left -= 1
            if self.left < 0:
                raise CrashError
            return call(*arguments, **more)

        return limited


def test_a_crash_at_any_moment_leaves_a_whole_one(tmp_path, monkeypatch):
    """After a crash at any change on the disk, the previous checkpoint or the new one is complete."""
    ranks, step = ranks_of(Layout(1, 1, 2)), 1
    save(tmp_path, ranks, step=step)
    for changes in itertools.count():
        remove_unfinished(tmp_path)
        with monkeypatch.context() as patch, contextlib.suppress(CrashError):
            disk = Disk(patch, changes)
            save(tmp_path, ranks, next_number(tmp_path), step + 1)
            keep_last(tmp_path, 1, looks_whole)
        path = CheckpointLoader(tmp_path, ALONE, say=pytest.fail).newest()
        assert path
        assert Checkpoint(path).index.step in (step, step + 1)
        step = Checkpoint(path).index.step
        if disk.left > 0:
            break
    assert changes > 10
    assert len(complete_checkpoints(tmp_path)) == 1


def test_several_are_kept(tmp_path):
    paths = [save(tmp_path, ranks_of(Layout(1, 1, 1)), number, 10 * number) for number in range(5)]
    (tmp_path / "notes.txt").touch()
    keep_last(tmp_path, 2, looks_whole)
    assert complete_checkpoints(tmp_path) == paths[3:]
    assert len([*tmp_path.iterdir()]) == 3


def test_broken_ones_do_not_count_among_those_kept(tmp_path):
    """There are four kinds of damage; only reading detects one of them, as a resumed run has done."""
    paths = [save(tmp_path, ranks_of(Layout(1, 1, 1)), number, 10 * number) for number in range(8)]
    (paths[3] / "index.json").unlink()
    (paths[4] / "rank-0.safetensors").unlink()
    os.truncate(paths[5] / "rank-0.safetensors", 100)
    keep_last(tmp_path, 3, lambda path: path != paths[6] and looks_whole(path))
    assert complete_checkpoints(tmp_path) == paths[1:]
    keep_last(tmp_path, 1, looks_whole)
    assert complete_checkpoints(tmp_path) == paths[7:]


def forged(*keys, value=None, remove=False):
    """Return an edit of an index that replaces the value at the keys."""

    def forge(values):
        for key in keys[:-1]:
            values = values[key]
        if remove:
            del values[keys[-1]]
        else:
            values[keys[-1]] = value

    return pytest.param(forge, id=f"{'-'.join(map(str, keys))}={value!r:.20}")


# file, nbytes, header_checksum, pieces; name, kind, dtype, extent, length, block_bytes, checksums.
PIECE = ("entries", 0, 3, 0)
FORGERIES = [
    *(forged(key, remove=True) for key in ("step", "whole", "entries", "format")),
    *(forged("entries", value=value) for value in (None, 3, [3], [[]], {"a": 1})),
    *(forged("step", value=value) for value in ("x", -1, True, None)),
    *(forged("whole", value=value) for value in ([], None)),
    forged("more", value=3),
    *(forged("entries", 0, 0, value=value) for value in (3, None, "../rank-0.safetensors", "/etc/passwd")),
    *(forged("entries", 0, field, value=value) for field in (1, 2) for value in ("x", -1, 1.5)),
    *(forged("entries", 0, 3, value=value) for value in (None, 3, [3], [[]])),
    *(forged(*PIECE, field, value=value) for field in range(7) for value in (None, -1, "x", [], [-1], 1 << 70)),
    *(forged(*PIECE, 3, field, value=value) for field in (0, 1, 2, 3) for value in (-1, "x", [-1], 1 << 70)),
    *(forged(*PIECE, 3, field, value=[]) for field in (0, 1, 2)),
    forged(*PIECE, 3, 0, value=[1 << 60] * 10**6),
    forged(*PIECE, 6, value=[]),
    forged(*PIECE, 6, value=["a"]),
    forged(*PIECE, 2, value="nn"),
    forged(*PIECE, 5, value=0),
]


@pytest.mark.parametrize("forge", FORGERIES)
def test_a_forged_index_is_refused_in_a_line(tmp_path, forge):
    """The index has a valid checksum, but no run wrote its content."""
    path = save(tmp_path, ranks_of(Layout(1, 1, 1))) / "index.json"
    values = json.loads(path.read_text())["index"]
    forge(values)
    path.write_text(sealed(values))
    with pytest.raises((ValueError, OSError), match=f"{path}: not what |rank-0.safetensors: .* not contain") as caught:
        Checkpoint(path.parent).verify()
    assert "\n" not in str(caught.value)


def test_shards_that_are_no_whole_make_no_checkpoint(tmp_path):
    ranks = ranks_of(Layout(1, 1, 2))
    with pytest.raises(ValueError, match=r"all ranks' parts have \d+ of \d+ elements"):
        save(tmp_path, ranks[:1])
    assert complete_checkpoints(tmp_path) == []
