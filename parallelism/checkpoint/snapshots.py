"""Snapshots: checkpoints in the memory of the hosts, each shard on its rank's host and on the next one.

They outlive the processes of a job, and the loss of hosts of which no two are neighbours.  A folder of each host has
the index, and the shards of its ranks and of those of the host before it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

import collectives
from collectives.algorithms.groups import Topology
from collectives.job.launch import keep_in_flight
from parallelism.checkpoint.checkpoints import Checkpoints, file_of, identity, sizes, writers
from parallelism.checkpoint.extent import intersection
from parallelism.checkpoint.folders import INDEX, UNFINISHED, complete_checkpoints, number_of
from parallelism.checkpoint.part import TensorShard
from parallelism.checkpoint.reading import Checkpoint, Index
from parallelism.checkpoint.shards import ShardEntry, ShardReader, writing

if TYPE_CHECKING:
    from mpi4py import MPI

KEEP = 2
POLL_S = 1e-3
CHUNK_BYTES = 1 << 30  # of a message
ABSENT = -1  # in place of the length of a file that could not be written


class Snapshots(Checkpoints):
    """Keeps the last two snapshots of a run in `directory`, a folder that the ranks of each host share.

    They are written and loaded as checkpoints are, by a thread that also sends each shard to a rank of the next host.
    Replicas are not compared.  `topology` has the hosts, by default those of `comm`.

    Raises: InputError as Checkpoints does, and if MPI was not started for threads that communicate.
    """

    def __init__(self, directory: str | Path, comm: collectives.Communicator, topology: Topology | None = None):
        from mpi4py import MPI  # comm has started it

        self.topology = topology or comm.topology
        self.node = self.topology.node_of[comm.rank]
        self.buddies = buddies_of(self.topology)
        self.released = False
        self._in_flight: list[MPI.Request] = []
        with comm.agreed("Snapshots"):
            if len(self.topology.nodes) > 1 and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
                raise ValueError("snapshots on several hosts need an MPI started with THREAD_MULTIPLE: omit them")
        self.messages = comm.mpi.Dup()
        super().__init__(directory, comm, KEEP, say=lambda line: None)

    def _keeper(self) -> int:
        return self.topology.nodes[self.node][0]

    def _clean(self) -> None:
        """Keep unfinished snapshots, which have shards that the finished ones of other hosts may lack."""

    def _check(self, offers: Mapping[int, TensorShard], of_ranks: Sequence[Iterable[int]]) -> None:
        """Leave the comparison of replicas to checkpoints."""

    def reserve(self, parts: Iterable[TensorShard]) -> None:
        """Raise InputError if a host's folder has too little memory for snapshots of these parts.  Collective."""
        of_ranks = self.comm.all_gather_object(sizes({identity(part): part for part in parts}))
        per_rank = [sum(of_ranks[rank][key] for key in keys) for rank, keys in enumerate(writers(of_ranks))]
        here = sum(per_rank[rank] for rank in self._ranks_here())
        with self.comm.agreed("snapshots"):
            used = sum(path.stat().st_size for path in self.directory.rglob("*") if path.is_file())
            free = shutil.disk_usage(self.directory).free + used
            if (needed := (KEEP + 1) * here) > free:
                raise ValueError(
                    f"snapshots: {KEEP + 1} of {here:,} bytes need {needed:,} bytes in {self.directory}, which has "
                    f"{free:,}: use more hosts, a larger --snapshot_dir, or omit --snapshot_interval"
                )

    def _ranks_here(self) -> list[int]:
        """Return the ranks whose shards are on this host."""
        node_of = self.topology.node_of
        return [rank for rank, buddy in enumerate(self.buddies) if self.node in (node_of[rank], node_of[buddy])]

    def _files(self, entries: Iterable[ShardEntry]) -> Iterable[str]:
        return {entry.file for entry in entries} & {*map(file_of, self._ranks_here())}

    def _looks_whole(self, path: Path) -> bool:
        return (path / INDEX).exists()

    def _write(self, folder: Path, copies: Sequence[tuple[TensorShard, Tensor]]) -> ShardEntry:
        """Write this rank's shard, send it to its buddy, and write the shards whose buddy this rank is."""
        rank, buddy, failures, sent = self.comm.rank, self.buddies[self.comm.rank], [], []
        entry = ShardEntry(file_of(rank), 0, 0, [])
        try:
            entry = super()._write(folder, copies)
        except (OSError, ValueError) as error:  # the others wait for messages
            failures.append(error)
        if buddy != rank:
            sent = self._send(folder / file_of(rank), buddy, bool(failures))
        for source in [other for other, its in enumerate(self.buddies) if its == rank != other]:
            try:
                self._receive(folder / file_of(source), source)
            except OSError as error:
                failures.append(error)
        self._finish(sent)
        if failures:
            raise failures[0]
        return entry

    def _send(self, path: Path, dest: int, failed: bool = False) -> list[MPI.Request]:
        """Start to send a file; a rank that has no shard sends none."""
        nbytes = ABSENT if failed or not path.exists() else path.stat().st_size
        file = np.memmap(path, np.uint8, "r") if nbytes > 0 else np.empty(0, np.uint8)
        chunks = [file[begin : begin + CHUNK_BYTES] for begin in range(0, len(file), CHUNK_BYTES)]
        return self._started(self.messages.Isend(part, dest) for part in (np.array([nbytes]), *chunks))

    def _receive(self, path: Path, source: int) -> None:
        """Write the file that another rank sends; raise OSError, once it has come, if there is no memory for it."""
        nbytes, failure = np.empty(1, np.int64), None
        self._finish(self._started([self.messages.Irecv(nbytes, source)]))
        if nbytes[0] == ABSENT:
            return
        try:
            file = mapped(path, int(nbytes[0]))
        except OSError as error:
            file, failure = np.empty(nbytes[0], np.uint8), error
        for begin in range(0, len(file), CHUNK_BYTES):
            self._finish(self._started([self.messages.Irecv(file[begin : begin + CHUNK_BYTES], source)]))
        if failure:
            raise failure

    def _started(self, requests: Iterable[MPI.Request]) -> list[MPI.Request]:
        """Note requests as in flight, in place of those that are complete; return them."""
        started = [*requests]
        self._in_flight = [*filter(None, self._in_flight), *started]
        return started

    def _finish(self, requests: list[MPI.Request]) -> None:
        """Wait for messages, without a core; not for those of ranks that have died, once the run is left."""
        while not all(request.Test() for request in requests):
            if self.released:
                raise RuntimeError("the run has been left")
            time.sleep(POLL_S)

    def newest(self, after: int = 0) -> Path | None:
        """Return the newest snapshot of which a host that is left has each shard, verified, or None.

        Each host has its folder then, with the shards that were there.
        """
        self._holders: dict[str, list[int]] = {}
        for name, text in self._indices(after):
            index, folder = Index.unsealed(text), self._folder(name)
            held = [entry.file for entry in self._to_verify(index.entries) if is_sound(folder, entry)]
            holders: dict[str, list[int]] = defaultdict(list)
            for rank, files in enumerate(self.comm.all_gather_object(held)):
                for file in files:
                    holders[file].append(self.topology.node_of[rank])
            if all(entry.file in holders for entry in index.entries):
                self._holders = holders
                with self.comm.agreed("snapshots"):
                    if self._lock:
                        finish(folder, self.directory / name, text)
                return self.directory / name
        return None

    def _indices(self, after: int) -> list[tuple[str, str]]:
        """Return the names and intact indices of all hosts' snapshots above a number, the newest first."""
        own: dict[str, str] = {}
        for path in complete_checkpoints(self.directory) if self._lock else ():
            with suppress(ValueError, OSError):
                Index.unsealed(text := (path / INDEX).read_text())
                own[path.name] = text
        indices = {name: text for there in self.comm.all_gather_object(own) for name, text in there.items()}
        indices = {name: text for name, text in indices.items() if number_of(Path(name)) > after}
        return sorted(indices.items(), key=lambda item: number_of(Path(item[0])), reverse=True)

    def _folder(self, name: str) -> Path:
        """Return this host's folder of a snapshot, which may be unfinished here."""
        path = self.directory / name
        return path if path.exists() else path.with_name(name + UNFINISHED)

    def _to_verify(self, entries: Sequence[ShardEntry]) -> Sequence[ShardEntry]:
        """Return the shards that this rank verifies, of those that its host may have."""
        ranks = self.topology.nodes[self.node]
        return entries[ranks.index(self.comm.rank) :: len(ranks)]

    def load(self, parts: Iterable[TensorShard], path: str | Path, same: Mapping[str, Any] | None = None) -> Index:
        """Fill parts as Checkpoints does, once each host has fetched the shards that its ranks need.

        `path` is that of the newest snapshot.
        """
        parts = list(parts)
        with self.comm.agreed("load"):
            needed = {reader.entry.file for reader in readers_of(Checkpoint(path), parts)}
        missing = sorted(file for file in needed if self.node not in self._holders[file])
        of_ranks = zip(self.topology.node_of, self.comm.all_gather_object(missing), strict=True)
        wanted = {(file, node) for node, files in of_ranks for file in files}
        nodes = self.topology.nodes
        for file, node in sorted(wanted):
            source, dest = nodes[min(self._holders[file])][0], nodes[node][0]
            if self.comm.rank == source:
                self._finish(self._send(Path(path) / file, dest))
            if self.comm.rank == dest:
                self._receive(Path(path) / file, source)
        return super().load(parts, path, same)

    def clear(self) -> None:
        """Remove all snapshots, of a run that does not resume from one."""
        for path in self.directory.glob("*-step-*") if self._lock else ():
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Remove all snapshots and their folder, as the run has come to its end.  Collective."""
        super().close()
        self.messages.Free()
        if self.comm.rank == self.keeper:
            shutil.rmtree(self.directory, ignore_errors=True)

    def release(self) -> None:
        """Close without removing snapshots; not collective, for a run that fails."""
        self.released = True
        super().release()
        keep_in_flight(self._in_flight)


def buddies_of(topology: Topology) -> list[int]:
    """Return for each rank the one to which it sends its shard: on the next host, itself where there is one host.

    >>> buddies_of(Topology.from_ids([0, 0, 1, 2]))
    [2, 2, 3, 0]
    """
    nodes, buddies = topology.nodes, [*range(len(topology.node_of))]
    for node, following in zip(nodes, (*nodes[1:], nodes[0]), strict=True):
        for index, rank in enumerate(node):
            buddies[rank] = following[index % len(following)]
    return buddies


def mapped(path: Path, nbytes: int) -> np.ndarray:
    """Return the bytes of a new file, for which there is memory, as the system would end a process that finds none."""
    with writing(path):
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        return np.memmap(path, np.uint8, "r+")


def is_sound(folder: Path, entry: ShardEntry) -> bool:
    """Return whether a shard is there, and is what was written, which reads it."""
    try:
        ShardReader(folder, entry).verify()
    except (ValueError, OSError):
        return False
    return True


def finish(folder: Path, final: Path, index: str) -> None:
    """Have a snapshot's folder at its final path, with the index."""
    folder.mkdir(exist_ok=True)
    (folder / INDEX).write_text(index)
    folder.replace(final)


def readers_of(checkpoint: Checkpoint, parts: Iterable[TensorShard]) -> Iterable[ShardReader]:
    """Yield the readers of the shards that have elements of these parts."""
    for part in parts:
        runs = part.extent.runs()
        for reader, piece in checkpoint.pieces.get((part.kind, part.name), ()):
            if len(intersection(piece.runs, runs)):
                yield reader
