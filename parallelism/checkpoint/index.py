"""Checkpoint index: a small file that lists the shards, and whose presence completes the checkpoint."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

from parallelism.checkpoint.shards import ShardEntry, is_count

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
