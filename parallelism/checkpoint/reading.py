"""Find and load checkpoints, whatever layout they were written in.

A checkpoint's index, a small file whose presence completes it, lists the shards.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from isal.isal_zlib import crc32

import collectives
from collectives.job.errors import InputError
from parallelism.checkpoint.extent import intersection
from parallelism.checkpoint.folders import INDEX, complete_checkpoints, number_of
from parallelism.checkpoint.part import TensorShard
from parallelism.checkpoint.shards import Piece, ShardEntry, ShardReader, is_count

FORMAT = 2
BLOCK, MOST_BLOCKS = 1 << 22, 64  # tokens per block, and blocks, that a fingerprint samples


class Index(NamedTuple):
    """Entries of all shards, and `whole`: small values that are stored in the index itself."""

    step: int
    whole: Mapping[str, Any]
    entries: Sequence[ShardEntry]
    format: int = FORMAT

    @classmethod
    def unsealed(cls, text: str) -> Index:
        """Parse a `sealed` index; raise ValueError if it is damaged, or of another format."""
        try:
            values = json.loads(text)["index"]
            if sealed(values) != text:
                raise ValueError("not what was written, by its checksum")
            number = values["format"]
        except (KeyError, TypeError, RecursionError):
            raise ValueError("not what was written") from None
        if number != FORMAT:
            raise ValueError(f"of format {number}, but this program reads {FORMAT}")
        try:
            index = cls(**values)._replace(entries=[ShardEntry.from_json(entry) for entry in values["entries"]])
            if not (is_count(index.step) and isinstance(index.whole, dict)):
                raise ValueError("the step, or what is small, is of another type")
            check_complete(index.entries)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"not what a run writes ({type(error).__name__}: {error})") from None
        return index


def sealed(values: Any) -> str:
    """Return JSON with a checksum that detects a change of any byte."""
    text = json.dumps(values, separators=(",", ":"), allow_nan=False)
    return f'{{"crc32":{crc32(text.encode())},"index":{text}}}\n'


def check_complete(entries: Iterable[ShardEntry]) -> None:
    """Raise ValueError if the shards leave elements of a tensor out, or hold more than it has."""
    counts: dict[tuple[str, str, tuple[int, ...]], int] = defaultdict(int)
    for piece in (piece for entry in entries for piece in entry.pieces):
        counts[piece.kind, piece.name, piece.extent.shape] += piece.length
    for (kind, name, shape), count in counts.items():
        if count != math.prod(shape):
            raise ValueError(f"{kind} of {name}: all ranks' parts have {count} of {math.prod(shape)} elements")


class Checkpoint:
    """A checkpoint's folder, opened for reading by one rank.

    Raises: ValueError with the file's name if the index is missing or damaged.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        path = self.folder / INDEX
        if not path.is_file():
            raise ValueError(f"{path}: missing; pass the folder of a complete checkpoint")
        try:
            self.index = Index.unsealed(path.read_text())
        except (ValueError, OSError) as error:
            raise ValueError(f"{path}: {error}") from None
        self.readers = [ShardReader(self.folder, entry) for entry in self.index.entries]
        self.pieces: dict[tuple[str, str], list[tuple[ShardReader, Piece]]] = defaultdict(list)
        for reader in self.readers:
            for piece in reader.entry.pieces:
                self.pieces[piece.kind, piece.name].append((reader, piece))

    def verify(self, rank: int = 0, size: int = 1) -> None:
        """Read every `size`-th shard; raise ValueError with the file that is missing or damaged."""
        for reader in self.readers[rank::size]:
            reader.verify()

    def check(self, parts: Iterable[TensorShard]) -> None:
        """Raise ValueError if parts are of another model."""
        for part in parts:
            part.check()
            if (part.kind, part.name) not in self.pieces:
                raise ValueError(f"{self.folder} has no {part}: {self._alternative(part)}")
            _, piece = self.pieces[part.kind, part.name][0]
            there, here = (piece.extent.shape, piece.torch_dtype), (part.extent.shape, part.tensor.dtype)
            if there != here:
                raise ValueError(f"{self.folder}: {part} is {there[0]} of {there[1]}, but here {here[0]} of {here[1]}")

    def _alternative(self, part: TensorShard) -> str:
        """Describe what the checkpoint holds instead of a missing part."""
        kinds = sorted(kind for kind, name in self.pieces if name == part.name)
        if kinds:
            return f"it has {', '.join(kinds)}"
        names = {name for kind, name in self.pieces if kind == part.kind}
        return f"it is of another model, of {len(names)} parameters"

    def fill(self, parts: Iterable[TensorShard]) -> None:
        """Fill parts, reading only the blocks that contain them; raise ValueError with a missing or damaged file."""
        for part in parts:
            runs, flat = part.extent.runs(), part.flat
            num_missing = int(runs[:, 2].sum())
            if num_missing < len(flat):
                flat.zero_()  # padding
            for reader, piece in self.pieces[part.kind, part.name]:
                common = intersection(piece.runs, runs)
                reader.copy(piece, common, flat)
                num_missing -= int(common[:, 2].sum())
            if num_missing:
                raise ValueError(f"{self.folder}: {num_missing} elements of {part} are in no shard")


class CheckpointLoader:
    """Finds and loads checkpoints in `directory`, which all ranks of `comm` share.  All methods are collective."""

    def __init__(self, directory: str | Path, comm: collectives.Communicator, say: Callable[[str], None] = print):
        self.directory, self.comm, self.say = Path(directory), comm, say
        self._broken: set[Path] = set()  # skipped because they are damaged

    def newest(self, after: int = 0) -> Path | None:
        """Return the newest checkpoint whose shards all verify (each is read by one of the ranks), or None.

        Its number is above `after`.  Report why newer ones are skipped.
        """
        with self.comm.agreed("newest"):
            every = complete_checkpoints(self.directory) if self.comm.rank == 0 else []
            paths = [path for path in every if number_of(path) > after]
        for name in reversed(self.comm.broadcast_object([path.name for path in paths])):
            path = self.directory / name
            try:
                with self.comm.agreed("newest"):
                    Checkpoint(path).verify(self.comm.rank, self.comm.size)
            except (ValueError, OSError) as error:
                self._broken.add(path)
                self.say(f"skipped a broken checkpoint: {error}")
            else:
                return path
        return None

    def load(self, parts: Iterable[TensorShard], path: str | Path, same: Mapping[str, Any] | None = None) -> Index:
        """Fill parts from a checkpoint of the same model in any layout; return its index.

        Each rank reads the parts that it requests.  What the checkpoint has as `whole` must have the values in `same`.

        Raises: InputError if it is of another model, or a file is missing or damaged.
        """
        parts = list(parts)
        with self.comm.agreed("load"):
            checkpoint = Checkpoint(path)
            check_same(checkpoint.folder, checkpoint.index.whole, same or {})
            checkpoint.check(parts)
        self._check_coverage(checkpoint, parts)
        with self.comm.agreed("load"):
            checkpoint.fill(parts)
        return checkpoint.index

    def _check_coverage(self, checkpoint: Checkpoint, parts: Sequence[TensorShard]) -> None:
        """Check that the ranks together request every part of every parameter, for each requested kind."""
        own_keys = {(part.kind, part.name) for part in parts}
        there = sorted(checkpoint.pieces)
        by_some = self.comm.all_reduce(np.array([key in own_keys for key in there], np.int64), op="max").tolist()
        kinds = {kind for (kind, _), some in zip(there, by_some, strict=True) if some}
        for (kind, name), some in zip(there, by_some, strict=True):
            if kind in kinds and not some:
                raise InputError(f"{checkpoint.folder} has {kind} of {name}, which this model lacks")


def fingerprint(ids: Any) -> str:
    """Identify a token sequence by its length, dtype and a checksum; long sequences are sampled.

    >>> fingerprint(np.arange(3, dtype=np.uint16))
    '3 of uint16 with CRC-32 3b48a444'
    """
    step = max(1, len(ids) // (BLOCK * MOST_BLOCKS)) * BLOCK
    crc, dtype = 0, np.asarray(ids[:1]).dtype
    for start in range(0, len(ids), step):
        crc = crc32(np.ascontiguousarray(ids[start : start + BLOCK]).data, crc)
    return f"{len(ids)} of {dtype} with CRC-32 {crc:08x}"


def check_same(path: Any, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise ValueError with both values for the first that differs in the checkpoint at `path`."""
    for name, value in here.items():
        if there.get(name) != value:
            raise ValueError(f"{path}: {name} was {there.get(name)}, but is {value}: resume with the same")
