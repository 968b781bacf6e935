"""Shard files: one rank's part of a checkpoint, written and read in blocks with checksums.

A shard is a safetensors file of flat tensors.  Its entry in the checkpoint's JSON index describes its contents: name,
kind, dtype and extent of each tensor, the CRC-32 of each of its blocks, and that of the file's header.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from isal.isal_zlib import crc32
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from parallelism.checkpoint.extent import Extent, LocalShard
from parallelism.checkpoint.folders import naming
from parallelism.checkpoint.part import TensorShard
from parallelism.placement import Shard

MOST_DIMS = 64  # of a tensor in torch
BLOCK_BYTES = 4 << 20  # smallest unit that is read, as a checksum covers all of it


class Piece(NamedTuple):
    """A tensor in a shard file, of `length` elements; the padding of its extent is not stored."""

    name: str
    kind: str
    dtype: str
    extent: Extent
    length: int
    block_bytes: int
    checksums: Sequence[int] = ()

    @classmethod
    def of(cls, part: TensorShard, flat: Tensor) -> Piece:
        dtype = str(flat.dtype).removeprefix("torch.")
        piece = cls(part.name, part.kind, dtype, part.extent, len(flat), BLOCK_BYTES)
        return piece._replace(checksums=checksums(flat))

    @classmethod
    def from_json(cls, values: list[Any]) -> Piece:
        """Parse a tensor in the index; raise an error of some type if no shard file can contain this."""
        piece = cls(*values)
        texts, numbers = (piece.name, piece.kind, piece.dtype), (piece.length, piece.block_bytes, *piece.checksums)
        if not (all(isinstance(text, str) for text in texts) and all(map(is_count, numbers))):
            raise ValueError(f"{piece.name}: names must be strings, and lengths and checksums whole numbers")
        if not isinstance(getattr(torch, piece.dtype, None), torch.dtype):
            raise ValueError(f"{piece.name}: {piece.dtype!r} is not a dtype")
        shape, begin, length, shards = piece.extent
        if len(shape) > MOST_DIMS:
            raise ValueError(f"{piece.name}: {len(shape)} dims")
        local = tuple(LocalShard(Shard(*shard), rank, size) for shard, rank, size in shards)
        piece = piece._replace(extent=Extent(tuple(shape), begin, length, local))
        if not piece.block_length > 0 or len(piece.checksums) != max(1, -(-piece.length // piece.block_length)):
            raise ValueError(f"{piece.key}: {len(piece.checksums)} checksums for {piece.length} elements")
        if piece.runs[:, 2].sum() != piece.length:
            raise ValueError(f"{piece.key}: {piece.length} elements, but its extent has others")
        return piece

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.name}[{self.extent.begin}:{self.extent.end}]"

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def block_length(self) -> int:
        return self.block_bytes // self.torch_dtype.itemsize

    @property
    def runs(self) -> np.ndarray:
        """Runs of the extent as they are stored, without gaps."""
        runs = self.extent.runs()
        return np.column_stack([np.cumsum(runs[:, 2]) - runs[:, 2], runs[:, 1:]])

    @property
    def nbytes(self) -> int:
        return self.length * self.torch_dtype.itemsize

    def blocks(self, flat: Tensor) -> list[int]:
        """Return the checksums of a tensor's blocks."""
        return checksums(flat, self.block_length)


def checksums(flat: Tensor, block_length: int = 0) -> list[int]:
    """Return the CRC-32 of each block of a tensor on the host, by default of `BLOCK_BYTES`."""
    blocks = flat.split(block_length or BLOCK_BYTES // flat.element_size())
    return [crc32(memoryview(block.view(torch.uint8).numpy())) for block in blocks]


class ShardEntry(NamedTuple):
    """A shard file in the index."""

    file: str
    nbytes: int
    header_checksum: int
    pieces: Sequence[Piece]

    @classmethod
    def from_json(cls, values: list[Any]) -> ShardEntry:
        """Parse a shard file in the index; raise an error of some type if no checkpoint's folder can contain this."""
        file, nbytes, header_checksum, pieces = values
        if Path(file).name != file or not (is_count(nbytes) and is_count(header_checksum)):
            raise ValueError(f"{file!r} of {nbytes!r} bytes is not a shard file")
        return cls(file, nbytes, header_checksum, [Piece.from_json(piece) for piece in pieces])

    @property
    def header_bytes(self) -> int:
        return self.nbytes - sum(piece.nbytes for piece in self.pieces)


def is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Add the file's name and the remedy to errors of the system and of safetensors."""
    try:
        with naming(path):
            yield
    except OSError as error:
        raise OSError(f"{error}: free some space, or use another folder") from None


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk."""
    with writing(path):
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def write_shard(path: Path, parts: Sequence[tuple[TensorShard, Tensor]]) -> ShardEntry:
    """Write parts, given their compact copies, and flush them to disk; raise OSError with the file's name.

    Without parts there is no file.
    """
    pieces = [Piece.of(part, flat) for part, flat in parts]
    if not pieces:
        return ShardEntry(path.name, 0, 0, [])
    with writing(path):
        save_file({piece.key: flat for piece, (_, flat) in zip(pieces, parts, strict=True)}, path)
        path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors restricts access to the owner
        nbytes = path.stat().st_size
    sync(path)
    entry = ShardEntry(path.name, nbytes, 0, pieces)
    return entry._replace(header_checksum=crc32(head(path, entry.header_bytes)))


def head(path: Path, nbytes: int) -> bytes:
    with naming(path), path.open("rb") as file:
        return file.read(nbytes)


class ShardReader:
    """Reads the blocks of a shard file, and verifies their checksums.

    Raises: ValueError with the file's name if it is missing or damaged.
    """

    def __init__(self, folder: Path, entry: ShardEntry):
        self.path, self.entry = folder / entry.file, entry

    def check_file(self) -> None:
        if not self.path.is_file():
            raise ValueError(f"{self.path}: missing")
        nbytes = self.path.stat().st_size
        if nbytes != self.entry.nbytes:
            raise ValueError(f"{self.path}: of {nbytes} bytes, but {self.entry.nbytes} were written")

    @cached_property
    def file(self) -> Any:
        self.check_file()
        if crc32(head(self.path, self.entry.header_bytes)) != self.entry.header_checksum:
            raise ValueError(f"{self.path}: the header is not what was written, by its checksum")
        with naming(self.path):
            return safe_open(self.path, "pt")

    def block(self, piece: Piece, number: int) -> Tensor:
        begin = number * piece.block_length
        with naming(self.path):
            block = self.file.get_slice(piece.key)[begin : begin + piece.block_length]
        if piece.blocks(block) != [piece.checksums[number]]:
            raise ValueError(f"{self.path}: {piece.key} is not what was written, by the checksum of block {number}")
        return block

    def copy(self, piece: Piece, common: np.ndarray, flat: Tensor) -> None:
        """Copy a piece's elements to `flat`; `common` has rows of start in the piece, start in `flat`, count."""
        at, block = -1, flat
        for here, there, count in common.tolist():
            end = here + count
            while here < end:
                number, offset = divmod(here, piece.block_length)
                if number != at:
                    at, block = number, self.block(piece, number)
                step = min(end - here, piece.block_length - offset)
                flat[there : there + step] = block[offset : offset + step]
                here, there = here + step, there + step

    def verify(self) -> None:
        """Read the whole file, to verify its checksums."""
        assert self.file
        for piece in self.entry.pieces:
            for number in range(len(piece.checksums)):
                self.block(piece, number)
