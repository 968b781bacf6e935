"""Jobs under Slurm, with a slurmd on each of the rig's four hosts."""

import json
import os
import re
import sys

import pytest

from mpi_tests.helpers.documents import COMMANDS
from mpi_tests.helpers.launch import ROOT
from mpi_tests.helpers.slurm import Slurm, missing
from mpi_tests.helpers.torch_programs import INIT
from mpi_tests.rig import is_hydra

pytestmark = pytest.mark.shares_cores

SCRIPT = ROOT / "hostfiles" / "slurm.sh"
NODES = "--nodes=4"  # overrides the script's number
TINY = "--max_iters 5 --n_layer 1 --n_head 1 --n_embd 8 --block_size 8 --micro_batch_size 2 --sample_tokens 2"
TINY += " --val_fraction 0.002"

# Each rank writes to a file that it has reached a fence, and checks after the fence whether all ranks had.
FENCES = """
import ctypes, mmap, os, sys, time
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
rank, size, fences = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"]), 20
with open(sys.argv[1], "a+b") as file:
    file.truncate(size * fences)
    arrived = mmap.mmap(file.fileno(), size * fences)
pmix = ctypes.CDLL("libpmix.so.2")
assert pmix.PMIx_Init(ctypes.create_string_buffer(512), None, 0) == 0
for fence in range(fences):
    time.sleep(0.05 * (rank == fence % size))
    arrived[fence * size + rank] = 1
    assert pmix.PMIx_Fence(None, 0, None, 0) == 0
    late = [other for other in range(size) if not arrived[fence * size + other]]
    assert not late, f"rank {rank} passed fence {fence} before {late}"
print(f"{fences} fences")
pmix.PMIx_Finalize(None, 0)
"""

# Training whose last rank dies, once, after the first checkpoint.
DIES = """
import os, runpy, signal, sys, threading, time
from pathlib import Path
saved, mark = Path(sys.argv[-1]), Path(sys.argv[-1], "died")
def die():
    while not [*saved.glob("*-step-*[0-9]")]:
        time.sleep(0.01)
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)
if os.environ["SLURM_PROCID"] == "3" and not mark.exists():
    threading.Thread(target=die, daemon=True).start()
runpy.run_module("training", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def slurm(rig):
    if absent := missing():
        pytest.skip(f"there is no {', '.join(absent)}: apt-get install --no-install-recommends slurm-wlm munge")
    with Slurm(rig) as slurm:
        yield slurm


@pytest.mark.skipif(not (ROOT / ".venv").exists(), reason="the batch script activates .venv: make .venv/installed")
class TestBatchScript:
    def test_the_guide_submits_it(self):
        submitted = {command.text for command in COMMANDS if "sbatch" in command.text}
        assert submitted == {
            "sbatch hostfiles/slurm.sh",
            'COMMAND="python -m collectives.bench" sbatch hostfiles/slurm.sh',
            'COMMAND="python -m training --seed 7%a --checkpoint_dir saved%a --out_dir out%a --resume auto" '
            "sbatch --array=0-3 hostfiles/slurm.sh",
        }

    def test_it_trains_on_four_nodes(self, slurm, tmp_path):
        train = f"python train.py {TINY} --out_dir {tmp_path}"
        state, output = slurm.batch(NODES, "--ntasks-per-node=1", SCRIPT, env={"COMMAND": train})
        assert state == "COMPLETED", output
        assert "batch 8 = dp 4 x" in output
        assert "iter 5/5 | val loss" in output
        assert (tmp_path / "model.safetensors").exists()

    def test_its_ranks_are_where_slurm_says(self, slurm, tmp_path):
        (tmp_path / "where.py").write_text("import collectives\nprint(collectives.world().topology.nodes)")
        state, output = slurm.batch(
            NODES, "--ntasks-per-node=2", SCRIPT, env={"COMMAND": f"python {tmp_path}/where.py"}
        )
        assert state == "COMPLETED", output
        assert output.count("((0, 1), (2, 3), (4, 5), (6, 7))") == 8

    def test_the_tasks_of_an_array_have_their_own_words(self, slurm, tmp_path):
        env = {"COMMAND": f"touch {tmp_path}/task%a"}
        state, output = slurm.batch("--nodes=1", "--ntasks-per-node=1", "--array=0-1", SCRIPT, env=env)
        assert state == "COMPLETED", output
        assert {path.name for path in tmp_path.iterdir()} == {"task0", "task1"}

    @pytest.mark.skipif(is_hydra(), reason="MPICH's ranks start without PMIx")
    def test_no_rank_passes_a_fence_before_all_have_come(self, slurm, tmp_path):
        """Open MPI relies on it in MPI_Init; Slurm's default fence releases ranks early."""
        (tmp_path / "fences.py").write_text(FENCES)
        state, output = slurm.batch(
            NODES, "--ntasks-per-node=2", SCRIPT, env={"COMMAND": f"python {tmp_path}/fences.py {tmp_path}/arrived"}
        )
        assert state == "COMPLETED", output
        assert output.count("20 fences") == 8

    @pytest.mark.skipif(not os.environ.get("LARGEST"), reason="takes a quarter of an hour: make proof")
    def test_a_run_longer_than_its_time_limit_reaches_its_end(self, slurm, tmp_path):
        """600 iterations run in jobs of three minutes, each of which resumes from the previous one's checkpoint.

        A rank dies in the first job.
        """
        (tmp_path / "dies.py").write_text(DIES)
        flags = "--n_layer 2 --n_embd 128 --block_size 64 --micro_batch_size 2 --eval_interval 600"
        saved = f"--checkpoint_interval 20 --out_dir {tmp_path}/out --resume auto --checkpoint_dir {tmp_path}/saved"
        train = f"python {tmp_path}/dies.py --max_iters 600 {flags} {saved}"
        state, output = slurm.batch(
            "--nodes=4", "--ntasks-per-node=2", "--time=3", SCRIPT, env={"COMMAND": train}, timeout=2400
        )
        assert state == "COMPLETED", output
        assert "iter 600/600 | val loss" in output, output
        (failed,) = map(int, re.findall(r"supervise: the job has failed in step (\d+)", output))
        ends = [int(step) for step in re.findall(r"SIGUSR1: the run ends with a checkpoint of step (\d+)", output)]
        assert ends, output
        # One more job if the last one receives its signal between its last step and its end.
        assert output.count("requeueing the job") in (len(ends), len(ends) + 1)
        records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
        steps = [record["iter"] for record in records if "loss" in record]
        assert steps == [*range(1, failed + 1), *range(20 * (failed // 20) + 1, 601)]  # again, from the checkpoint

    @pytest.mark.proof
    def test_a_rank_that_dies_does_not_end_the_job(self, slurm, tmp_path):
        (tmp_path / "dies.py").write_text(DIES)
        flags = f"{TINY} --max_iters 300 --eval_interval 300 --checkpoint_interval 20"
        train = f"python {tmp_path}/dies.py {flags} --out_dir {tmp_path}/out --checkpoint_dir {tmp_path}/saved"
        state, output = slurm.batch(NODES, "--ntasks-per-node=1", SCRIPT, env={"COMMAND": train}, timeout=120)
        assert state == "COMPLETED", output
        assert output.count("ranks are starting") == 2, output
        assert "supervise: the job has failed in step " in output
        assert f"weights of {tmp_path}/saved/" in output
        assert "iter 300/300 | val loss" in output

    def test_it_fails_as_its_command_does(self, slurm):
        state, output = slurm.batch("--nodes=1", "--ntasks-per-node=1", SCRIPT, env={"COMMAND": "python missing.py"})
        assert state == "FAILED"
        assert "missing.py" in output


@pytest.mark.parametrize(
    "program", [("examples/sum.py",), pytest.param(("-c", INIT), marks=pytest.mark.proof)], ids=["collectives", "torch"]
)
def test_ranks_that_do_not_know_of_each_other_stop(slurm, program):
    result = slurm.run("srun", "-N2", "-n4", "--mpi=none", "python", *program)
    assert result.returncode != 0
    assert not result.stdout
    (line,) = [line for line in result.stderr.splitlines() if not line.startswith("srun: ")]
    assert line.startswith("error: srun started 4 processes, but each is alone in the MPI of mpi4py")
    assert line.endswith(f"start them with srun --mpi={'pmi2' if is_hydra() else 'pmix'}, or with mpirun in its place")


@pytest.mark.parametrize(
    ("program", "line"),
    [
        (("examples/sum.py",), "rank {} of 4 has [10. 10. 10. 10.]"),
        pytest.param(("-c", INIT), "{} 4 [4.0, 4.0]", marks=pytest.mark.proof),
    ],
    ids=["collectives", "torch"],
)
def test_the_remedy(slurm, program, line):
    interface = "pmi2" if is_hydra() else "pmix"
    stale = {"MASTER_ADDR": "nowhere.invalid", "WORLD_SIZE": "64", "SLURM_PMIX_FENCE": "ring"}
    result = slurm.run("srun", "-N2", "-n4", f"--mpi={interface}", "python", *program, env=stale)
    if "can not load PMIx library" in result.stderr:
        pytest.skip("this Slurm has no PMIx: apt-get install --no-install-recommends libpmix-dev")
    assert sorted(result.stdout.splitlines()) == [line.format(rank) for rank in range(4)], result.stderr


@pytest.mark.parametrize("inside", [("salloc", "-n4"), ("srun", "-n1")], ids=lambda words: words[0])
def test_one_process_may_be_alone(slurm, inside):
    """It runs in the shell of an allocation of four tasks, and as the only task of a step."""
    result = slurm.run(*inside, sys.executable, "examples/sum.py")
    assert result.stdout == "rank 0 of 1 has [1. 1. 1. 1.]\n", result.stderr
