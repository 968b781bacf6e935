"""What a release is checked on."""

import re
import tomllib

from mpi_tests.helpers.launch import ROOT
from mpi_tests.release import CHECKS


def test_the_backend_s_tests_run_on_the_oldest_and_the_newest_torch():
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    oldest = next(of.removeprefix("torch>=") for of in needed if of.startswith("torch>="))
    commands = [check.command for check in CHECKS if "test_torch_backend.py" in check.command]
    assert any(re.search(rf"torch=={re.escape(oldest)}\.\d", command) for command in commands)
    assert any("--upgrade torch " in command and "torch==" not in command for command in commands)


def test_torch_s_own_suite_runs_on_as_many_ranks_as_its_tests_tell_apart():
    suite = next(check.command for check in CHECKS if "torch_suite.py" in check.command)
    assert "for n in 2 3 4" in suite
