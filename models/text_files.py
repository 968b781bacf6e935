"""Text documents from plain text, JSON lines, Parquet, and folders of these."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from models.token_files import reading

PLAIN = (".txt", ".md", ".rst", ".tex", ".html", ".py", ".c", ".h", ".cpp", ".java", ".js", ".sh")
MOST_FILES = 100_000  # to search
KINDS = (*PLAIN, ".jsonl", ".parquet", ".bin")  # files of a folder that are read


def find_files(paths: list[str]) -> list[str]:
    """Return the files, and the files in the folders, sorted by name.

    Raises: ValueError for a folder without data files.
    """
    all_files: list[str] = []
    for path in paths:
        if not Path(path).is_dir():
            all_files.append(path)
            continue
        files = sorted(file for file in files_beneath(path) if file.suffix in KINDS and file.is_file())
        if not files:
            raise ValueError(f"{path}: no file in this folder ends in any of {' '.join(KINDS)}; check the path")
        all_files += map(str, files)
    return all_files


def files_beneath(folder: str) -> Iterator[Path]:
    """Yield the files of a folder and its subfolders, except hidden ones.

    Raises: ValueError for more than `MOST_FILES`.
    """
    count = 0
    for path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        count += len(folders) + len(names)
        if count > MOST_FILES:
            raise ValueError(f"{folder}: more than {MOST_FILES:,} files; name the folders that have the text")
        yield from (Path(path, name) for name in names if not name.startswith("."))


def read_documents(path: str, field: str) -> Iterator[str]:
    """Yield a file's documents: all of a plain file, or `field` of each row of JSON lines and Parquet.

    Raises: ValueError with the path and the remedy.
    """
    if path.endswith(".parquet"):
        yield from read_parquet(path, field)
    elif path.endswith(".jsonl"):
        yield from read_json_lines(path, field)
    else:
        yield read_plain(path)


def read_plain(path: str) -> str:
    with reading(path):
        data = Path(path).read_bytes()
    if not data:
        raise ValueError(f"{path}: empty; pass a file with text in it")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: byte {error.start} is not UTF-8; convert it, or name it .bin if it holds tokens"
        ) from None


def read_json_lines(path: str, field: str) -> Iterator[str]:
    with reading(path), open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}: line {number} is not JSON ({error}); write it again") from None
            if not isinstance(row, dict) or not isinstance(row.get(field), str):
                there = f"its fields are {', '.join(row)}" if isinstance(row, dict) else "it is not an object"
                raise ValueError(f"{path}: line {number} has no text in {field!r}, {there}: set text_field")
            yield row[field]


def read_parquet(path: str, field: str) -> Iterator[str]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError:
        raise ValueError(f"{path}: needs pyarrow, which is not installed; pip install pyarrow") from None
    with reading(path), open(path, "rb") as data:
        try:
            file = parquet.ParquetFile(data)
        except ArrowInvalid as error:
            raise ValueError(f"{path}: not Parquet ({error}); write it again") from None
        if field not in (names := file.schema_arrow.names):
            raise ValueError(f"{path}: no column {field!r} among {', '.join(names)}: set text_field")
        for batch in file.iter_batches(columns=[field]):
            for number, text in enumerate(batch.column(0).to_pylist()):
                if not isinstance(text, str):
                    raise ValueError(f"{path}: column {field!r} has {text!r} for text in row {number}: set text_field")
                yield text
