"""Asynchronous checkpoints: all ranks write their shards in background threads; each is committed atomically."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from hashlib import blake2b
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

import collectives
from collectives.job.errors import InputError
from parallelism.checkpoint.folders import INDEX, UNFINISHED, Lock, complete_checkpoints, next_number, remove_unfinished
from parallelism.checkpoint.part import TensorShard
from parallelism.checkpoint.reading import Checkpoint, CheckpointLoader, Index, check_complete, sealed
from parallelism.checkpoint.shards import ShardEntry, checksums, sync, write_shard, writing


class Checkpoints(CheckpointLoader):
    """Keeps the last `keep` checkpoints of a run in `directory`, which all ranks of `comm` share.

    `save` copies the state and returns; a thread writes it.  `poll`, called after each step, commits a checkpoint once
    all ranks have written their shards; so do `wait` and the next `save`.  Until then, the previous checkpoint remains
    the newest, even if the job crashes.  All methods are collective.

    Raises: InputError if another run writes to the directory, or it is not shared by all ranks.
    """

    def __init__(
        self, directory: str | Path, comm: collectives.Communicator, keep: int = 3, say: Callable[[str], None] = print
    ):
        super().__init__(directory, comm, say)
        self.keep, self.keeper = keep, self._keeper()
        self._pending: tuple[Future[ShardEntry], Path, Index] | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        with comm.agreed("Checkpoints"):
            if keep < 1:
                raise ValueError(f"keep={keep} checkpoints must be at least 1")
            self._lock = Lock(self.directory, say) if comm.rank == self.keeper else None
        try:
            self.numbers = count(self._first_number())
        except BaseException:
            self.release()
            raise
        self._done = np.zeros(1, np.int64)
        self._all_done = comm.plan("all_reduce", self._done, op="min")

    def _keeper(self) -> int:
        """Return the rank that locks the directory, commits checkpoints in it, and removes old ones."""
        return 0

    def _first_number(self) -> int:
        """Return the next checkpoint's number, which is larger than every existing one."""
        firsts = self.comm.all_gather_object((self._lock.text, next_number(self.directory)) if self._lock else ("", 0))
        with self.comm.agreed("Checkpoints"):
            path = self.directory / "lock"
            if not path.exists() or path.read_text() != firsts[self.keeper][0]:
                raise ValueError(f"{self.directory} is not the first rank's: choose a folder that all hosts share")
            if self._lock:
                self._clean()
        return max(number for _, number in firsts)

    def _clean(self) -> None:
        """Remove what other runs have left unfinished."""
        remove_unfinished(self.directory)

    def save(self, step: int, parts: Iterable[TensorShard], whole: Mapping[str, Any]) -> None:
        """Start writing a checkpoint; the tensors may change once this has returned.

        Each rank passes its own parts; a part that several ranks hold must be the same on all, and is written once.
        `whole` is used on rank 0 only: small values that JSON can represent.

        Raises: InputError as `wait` does, for the previous checkpoint; for invalid parts, parts that differ between
        ranks, or values that are not JSON.
        """
        self.wait()
        folder = self.directory / f"{next(self.numbers):05}-step-{step}{UNFINISHED}"
        parts = list(parts)
        with self.comm.agreed("save"):
            for part in parts:
                part.check()
            try:
                metadata = json.loads(json.dumps(whole, allow_nan=False))
            except (TypeError, ValueError) as error:
                raise ValueError(f"a checkpoint's metadata must be JSON-serializable: {error}") from None
        offers = {identity(part): part for part in parts}
        of_ranks = self.comm.all_gather_object(sizes(offers))
        self._check(offers, of_ranks)
        with self.comm.agreed("save"):
            if self._lock:
                folder.mkdir()
        copies = [(offers[key], offers[key].compact()) for key in writers(of_ranks)[self.comm.rank]]
        written = self._thread.submit(self._write, folder, copies)
        self._pending = written, folder, Index(step, metadata, [])

    def _check(self, offers: Mapping[int, TensorShard], of_ranks: Sequence[Iterable[int]]) -> None:
        """Raise InputError for parts that differ between the ranks that hold them."""
        check_replicas(self.comm, offers, of_ranks)

    def _write(self, folder: Path, copies: Sequence[tuple[TensorShard, Tensor]]) -> ShardEntry:
        """Write this rank's shard, in a thread."""
        return write_finite(folder / file_of(self.comm.rank), copies)

    def _files(self, entries: Iterable[ShardEntry]) -> Iterable[str]:
        """Return the files that a complete checkpoint has in the directory."""
        return [entry.file for entry in entries]

    def _looks_whole(self, path: Path) -> bool:
        return path not in self._broken and looks_whole(path)

    @property
    def is_pending(self) -> bool:
        """Whether a checkpoint is being written, or is to be committed."""
        return self._pending is not None

    def poll(self) -> bool:
        """Commit the pending checkpoint, as `wait` does, if all shards are written; return whether none is pending."""
        if self._pending:
            written, _, _ = self._pending
            self._done[0] = written.done()
            if self._all_done()[0]:
                self.wait()
        return self._pending is None

    def wait(self) -> None:
        """Wait until all ranks have written their shards of the pending checkpoint, and commit it.

        Raises: InputError with the file that could not be written, or the tensor that is not finite; the previous
        checkpoint then remains the newest.
        """
        if self._pending is None:
            return
        (written, folder, index), self._pending = self._pending, None
        wait([written])
        try:
            with self.comm.agreed("checkpoint"):
                entry = written.result()
            entries = [each for each in self.comm.all_gather_object(entry) if each.pieces]
            with self.comm.agreed("checkpoint"):
                if self._lock:
                    check_visible(folder, self._files(entries))
                    commit(folder, index._replace(entries=entries))
                    keep_last(self.directory, self.keep, self._looks_whole)
        except InputError:
            if self._lock:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def close(self) -> None:
        """Wait for the pending checkpoint, and unlock the directory for other runs."""
        self.wait()
        self.release()

    def release(self) -> None:
        """Close without removing incomplete checkpoints; not collective, for a run that fails."""
        self._thread.shutdown()
        if self._lock:
            self._lock.release()


def write_finite(path: Path, copies: Sequence[tuple[TensorShard, Tensor]]) -> ShardEntry:
    """Write parts as `write_shard` does; raise ValueError for one that is not finite, before anything is written."""
    for part, flat in copies:
        if not is_finite(flat):
            raise ValueError(f"{part} is not finite, and no checkpoint was written: resume from an earlier one")
    return write_shard(path, copies)


def is_finite(x: Tensor) -> bool:
    """Return whether all elements are finite; one pass of a tenth of the time that `isfinite` takes on a CPU."""
    return not x.numel() or all(bound.isfinite() for bound in x.aminmax())


def check_replicas(
    comm: collectives.Communicator, offers: Mapping[int, TensorShard], of_ranks: Sequence[Iterable[int]]
) -> None:
    """Compare the checksums of each part that several ranks hold; `of_ranks` are the identities of each rank's parts.

    Raises: InputError on every rank, with the first part that differs, and each checksum's ranks.  Collective.
    """
    counts = Counter(chain(*of_ranks))
    if max(counts.values(), default=1) == 1:
        return
    own = {key: tuple(checksums(part.compact())) for key, part in offers.items() if counts[key] > 1}
    remedy = "no checkpoint was written; resume from an earlier one"
    refuse_different(comm, offers, comm.all_gather_object(own), "its CRC-32", remedy)


def refuse_different(
    comm: collectives.Communicator,
    offers: Mapping[int, TensorShard],
    of_ranks: Sequence[Mapping[int, tuple[Any, ...]]],
    what: str,
    remedy: str,
) -> None:
    """Compare the numbers, `what`, that each rank has for its parts, of which `offers` are this rank's.

    Raises: InputError on every rank, with the first part whose numbers differ, and each one's ranks.  Collective.
    """
    ranks: dict[int, dict[tuple[Any, ...], list[int]]] = defaultdict(lambda: defaultdict(list))  # by part and numbers
    for rank, numbers in enumerate(of_ranks):
        for key in numbers:
            ranks[key][numbers[key]].append(rank)
    different = {key: holders for key, holders in ranks.items() if len(holders) > 1}
    if not different:
        return
    key, holders = next(iter(different.items()))
    name = comm.broadcast_object(str(offers.get(key)), min(chain(*holders.values())))
    block = next(index for index, values in enumerate(zip(*holders, strict=True)) if len(set(values)) > 1)
    words = [f"{numbers[block]:08x} on rank {', '.join(map(str, its))}" for numbers, its in holders.items()]
    more = f" ({len(different)} tensors differ)" if len(different) > 1 else ""
    raise InputError(
        f"{name} should be the same on all ranks that hold it, but {what} is {' and '.join(words)}{more}: {remedy}"
    )


def file_of(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def sizes(offers: Mapping[int, TensorShard]) -> dict[int, int]:
    """Return the bytes of each part."""
    return {key: part.extent.length * part.tensor.element_size() for key, part in offers.items()}


def identity(part: TensorShard) -> int:
    """Return a 63-bit hash that two ranks compute equally for the same part of the same tensor."""
    text = json.dumps([part.name, part.kind, part.extent])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def writers(offers: Sequence[Mapping[int, int]]) -> list[list[int]]:
    """Assign each part to one of the ranks that hold it, balancing bytes; return each rank's parts.

    `offers` maps, for each rank, the identities of its parts to their sizes.

    >>> writers([{1: 100, 2: 60, 3: 30}, {1: 100, 2: 60, 4: 10}])
    [[1, 3], [2, 4]]
    """
    holders: dict[int, list[int]] = defaultdict(list)
    for rank, sizes in enumerate(offers):
        for key in sizes:
            holders[key].append(rank)
    load = [0] * len(offers)
    mine: list[list[int]] = [[] for _ in offers]
    for key in sorted(holders, key=lambda key: (-offers[holders[key][0]][key], key)):
        rank = min(holders[key], key=load.__getitem__)
        load[rank] += offers[rank][key]
        mine[rank].append(key)
    return mine


def check_visible(folder: Path, files: Iterable[str]) -> None:
    """Raise ValueError for a file that is not in a folder."""
    for path in map(folder.joinpath, files):
        if not path.exists():
            raise ValueError(f"{path} is not visible on the first rank's host: choose a folder that all hosts share")


def commit(unfinished: Path, index: Index) -> Path:
    """Turn a folder that contains all shards into a valid checkpoint; return its final name.

    Raises: ValueError if the shards are incomplete; OSError with the file's name.
    """
    check_complete(index.entries)
    path = unfinished / INDEX
    with writing(path):
        path.write_text(sealed(index._asdict()))
    sync(path)
    sync(unfinished)
    finished = unfinished.with_name(unfinished.name.removesuffix(UNFINISHED))
    with writing(finished):
        os.replace(unfinished, finished)
    sync(finished.parent)
    return finished


def keep_last(directory: Path, keep: int, is_whole: Callable[[Path], bool]) -> None:
    """Remove all checkpoints before the last `keep` complete ones, which `is_whole` tells, and partly removed ones."""
    paths, whole = complete_checkpoints(directory), 0
    while paths and whole < keep:
        whole += is_whole(paths.pop())
    for path in paths:
        os.replace(path, path.with_name(path.name + UNFINISHED))
    remove_unfinished(directory)


def looks_whole(path: Path) -> bool:
    """Return whether all shards are there, and as long as they were written; they are not read."""
    try:
        for reader in Checkpoint(path).readers:
            reader.check_file()
    except (ValueError, OSError):
        return False
    return True
