"""Bad input to train.py and to a user's script: rank 0 prints one clear line, all ranks exit non-zero, none hangs."""

import subprocess
import sys
from pathlib import Path

import pytest

from mpi_tests.helpers.launch import ROOT, environment, launch, refusal

pytestmark = pytest.mark.shares_cores

TINY = ["--n_layer", 1, "--n_head", 1, "--n_embd", 8, "--block_size", 8, "--max_iters", 2, "--sample_tokens", 1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--learning_rate", 1], "unrecognized arguments: --learning_rate 1; see --help"),
        (["--tp", 2], "n_head=1 is not divisible by tp=2: use a tp of 1, or n_head=2"),
    ],
    ids=["by its flags", "by what they ask for"],
)
def test_train_py_refuses(tmp_path, flags, message):
    """without_ranks/test_refusals.py tests all messages."""
    result = launch(2, "python", "train.py", *TINY, "--out_dir", tmp_path / "out", *flags)
    assert refusal(result) == f"error: {message}"
    assert result.stdout == "2 ranks are starting\n"
    assert not (tmp_path / "out").exists()


def script(tmp_path: Path, body: str) -> Path:
    lines = ["import sys, numpy as np, collectives", "comm = collectives.world()", *body.splitlines()]
    path = tmp_path / "script.py"
    path.write_text("\n".join(lines))
    return path


REFUSED = """
def tell(call):
    try:
        call()
    except collectives.InputError as error:
        if comm.rank == 0:
            print(error)

tell(lambda: comm.all_reduce(np.ones(2 + comm.rank)))
tell(lambda: comm.all_reduce(np.ones(2, ["f4", "f8"][comm.rank])))
tell(lambda: comm.plan("all_reduce", np.ones((4, 4))[:, 1]))
collectives.Communicator(comm.mpi, timeout_s=-1)
"""


def test_arguments_that_do_not_fit(tmp_path):
    """with_ranks/test_disagreement.py tests all messages; here, a script catches some errors, and another ends it."""
    result = launch(2, "python", script(tmp_path, REFUSED))
    assert "timeout_s=-1 must be seconds, or 0 for no limit" in refusal(result)
    length, dtype, strides = result.stdout.splitlines()
    assert "ranks disagree: rank 0 calls all_reduce(2 elements, float64" in length
    assert "rank 1 calls all_reduce(2 elements, float64" in dtype
    assert "strides (32,) is not C-contiguous: pass a copy of it" in strides


def test_a_rank_that_raises_ends_the_job_with_its_traceback(tmp_path):
    body = """
x = np.ones(1 << 20)
comm.all_reduce(x)
if comm.rank == 1:
    raise KeyError("lost on rank 1")
comm.all_reduce(x)
"""
    result = launch(3, "python", script(tmp_path, body), timeout=60)  # a tenth of the watchdog's limit
    assert result.returncode != 0
    assert "rank 1 of 3 failed and ends the job:" in result.stderr
    assert "KeyError: 'lost on rank 1'" in result.stderr


LAUNCHERS = {
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "Hydra": ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),
    "srun": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    "srun --mpi=pmi2": ("PMI_SIZE", "PMI_RANK", "SLURM_STEP_NUM_TASKS"),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_mpirun_of_another_mpi(launcher):
    """Each process is then a world of size 1; here, two processes have that mpirun's variables of a job of two."""
    for rank in ("0", "1"):
        variables = dict(zip(LAUNCHERS[launcher], ("2", rank, "2"), strict=False))
        command, env = [sys.executable, "examples/sum.py"], environment() | variables
        job = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
        assert job.returncode != 0
        assert not job.stdout
        if rank == "0":
            program = "srun" if "srun" in launcher else "mpirun"
            assert f"{program} started 2 processes, but each is alone in the MPI of mpi4py, which is " in refusal(job)
        else:
            assert not job.stderr


def test_a_process_alone_in_a_batch_script():
    """test_slurm.py does the same in a real allocation."""
    variables = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "PBS_NP": "4", "LSB_DJOB_NUMPROC": "4"}
    result = subprocess.run(
        [sys.executable, "examples/sum.py"], cwd=ROOT, env=environment() | variables, capture_output=True
    )
    assert result.stdout == b"rank 0 of 1 has [1. 1. 1. 1.]\n"
