"""Make .bin files of tokens from text, on all cores.

python -m training.prepare corpus/ --tokenizer tokenizer.json --val held_back.jsonl --out tokens
python -m training --data tokens
"""

from __future__ import annotations

import os
import shutil
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from tqdm import tqdm

from collectives.job import environment
from collectives.job.settings import Parser
from training.data.text_files import find_files, holds_tokens, read_documents
from training.data.token_files import write_llmc
from training.data.tokenizer import BYTES, Tokenizer, load_tokenizer, save_tokenizer

CHUNK_CHARACTERS = 1 << 20  # of documents per task of a process
tokenizer_of_process: Tokenizer


def main() -> int:
    parser = Parser(description=__doc__, allow_abbrev=False)
    parser.add_argument("text", nargs="+", help="files of text, JSON or Parquet, or folders of these")
    parser.add_argument("--val", nargs="+", default=[], help="validation data, likewise")
    parser.add_argument("--out", type=Path, required=True, help="new output folder")
    parser.add_argument(
        "--tokenizer",
        default=BYTES,
        help="tokenizer: bytes (the default), a tokenizer.json, a .tiktoken file, or nanoGPT's meta.pkl",
    )
    parser.add_argument(
        "--text_field", default="text", help="field of JSON, or column of Parquet, with the text (default: text)"
    )
    parser.add_argument(
        "--shard_tokens", type=int, default=100_000_000, help="tokens in each output file (default: %(default)s)"
    )
    parser.add_argument(
        "--workers", type=int, default=environment.cores(), help="number of worker processes (default: the cores)"
    )
    try:
        print(prepare(parser.parse_args()))
    except ValueError as error:
        print(f"training.prepare: {error}", file=sys.stderr)
        return 2
    return 0


def prepare(args: Namespace) -> str:
    """Write the files; return a summary line, with the command to train on them.

    Raises: ValueError for files that cannot be read or written, after removing its output.
    """
    for name in ("shard_tokens", "workers"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name}={getattr(args, name)} must be at least 1")
    tokenizer = load_tokenizer(args.tokenizer)
    dtype = np.dtype("<u4") if tokenizer.vocab_size > 1 << 16 else np.dtype("<u2")
    kinds = {"train": find_files(args.text), "val": find_files(args.val)}
    for path in (*kinds["train"], *kinds["val"]):
        if holds_tokens(path):
            raise ValueError(f"{path} has tokens already: pass text")
    try:
        args.out.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"out={args.out}: {error.strerror}; name a new folder") from None
    try:
        counts = {}
        os.environ.setdefault("PYTHONSAFEPATH", "1")  # as in `system.python`, for the processes of the pool
        with ProcessPoolExecutor(args.workers, get_context("spawn"), start, (args.tokenizer,)) as pool:
            for kind, files in kinds.items():
                chunks = encoded(pool, files, args.text_field, 2 * args.workers)
                counts[kind] = write_shards(args.out, kind, chunks, args.shard_tokens, dtype)
                if files and not counts[kind]:
                    raise ValueError(f"{files[0]}: empty; pass a file with text in it")
        save_tokenizer(tokenizer, args.out, tokenizer.vocab_size, dtype.name)
    except BaseException as error:
        shutil.rmtree(args.out)
        if isinstance(error, OSError):
            raise ValueError(f"out={args.out} can't be written ({error.strerror}): name another folder") from None
        raise
    end = "" if tokenizer.end is None else f" --document_end {tokenizer.end}"
    summary = f"{counts['train']:,} tokens, and {counts['val']:,} to validate on"
    return f"{summary}: python -m training --data {args.out}{end}"


def start(name: str) -> None:
    """Load the tokenizer in a process of the pool."""
    global tokenizer_of_process
    tokenizer_of_process = load_tokenizer(name)


def encode(documents: list[str]) -> np.ndarray:
    """Return the tokens of documents, each followed by the end token."""
    return np.concatenate([tokenizer_of_process.tokens(text, document_end=True) for text in documents])


def encoded(pool: ProcessPoolExecutor, files: list[str], field: str, most: int) -> Iterator[np.ndarray]:
    """Yield the tokens of the files' documents in order, with at most `most` chunks in progress."""
    under_way: deque[Future[np.ndarray]] = deque()
    for chunk in chunks_of(files, field):
        under_way.append(pool.submit(encode, chunk))
        if len(under_way) == most:
            yield under_way.popleft().result()
    while under_way:
        yield under_way.popleft().result()


def chunks_of(files: list[str], field: str) -> Iterator[list[str]]:
    """Yield documents in chunks of a million characters, with a progress bar."""
    chunk: list[str] = []
    length = 0
    with tqdm(files, unit="file", disable=None) as bar:
        for path in bar:
            for text in read_documents(path, field):
                chunk.append(text)
                length += len(text)
                if length >= CHUNK_CHARACTERS:
                    yield chunk
                    chunk, length = [], 0
    if chunk:
        yield chunk


def write_shards(out: Path, kind: str, chunks: Iterator[np.ndarray], size: int, dtype: np.dtype) -> int:
    """Write files of `size` tokens, the last of the rest; return the number of tokens."""
    buffer, filled, number = np.empty(size, dtype), 0, 0
    for chunk in chunks:
        while len(chunk):
            part, chunk = chunk[: size - filled], chunk[size - filled :]
            buffer[filled : filled + len(part)] = part
            filled += len(part)
            if filled == size:
                write_llmc(out / f"{kind}_{number:06}.bin", buffer)
                filled, number = 0, number + 1
    if filled:
        write_llmc(out / f"{kind}_{number:06}.bin", buffer[:filled])
    return number * size + filled


if __name__ == "__main__":
    sys.exit(main())
