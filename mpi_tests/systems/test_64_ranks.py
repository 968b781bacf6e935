"""train.py and the benchmark of collectives on 64 ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mpi_tests.helpers.launch import ROOT, environment, find_mpirun, launch, watched
from mpi_tests.helpers.trained import config, flags, left_in

pytestmark = pytest.mark.skipif(not os.environ.get("LARGEST"), reason="takes minutes and 16 GiB: make proof")


def test_64_ranks_in_all_dimensions(tmp_path):
    alone, many = tmp_path / "alone", tmp_path / "many"
    axes = {"pp": 4, "dp": 4, "tp": 2, "sp": 2, "zero_stage": 1, "num_micro_batches": 3}
    result = launch(1, "python", "train.py", *flags(config(1, n_layer=4, out_dir=str(alone))), timeout=120)
    assert result.returncode == 0, result.stderr
    words = flags(config(4, n_layer=4, out_dir=str(many), **axes))
    command = [find_mpirun(), "--hostfile", "hostfiles/local.txt", "-np", "64", "python", "train.py", *words]
    env = environment() | {"PATH": f"{Path(sys.executable).parent}:{environment()['PATH']}"}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    np.testing.assert_allclose(left_in(many).losses, left_in(alone).losses, rtol=1e-5)


def test_64_ranks_end_with_right_results(tmp_path):
    """A hostfile starts more ranks than cores; training on them takes the same command and more time."""
    file = tmp_path / "r.json"
    flags = ("-A", "auto", "mpi", "ring", "-b", "1K", "-e", "4K", "-n", 1, "-w", 0)
    words = "-np", 64, "python", "-m", "collectives.bench", "all_reduce", *flags
    command = find_mpirun(), "--hostfile", Path("hostfiles", "local.txt"), *words, "--json", file
    result = watched(command, environment(), timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    data = json.loads(file.read_text())
    assert data["ranks"] == 64
    assert [(r["bytes"], r["wrong"]) for r in data["results"]] == [(1024, 0)] * 6 + [(4096, 0)] * 6
