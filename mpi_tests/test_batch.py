"""The batch scripts of PBS and LSF, told on this machine what those would tell them; test_slurm.py has a real Slurm."""

import pytest

from mpi_tests.launch import ROOT, environment, watched

FOLDER = ROOT / "hostfiles"
TRAIN = (
    "python train.py --max_iters 2 --n_layer 1 --n_head 1 --n_embd 8 --block_size 8 --sample_tokens 2 --out_dir {}/out"
)
BENCH = "python -m collectives.bench --collectives all_reduce --end 8 --repeats 1 --warmups 1"
TOLD = {
    "pbs.sh": {"PBS_JOBID": "1.host", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_NODEFILE": "hosts", "PBS_O_WORKDIR": ROOT},
    "lsf.sh": {"LSB_JOBID": "1", "LSB_DJOB_HOSTFILE": "hosts", "LS_SUBCWD": ROOT},
}


@pytest.mark.skipif(not (ROOT / ".venv").exists(), reason="the batch scripts activate .venv: make .venv/installed")
@pytest.mark.parametrize(
    ("script", "command", "shown"),
    [("pbs.sh", TRAIN, "iter 2/2 | val loss"), ("lsf.sh", BENCH, "all_reduce"), ("pbs.sh", "python no.py", None)],
)
def test_a_job_on_two_slots_of_this_machine(tmp_path, script, command, shown):
    (tmp_path / "hosts").write_text("localhost\nlocalhost\n")
    told = {name: str(tmp_path / value if value == "hosts" else value) for name, value in TOLD[script].items()}
    told["COMMAND"] = command.format(tmp_path)
    ended = watched(["env", f"--chdir={tmp_path}", "bash", FOLDER / script], environment() | told, 120)
    output = ended.stdout + ended.stderr
    assert (ended.returncode == 0) == (shown is not None), output
    assert (shown or "no.py") in output


@pytest.mark.parametrize(("script", "mark"), [("slurm.sh", "#SBATCH"), ("pbs.sh", "#PBS"), ("lsf.sh", "#BSUB")])
def test_three_lines_are_to_be_edited(script, mark):
    """Two for the batch system, which reads no further than the first command, and that."""
    lines = (FOLDER / script).read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    assert [line.startswith(mark) for line in lines[first - 2 : first]] == [True, True]
    assert lines[first] == "COMMAND=${COMMAND:-python train.py}"
    assert "Edit three lines" in lines[2]
