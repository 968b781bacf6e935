"""One start of a job: its processes on this host, the step that it has begun, and what it has written to stderr."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread

from collectives.job import environment
from training.supervision.heartbeat import has_ended, newest_step

POLL_S = 0.2
GRACE_S = 10.0  # for mpirun to end its ranks
STDERR_BYTES = 1 << 18  # the last ones that are kept
WIDTH = 300  # of an error in one line
ERROR = re.compile(r"^(?:error: (.*)|[\w.]*(?:Error|Exception)\b.*)$", re.MULTILINE)


class Job:
    """A job that has been started, in a process group of its own.

    Its hosts write their steps to the new folder `heartbeat`.  With `is_quiet`, its stderr is kept until `show()`.

    Raises: ValueError if the command cannot be started.
    """

    def __init__(self, words: Sequence[str], heartbeat: Path, is_quiet: bool = False):
        self.heartbeat, self.is_quiet, self.step = heartbeat.resolve(), is_quiet, 0
        self.stderr, self.writing = bytearray(), Lock()
        self.heartbeat.mkdir(parents=True)
        try:
            self.process = subprocess.Popen(
                words,
                env=environment.with_heartbeat(self.heartbeat),
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise ValueError(f"{words[0]} can't be started ({error.strerror}): check the command after --") from None
        self.reader = Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stderr
        with self.process.stderr as pipe:
            while part := os.read(pipe.fileno(), 1 << 16):
                with self.writing:
                    self.stderr += part
                    del self.stderr[:-STDERR_BYTES]
                    if not self.is_quiet:
                        write(part)

    def show(self) -> None:
        """Write what has been kept of stderr, and what follows as it comes."""
        with self.writing:
            if self.is_quiet:
                self.is_quiet = False
                write(bytes(self.stderr))

    def watch(self, start_s: float, silence_s: float, step: int) -> str:
        """Wait until the job ends; return why it counts as failed before that, if it does.

        It may take `start_s` seconds to its first step, and `silence_s` to each other one; 0: any time.  Beyond `step`,
        its stderr is shown.
        """
        heard_s = time.monotonic()
        while not (limit_s := silence_s if self.step else start_s) or time.monotonic() - heard_s < limit_s:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(POLL_S)
                return ""
            if (newest := newest_step(self.heartbeat)) > self.step:
                self.step, heard_s = newest, time.monotonic()
            if self.step > step:
                self.show()
        return f"no new step for {limit_s:g} s"

    @property
    def status(self) -> int:
        """The exit status of a job that has ended, as a shell has it."""
        status = self.process.returncode
        return status if status >= 0 else 128 - status

    @property
    def succeeded(self) -> bool:
        """Whether its run has come to its end: Open MPI's mpirun ends with status 0 after it has lost a host, too."""
        return self.process.returncode == 0 and has_ended(self.heartbeat)

    def close(self) -> None:
        """Wait for the last of the job's stderr, and for its last step."""
        self.reader.join(GRACE_S)
        self.step = max(self.step, newest_step(self.heartbeat))

    def end(self) -> int:
        """End what is left of the job on this host, and return its exit status."""
        if self.process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                os.killpg(self.process.pid, signal.SIGTERM)
                self.process.wait(GRACE_S)
            self.process.kill()
        deadline_s = time.monotonic() + GRACE_S
        while (left := self.processes()) and time.monotonic() < deadline_s:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        self.process.wait()
        self.close()
        return self.status

    def processes(self) -> list[int]:
        """Return the job's processes on this host: those in whose environment its folder is.

        Ranks are in groups and sessions of their own, and outlive an mpirun that is killed.
        """
        mark, pids = f"={self.heartbeat}\0".encode(), []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it has ended, or is another user's
                if mark in path.read_bytes():
                    pids.append(int(path.parent.name))
        return pids

    def error(self) -> str:
        """Return the job's first error in one line: Python's, or else the last paragraph, which is mpirun's."""
        text = self.stderr.decode(errors="replace").replace("\0", "")
        if match := ERROR.search(text):
            return textwrap.shorten(match[1] or match[0], WIDTH)
        paragraphs = [part for part in re.split(r"\n(?:\W*\n)+", text) if re.search(r"\w", part)]
        return textwrap.shorten(paragraphs[-1].strip("-= \n") if paragraphs else "nothing on stderr", WIDTH)


def write(part: bytes) -> None:
    sys.stderr.buffer.write(part)
    sys.stderr.flush()
