"""Hostfiles in both formats, and the lines of batch scripts that users edit."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpi_tests.helpers.hostfiles import FOLDER, entries
from mpi_tests.helpers.launch import ROOT

DEFAULT = "-m training --checkpoint_dir saved{} --out_dir out{} --resume auto"


@pytest.mark.parametrize("name", ["rig", "8x8"])
def test_both_forms_say_the_same(name):
    pairs = [line.split(" slots=") for line in entries(FOLDER / f"{name}.txt")]
    assert [":".join(pair) for pair in pairs] == entries(FOLDER / f"{name}.mpich.txt")


@pytest.mark.parametrize(("script", "mark"), [("slurm.sh", "#SBATCH"), ("pbs.sh", "#PBS"), ("lsf.sh", "#BSUB")])
def test_batch_scripts_begin_with_what_is_to_be_edited(script, mark):
    """Batch systems stop reading directives at the first command, the one that all ranks run."""
    lines = (FOLDER / script).read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    assert lines[first] == f"COMMAND=${{COMMAND:-python {DEFAULT.format('%a', '%a')}}}"
    assert len([line for line in lines[:first] if line.startswith(mark)]) >= 4
    assert not [line for line in lines[first:] if line.startswith(mark)]
    subprocess.run(["bash", "-n", FOLDER / script], check=True)


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="needs shellcheck: apt-get install shellcheck")
@pytest.mark.parametrize("script", sorted(FOLDER.glob("*.sh")), ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    result = subprocess.run(["shellcheck", "--exclude=SC1091", script], text=True, capture_output=True)
    assert result.stdout == ""


SAVES = 'trap "echo saved; sleep 0.1; exit 0" USR1; for i in $(seq 600); do sleep 0.05; done'


@pytest.mark.parametrize(
    ("command", "num_signals", "status", "words"),
    [
        ("sleep 0; exit 0", 0, 0, []),
        ("sleep 0; exit 3", 0, 3, []),
        (
            SAVES,
            1,
            0,
            ["saved", "The time limit is near: requeueing the job, which resumes from its checkpoint.", "again"],
        ),
        (SAVES.replace("exit 0", "exit 4"), 2, 4, ["saved"]),
    ],
    ids=["ends", "fails", "saves", "fails to save"],
)
def test_a_job_is_requeued_if_it_saved_ahead_of_its_time_limit(command, num_signals, status, words):
    script = 'set -euo pipefail; source "$1"; (for i in $(seq "$2"); do sleep 0.5; kill -USR1 $$; done) & '
    script += 'run_and_requeue "echo again" bash -c "$3"'
    arguments = ["bash", "-c", script, "bash", FOLDER / "run_and_requeue.sh", str(num_signals), command]
    result = subprocess.run(arguments, text=True, capture_output=True, timeout=60)
    assert (result.returncode, result.stdout.splitlines()) == (status, words), result.stderr


@pytest.mark.parametrize(("num_failures", "status"), [(1, 0), (2, 1)])
def test_a_job_with_checkpoints_is_started_again_if_it_fails(tmp_path, num_failures, status):
    command = f"echo start >>{tmp_path}/starts; [ $(wc -l <{tmp_path}/starts) -gt {num_failures} ]"
    script = f'source "$1"; run_and_requeue "echo again" bash -c "$2" bash --checkpoint_dir {tmp_path}/saved'
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "SUPERVISE": "--max_failures 2"}
    arguments = ["bash", "-c", script, "bash", FOLDER / "run_and_requeue.sh", command]
    result = subprocess.run(arguments, cwd=ROOT, env=env, text=True, capture_output=True, timeout=60)
    assert result.returncode == status, result.stderr
    assert (tmp_path / "starts").read_text() == 2 * "start\n"
    assert "again\n" not in result.stdout


# A launcher that prints the program's words, and has the batch system announce the time limit.
LAUNCHER = """#!/bin/bash
case "$*" in --version) echo Open MPI; exit ;; --mpi=list) echo pmix; exit ;; esac
trap "" USR1
words=$*
echo "runs: ${words#*python }"
sleep 0.3
kill -USR1 $BATCH_SCRIPT
sleep 0.3
"""
REQUEUE = '#!/bin/bash\n[ "$1" = show ] || echo "${0##*/} $*: $COMMAND"\n'
SUBMITTED = "qsub -v COMMAND,SIGNAL_AFTER_S hostfiles/pbs.sh"


@pytest.mark.parametrize(
    ("script", "job", "task", "requeue"),
    [
        ("slurm.sh", {"SLURM_JOB_ID": "12"}, "", "scontrol requeue 12"),
        (
            "slurm.sh",
            {"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "0"},
            "0",
            "scontrol requeue 12_0",
        ),
        ("pbs.sh", {"PBS_JOBID": "12.host"}, "", SUBMITTED),
        ("pbs.sh", {"PBS_JOBID": "12[3].host", "PBS_ARRAY_INDEX": "3"}, "3", SUBMITTED),
        ("lsf.sh", {"LSB_JOBID": "12", "LSB_JOBINDEX": "0"}, "", "brequeue 12"),
        ("lsf.sh", {"LSB_JOBID": "12", "LSB_JOBINDEX": "10"}, "10", "brequeue 12[10]"),
    ],
)
def test_a_task_of_an_array_requeues_itself_alone_and_has_its_own_folders(tmp_path, script, job, task, requeue):
    for name in ("srun", "mpirun"):
        (tmp_path / name).write_text(LAUNCHER)
    for name in ("scontrol", "qsub", "brequeue"):
        (tmp_path / name).write_text(REQUEUE)
    (tmp_path / "python").write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} "$@"\n')
    for path in tmp_path.iterdir():
        path.chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    (tmp_path / "hostfiles").symlink_to(FOLDER)
    (tmp_path / "hosts").write_text("localhost\n")
    folders = dict.fromkeys(("SLURM_SUBMIT_DIR", "PBS_O_WORKDIR", "LS_SUBCWD"), str(tmp_path))
    files = dict.fromkeys(("PBS_NODEFILE", "LSB_DJOB_HOSTFILE"), str(tmp_path / "hosts"))
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", **folders, **files, **job}
    command = ["bash", "-c", 'BATCH_SCRIPT=$$ exec bash "$1"', "bash", FOLDER / script]
    result = subprocess.run(command, env=env, text=True, capture_output=True, timeout=60)
    assert result.returncode == 0, result.stderr
    runs, _, requeued = result.stdout.splitlines()
    assert runs == f"runs: {DEFAULT.format(task, task)}"
    command, _, submitted = requeued.partition(": ")
    assert command == requeue
    if script == "pbs.sh":  # the job that it submits is not of the array
        assert submitted == f"python {DEFAULT.format(task, task)}"


@pytest.mark.parametrize(
    ("num_cores", "in_container", "oversubscribes"),
    [(2, False, True), (8, False, True), (64, False, False), (64, True, True)],
)
def test_few_cores_are_oversubscribed(tmp_path, num_cores, in_container, oversubscribes):
    """The test runs a copy of the script that looks for a container's marker file elsewhere."""
    (tmp_path / "getconf").write_text(f"#!/bin/sh\necho {num_cores}\n")
    (tmp_path / "getconf").chmod(0o755)
    marks = tmp_path / "marks"
    marks.mkdir()
    (marks / ".containerenv" if in_container else marks / "other").touch()
    script = re.sub(r" /\S*(?=/?\.(docker|container)env)", f" {marks}/", (FOLDER / "activate.sh").read_text())
    assert script.count(f"{marks}/.") == 2
    echo = 'echo "$OMP_NUM_THREADS ${OMPI_ALLOW_RUN_AS_ROOT:-unset}"'
    plain = {"PATH": f"{tmp_path}:/usr/bin:/bin", "VIRTUAL_ENV": str(ROOT / ".venv")}
    result = subprocess.run(["bash", "-c", script + echo], env=plain, text=True, capture_output=True, check=True)
    assert result.stdout == f"1 {'1' if oversubscribes else 'unset'}\n"


@pytest.mark.parametrize("script", ["build_open_mpi.sh", "gpu_check.sh"])
def test_scripts_say_what_they_lack(script):
    result = subprocess.run([FOLDER / script], text=True, capture_output=True)
    assert result.returncode != 0
    assert f"usage: hostfiles/{script} " in result.stderr
    assert len(result.stderr.splitlines()) == 1
