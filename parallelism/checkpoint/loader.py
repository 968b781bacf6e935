"""Load checkpoints into any layout; read-only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

import collectives
from collectives.job.errors import InputError
from parallelism.checkpoint.folders import complete_checkpoints, newest
from parallelism.checkpoint.part import TensorShard
from parallelism.checkpoint.reading import Checkpoint

BLOCK, MOST_BLOCKS = 1 << 22, 64  # tokens per block, and blocks, that a fingerprint samples
ANYTHING: Mapping[str, Any] = MappingProxyType({})


class LoadedState(NamedTuple):
    """State in a checkpoint other than tensors."""

    path: Path
    step: int
    whole: Mapping[str, Any]


class CheckpointLoader:
    """Finds and loads checkpoints in `directory`, which all ranks of `comm` share.  All methods are collective."""

    def __init__(self, directory: str | Path, comm: collectives.Communicator, say: Callable[[str], None] = print):
        self.directory, self.comm, self.say = Path(directory), comm, say
        self._broken: set[Path] = set()  # skipped because they are damaged

    def newest(self) -> Path | None:
        """Return the newest checkpoint whose shards all verify (each is read by one of the ranks), or None."""
        with self.comm.agreed("newest"):
            paths = complete_checkpoints(self.directory) if self.comm.rank == 0 else []
        names = self.comm.broadcast_object([path.name for path in paths])
        return newest([self.directory / name for name in names], self._check, self.say)

    def _check(self, path: Path) -> None:
        self._broken.add(path)
        with self.comm.agreed("newest"):
            Checkpoint(path).verify(self.comm.rank, self.comm.size)
        self._broken.remove(path)

    def load(self, parts: Iterable[TensorShard], path: str | Path, same: Mapping[str, Any] = ANYTHING) -> LoadedState:
        """Fill parts from a checkpoint of the same model in any layout; each rank reads the parts that it requests.

        The checkpoint's other state must have the values in `same`.

        Raises: InputError if it is of another model, or a file is missing or damaged.
        """
        parts = list(parts)
        with self.comm.agreed("load"):
            checkpoint = Checkpoint(path)
            check_same(checkpoint.folder, checkpoint.index.whole, same)
            checkpoint.check(parts)
        self._check_all_asked(checkpoint, parts)
        with self.comm.agreed("load"):
            checkpoint.fill(parts)
        index = checkpoint.index
        return LoadedState(checkpoint.folder, index.step, index.whole)

    def _check_all_asked(self, checkpoint: Checkpoint, parts: Sequence[TensorShard]) -> None:
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
