"""Token files, read lazily: .bin files of nanoGPT and llm.c, joined to one sequence."""

from __future__ import annotations

import os
import stat
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np

from training.settings.ranges import VOCABULARY

# llm.c's formats: magic number, version, and type of a token.
LLMC_FORMATS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
LLMC_HEADER_BYTES = 256 * 4
TOKEN_DTYPES = {"uint16": "<u2", "uint32": "<u4", "int32": "<i4", "int64": "<i8"}
# Ways to read a file without a header.  Read as unsigned, a negative number exceeds every vocabulary.
READINGS = {"uint16": "<u2", "uint32": "<u4", "int64": "<u8"}
GPT2_VOCABULARY = 50257
SAMPLE_BYTES, SAMPLES = 1 << 20, 16  # of a file, from which its dtype follows


class TokenFile:
    """Tokens of a .bin file.  It is read, not mapped, because mapped pages would count as this process's memory.

    Their dtype is that of the file's header, or else `token_dtype`, or else follows from the vocabulary's size.

    Raises: ValueError with the path and the remedy.
    """

    def __init__(self, path: str, token_dtype: str | None = None, vocab_size: int | None = None):
        with reading(path):
            num_bytes = os.path.getsize(path)
            header = np.fromfile(path, "<i4", LLMC_HEADER_BYTES // 4)
        # GPT-2 tokens cannot begin like a magic number: its lower half, read as uint16, exceeds 50256.
        is_llmc = len(header) and int(header[0]) in LLMC_FORMATS
        self.path, self.offset = path, LLMC_HEADER_BYTES if is_llmc else 0
        if is_llmc:
            check_llmc(path, header, num_bytes)
            self.dtype = np.dtype(LLMC_FORMATS[int(header[0])][1])
            if token_dtype not in (None, self.dtype.name):
                raise ValueError(f"{path}: token_dtype={token_dtype}, but {self.dtype.name} by its header; omit it")
        size = num_bytes - self.offset
        if not size:
            raise ValueError(f"{path}: empty; pass a file with tokens in it")
        if not is_llmc:
            self.dtype = np.dtype(TOKEN_DTYPES[token_dtype or infer_dtype(path, num_bytes, vocab_size)])
        if size % self.dtype.itemsize:
            raise ValueError(
                f"{path}: {num_bytes} bytes can't be {self.dtype.name} tokens of {self.dtype.itemsize} bytes; "
                "if it is text, rename it"
            )
        self.length = size // self.dtype.itemsize

    def __len__(self) -> int:
        return self.length

    @cached_property
    def _file(self) -> int:
        return os.open(self.path, os.O_RDONLY)

    def __del__(self) -> None:
        if "_file" in self.__dict__:
            os.close(self._file)

    def read(self, start: int, stop: int) -> np.ndarray:
        width = self.dtype.itemsize
        data = os.pread(self._file, (stop - start) * width, self.offset + start * width)
        return np.frombuffer(data, self.dtype)


class TokenSequence:
    """Concatenated tokens of several files or arrays.  A slice is a view, which `np.asarray` reads.

    >>> ids = TokenSequence([np.array([1, 2, 3]), np.array([4, 5])])
    >>> len(ids), np.asarray(ids[1:4]), np.asarray(ids[3:][1:])
    (5, array([2, 3, 4]), array([5]))
    """

    def __init__(self, parts: Sequence[TokenFile | np.ndarray], start: int = 0, stop: int | None = None):
        self.parts = parts
        self.ends = list(accumulate(map(len, parts)))
        self.start, self.stop = start, self.ends[-1] if stop is None else stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, span: slice) -> TokenSequence:
        start, stop, _ = span.indices(len(self))
        return TokenSequence(self.parts, self.start + start, self.start + max(start, stop))

    def __array__(self, dtype: np.typing.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        pieces = [
            part.read(*ends) if isinstance(part, TokenFile) else part[slice(*ends)] for part, *ends in self._pieces()
        ]
        whole = pieces[0] if len(pieces) == 1 else np.concatenate(pieces) if pieces else np.zeros(0, np.uint8)
        return whole if dtype is None else whole.astype(dtype)

    def _pieces(self) -> Iterator[tuple[TokenFile | np.ndarray, int, int]]:
        """Yield the parts that this view spans, each with a range of tokens."""
        first = bisect_right(self.ends, self.start)
        for part, end in zip(self.parts[first:], self.ends[first:], strict=True):
            begin = end - len(part)
            if begin >= self.stop:
                return
            yield part, max(self.start - begin, 0), min(self.stop - begin, len(part))

    def blocks(self, length: int = 1 << 22) -> Iterator[np.ndarray]:
        """Yield all tokens, `length` at a time."""
        for start in range(0, len(self), length):
            yield np.asarray(self[start : start + length])


def infer_dtype(path: str, num_bytes: int, vocab_size: int | None) -> str:
    """Return the only dtype in which a file without a header can hold tokens of a vocabulary.

    Without `vocab_size`, uint16 tokens are GPT-2's at most, and others are any that train.py accepts.

    Raises: ValueError with the possible readings unless there is just one.
    """
    with reading(path):
        sample = sample_of(path, num_bytes)
    readings = {
        name: np.frombuffer(sample, dtype)
        for name, dtype in READINGS.items()
        if num_bytes % np.dtype(dtype).itemsize == 0
    }
    if len(readings) < 2:
        return "uint16"  # by the size, which may be odd, too
    possible = {name: ids for name, ids in readings.items() if is_possible(ids, vocab_size)}
    if len(possible) == 1 and (vocab_size or is_needed(*possible.values())):
        return next(iter(possible))
    why = "its dtype is ambiguous" if possible else f"no dtype fits a vocabulary of {vocab_size or GPT2_VOCABULARY}"
    texts = (
        f"{num_bytes // ids.itemsize:,} tokens up to {ids.max():,} as {name}"
        for name, ids in (possible if len(possible) > 1 else readings).items()
    )
    raise ValueError(f"{path}: {why}: {', '.join(texts)}; set token_dtype")


def sample_of(path: str, num_bytes: int) -> bytes:
    """Return a file's bytes; of a large one, blocks that are spread over it."""
    if num_bytes <= SAMPLES * SAMPLE_BYTES:
        return Path(path).read_bytes()
    step = num_bytes // SAMPLES // 8 * 8
    with open(path, "rb") as file:
        return b"".join(os.pread(file.fileno(), SAMPLE_BYTES, number * step) for number in range(SAMPLES))


def is_possible(ids: np.ndarray, vocab_size: int | None) -> bool:
    if vocab_size:
        return int(ids.max()) < vocab_size <= 1 << 8 * ids.itemsize
    return int(ids.max()) < (GPT2_VOCABULARY if ids.itemsize == 2 else VOCABULARY.most)


def is_needed(ids: np.ndarray) -> bool:
    """Return whether ids need their dtype: some exceed uint16, and not all do, as pairs of uint16 ids could."""
    return ids.itemsize == 2 or int(ids.min()) < 1 << 16 <= int(ids.max())


def check_llmc(path: str, header: np.ndarray, num_bytes: int) -> None:
    if len(header) < LLMC_HEADER_BYTES // 4:
        raise ValueError(f"{path}: {num_bytes} bytes, less than llm.c's header of {LLMC_HEADER_BYTES}; write it again")
    magic, version, num_tokens = header[:3].tolist()
    expected, dtype = LLMC_FORMATS[magic]
    if version != expected:
        raise ValueError(f"{path}: version {version} of llm.c's format; write it again as version {expected}")
    length = (num_bytes - LLMC_HEADER_BYTES) / np.dtype(dtype).itemsize
    if num_tokens != length:
        raise ValueError(f"{path}: {num_tokens} tokens by its header, {length:g} by its size; write it again")


def write_llmc(path: Path, ids: np.ndarray) -> None:
    """Write tokens in llm.c's format: a header, then uint16 or uint32."""
    magic = next(magic for magic, (_, dtype) in LLMC_FORMATS.items() if np.dtype(dtype) == ids.dtype)
    header = np.zeros(LLMC_HEADER_BYTES // 4, "<i4")
    header[:3] = magic, LLMC_FORMATS[magic][0], len(ids)
    with path.open("wb") as file:
        file.write(header.tobytes())
        file.write(np.ascontiguousarray(ids).data)


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Convert errors of a file that cannot be read to one line.

    Raises: ValueError.
    """
    try:
        if not stat.S_ISREG(mode := os.stat(path).st_mode) and not stat.S_ISDIR(mode):
            raise ValueError(f"{path}: not a regular file; pass one that every rank can read")
        yield
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; check the path") from None
    except IsADirectoryError:
        raise ValueError(f"{path}: a directory; pass the files in it") from None
    except OSError as error:
        raise ValueError(f"{path}: can't be read ({error.strerror}); check its permissions") from error
