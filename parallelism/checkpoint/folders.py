"""Checkpoint folders: commit, list and remove them, each atomically.

A folder is named by a sequence number and the step: `00007-step-300`.  While it is incomplete, being written or
removed, its name ends in `.unfinished`.
"""

import os
import re
import shutil
from collections.abc import Callable, Container, Iterable
from pathlib import Path

from parallelism.checkpoint.reading import INDEX, Checkpoint, Index, check_complete
from parallelism.checkpoint.shards import naming, sync

UNFINISHED = ".unfinished"
NAME = re.compile(r"(\d+)-step-(\d+)(\.unfinished)?")


def commit(unfinished: Path, index: Index) -> Path:
    """Turn a folder that contains all shards into a valid checkpoint; return its final name.

    Raises: ValueError if the shards are incomplete; OSError with the file's name.
    """
    check_complete(index.entries)
    for entry in index.entries:
        path = unfinished / entry.file
        if not path.exists():
            raise ValueError(f"{path} is not visible on the first rank's host: choose a folder that all hosts share")
    path = unfinished / INDEX
    with naming(path):
        path.write_text(index.sealed())
    sync(path)
    sync(unfinished)
    finished = unfinished.with_name(unfinished.name.removesuffix(UNFINISHED))
    with naming(finished):
        os.replace(unfinished, finished)
    sync(finished.parent)
    return finished


def complete_checkpoints(directory: Path) -> list[Path]:
    """Return the complete checkpoints of a directory in order, going by the folders' names."""
    if not directory.is_dir():
        return []
    numbers = {path: NAME.fullmatch(path.name) for path in directory.iterdir()}
    whole = {path: int(match[1]) for path, match in numbers.items() if match and not match[3]}
    return sorted(whole, key=whole.__getitem__)


def newest(
    paths: Iterable[Path],
    check: Callable[[Path], None] = lambda path: Checkpoint(path).verify(),
    say: Callable[[str], None] = print,
) -> Path | None:
    """Return the last of `paths` that passes `check`; report why later ones are skipped."""
    for path in reversed([*paths]):
        try:
            check(path)
        except (ValueError, OSError) as error:
            say(f"skipped a broken checkpoint: {error}")
        else:
            return path
    return None


def next_number(directory: Path) -> int:
    matches = [NAME.fullmatch(path.name) for path in directory.iterdir()]
    return max((int(match[1]) for match in matches if match), default=0) + 1


def looks_whole(path: Path) -> bool:
    try:
        Checkpoint(path).check_files()
    except (ValueError, OSError):
        return False
    return True


def remove_unfinished(directory: Path) -> None:
    for path in directory.glob(f"*{UNFINISHED}"):
        shutil.rmtree(path, ignore_errors=True)


def keep_last(directory: Path, keep: int, broken: Container[Path] = ()) -> None:
    """Remove all checkpoints before the last `keep` complete ones, which are judged without reading their shards.

    Checkpoints in `broken`, and partly removed ones, do not count.
    """
    paths, whole = complete_checkpoints(directory), 0
    while paths and whole < keep:
        path = paths.pop()
        whole += path not in broken and looks_whole(path)
    for path in paths:
        os.replace(path, path.with_name(path.name + UNFINISHED))
    remove_unfinished(directory)
