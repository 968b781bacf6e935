"""Bad input to train.py and to a user's script: one clear line of rank 0, every rank exits non-zero, nothing hangs."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpi_tests.launch import ROOT, environment, launch

TINY = ["--n_layer", 1, "--n_head", 1, "--n_embd", 8, "--block_size", 8, "--max_iters", 2, "--sample_tokens", 1]
TWO = ["--n_layer", 2]


def refused(ended: subprocess.CompletedProcess) -> str:
    """The one line that rank 0 wrote."""
    assert ended.returncode != 0, ended.stdout
    assert "Traceback" not in ended.stderr, ended.stderr
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, ended.stderr
    return errors[0]


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data", "no-such-file.txt"], "no-such-file.txt: no such file; check the path"),
        (["--data", "{tmp}/empty.txt"], "empty.txt: empty; pass a file with text in it"),
        (["--data", "{tmp}/latin.txt"], "latin.txt: byte 3 is not UTF-8; convert it"),
        (["--data", "{tmp}/short.txt"], "too few for block_size=8; pass a longer text"),
        (["--global_batch_size", 5, "--micro_batch_size", 2], "global_batch_size=5 can't be shared by dp=2 ranks"),
        (["--dp", 3], "mesh dp=3 x pp=1 x sp=1 x tp=1 makes 3 ranks, but mpirun started 2"),
        (["--tp", 2], "transformer.h.0.attn.c_attn: 1 heads can't be split over tp=2: use a tp of 1, or 2 heads"),
        (["--sp", 2, "--block_size", 6], "a sequence of 6 tokens can't be split over sp=2 ranks in zigzag order: use"),
        (["--sp", 2, "--sp_mode", "ulysses"], "transformer.h.0.attn.attend: 1 query heads can't be exchanged by 2"),
        (["--compile", "--tp", 2], "compile is of models that ranks compute whole, not with tp=2: leave it out"),
        (["--sp", 2, "--sp_mode", "hybrid", "--sp_heads", 3], "sp=2 ranks can't be divided in groups of 3"),
        (["--sp_mode", "rings"], "argument --sp_mode: invalid choice: 'rings'"),
        (
            ["--tp", 2, "--n_head", 2, "--sequence_parallel", "--block_size", 7],
            "block_size=7 leaves 1 of a rank's 7 tokens over from tp=2 with --sequence_parallel: use a multiple of 2",
        ),
        (
            ["--pp", 2],
            "pp=2 with schedule=1f1b makes 2 stages of n_layer=1 blocks: use at most 1 stages, or more blocks",
        ),
        (["--pp", 2, *TWO, "--schedule", "fifo"], "schedule='fifo' is no file, and none of naive, gpipe, 1f1b, "),
        (["--pp", 2, *TWO, "--virtual_stages", 2], "schedule '1f1b' takes 1 stages a rank, not 2: for 2, use inter"),
        (["--pp", 2, *TWO, "--schedule", "{tmp}/missing.csv"], "missing.csv, line 2, behind the last cell: "),
        (
            ["--pp", 2, *TWO, "--schedule", "{tmp}/other.csv"],
            "other.csv is for pp=1 and num_micro_batches=1, not for 2 ",
        ),
        (["--pp", 2, *TWO, "--max_alive", 2], "max_alive=2 limits a searched schedule, not 1f1b: use schedule=search"),
        (["--pp", 2, *TWO, "--schedule", "search", "--max_alive", 0], "a limit of 0 activations: a rank has one alive"),
        (
            ["--zero_stage", 1, "--zero_group", "3"],
            "zero_group 3 does not divide 2 ranks: use all, node, or one of 1, 2",
        ),
        (["--zero_stage", 1, "--zero_group", "rack"], "zero_group rack does not divide 2 ranks: use all, node, or one"),
        (["--trace", "trace.json"], "trace=trace.json is of a pipeline: use pp of 2 or more, or leave it out"),
        (["--pp", 2, *TWO, "--trace", "{tmp}/none/trace.json"], "none/trace.json can't be written: pass a path in a"),
        (["--device", "cuda"], "device 'cuda'"),
        (["--device", "tpu"], "device 'tpu' is unknown: use 'cpu', 'cuda'"),
        (["--out_dir", "{tmp}/empty.txt/out"], "can't be written (Not a directory): pass another --out_dir"),
        (["--n_embd", 9, "--n_head", 2], "n_embd=9 can't be split over n_head=2: use 8 or 10"),
        (["--max_iters", 0], "max_iters=0 must be at least 1"),
        (["--lr", "fast"], "argument --lr: invalid float value: 'fast'; see --help"),
        (["--learning_rate", 1], "unrecognized arguments: --learning_rate 1; see --help"),
        (["--config", "{tmp}/bad.toml"], "bad.toml: learning_rate is no setting; there are data, "),
        (["--config", "{tmp}/type.toml"], "type.toml: n_layer = 'two' must be of type int"),
        (["--config", "{tmp}/none.toml"], "none.toml: can't be read"),
    ],
    ids=lambda value: value[0].lstrip("-") + "=" + Path(str(value[1])).name if isinstance(value, list) else "",
)
def test_settings_that_train_py_refuses(tmp_path, flags, message):
    if flags == ["--device", "cuda"] and cuda_is_available():
        pytest.skip("this machine has a CUDA device")
    write(tmp_path / "empty.txt", b"")
    write(tmp_path / "latin.txt", "abc\u00e9def".encode("latin-1"))
    write(tmp_path / "short.txt", b"too short")
    write(tmp_path / "bad.toml", b"learning_rate = 1")
    write(tmp_path / "missing.csv", b"0F0,0B0\n1F0")
    write(tmp_path / "other.csv", b"0F0,0B0")
    write(tmp_path / "type.toml", b"n_layer = 'two'")
    before = sorted(tmp_path.iterdir())
    out_dir = [] if "--out_dir" in flags else ["--out_dir", tmp_path / "out"]
    words = [str(word).format(tmp=tmp_path) for word in [*TINY, *out_dir, *flags]]
    assert message in refused(launch(2, "python", "train.py", *words))
    assert sorted(tmp_path.rglob("*")) == before  # nothing was written


def cuda_is_available() -> bool:
    try:
        import cupy
    except ImportError:
        return False
    return cupy.cuda.is_available()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_out_dir_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    ended = launch(2, "python", "train.py", *TINY, "--out_dir", tmp_path / "out")
    assert "can't be written (Permission denied): pass another --out_dir" in refused(ended)


def script(tmp_path: Path, body: str) -> Path:
    lines = ["import sys, numpy as np, collectives", "comm = collectives.world()", *body.splitlines()]
    return write(tmp_path / "script.py", "\n".join(lines).encode())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("comm.all_reduce(np.ones(2 + comm.rank))", "ranks disagree: rank 0 calls all_reduce(2 elements, float64"),
        ("comm.all_reduce(np.ones(2, ['f4', 'f8'][comm.rank]))", "rank 1 calls all_reduce(2 elements, float64"),
        ("comm.all_reduce(np.ones((4, 4))[:, 1])", "strides (32,) is not C-contiguous: pass a copy of it"),
        ("collectives.world(levels=[4, 4])", "levels=[4, 4] must be positive integers, each smaller than the one"),
    ],
)
def test_arguments_that_do_not_fit(tmp_path, body, message):
    assert message in refused(launch(2, "python", script(tmp_path, body)))


def test_a_rank_that_raises_ends_the_job_with_its_traceback(tmp_path):
    body = """
x = np.ones(1 << 20)
comm.all_reduce(x)
if comm.rank == 1:
    raise KeyError("lost on rank 1")
comm.all_reduce(x)
"""
    begin = time.monotonic()
    ended = launch(3, "python", script(tmp_path, body), timeout=30)
    assert time.monotonic() - begin < 10
    assert ended.returncode != 0
    assert "rank 1 of 3 failed and ends the job:" in ended.stderr
    assert "KeyError: 'lost on rank 1'" in ended.stderr


LAUNCHERS = {
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "Hydra": ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),
    "srun": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    "srun --mpi=pmi2": ("PMI_SIZE", "PMI_RANK", "SLURM_STEP_NUM_TASKS"),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_mpirun_of_another_mpi(tmp_path, launcher):
    """Each process then finds itself alone: here, two that were told of each other, as that mpirun would."""
    for rank in ("0", "1"):
        told = dict(zip(LAUNCHERS[launcher], ("2", rank, "2"), strict=False))
        command = [sys.executable, "train.py", *map(str, TINY), "--out_dir", str(tmp_path / "out")]
        ended = subprocess.run(command, cwd=ROOT, env=environment() | told, capture_output=True, text=True, timeout=60)
        assert ended.returncode != 0
        if rank == "0":
            program = "srun" if "srun" in launcher else "mpirun"
            assert f"{program} started 2 processes, but each is alone in the MPI of mpi4py, which is " in refused(ended)
        else:
            assert not ended.stderr
    assert not (tmp_path / "out").exists()


def test_a_process_alone_in_a_batch_script():
    """test_slurm.py has it for real."""
    told = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "PBS_NP": "4", "LSB_DJOB_NUMPROC": "4"}
    ended = subprocess.run([sys.executable, "examples/sum.py"], cwd=ROOT, env=environment() | told, capture_output=True)
    assert ended.stdout == b"rank 0 of 1 has [1. 1. 1. 1.]\n"
