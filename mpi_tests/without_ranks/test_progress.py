"""The lines that pytest prints for test files, and the durations that it saves."""

import contextlib
import json
import os
import re
import subprocess
import sys

import pytest

from mpi_tests.helpers.launch import ROOT

SAMPLES = {
    "test_a.py": "import pytest\n@pytest.mark.parametrize('x', range(3))\ndef test_it(x): assert x != 1",
    "test_b.py": "import pytest\ndef test_it(): pytest.skip('why not')",
}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_line_for_each_file_and_one_for_each_failure(tmp_path, workers):
    (tmp_path / "pytest.ini").write_text("[pytest]\nconsole_output_style = classic\naddopts = -q\n")
    for name, source in SAMPLES.items():
        (tmp_path / name).write_text(source)
    command = [sys.executable, "-m", "pytest", "-p", "mpi_tests.helpers.progress", "-n", str(workers), "--color=no"]
    options = ["-p", "mpi_tests.helpers.ranks", "--rootdir", tmp_path, "-c", tmp_path / "pytest.ini", tmp_path]
    result = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
    head = result.stdout.partition("= FAILURES =")[0]
    lines = [line for line in head.splitlines() if line.startswith(("test_", "FAILED", "."))]
    assert "FAILED test_a.py::test_it[1]" in lines
    rest = sorted(re.sub(r" +", " ", line) for line in lines if not line.startswith("FAILED"))
    assert [re.sub(r"\d+\.\d s \d:\d\d", "T", line) for line in rest] == [
        "test_a.py 2 passed, 1 failed T left",
        "test_b.py 1 skipped T left",
    ]
    assert "1 failed, 2 passed, 1 skipped in" in result.stdout
    (path,) = (tmp_path / ".pytest_cache" / "v" / "seconds").iterdir()
    assert len(json.loads(path.read_text())) == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_a_terminal_shows_how_many_tests_have_ended(tmp_path, workers):
    (tmp_path / "pytest.ini").write_text("[pytest]\nconsole_output_style = classic\naddopts = -q\n")
    (tmp_path / "test_a.py").write_text(SAMPLES["test_a.py"])
    command = [sys.executable, "-m", "pytest", "-p", "mpi_tests.helpers.progress", "-n", str(workers), "--color=no"]
    screen, terminal = os.openpty()
    options = ["--rootdir", tmp_path, "-c", tmp_path / "pytest.ini", tmp_path]
    with subprocess.Popen([*command, *options], cwd=ROOT, stdout=terminal, stderr=terminal):
        os.close(terminal)
        output = b""
        with contextlib.suppress(OSError):  # a closed pseudo-terminal raises it
            while part := os.read(screen, 1 << 16):
                output += part
    os.close(screen)
    lines = re.split(r"[\r\n]+", output.decode())
    assert any(re.fullmatch(r"1 of 3 tests, \d+:\d\d left *", line) for line in lines), lines
    assert any(line.startswith("test_a.py ") for line in lines)
