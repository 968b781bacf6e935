"""Tokens from text or .bin files, and the windows of them that a model is trained on."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import numpy as np

LLMC_MAGIC = 20240520
LLAMA3_MAGIC = 20240801
LLMC_HEADER_BYTES = 256 * 4


class Tokens(NamedTuple):
    ids: np.ndarray  # uint8 or uint16
    vocab_size: int
    name: str
    is_text: bool  # the ids are bytes of UTF-8


def language_reference() -> bytes:
    """Return the parts of Python's language reference that every CPython carries for `help()`."""
    return "\n".join(topics[key] for key in sorted(topics)).encode()


def load_tokens(paths: list[str]) -> Tokens:
    """Read files one after another, or the language reference if there are none.

    A .bin file holds uint16 tokens, as nanoGPT writes them or, with a header, llm.c; a single one is
    memory-mapped. Any other file is UTF-8 text, and its tokens are its bytes.

    Raises: ValueError naming the path and what to do.
    """
    if not paths:
        ids = np.frombuffer(language_reference(), np.uint8)
        return Tokens(ids, 256, "Python language reference", is_text=True)
    binary = [path for path in paths if path.endswith(".bin")]
    text = [path for path in paths if not path.endswith(".bin")]
    if binary and text:
        raise ValueError(f"{binary[0]} holds tokens and {text[0]} text; pass files of one kind")
    parts = [*map(read_bin, binary), *map(read_text, text)]
    ids = parts[0] if len(parts) == 1 else np.concatenate(parts)
    name = " + ".join(Path(path).name for path in paths)
    return Tokens(ids, bin_vocab_size(ids) if binary else 256, name, is_text=not binary)


def read_text(path: str) -> np.ndarray:
    with reading(path):
        data = Path(path).read_bytes()
    if not data:
        raise ValueError(f"{path}: empty; pass a file with text in it")
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: byte {error.start} is not UTF-8; convert it, or name it .bin if it holds tokens"
        ) from None
    return np.frombuffer(data, np.uint8)


def read_bin(path: str) -> np.ndarray:
    with reading(path):
        num_bytes = os.path.getsize(path)
        header = np.fromfile(path, "<i4", LLMC_HEADER_BYTES // 4)
    # No GPT-2 tokens begin like either magic: its lower half, read as uint16, is beyond 50256.
    magic = header[0] if len(header) else None
    if magic == LLAMA3_MAGIC:
        raise ValueError(f"{path}: llama-3 tokens of llm.c, which are uint32; pass uint16 (GPT-2) tokens")
    if magic == LLMC_MAGIC:
        check_llmc(path, header, num_bytes)
    elif num_bytes % 2:
        raise ValueError(f"{path}: {num_bytes} bytes, an odd number, can't be uint16 tokens; if it is text, rename it")
    offset = LLMC_HEADER_BYTES if magic == LLMC_MAGIC else 0
    if num_bytes == offset:
        raise ValueError(f"{path}: empty; pass a file with tokens in it")
    return np.asarray(np.memmap(path, "<u2", "r", offset))


def check_llmc(path: str, header: np.ndarray, num_bytes: int):
    if len(header) < LLMC_HEADER_BYTES // 4:
        raise ValueError(f"{path}: {num_bytes} bytes, less than llm.c's header of {LLMC_HEADER_BYTES}; write it again")
    version, num_tokens = header[1:3]
    if version != 1:
        raise ValueError(f"{path}: version {version} of llm.c's format; write it again as version 1")
    found = (num_bytes - LLMC_HEADER_BYTES) / 2
    if num_tokens != found:
        raise ValueError(f"{path}: {num_tokens} tokens by its header, {found:g} by its size; write it again")


@contextmanager
def reading(path: str) -> Iterator[None]:
    try:
        if not stat.S_ISREG(mode := os.stat(path).st_mode) and not stat.S_ISDIR(mode):
            raise ValueError(f"{path}: no regular file; pass one that every rank can read from its beginning")
        yield
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; check the path") from None
    except IsADirectoryError:
        raise ValueError(f"{path}: a directory; pass the files in it") from None
    except OSError as error:
        raise ValueError(f"{path}: can't be read ({error.strerror}); check its permissions") from error


def bin_vocab_size(ids: np.ndarray) -> int:
    # GPT-2's vocabulary, whichever of its tokens occur; beyond it, a multiple of 64, which splits evenly
    # over ranks and fills the tiles of a matrix unit.
    largest = int(ids.max())
    return 50257 if largest < 50257 else (largest // 64 + 1) * 64


def split(tokens: Tokens, val_fraction: float, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids to train on and, from the end, the ids to validate on, enough for `TokenWindows` of each."""
    if not 0 < val_fraction < 1:
        raise ValueError(f"val_fraction={val_fraction} must be between 0 and 1, for example 0.1")
    num_val = int(len(tokens.ids) * val_fraction)
    num_train = len(tokens.ids) - num_val
    largest = min(num_train // 2, num_val - 1)
    if block_size > largest:
        remedy = f"use block_size={largest} or less" if largest > 0 else "pass a longer text"
        raise ValueError(
            f"{tokens.name}: {num_train} tokens to train and {num_val} to validate on are too few for "
            f"block_size={block_size}; {remedy}"
        )
    return tokens.ids[:num_train], tokens.ids[num_train:]


class TokenWindows:
    """Windows that tile `ids`, in each epoch from another phase in [0, block_size).

    Their number is the same in every epoch: it is that at the largest phase. With seed=None the phase
    stays 0, to validate on the same windows each time.
    """

    def __init__(self, ids: np.ndarray, block_size: int, seed: int | None):
        largest = len(ids) - 1 if seed is None else len(ids) // 2
        if not 1 <= block_size <= largest:
            raise ValueError(f"block_size={block_size} for {len(ids)} tokens: use 1 to {largest}")
        if seed is not None and not 0 <= seed < 2**63:
            raise ValueError(f"seed={seed} must be from 0 to 2**63 - 1")
        self.ids = ids
        self.block_size = block_size
        self.seed = seed
        self.set_epoch(0)

    def __len__(self) -> int:
        max_phase = 0 if self.seed is None else self.block_size - 1
        return (len(self.ids) - 1 - max_phase) // self.block_size

    def set_epoch(self, epoch: int):
        if epoch < 0:
            raise ValueError(f"epoch={epoch} must be at least 0")
        self.phase = 0 if self.seed is None else draw(self.seed, epoch) % self.block_size

    def batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return windows(self.ids, self.phase + np.asarray(indices) * self.block_size, self.block_size)


def draw(seed: int, epoch: int) -> int:
    # Raw bits are the same in every version of NumPy. The last word of the counter names a stream: 0 is
    # left to a shuffle keyed by the same seed and epoch.
    philox = np.random.Philox(key=[seed, epoch], counter=[0, 0, 0, 1])
    return int(philox.random_raw())


def windows(ids: np.ndarray, starts: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `block_size` ids from each start and the ids that follow each of them, as int64.

    Shapes: starts (batch,), results (batch, seq).
    """
    last = len(ids) - block_size - 1
    outside = [int(start) for start in starts if not 0 <= start <= last]
    if outside:
        raise ValueError(f"a window of {block_size} can't start at {outside[0]} in {len(ids)} ids: use 0 to {last}")
    positions = np.asarray(starts)[:, None] + np.arange(block_size)  # (batch, seq)
    return ids[positions].astype(np.int64), ids[positions + 1].astype(np.int64)


def documents(ids: np.ndarray, end: int) -> np.ndarray:
    """Number each token's document, where each document ends with token `end`.

    Shapes: ids and result (batch, seq).

    >>> documents(np.array([[7, 0, 7, 7, 0, 0, 7]]), end=0).tolist()
    [[0, 0, 1, 1, 1, 2, 3]]
    """
    ends = ids == end
    return np.cumsum(ends, axis=1) - ends
