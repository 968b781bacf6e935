"""Text documents from plain text, JSON, Parquet, and folders of these."""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from training.data.token_files import reading

PLAIN = (".txt", ".md", ".rst", ".tex", ".html", ".py", ".c", ".h", ".cpp", ".java", ".js", ".sh")
JSON_ROWS = (".jsonl", ".ndjson", ".json")
PARQUET_MAGIC, JSON_BEGINS = b"PAR1", re.compile(rb"\s*(\[\s*)?\{\s*\"")
MOST_FILES = 100_000  # to search
# Files of a folder that are read; a .json may be of a program's settings, and is only read when named.
KINDS = (*PLAIN, ".jsonl", ".ndjson", ".parquet", ".bin")


def find_files(paths: list[str]) -> list[str]:
    """Return the files, and the files in the folders, sorted by name.

    Raises: ValueError for a folder without data files.
    """
    all_files: list[str] = []
    for path in paths:
        if not Path(path).is_dir():
            all_files.append(path)
            continue
        files = sorted(file for file in files_beneath(path) if suffix(file) in KINDS and file.is_file())
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


def suffix(path: str | Path) -> str:
    return Path(path).suffix.lower()


def holds_tokens(path: str) -> bool:
    return suffix(path) == ".bin"


def has_rows(path: str) -> bool:
    """Return whether each row of a file of text is a document."""
    return kind_of(path) != "plain"


def kind_of(path: str) -> str:
    """Return "plain", "json" or "parquet", by the file's name, or else by how it begins."""
    name = suffix(path)
    if name in (*PLAIN, ".parquet", *JSON_ROWS):
        return "plain" if name in PLAIN else "parquet" if name == ".parquet" else "json"
    begin = beginning(path)
    return "parquet" if begin.startswith(PARQUET_MAGIC) else "json" if JSON_BEGINS.match(begin) else "plain"


def beginning(path: str) -> bytes:
    with reading(path), open(path, "rb") as file:
        return file.read(1 << 12).removeprefix(codecs.BOM_UTF8)


def read_documents(path: str, field: str) -> Iterator[str]:
    """Yield a file's documents: all of a plain file, or `field` of each row of JSON and Parquet.

    Raises: ValueError with the path and the remedy.
    """
    kind = kind_of(path)
    if kind == "plain":
        yield read_plain(path)
    elif kind == "parquet":
        yield from read_parquet(path, field)
    else:
        for where, row in read_json(path):
            if not isinstance(row, dict) or not isinstance(row.get(field), str):
                there = f"its fields are {', '.join(row)}" if isinstance(row, dict) else "it is not an object"
                raise ValueError(f"{path}: {where} has no text in {field!r}, {there}: set text_field")
            yield row[field]


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


def read_json(path: str) -> Iterator[tuple[str, Any]]:
    """Yield the rows of an array, or of lines, each with where it is in the file."""
    with reading(path), open(path, "rb") as file:
        if beginning(path).lstrip().startswith(b"["):
            rows = from_json(file.read(), f"{path}: not JSON")
            yield from ((f"row {number}", row) for number, row in enumerate(rows, 1))
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"line {number}", from_json(line, f"{path}: line {number} is not JSON")


def from_json(text: bytes, refusal: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{refusal} ({error}); pass lines that each have a row, or an array of rows") from None


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
