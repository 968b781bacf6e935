"""train.py with torch.compile."""

import os
import shutil

import numpy as np
import pytest

from mpi_tests.helpers.launch import launch
from mpi_tests.helpers.trained import config, flags, left_in, plain_training


@pytest.mark.skipif(not os.environ.get("LARGEST"), reason="compiles for minutes: make proof")
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ for the CPU")
@pytest.mark.parametrize("layout", [{"zero_stage": 2}, {"tp": 2, "recompute": "full"}], ids=["whole", "blocks"])
def test_models_may_be_compiled(tmp_path, monkeypatch, layout):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    words = flags(config(2 // layout.get("tp", 1), out_dir=str(tmp_path / "out"), compile=True, **layout))
    result = launch(2, "python", "train.py", *words, timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "torch.compile works in the first step, which can take minutes" in result.stdout
    np.testing.assert_allclose(left_in(tmp_path / "out").losses, plain_training().losses, rtol=1e-5)


@pytest.mark.shares_cores
@pytest.mark.proof
def test_the_first_run_says_that_it_compiles_kernels(tmp_path):
    """An empty cache folder of Numba simulates a new machine."""
    cached = {"NUMBA_CACHE_DIR": str(tmp_path)}
    first, second = (launch(2, "python", "examples/sum.py", timeout=200, env=cached).stderr for _ in range(2))
    assert first.count("collectives: compiling kernels, once; they stay on disk") == 1
    assert "compiling" not in second
