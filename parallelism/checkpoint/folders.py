"""Checkpoint folders in a directory to which only one run at a time writes.

A folder is named by a sequence number and the step: `00007-step-300`.  While it is incomplete, being written or
removed, its name ends in `.unfinished`.
"""

import fcntl
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

from safetensors import SafetensorError

UNFINISHED = ".unfinished"
INDEX = "index.json"
MEMORY = "/dev/shm"  # the folder that Linux has in memory
NAME = re.compile(r"(\d+)-step-(\d+)(\.unfinished)?")


def complete_checkpoints(directory: Path) -> list[Path]:
    """Return the complete checkpoints of a directory in order, going by the folders' names."""
    if not directory.is_dir():
        return []
    whole = [path for path in directory.iterdir() if (match := NAME.fullmatch(path.name)) and not match[3]]
    return sorted(whole, key=number_of)


def next_number(directory: Path) -> int:
    return max(map(number_of, directory.iterdir()), default=0) + 1


def number_of(path: Path) -> int:
    """Return the number of a checkpoint's folder, 0 if it is none."""
    match = NAME.fullmatch(path.name)
    return int(match[1]) if match else 0


def snapshot_folder(memory: Path, checkpoints: Path) -> Path:
    """Return the folder, in the memory of a host, of the snapshots of a run with checkpoints in another."""
    return memory / f"snapshots-{blake2b(str(checkpoints.resolve()).encode(), digest_size=8).hexdigest()}"


def remove_unfinished(directory: Path) -> None:
    for path in directory.glob(f"*{UNFINISHED}"):
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to errors of the system and of safetensors."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise OSError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


class Lock:
    """Creates a directory, and locks it for this process until `release()`, or until the process ends for any reason.

    The operating system keeps the lock, on the file `lock`, so a dead process holds none; the file names the owner.

    Raises: ValueError with the process that holds it; OSError if the file system has no locks.
    """

    def __init__(self, directory: Path, say: Callable[[str], None] = print):
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"folder {directory} can't be created ({error.strerror}): pass another") from None
        self.path = directory / "lock"
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        self.text = json.dumps({"pid": os.getpid(), "host": platform.node(), "since": since})
        self.file = open(self.path, "ab+", buffering=0)  # noqa: SIM115 - open as long as the lock is held
        try:
            self._take(directory)
            if holder := self._holder():
                say(f"{directory}: a run that wrote there has died, {holder}; its incomplete checkpoints are removed")
            self._write(self.text)
        except (ValueError, OSError):
            self.file.close()
            raise

    def _take(self, directory: Path) -> None:
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{directory}: another run writes there, {self._holder()}: wait until it ends, or choose another"
            ) from None
        except OSError as error:
            remedy = "choose a file system that supports locks"
            raise OSError(f"{self.path}: can't be locked ({error.strerror}): {remedy}") from None

    def _holder(self) -> str:
        """Describe the process that holds the lock, or that held it last without releasing it."""
        self.file.seek(0)
        try:
            values = json.loads(self.file.read())
            return f"process {values['pid']} on {values['host']}, since {values['since']}"
        except (ValueError, KeyError, TypeError):
            return ""

    def _write(self, text: str) -> None:
        with naming(self.path):
            self.file.truncate(0)
            self.file.write(text.encode())

    def release(self) -> None:
        if not self.file.closed:
            self._write("")
            self.file.close()
