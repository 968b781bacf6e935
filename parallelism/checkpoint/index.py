"""A checkpoint: a folder of shard files and one index, which makes it valid; written whole, read in part.

Folders are named by a number that rises with each checkpoint, and its step: `00007-step-300`.  What is not whole yet,
or not any more, has a name that ends in `.unfinished`.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from parallelism.checkpoint.part import Part, meet
from parallelism.checkpoint.shards import Entry, Piece, ShardReader, naming, sync

FORMAT = 1
INDEX = "index.json"
UNFINISHED = ".unfinished"
NAME = re.compile(r"(\d+)-step-(\d+)(\.unfinished)?")


class Index(NamedTuple):
    """What is known of all shards, and what is small: `whole`, and `own` of each rank that wrote."""

    step: int
    whole: Mapping[str, Any]
    own: Sequence[Any]
    entries: Sequence[Entry]
    format: int = FORMAT

    def sealed(self) -> str:
        return sealed(self._asdict())

    @classmethod
    def unsealed(cls, text: str) -> Index:
        """Raise ValueError where it is not what `sealed` gave."""
        try:
            values = json.loads(text)["index"]
            if sealed(values) != text:
                raise ValueError("not what was written, by its checksum")
        except (KeyError, TypeError):
            raise ValueError("not what was written") from None
        if values["format"] != FORMAT:
            raise ValueError(f"of format {values['format']}, but this program reads {FORMAT}")
        return cls(**values)._replace(entries=[Entry.from_json(entry) for entry in values["entries"]])


def sealed(values: Any) -> str:
    """JSON with a checksum, in which no byte can be another."""
    text = json.dumps(values, separators=(",", ":"))
    return f'{{"crc32":{crc32(text.encode())},"index":{text}}}\n'


def check_complete(entries: Iterable[Entry]) -> None:
    """Raise ValueError where shards hold less than the whole of something, or more."""
    counts: dict[tuple[str, str, tuple[int, ...]], int] = defaultdict(int)
    for piece in (piece for entry in entries for piece in entry.pieces):
        counts[piece.kind, piece.name, piece.extent.shape] += piece.length
    for (kind, name, shape), count in counts.items():
        if count != math.prod(shape):
            raise ValueError(f"{kind} of {name}: all ranks' parts have {count} of {math.prod(shape)} elements")


def commit(unfinished: Path, index: Index) -> Path:
    """Make a folder in which all shards have been written a checkpoint; returns its name from then on.

    Raises: ValueError where the shards don't make a whole, OSError that names the file.
    """
    check_complete(index.entries)
    for entry in index.entries:
        path = unfinished / entry.file
        if not path.exists():
            raise ValueError(f"{path} is not seen on the first rank's host: choose a folder that all hosts share")
    path = unfinished / INDEX
    with naming(path):
        path.write_text(index.sealed())
    sync(path)
    sync(unfinished)
    finished = unfinished.with_name(unfinished.name.removesuffix(UNFINISHED))
    with naming(finished):
        os.replace(unfinished, finished)
    sync(finished.parent)
    return finished


class Checkpoint:
    """A checkpoint's folder, open to be read by one rank.

    Raises: ValueError that names the file, where the index is missing or not as it was written.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        path = self.folder / INDEX
        if not path.is_file():
            raise ValueError(f"{path}: missing; pass the folder of a whole checkpoint")
        try:
            self.index = Index.unsealed(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        self.readers = [ShardReader(self.folder, entry) for entry in self.index.entries]
        self.pieces: dict[tuple[str, str], list[tuple[ShardReader, Piece]]] = defaultdict(list)
        for reader in self.readers:
            for piece in reader.entry.pieces:
                self.pieces[piece.kind, piece.name].append((reader, piece))

    def verify(self, rank: int = 0, size: int = 1) -> None:
        """Read every `size`-th of the shards.

        Raises: ValueError that names the file that is missing, or not as it was written.
        """
        for reader in self.readers[rank::size]:
            reader.verify()

    def check(self, parts: Iterable[Part]) -> None:
        """Raise ValueError where parts are of another model."""
        for part in parts:
            part.check()
            if (part.kind, part.name) not in self.pieces:
                raise ValueError(f"{self.folder} has no {part}: {self._alternative(part)}")
            _, piece = self.pieces[part.kind, part.name][0]
            there, here = (piece.extent.shape, piece.torch_dtype), (part.extent.shape, part.tensor.dtype)
            if there != here:
                raise ValueError(f"{self.folder}: {part} is {there[0]} of {there[1]}, but here {here[0]} of {here[1]}")

    def _alternative(self, part: Part) -> str:
        """What there is instead of a part."""
        kinds = sorted(kind for kind, name in self.pieces if name == part.name)
        if kinds:
            return f"it has {', '.join(kinds)}"
        names = {name for kind, name in self.pieces if kind == part.kind}
        return f"it is of another model, of {len(names)} parameters"

    def fill(self, parts: Iterable[Part]) -> None:
        """Read parts into their tensors, reading of the shards only the blocks in which they lie.

        Raises: ValueError that names the file that is missing, or not as it was written.
        """
        for part in parts:
            runs, flat = part.extent.runs(), part.flat
            left = int(runs[:, 2].sum())
            if left < len(flat):
                flat.zero_()  # padding
            for reader, piece in self.pieces[part.kind, part.name]:
                common = meet(piece.runs, runs)
                reader.copy(piece, common, flat)
                left -= int(common[:, 2].sum())
            if left:
                raise ValueError(f"{self.folder}: {left} elements of {part} are in no shard")


def found(directory: Path) -> list[Path]:
    """The checkpoints in a directory, whole by their names, from the first to the last."""
    numbers = {path: NAME.fullmatch(path.name) for path in directory.iterdir()}
    whole = {path: int(match[1]) for path, match in numbers.items() if match and not match[3]}
    return sorted(whole, key=whole.__getitem__)


def newest(
    paths: Iterable[Path],
    check: Callable[[Path], None] = lambda path: Checkpoint(path).verify(),
    say: Callable[[str], None] = print,
) -> Path | None:
    """The last one of `paths` that is whole, by `check`; says of the others why they are passed over."""
    for path in reversed([*paths]):
        try:
            check(path)
        except (ValueError, OSError) as error:
            say(f"passed over a broken checkpoint: {error}")
        else:
            return path
    return None


def next_number(directory: Path) -> int:
    matches = [NAME.fullmatch(path.name) for path in directory.iterdir()]
    return max((int(match[1]) for match in matches if match), default=0) + 1


def remove_unfinished(directory: Path) -> None:
    for path in directory.glob(f"*{UNFINISHED}"):
        shutil.rmtree(path, ignore_errors=True)


def keep_last(directory: Path, keep: int) -> None:
    """Remove all but the last checkpoints.  One that is half removed doesn't look like one."""
    for path in found(directory)[:-keep]:
        os.replace(path, path.with_name(path.name + UNFINISHED))
    remove_unfinished(directory)
