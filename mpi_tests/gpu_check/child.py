"""Run a check in a child process with a time limit, so that a crash or hang does not end the other checks."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pkgutil import resolve_name
from typing import IO, Any

from mpi_tests.gpu_check.rows import SKIPPED, Row, Setting
from mpi_tests.helpers.launch import ROOT, TERMINATION_S, environment

MOST_SPARE_S, SPARE = 20.0, 0.2  # of a check's time, for it to report that a program it started has timed out


class CannotRunError(Exception):
    """A check cannot run here and is skipped; the message gives the reason."""


class BadEndError(Exception):
    """A program has crashed, or run for too long, as `verdict` says; the message tells how, and its last line."""

    def __init__(self, verdict: str, words: str):
        super().__init__(words)
        self.verdict = verdict


def rows_of(name: str, setting: Setting, limit_s: float, module: str) -> Iterator[Row]:
    """Run `python -m module --child NAME ...`, and yield its rows as they come, however it ends."""
    words = ["-m", module, "--child", name, "--device", setting.device, "--limit_s", limit_s - spare_s(limit_s)]
    words += ["--mixes", *setting.mixes] if setting.mixes else []
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    try:
        for line in lines_of([sys.executable, *words], environment() | {"PYTHONPATH": paths}, limit_s):
            yield Row(*json.loads(line))
    except BadEndError as error:
        yield Row(name, "an end", str(error), error.verdict)


def spare_s(limit_s: float) -> float:
    return min(MOST_SPARE_S, SPARE * limit_s)


def run_child(name: str, function: str, setting: Setting) -> None:
    """Run a check in the child, and print each of its rows as soon as it is complete."""
    with os.fdopen(os.dup(1), "w", buffering=1) as file:
        os.dup2(2, 1)  # so that nothing else is taken for a row
        try:
            for row in resolve_name(function)(setting):
                print(json.dumps(row), file=file)
        except CannotRunError as error:
            print(json.dumps(Row(name, "", str(error), SKIPPED)), file=file)
        except Exception as error:
            traceback.print_exc()
            words = f"{type(error).__name__}: {last_line(str(error))}"
            print(json.dumps(Row(name, "an end", words, "crashed")), file=file)


def lines_of(
    arguments: Sequence[Any], env: dict[str, str], limit_s: float, silent_s: float | None = None
) -> Iterator[str]:
    """Yield the whole lines that a command prints in the repository's root, as they come.

    Raises: BadEndError if it fails, runs for more than `limit_s` seconds, or prints nothing for `silent_s`.
    """
    deadline, lines = time.monotonic() + limit_s, queue.SimpleQueue[str]()
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            [str(argument) for argument in arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
            cwd=ROOT,
            env=env,
            start_new_session=True,
        )
        assert process.stdout is not None
        threading.Thread(target=forward, args=(process.stdout, lines), daemon=True).start()
        try:
            while line := lines.get(timeout=min(max(0.0, deadline - time.monotonic()), silent_s or limit_s)):
                if line.endswith("\n"):  # not one that was cut off
                    yield line
            process.wait(max(1.0, deadline - time.monotonic()))
        except (queue.Empty, subprocess.TimeoutExpired):
            raise BadEndError("too long", f"not finished in time: {error_line(errors)}") from None
        finally:
            stop(process)
        if process.returncode:
            how = f"signal {-process.returncode}" if process.returncode < 0 else f"exit status {process.returncode}"
            raise BadEndError("crashed", f"{how}: {error_line(errors)}")


def forward(stream: IO[str], lines: queue.SimpleQueue[str]) -> None:
    """Put a stream's lines into a queue, and "" at its end."""
    for line in stream:
        lines.put(line)
    lines.put("")


def stop(process: subprocess.Popen) -> None:
    """End a process, and its group, if it still runs."""
    for number in (signal.SIGTERM, signal.SIGKILL):  # mpirun ends its ranks when terminated, but not when killed
        with suppress(ProcessLookupError):
            if process.poll() is None:
                os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(TERMINATION_S)


def error_line(errors: IO[str]) -> str:
    errors.seek(0)
    return last_line(errors.read())


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.replace("\0", "").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing was said"
