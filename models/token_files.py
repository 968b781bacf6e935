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

# llm.c's formats: magic number, version, and type of a token.
LLMC_FORMATS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
LLMC_HEADER_BYTES = 256 * 4
SAMPLE_TOKENS = 4096  # to distinguish uint32 tokens from uint16 ones
LARGEST_UINT32_TOKEN = 2 * 2**16 + 2**16 - 1


class TokenFile:
    """Tokens of a .bin file.  It is read, not mapped, because mapped pages would count as this process's memory.

    Raises: ValueError with the path and the remedy.
    """

    def __init__(self, path: str):
        with reading(path):
            num_bytes = os.path.getsize(path)
            header = np.fromfile(path, "<i4", LLMC_HEADER_BYTES // 4)
            sample = np.fromfile(path, "<u2", 2 * SAMPLE_TOKENS)
        # GPT-2 tokens cannot begin like a magic number: its lower half, read as uint16, exceeds 50256.
        is_llmc = len(header) and int(header[0]) in LLMC_FORMATS
        if is_llmc:
            check_llmc(path, header, num_bytes)
            self.dtype, self.offset = np.dtype(LLMC_FORMATS[int(header[0])][1]), LLMC_HEADER_BYTES
        else:
            self.dtype, self.offset = np.dtype("<u4" if looks_like_uint32(sample) else "<u2"), 0
        self.path, size = path, num_bytes - self.offset
        if not size:
            raise ValueError(f"{path}: empty; pass a file with tokens in it")
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

    def __getitem__(self, place: slice) -> TokenSequence:
        start, stop, _ = place.indices(len(self))
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


def looks_like_uint32(sample: np.ndarray) -> bool:
    """Return whether a file's uint16 `sample` consists of lower and upper halves of uint32 tokens.

    Upper halves of tokens are 0 to 2 in any vocabulary; of 64 or more uint16 tokens, never is every other one so small.
    """
    upper = sample[1::2]
    return len(upper) >= 32 and len(sample) % 2 == 0 and int(upper.max()) <= LARGEST_UINT32_TOKEN >> 16


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
