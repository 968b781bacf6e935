"""The supervisor of training jobs: when it starts a job again, where, and with which words. The jobs are fakes."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpi_tests.helpers.launch import ROOT
from parallelism.planner.layout import ParallelLayout
from training import supervise
from training.settings.checks import USES
from training.settings.config import Config
from training.supervision.command import LAYOUT, without
from training.supervision.heartbeat import beat
from training.supervision.hosts import Hosts, read_hosts, slots_of
from training.supervision.job import Job

# A job that appends its arguments to a file, and begins the steps that it is told to, as a rank does.
FAKE = """
import os, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
with (folder / "starts").open("a") as file:
    file.write(" ".join(sys.argv[2:]) + "\\n")
start = len((folder / "starts").read_text().splitlines())
def begin(step):
    Path(os.environ["COLLECTIVES_HEARTBEAT"], "host").write_text(str(step))
"""


def supervised(tmp_path, job, *flags, words=(), **options):
    """Run a supervisor in a process of its own; return what it printed, and the words of each start of the job."""
    command = supervised_command(tmp_path, job, *flags, words=words)
    result = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=60, **options)
    starts = tmp_path / "starts"
    return result, starts.read_text().splitlines() if starts.exists() else []


def supervised_command(tmp_path, job, *flags, words=()):
    saved = ["--checkpoint_dir", str(tmp_path / "saved")]
    return [
        *(sys.executable, "-m", "training.supervise", *flags, "--"),
        *(sys.executable, "-c", FAKE + job, str(tmp_path), *words, *saved),
    ]


def checkpoint(folder, number=1, step=10, **values):
    path = folder / f"{number:05}-step-{step}"
    path.mkdir(parents=True)
    (path / "index.json").write_text(json.dumps({"index": {"whole": values}}))
    return path


def test_a_job_that_succeeds_is_started_once(tmp_path):
    result, starts = supervised(tmp_path, "print('done')")
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")
    assert starts == [f"--checkpoint_dir {tmp_path}/saved"]
    assert not [*(tmp_path / "saved").iterdir()]


def test_a_job_that_fails_in_its_first_step_is_started_three_times_and_its_error_shown_in_full_once(tmp_path):
    job = "begin(1)\nprint('a warning', file=sys.stderr)\nraise RuntimeError('out of luck')"
    result, starts = supervised(tmp_path, job)
    assert (result.returncode, len(starts)) == (1, 3)
    assert result.stderr.count("Traceback") == result.stderr.count("a warning") == 1
    assert result.stderr.splitlines()[-1] == (
        "error: the job has failed 3 times without progress beyond step 1, with status 1: RuntimeError: out of luck"
    )
    assert result.stdout.splitlines() == [
        f"supervise: the job has failed in step 1, with status 1: start {start} follows" for start in (2, 3)
    ]


@pytest.mark.parametrize(
    ("job", "status", "words"),
    [
        ("print('error: lr=-1 must be above 0', file=sys.stderr); sys.exit(2)", 2, "lr=-1 must be above 0"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "nothing on stderr"),
        (
            "print('---\\n\\nx noticed that process rank 0 exited on\\nsignal 9 (Killed).\\n---', file=sys.stderr)\n"
            "sys.exit(9)",
            9,
            "x noticed that process rank 0 exited on signal 9 (Killed).",
        ),
    ],
)
def test_the_last_line_has_the_jobs_status_and_error(tmp_path, job, status, words):
    result, starts = supervised(tmp_path, job, "--max_failures", "2")
    assert (result.returncode, len(starts)) == (status, 2)
    line = f"error: the job has failed 2 times before its first step, with status {status}: {words}"
    assert result.stderr.splitlines()[-1] == line


def test_another_error_is_shown_too(tmp_path):
    result, starts = supervised(tmp_path, "raise RuntimeError(f'number {start}')")
    assert result.stderr.count("Traceback") == len(starts) == 3


def test_failures_are_counted_anew_after_progress(tmp_path):
    """The steps at which the starts fail; the last three bring no progress."""
    job = "begin((1, 1, 2, 3, 3, 2)[start - 1])\nsys.exit(1)"
    _, starts = supervised(tmp_path, job)
    assert len(starts) == 6


def test_a_run_that_has_not_come_to_its_end_has_failed(tmp_path):
    """Open MPI's mpirun ends with status 0 if it loses a host."""
    result, starts = supervised(tmp_path, "begin('ended' if start == 2 else 5)")
    assert (result.returncode, len(starts)) == (0, 2)
    assert result.stdout == "supervise: the job has failed in step 5, with status 0: start 2 follows\n"
    result, _ = supervised(tmp_path, "begin(6)")
    assert result.returncode == 1


def test_what_a_restarted_job_warns_of_is_shown_once_it_has_progressed(tmp_path):
    job = """
print(f"start {start}", file=sys.stderr, flush=True)
begin(1)
if start == 1: sys.exit(1)
begin(2)
time.sleep(1)
begin("ended")
"""
    result, _ = supervised(tmp_path, job)
    assert (result.returncode, result.stderr) == (0, "start 1\nstart 2\n")


def test_a_restarted_job_resumes_from_what_it_has_written_itself(tmp_path):
    """Without --resume, the first start begins a new run, whatever the folder has of an older one."""
    checkpoint(tmp_path / "saved")
    job = "if start == 2: (folder / 'saved' / '00002-step-1').mkdir()\nsys.exit(start < 3)"
    result, starts = supervised(tmp_path, job)
    saved = f"--checkpoint_dir {tmp_path}/saved"
    assert result.returncode == 0
    assert starts == [saved, saved, f"{saved} --resume auto"]


def test_a_command_that_resumes_stays_as_it_is(tmp_path):
    checkpoint(tmp_path / "saved")
    _, starts = supervised(tmp_path, "sys.exit(start < 2)", words=["--resume", "auto"])
    assert starts == [f"--resume auto --checkpoint_dir {tmp_path}/saved"] * 2


def test_a_silent_job_is_ended_and_started_again(tmp_path):
    result, starts = supervised(tmp_path, "begin(7); time.sleep(60 * (start < 2)); begin('ended')", "--silence_s", "1")
    assert (result.returncode, len(starts)) == (0, 2)
    how = "in step 7, with no new step for 1 s"
    assert result.stdout == f"supervise: the job has failed {how}: start 2 follows\n"


@pytest.mark.parametrize(
    ("limits", "begins", "why", "seconds"),
    [
        ((0, 10), {3: 1, 12: 2, 21: 3}, "no new step for 10 s", 31),  # the times at which steps begin
        ((5, 10), {}, "no new step for 5 s", 5),
        ((5, 10), {3: 1}, "no new step for 10 s", 13),
        ((5, 0), {3: 1}, "", 100),
        ((0, 10), {}, "", 100),
    ],
)
def test_a_job_is_silent_if_no_step_begins_in_time(monkeypatch, limits, begins, why, seconds):
    """The clock advances while the supervisor waits for the job, which ends after 100 s."""
    clock = SimpleNamespace(now_s=0)

    def wait(timeout):
        clock.now_s += 1
        if clock.now_s < 100:
            raise subprocess.TimeoutExpired("job", timeout)

    def newest_step(folder):
        return max((step for time_s, step in begins.items() if time_s <= clock.now_s), default=0)

    monkeypatch.setattr("training.supervision.job.time", SimpleNamespace(monotonic=lambda: clock.now_s))
    job = SimpleNamespace(step=0, heartbeat=None, process=SimpleNamespace(wait=wait), show=lambda: None)
    monkeypatch.setattr("training.supervision.job.newest_step", newest_step)
    assert (Job.watch(job, *limits, 0), clock.now_s) == (why, seconds)


def test_the_old_jobs_processes_are_gone_before_the_next_start(tmp_path):
    """A process in a session of its own, as a rank of MPICH, ignores SIGTERM, and has lost its parent."""
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    code = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {child!r}], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
raise SystemExit(3)
"""
    job = Job([sys.executable, "-c", code], tmp_path / "heartbeat")
    assert job.watch(0, 0, 0) == ""
    (orphan,) = job.processes()
    assert job.end() == 3
    status = Path(f"/proc/{orphan}/status")
    assert not status.exists() or "State:\tZ" in status.read_text()


def test_a_job_that_ignores_sigterm_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("training.supervision.job.GRACE_S", 0.2)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    job = Job([sys.executable, "-c", code], tmp_path / "heartbeat")
    time.sleep(0.5)
    assert job.end() == 128 + signal.SIGKILL


SAVES = """
signal.signal(signal.{}, lambda *_: sys.exit({}))
(folder / "ready").touch()
time.sleep(60)
"""


@pytest.mark.parametrize(("name", "job_status", "status"), [("SIGUSR1", 0, 0), ("SIGTERM", 3, 3), ("SIGINT", 0, 0)])
def test_signals_go_to_the_job_which_is_not_started_again(tmp_path, name, job_status, status):
    command = supervised_command(tmp_path, SAVES.format(name, job_status))
    with subprocess.Popen(command, cwd=ROOT, preexec_fn=take_interrupts) as process:
        while not (tmp_path / "ready").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(getattr(signal, name))
        assert process.wait(60) == status
    assert len((tmp_path / "starts").read_text().splitlines()) == 1


def take_interrupts():
    """Undo that a shell lets its jobs in the background ignore them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def restored():
    before = {number: signal.getsignal(number) for number in supervise.SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGUSR1, 0), (signal.SIGTERM, 143)])
def test_a_signal_between_two_jobs_ends_the_supervisor(tmp_path, restored, number, status):
    """It arrives while hosts are checked."""
    flags = SimpleNamespace(start_s=0, silence_s=0, max_failures=3)
    supervisor = supervise.Supervisor(flags, ["no-such-program"], None, tmp_path, tmp_path)
    signal.raise_signal(number)
    assert supervisor.run() == status


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no command after --: write it as in python -m training.supervise -- mpirun -n 2 python -m training "),
        (["--silence_s", "3"], "no command after --: write it as in"),
        (["--", "mpirun", "python"], "the command has no --checkpoint_dir, from which a job resumes: add it, as in"),
        (["--", "a", "--checkpoint-dir="], "the command has no --checkpoint_dir, from which a job resumes: add it"),
        (["--max_failures", "0", "--", "a"], "argument --max_failures: '0' must be a whole number from 1 to"),
        (["--silence", "3", "--", "a"], "unrecognized arguments: --silence 3 (nearest: --silence_s); see --help"),
        (["--", "a", "--checkpoint_dir", "s", "--resume", "s/1"], "--resume s/1 goes back to one checkpoint at each"),
        (["--", "no-such", "--checkpoint_dir", "SAVED"], "no-such can't be started (No such file or directory): check"),
        (
            ["--", "a", "--checkpoint_dir", "/dev/null/x"],
            "checkpoint_dir /dev/null/x can't be written (Not a directory",
        ),
        (["--remote_shell", "ssh '", "--", "a"], 'argument --remote_shell: invalid split value: "ssh \'"; see --help'),
        (["--spares", "1", "--", "a", "--checkpoint_dir", "s"], "spares=1: a command without a hostfile has none: use"),
        (["--", "a", "-f", "no-such", "--checkpoint_dir", "s"], "hostfile no-such: No such file or directory: pass"),
        (["--", "a", "-f", "/dev/null", "--checkpoint_dir", "s"], "hostfile /dev/null: names no host: pass another"),
        (
            ["--spares", "1", "--", "a", "-f", "hostfiles/local.txt", "--checkpoint_dir", "s"],
            "spares=1: the 1 hosts of hostfiles/local.txt leave none: use fewer spares, or a hostfile with more hosts",
        ),
    ],
)
def test_refusals(tmp_path, words, message):
    words = [word.replace("SAVED", str(tmp_path)) for word in words]
    command = [sys.executable, "-m", "training.supervise", *words]
    result = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=60)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {message}")


def test_the_settings_that_a_planned_layout_replaces_are_those_of_layouts():
    """They are a layout's own, and those that have an effect in some layouts only."""
    own = {"layout", *ParallelLayout._fields}
    depend = {name for name, use in USES if use.other in own}
    assert set(LAYOUT) == own | depend | {name for name, use in USES if use.other in depend}
    assert set(LAYOUT) <= {field.name for field in fields(Config)}


@pytest.mark.parametrize(
    ("words", "rest"),
    [
        ("mpirun -n 4 python train.py --tp 2 --seed -1 --pp=2 --lr 1", "mpirun -n 4 python train.py --seed -1 --lr 1"),
        ("--sequence_parallel --no-sequence-parallel --data a b --sp-mode ulysses", "--data a b"),
        ("--tp_like 2 --data --dp", "--tp_like 2 --data"),
    ],
)
def test_flags_are_dropped_with_their_values(words, rest):
    assert " ".join(without(words.split(), LAYOUT)) == rest


HOSTFILES = {
    "open_mpi": "# two\na slots=2\nb  slots = 4 max_slots=4\n\nc slots=2\n",
    "mpich": "a:2\nb:4 # fast\nc:2\n",
    "pbs": "a\na\nb\nb\nb\nb\nc\nc\n",
}


@pytest.mark.parametrize("kind", HOSTFILES)
def test_hostfiles_of_all_kinds(tmp_path, kind):
    (tmp_path / "hosts").write_text(HOSTFILES[kind])
    hosts = Hosts(read_hosts(str(tmp_path / "hosts")), 3)
    assert {host: hosts.slots([host]) for host in hosts.first} == {"a": 2, "b": 4, "c": 2}
    (tmp_path / "fewer").write_text(hosts.text(["a", "c"]))
    assert {host: sum(map(slots_of, lines)) for host, lines in read_hosts(str(tmp_path / "fewer")).items()} == {
        "a": 2,
        "c": 2,
    }


@pytest.fixture
def cluster(tmp_path):
    """Return a remote shell by which those hosts answer that have a file, and the folder of the files."""
    shell = tmp_path / "shell"
    shell.write_text(f'#!/bin/sh\n[ "$2" = true ] && [ -e "{tmp_path}/up/$1" ]\n')
    shell.chmod(0o755)
    (tmp_path / "up").mkdir()
    for host in "abcd":
        (tmp_path / "up" / host).touch()
    return str(shell), tmp_path / "up"


def parsed(tmp_path, cluster, slots, *words, spares=0):
    """Return a supervisor of a job on a, b, c and d."""
    (tmp_path / "hosts").write_text("".join(f"{host} slots={slots}\n" for host in "abcd"))
    saved = tmp_path / "saved"
    saved.mkdir(exist_ok=True)
    command = ["mpirun", "--hostfile", str(tmp_path / "hosts"), *words, "--checkpoint_dir", str(saved)]
    flags, command = supervise.parse(["--remote_shell", cluster[0], "--spares", str(spares), "--", *command])
    return supervise.Supervisor(flags, command, supervise.find_hosts(command, flags), saved, saved)


def test_a_lost_host_is_left_out_and_taken_in_again(tmp_path, cluster, restored, capsys):
    supervisor = parsed(tmp_path, cluster, 2, "-n", "8", "python", "train.py", "--tp", "2", "--resume", "auto")
    command = supervisor.command
    checkpoint(tmp_path / "saved", batch_size=24, n_layer=2)
    assert supervisor.words() == command
    (cluster[1] / "b").unlink()
    words = " ".join(supervisor.words())
    saved = tmp_path / "saved"
    assert words == (
        f"mpirun --hostfile {saved}/hosts -n 6 python train.py --resume auto --checkpoint_dir {saved} --layout auto "
        "--global_batch_size 24"
    )
    assert (tmp_path / "saved" / "hosts").read_text() == "a slots=2\nc slots=2\nd slots=2\n"
    assert capsys.readouterr().out.splitlines() == [
        "supervise: the next start is on a, c, d",
        "supervise: 6 of 8 ranks, and --layout auto in place of the command's layout",
    ]
    (cluster[1] / "b").touch()
    assert supervisor.words() == command


def test_a_spare_takes_over_from_a_lost_host(tmp_path, cluster, restored):
    supervisor = parsed(tmp_path, cluster, 2, "-n", "4", "python", "train.py", "--tp", "2", spares=2)
    for lost, hosts in (("", "ab"), ("a", "bc"), ("b", "cd")):
        (cluster[1] / lost).unlink() if lost else None
        assert supervisor.words()[3:8] == ["-n", "4", "python", "train.py", "--tp"]
        assert (tmp_path / "saved" / "hosts").read_text() == "".join(f"{host} slots=2\n" for host in hosts)


@pytest.mark.parametrize(
    ("slots", "words", "lost", "number"),
    [
        (2, "-n 8 python --global_batch_size=24", "d", "6"),
        (2, "python --global_batch_size=24", "d", "6"),  # a rank for each slot
        (2, "-n 8 python --global_batch_size=25", "d", "5"),  # 6 ranks are no dp that divides the batch
        (2, "-n 4 python --global_batch_size=24 --tp 2", "d", None),
        (1, "-n 16 python --global_batch_size=24", "cd", "8"),  # more ranks than slots
    ],
)
def test_there_are_as_many_ranks_as_slots_and_batch_allow(tmp_path, cluster, restored, slots, words, lost, number):
    supervisor = parsed(tmp_path, cluster, slots, *words.split())
    for host in lost:
        (cluster[1] / host).unlink()
    there = supervisor.words()
    if number is None:
        assert there[3:] == supervisor.command[3:]
    else:
        assert there[there.index("-n") + 1] == number
        assert there[-4:-1] == ["--layout", "auto", "--global_batch_size"]


def test_fewer_ranks_with_an_unknown_global_batch_are_refused(tmp_path, cluster, restored):
    supervisor = parsed(tmp_path, cluster, 2, "-n", "8", "python", "train.py")
    (cluster[1] / "c").unlink()
    checkpoint(tmp_path / "saved")  # a damaged index
    with pytest.raises(
        ValueError, match=r"6 of 8 ranks are left, and no checkpoint has the global batch yet: pass --g"
    ):
        supervisor.words()
    for host in ("a", "b", "d"):
        (cluster[1] / host).unlink()
    with pytest.raises(ValueError, match=r"none of the hosts a, b, c, d can be reached: start again when one is back"):
        supervisor.words()


def test_hosts_that_no_remote_shell_reaches_are_not_checked(tmp_path, cluster, restored, capsys):
    """Some batch systems have no ssh between their hosts."""
    for shell in ("false", "no-such-shell -o x"):
        supervisor = parsed(tmp_path, (shell, None), 2, "python", "train.py")
        line = f"supervise: none of a, b, c, d answers to {shell}: hosts are not checked\n"
        assert capsys.readouterr().out == line
        assert supervisor.words() == supervisor.command
    with pytest.raises(ValueError, match=r"spares=1: none of a, b, c, d answers to false: pass a --remote_shell by"):
        parsed(tmp_path, ("false", None), 2, "python", "train.py", spares=1)


def test_the_first_rank_of_each_host_writes_its_step(tmp_path, monkeypatch):
    steps = {}
    for rank in range(4):
        folder = tmp_path / str(rank)
        folder.mkdir()
        monkeypatch.setenv("COLLECTIVES_HEARTBEAT", str(folder))
        beat(SimpleNamespace(rank=rank, topology=SimpleNamespace(nodes=((0, 1), (2, 3)))), 7)
        steps[rank] = [path.read_text() for path in folder.iterdir()]
    assert steps == {0: ["7"], 1: [], 2: ["7"], 3: []}
    monkeypatch.setenv("COLLECTIVES_HEARTBEAT", str(tmp_path / "gone"))
    beat(SimpleNamespace(rank=0, topology=SimpleNamespace(nodes=((0,),))), 8)
    assert not (tmp_path / "gone").exists()


def test_ranks_on_other_hosts_get_the_folder(tmp_path, monkeypatch):
    """Open MPI hands on the variables of a list."""
    monkeypatch.setenv("OMPI_MCA_mca_base_env_list", "PATH")
    job = Job(["sh", "-c", "echo $OMPI_MCA_mca_base_env_list $COLLECTIVES_HEARTBEAT >&2"], tmp_path / "heartbeat")
    job.watch(0, 0, 0)
    job.close()
    assert job.stderr.decode() == f"PATH;COLLECTIVES_HEARTBEAT {tmp_path}/heartbeat\n"
