"""Read a checkpoint, whatever layout it was written in.

Its index, a small file whose presence completes the checkpoint, lists the shards.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from parallelism.checkpoint.extent import intersection
from parallelism.checkpoint.part import TensorShard
from parallelism.checkpoint.shards import Piece, ShardEntry, ShardReader, is_count

FORMAT = 2
INDEX = "index.json"


class Index(NamedTuple):
    """Entries of all shards, and `whole`: small values that are stored in the index itself."""

    step: int
    whole: Mapping[str, Any]
    entries: Sequence[ShardEntry]
    format: int = FORMAT

    def sealed(self) -> str:
        return sealed(self._asdict())

    @classmethod
    def unsealed(cls, text: str) -> Index:
        """Parse the output of `sealed`; raise ValueError if it is damaged, or of another format."""
        try:
            values = json.loads(text)["index"]
            if sealed(values) != text:
                raise ValueError("not what was written, by its checksum")
        except (KeyError, TypeError, RecursionError):
            raise ValueError("not what was written") from None
        if not isinstance(values, dict) or "format" not in values:
            raise ValueError("not what was written")
        if values["format"] != FORMAT:
            raise ValueError(f"of format {values['format']}, but this program reads {FORMAT}")
        try:
            index = cls(**values)._replace(entries=[ShardEntry.from_json(entry) for entry in values["entries"]])
            index.check()
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"not what a run writes ({type(error).__name__}: {error})") from None
        return index

    def check(self) -> None:
        """Raise ValueError for an index with a correct checksum but invalid contents."""
        if not (is_count(self.step) and isinstance(self.whole, dict)):
            raise ValueError("the step, or what is small, is of another type")
        for entry in self.entries:
            entry.check()
        check_complete(self.entries)


def sealed(values: Any) -> str:
    """Return JSON with a checksum that detects a change of any byte."""
    text = json.dumps(values, separators=(",", ":"))
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
        """Read every `size`-th shard.

        Raises: ValueError with the file that is missing or damaged.
        """
        for reader in self.readers[rank::size]:
            reader.verify()

    def check_files(self) -> None:
        """Check that the shards exist, without reading them.

        Raises: ValueError with the file that is missing, or whose length has changed.
        """
        for reader in self.readers:
            reader.check_file()

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
        """Read parts into their tensors, reading only the blocks of the shards that contain them.

        Raises: ValueError with the file that is missing or damaged.
        """
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
