"""Run the commands of CONTRIBUTING.md."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mpi_tests.helpers.launch import ROOT, environment

pytestmark = pytest.mark.shares_cores

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
BLOCK = re.search(r"```bash\n(.*?)```", TEXT, re.DOTALL)[1]
COMMANDS = [line.split("#")[0].strip() for line in BLOCK.splitlines()]


def run(command):
    path = {"PATH": f"{Path(sys.executable).parent}:{environment()['PATH']}"}
    result = subprocess.run(
        command, shell=True, cwd=ROOT, env=environment() | path, capture_output=True, text=True, timeout=400
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize(
    "command", [pytest.param(each, marks=[pytest.mark.proof] * each.startswith("mpirun -n 4")) for each in COMMANDS[1:]]
)
def test_commands(command):
    output = run(command.replace("--seconds 60", "--seconds 1"))
    assert re.search(r"[1-9]\d* passed|[1-9]\d* collectives on up to 3 ranks as|[1-9]\d* cases of --seed", output)


def test_targets_of_make():
    assert COMMANDS[0] == "source .venv/bin/activate"
    targets = re.findall(r"^    make (\S+)", TEXT, re.MULTILINE)
    assert targets == ["test", "test-system", "lint", "mutants", "bench", "docs"]
    for target in [*targets, "test-all"]:
        assert run(f"make --dry-run --assume-old=.venv/installed --assume-old=.venv/kernels {target}")
