"""The batch scripts of PBS and LSF, run with the variables that those set; test_slurm.py has a real Slurm."""

import pytest

from mpi_tests.helpers.hostfiles import FOLDER
from mpi_tests.helpers.launch import ROOT, environment, watched

pytestmark = pytest.mark.shares_cores

SUM = "python examples/sum.py"
BENCH = "python -m collectives.bench all_reduce --end 8 --iters 1 --warmup_iters 1"
VARIABLES = {
    "pbs.sh": {"PBS_JOBID": "1.host", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_NODEFILE": "hosts", "PBS_O_WORKDIR": ROOT},
    "lsf.sh": {"LSB_JOBID": "1", "LSB_DJOB_HOSTFILE": "hosts", "LS_SUBCWD": ROOT},
}


@pytest.mark.skipif(not (ROOT / ".venv").exists(), reason="the batch scripts activate .venv: make .venv/installed")
@pytest.mark.parametrize(
    ("script", "command", "text"),
    [("pbs.sh", SUM, "rank 1 of 2 has"), ("lsf.sh", BENCH, "all_reduce"), ("pbs.sh", "python no.py", None)],
)
def test_a_job_on_two_slots_of_this_machine(tmp_path, script, command, text):
    (tmp_path / "hosts").write_text("localhost\nlocalhost\n")
    variables = {
        name: str(tmp_path / value if value == "hosts" else value) for name, value in VARIABLES[script].items()
    }
    variables["COMMAND"] = command
    result = watched(["env", f"--chdir={tmp_path}", "bash", FOLDER / script], environment() | variables, 120)
    output = result.stdout + result.stderr
    assert (result.returncode == 0) == (text is not None), output
    assert (text or "no.py") in output


@pytest.mark.skipif(not (ROOT / ".venv").exists(), reason="the batch scripts activate .venv: make .venv/installed")
def test_a_pbs_job_submits_itself_again(tmp_path):
    """PBS sends no signal ahead of the time limit, so the script does; a stand-in for qsub prints its arguments."""
    (tmp_path / "hosts").write_text("localhost\nlocalhost\n")
    program = tmp_path / "saves.py"
    program.write_text(
        "import signal, sys, time\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit())\ntime.sleep(90)\n"
    )
    qsub = tmp_path / "qsub"
    qsub.write_text('#!/bin/sh\necho "qsub $*: $COMMAND"\n')
    qsub.chmod(0o755)
    variables = {**VARIABLES["pbs.sh"], "PBS_NODEFILE": str(tmp_path / "hosts"), "COMMAND": f"python {program}"}
    activated = f"PATH={tmp_path}:$PATH"
    script = (
        (FOLDER / "pbs.sh").read_text().replace("source .venv/bin/activate", f"source .venv/bin/activate; {activated}")
    )
    (tmp_path / "pbs.sh").write_text(script)
    set_by = environment() | {name: str(value) for name, value in variables.items()} | {"SIGNAL_AFTER_S": "5"}
    result = watched(["bash", tmp_path / "pbs.sh"], set_by, 120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == f"qsub -v COMMAND,SIGNAL_AFTER_S hostfiles/pbs.sh: python {program}"
