"""Hostfiles in both of their forms, and the lines of batch scripts that are to be edited."""

import subprocess

import pytest

from mpi_tests.helpers.hostfiles import FOLDER, entries


@pytest.mark.parametrize("name", ["rig", "8x8"])
def test_both_forms_say_the_same(name):
    pairs = [line.split(" slots=") for line in entries(FOLDER / f"{name}.txt")]
    assert [":".join(pair) for pair in pairs] == entries(FOLDER / f"{name}.mpich.txt")


@pytest.mark.parametrize(("script", "mark"), [("slurm.sh", "#SBATCH"), ("pbs.sh", "#PBS"), ("lsf.sh", "#BSUB")])
def test_three_lines_are_to_be_edited(script, mark):
    """Two for the batch system, which reads no further than the first command, and that."""
    lines = (FOLDER / script).read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    assert [line.startswith(mark) for line in lines[first - 2 : first]] == [True, True]
    assert lines[first] == "COMMAND=${COMMAND:-python train.py}"
    assert "Edit three lines" in lines[2]


@pytest.mark.parametrize("script", ["build_open_mpi.sh", "gpu_check.sh"])
def test_scripts_say_what_they_lack(script):
    ended = subprocess.run([FOLDER / script], text=True, capture_output=True)
    assert ended.returncode != 0
    assert f"usage: hostfiles/{script} " in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
