"""Open MPI follows rules for its own collectives."""

import json
import re
import subprocess
import sys

import pytest

from collectives.bench.openmpi_rules import convert, export
from collectives.tuning import to_json
from mpi_tests.helpers.launch import find_mpirun, launch
from mpi_tests.helpers.networks import ALL_REDUCE, tuning

# Which sizes Open MPI refuses, as it does where a rule has an algorithm that there is not.
PROBE = """
import numpy as np
from mpi4py import MPI
comm = MPI.COMM_WORLD
comm.Set_errhandler(MPI.ERRORS_RETURN)
refused = []
for nbytes in range(4, 300, 4):
    x = np.ones(nbytes // 4, "float32")
    try:
        comm.Allreduce(MPI.IN_PLACE, x)
        assert (x == comm.size).all()
    except MPI.Exception:
        refused.append(nbytes)
if comm.rank == 0:
    print("refused", refused)
"""


def openmpi():
    version = subprocess.run([find_mpirun(), "--version"], capture_output=True, text=True, check=True).stdout
    if "Open MPI" not in version:
        pytest.skip("mpirun is not Open MPI's, which alone reads these rules")


def refused(rules):
    flags = "--mca", "coll_tuned_use_dynamic_rules", 1, "--mca", "coll_tuned_dynamic_rules_filename", rules
    ran = launch(4, *flags, sys.executable, "-c", PROBE)
    assert ran.returncode == 0, ran.stderr
    return json.loads(re.search(r"refused (\[.*\])", ran.stdout)[1])


def test_open_mpi_follows_the_rules(tmp_path):
    openmpi()
    (tmp_path / "tuning.json").write_text(to_json(tuning(ALL_REDUCE)))
    convert(tmp_path / "tuning.json", tmp_path / "rules.txt")
    assert refused(tmp_path / "rules.txt") == []
    text = (tmp_path / "rules.txt").read_text()
    for rule, sizes in {"0 4 0 0": range(4, 65, 4), "129 6 0 0": range(132, 257, 4)}.items():
        begin = rule.split()[0]
        (tmp_path / "wrong.txt").write_text(text.replace(f"{rule}\n", f"{begin} 99 0 0\n"))
        assert refused(tmp_path / "wrong.txt") == list(sizes)


def test_open_mpi_ignores_a_file_that_breaks_off(tmp_path):
    openmpi()
    text = export(tuning(ALL_REDUCE)).text.replace("0 4 0 0\n", "0 99 0 0\n")
    (tmp_path / "rules.txt").write_text(text[: text.index("129")])
    assert refused(tmp_path / "rules.txt") == []
