"""mpi_tests.gpu_check: every outcome of a check, and small versions of all checks on the CPU."""

import subprocess
import sys
import time

import pytest

from mpi_tests.gpu_check.rows import NO_GOAL
from mpi_tests.helpers.launch import ROOT, environment

pytestmark = pytest.mark.shares_cores


STANDINS = ("mpi_tests.helpers.gpu_standins", "--device", "cpu", "--seconds", "12")


def command(module, *words):
    return [sys.executable, "-W", "error", "-m", module, *map(str, words)]


def run(*words):
    return subprocess.run(command(*words), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600)


def test_whatever_becomes_of_a_check_the_others_are_done(tmp_path):
    result = run(*STANDINS, "--out", tmp_path / "table.md")
    assert [path.name for path in tmp_path.iterdir()] == ["table.md"]
    title, _, head, line, *rows = (tmp_path / "table.md").read_text().splitlines()
    assert "the CPU in place of a device" in title
    assert "numpy" in title
    assert (head, line) == ("| check | goal | measured | verdict |", "|---|---|---|---|")
    assert rows == [
        "| sum | equal | on cpu / or not | passed |",
        f"| speed | none | 1 | {NO_GOAL} |",
        "| order | equal | 1 wrong | failed |",
        "| lacks |  | no such thing here | skipped |",
        "| half | kept | before the error | passed |",
        "| raises | an end | RuntimeError: last line | crashed |",
        "| dies | an end | signal 9: nothing was said | crashed |",
        "| first | kept | before the end | passed |",
        rows[-1],
    ]
    assert rows[-1].endswith("| too long |")
    assert all(row in result.stdout for row in rows)
    assert result.returncode == 1


def test_the_file_has_each_row_as_soon_as_there_is_one(tmp_path):
    """While a check still runs, the file is whole, with the rows of the checks before it and of its own."""
    table, text, deadline_s = tmp_path / "table.md", "", time.monotonic() + 60
    with subprocess.Popen(
        command(*STANDINS, "--only", "passes", "stays", "--out", table),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
    ) as process:
        while "| first |" not in text and time.monotonic() < deadline_s:
            text = table.read_text() if table.exists() else ""
            assert not text or text.endswith(" |\n")
        assert process.poll() is None
        assert [line.split(" | ")[0] for line in text.splitlines()[4:]] == ["| sum", "| speed", "| first"]


@pytest.mark.parametrize(
    ("words", "status", "names"),
    [
        (["passes", "lacks"], 0, ["sum", "speed", "lacks"]),
        (["raises", "passes"], 1, ["half", "raises", "sum", "speed"]),
    ],
)
def test_some_of_the_checks(words, status, names):
    result = run(*STANDINS, "--only", *words)
    rows = [line for line in result.stdout.splitlines() if line.startswith("| ")][1:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == names
    assert result.returncode == status


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "order"], "invalid choice: 'order'"),
        (["--mixes", "dp5"], "invalid choice: 'dp5'"),
        (["--seconds", "0"], "--seconds 0 must be above 0"),
        (["--seconds", "nan"], "--seconds nan must be above 0"),
        (["--out", "there/is/none.md"], "there is no folder there/is"),
    ],
)
def test_flags_that_make_no_sense(words, message):
    result = run(*STANDINS, *words)
    assert result.returncode == 2
    assert message in result.stderr


def test_where_there_is_no_device():
    cupy = pytest.importorskip("cupy") if "cupy" in sys.modules else None
    if cupy and cupy.cuda.is_available():
        pytest.skip("this machine has a GPU")
    result = run("mpi_tests.gpu_check")
    assert (result.returncode, result.stdout.startswith("skipped: ")) == (0, True)


@pytest.mark.proof
def test_all_checks_on_the_cpu():
    result = run("mpi_tests.gpu_check", "--device", "cpu", "--seconds", "1200")  # as tests beside it take the cores
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [line.strip("| ").split(" | ") for line in result.stdout.splitlines() if line.startswith("| ")][1:]
    verdicts = {row[0]: row[-1] for row in rows}
    assert {"barriers", "doctor", "kernels"} == {name for name, verdict in verdicts.items() if verdict == "skipped"}
    judged = [
        "every collective, 3 ranks",
        "stream order, 2 ranks",
        "training, tp: --tp 4",
        "torch.distributed, 2 ranks, FSDP2",
    ]
    assert [verdicts[name] for name in judged] == ["passed"] * 4
    assert [verdicts[name] for name in ("all_reduce of 256 MiB, 4 ranks", "GPT-2 124M, one rank")] == [NO_GOAL] * 2
