"""The list of release checks, and their table."""

import re
import subprocess
import tomllib
from datetime import date

import pytest

from mpi_tests import release
from mpi_tests.helpers.launch import ROOT
from mpi_tests.release import CHECKS, Check


def test_the_backend_s_tests_run_on_the_oldest_and_the_newest_torch():
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["torch"]
    oldest = next(of.removeprefix("torch>=") for of in requirements if of.startswith("torch>="))
    commands = [check.command for check in CHECKS if "test_torch_backend.py" in check.command]
    assert any(re.search(rf"torch=={re.escape(oldest)}\.\d", command) for command in commands)
    assert any("--upgrade torch " in command and "torch==" not in command for command in commands)


def test_torch_s_own_suite_runs_on_as_many_ranks_as_its_tests_tell_apart():
    suite = next(check.command for check in CHECKS if "torch_suite.py" in check.command)
    assert "for n in 2 3 4" in suite


def test_the_kept_table_has_a_row_for_each_check_in_order():
    assert list(release.earlier(ROOT / "benchmarks" / "results" / "release.md")) == [check.name for check in CHECKS]


def test_the_parts_of_the_proof_are_those_of_make_proof():
    command = ["make", "--dry-run", "--assume-old=.venv/kernels"]
    parts = [check.command.split()[1] for check in CHECKS if check.name.startswith("proof, ")]
    whole, each = (
        subprocess.run([*command, *goals], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for goals in (["proof"], parts)
    )
    assert whole.count("pytest") > len(parts) > 5
    assert each == whole


@pytest.fixture
def checks(monkeypatch, tmp_path):
    """Define three checks, of which one fails and one lacks a requirement."""
    monkeypatch.setattr(release, "LOGS", tmp_path)
    rows = (
        Check("good", "echo '3 passed in 1 s'; echo $FUZZ_S"),
        Check("bad", "false; echo not reached"),
        Check("other", "true", "python0.1 --version"),
    )
    monkeypatch.setattr(release, "CHECKS", rows)


def run_release(monkeypatch, *words) -> int:
    monkeypatch.setattr("sys.argv", ["release", *map(str, words)])
    return release.main()


def test_parts_make_one_table(monkeypatch, tmp_path, checks):
    """Checks that are not run keep their rows and dates."""
    path, day = tmp_path / "release.md", str(date.today())
    assert run_release(monkeypatch, "--out", path, "--only", "good", "other") == 0
    path.write_text(path.read_text().replace(day, "2001-02-03"))
    assert run_release(monkeypatch, "--out", path, "--only", "bad") == 1
    rows = [line.strip("| ").split(" | ") for line in path.read_text().splitlines()[4:]]
    assert [row[:3] for row in rows] == [
        ["good", "passed", "2001-02-03"],
        ["bad", "FAILED (1)", day],
        ["other", "not run: python0.1 --version fails", "2001-02-03"],
    ]
    assert rows[0][4] == "3 passed in 1 s"


def test_fuzzing_ends_at_the_first_failure_and_may_be_shorter(monkeypatch, tmp_path):
    monkeypatch.setattr(release, "LOGS", tmp_path)
    fuzz = next(check.command for check in CHECKS if check.name == "fuzz")
    programs = "timeout() { echo $1; }; python() { [ $4 = $FUZZ_S ]; };"
    assert release.run(Check("fuzz", programs + fuzz), fuzz_s=7).last.startswith("7 s of collectives")
    assert release.run(Check("fuzz", f"timeout() {{ false; }}; {fuzz}")).outcome == "FAILED (1)"


def test_pyenv_s_interpreter_is_found_where_its_name_on_the_path_runs_none(monkeypatch, tmp_path):
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert release.interpreter("3.99") == "python3.99"
    path = tmp_path / "versions" / "3.99.1" / "bin" / "python3.99"
    path.parent.mkdir(parents=True)
    path.touch()
    assert release.interpreter("3.99") == str(path)


def test_examples_run_on_the_oldest_and_the_newest_torch():
    folders = {check.name: check.command.split()[2] for check in CHECKS if "bin/activate" in check.command}
    assert folders["examples, torch 2.6"] == folders["torch 2.6"]
    assert folders["examples, newest torch"] == folders["newest torch"]
