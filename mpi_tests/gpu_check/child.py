"""Run a check in a child process with a time limit, so that a crash or hang does not end the other checks."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from pkgutil import resolve_name

from mpi_tests.gpu_check.rows import SKIPPED, Row, Setting
from mpi_tests.helpers.launch import ROOT, environment, watched

SPARE_S = 20.0  # for a check to report that a program it started has timed out


class CannotRunError(Exception):
    """A check cannot run here and is skipped; the message gives the reason."""


def rows_of(name: str, device: str, limit_s: float, module: str) -> list[Row]:
    """Run `python -m module --child NAME ...`, and return the rows that it has written, however it ends."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        words = ["-m", module, "--child", name, "--device", device, "--limit_s", limit_s, "--rows", path]
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        end = []
        try:
            result = watched([sys.executable, *words], environment() | {"PYTHONPATH": paths}, limit_s + SPARE_S)
        except AssertionError as error:
            end = [Row(name, "an end", last_line(str(error)), "too long")]
        else:
            if result.returncode:
                how = f"signal {-result.returncode}" if result.returncode < 0 else f"exit status {result.returncode}"
                end = [Row(name, "an end", f"{how}: {last_line(result.stderr)}", "crashed")]
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [Row(*json.loads(line)) for line in lines if line.endswith("\n")] + end


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing was said"


def run_child(name: str, place: str, setting: Setting, path: Path) -> None:
    """Run a check in the child, and write each of its rows as soon as it is complete."""
    with path.open("w", buffering=1) as file:
        try:
            for row in resolve_name(place)(setting):
                print(json.dumps(row), file=file)
        except CannotRunError as error:
            print(json.dumps(Row(name, "", str(error), SKIPPED)), file=file)
        except Exception as error:
            traceback.print_exc()
            words = f"{type(error).__name__}: {last_line(str(error))}"
            print(json.dumps(Row(name, "an end", words, "crashed")), file=file)
