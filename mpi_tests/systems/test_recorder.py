"""Hangs: PyTorch's flight-recorder analyzer finds the same rank and call in the ranks' files as the report."""

import gc
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from torch.distributed.flight_recorder.components.builder import build_db
from torch.distributed.flight_recorder.components.config_manager import JobConfig
from torch.distributed.flight_recorder.components.loader import read_dir

from mpi_tests.helpers.launch import ROOT, environment, find_mpirun, launch, watched

pytestmark = pytest.mark.shares_cores

# Start-up and compilation may take longer, so `world` has the default time limit.
BEGIN = """
import os, signal, sys, time
import numpy as np
import collectives

world = collectives.world()
x = world.empty(8)
world.plan("all_reduce", x, algorithm="one_shot")()
world.barrier()
comm = collectives.Communicator(world.mpi, check={check}, timeout_s=2, segment_bytes=1024)
late = world.rank == 1
def load():
    time.sleep(60)
"""
NEVER = r"not arrived at (\S+)[^#]* #(\d+).*: ranks? (\S+)"
DISAGREE = r"ranks disagree: call #(\d+).* is (\w+)\(.* on ranks? (\S+), (\w+)\(.* on ranks? (\S+)"


class Culprits(NamedTuple):
    """Ranks that are missing from a call, or make another one."""

    call: str
    number: int
    ranks: set[int]


def run(folder: Path, body: str, num_ranks: int = 3, check: bool = True, **env: str):
    script = folder / "script.py"
    script.write_text(BEGIN.format(check=check) + body)
    return launch(num_ranks, "python", script, env={"COLLECTIVES_CALLS": str(folder / "calls")} | env)


def folder_of(result, tmp_path: Path) -> Path:
    """Return the folder of the ranks' files, which the report names once."""
    (folder,) = (tmp_path / "calls").iterdir()
    assert re.search(
        f"^the last calls of each rank: torchfrtrace (--allow-incomplete-ranks )?{folder}$", result.stderr, re.M
    )
    return folder


def analyzed(folder: Path, *words: str):
    """Return the mismatches that torch's analyzer finds, as `Collective` entries of its table."""
    flags = JobConfig().parse_args([str(folder), *words])
    try:
        collectives = build_db(*read_dir(flags)[:1], flags, "2.10").collectives
    finally:
        gc.enable()  # the analyzer disables it
    return [one for one in collectives if one.missing_ranks or one.mismatch_collectives]


def by_torch(folder: Path) -> list[Culprits]:
    culprits = analyzed(folder)
    return [
        Culprits(
            one.collective_name.removeprefix("nccl:").split()[is_collective(one)],
            one.collective_seq_id,
            set(one.missing_ranks or one.mismatch_collectives),
        )
        for one in culprits
    ]


def is_collective(one) -> bool:
    """Return whether our own name follows the analyzer's."""
    return not one.collective_name.startswith(("nccl:send ", "nccl:recv "))


def by_report(result) -> list[Culprits]:
    return [
        Culprits(call, int(number), set(map(int, ranks.split(","))))
        for call, number, ranks in re.findall(NEVER, result.stderr)
    ]


SKIPPED = """
for _ in range(3):
    comm.broadcast(x)
if not late:
    comm.all_reduce(x)
"""
ASLEEP = """
plan = comm.plan("all_reduce", x, algorithm="ring")
plan()
if late:
    load()
plan()
"""
# Shared-memory runs on the fast path, which are only counted; other ranks have made one more.
SHORT_RUNS = """
plans = [comm.plan("all_reduce", x, algorithm="one_shot"), comm.plan("broadcast", x, algorithm="staged")]
for _ in range(40):
    for plan in plans:
        plan()
if late:
    load()
plans[0]()
"""
LIBRARY = """
plan = comm.plan("barrier", algorithm="mpi")
if late:
    load()
plan()
"""
PART = """
part = comm.split(0 if comm.rank else 1)
barrier = part.plan("barrier", algorithm="dissemination")
if not late:
    barrier()
"""
STARTED = """
works = [comm.all_reduce(np.ones(n, "float32"), blocking=False) for n in (4, 5)]
if not late:
    works.append(comm.all_gather(np.ones(3), blocking=False))
for work in works:
    work.wait()
"""
LONG_AGO = """
world.scan(np.ones(4))  # compiles
world.exscan(np.ones(4))
alone = comm.split(comm.rank)
for _ in range(1000 * (1 + comm.rank)):
    alone.barrier(algorithm="dissemination")  # far more on some ranks than what is kept
for _ in range(5):
    comm.scan(np.ones(4))
if comm.rank != 2:
    comm.exscan(np.ones(4))
"""


@pytest.mark.parametrize(
    ("body", "call", "number", "ranks"),
    [
        pytest.param(SKIPPED, "all_reduce", 5, {1}, id="skipped"),
        pytest.param(ASLEEP, "all_reduce", 4, {1}, id="asleep"),
        pytest.param(SHORT_RUNS, "all_reduce", 84, {1}, id="short_runs"),
        pytest.param(LIBRARY, "barrier", 3, {1}, id="library"),
        pytest.param(PART, "barrier", 2, {1}, id="part"),
        pytest.param(STARTED, "all_gather", 4, {1}, id="started"),
        pytest.param(LONG_AGO, "exscan", 8, {2}, id="long_ago"),
    ],
)
def test_a_rank_that_is_missing(tmp_path, body, call, number, ranks):
    result = run(tmp_path, body)
    assert by_report(result)[0] == (call, number, ranks), result.stderr
    (first, *_) = by_torch(folder_of(result, tmp_path))
    assert first == (call, number, ranks)


def test_ranks_that_wait_for_each_other_in_two_parts(tmp_path):
    body = """
a, b = comm.split(0), comm.split(0)
for part in (b, a) if late else (a, b):
    part.plan("barrier", algorithm="dissemination")()
"""
    result = run(tmp_path, body, num_ranks=2)
    expected = {("plan", 1, (1,)), ("plan", 1, (0,))}  # making a plan is collective
    assert {(call, number, tuple(ranks)) for call, number, ranks in by_torch(folder_of(result, tmp_path))} == expected
    words = "not arrived at plan barrier #1 of split(color=0) "
    assert f"{words}#2: rank 1" in result.stderr
    assert f"{words}#3: rank 0" in result.stderr


DIFFERENT = {
    "collective": (
        'comm.broadcast(x, algorithm="binomial", root=2) if late else comm.all_reduce(x, algorithm="ring")',
        "COLLECTIVE_TYPE_MISMATCH",
    ),
    "length": (
        'comm.all_reduce(np.ones(256 * (3 if late else 6), "float32"), algorithm="ring")',
        "SIZE_OR_SYNTAX_MISMATCH",
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_rank_that_calls_something_else(tmp_path, what):
    body, kind = DIFFERENT[what]
    result = run(tmp_path, body, check=False)
    (one, *_) = analyzed(folder_of(result, tmp_path))
    ((culprit, other),) = one.mismatch_collectives.items()
    assert (culprit, one.collective_seq_id, other.type_of_mismatch.state.name) == (1, 2, kind)
    number, call, ranks, other_call, late = re.search(DISAGREE, result.stderr).groups()
    assert (number, ranks, late) == ("2", "0,2", "1")
    assert [one.collective_name.split()[0], other.collective_name.split()[0]] == [f"nccl:{call}", f"nccl:{other_call}"]
    (line,) = [n for n, text in enumerate((tmp_path / "script.py").read_text().splitlines(), 1) if text == body]
    (frame,) = one.collective_frames
    assert (frame["filename"], frame["line"]) == (str(tmp_path / "script.py"), line)


MESSAGES = {
    "recv": ("if late: comm.recv(x, source=2, tag=7)", "rank 1 of 3 waits", "recv from rank 2 with tag 7", {2}),
    "send": ("if late: comm.send(np.ones(10**6), 2, 3)", "rank 1 of 3 waits", "send to rank 2 with tag 3", {2}),
    "any": ("if late: comm.recv(x)", "rank 1 of 3 waits", "recv from any rank with tag 0", {0, 2}),
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_message_without_its_other_end(tmp_path, kind):
    body, waits, words, missing = MESSAGES[kind]
    result = run(tmp_path, body)
    assert re.search(rf"^{waits} \d+ s in {words} \(", result.stderr, re.MULTILINE), result.stderr
    ((call, number, ranks),) = by_torch(folder_of(result, tmp_path))
    assert (call, number, ranks) == ("send" if kind == "send" else "recv", 1, missing)


def test_messages_of_two_tags(tmp_path):
    body = "comm.send(np.ones(10**6), 0, tag=8) if late else comm.recv(np.ones(10**6), 1, tag=7)"
    result = run(tmp_path, body, num_ranks=2)
    assert "in recv from rank 1 with tag 7 (" in result.stderr
    assert "in send to rank 0 with tag 8 (" in result.stderr
    culprits = sorted(by_torch(folder_of(result, tmp_path)))
    assert culprits == [("recv", 1, {1}), ("send", 1, {0})]


def test_a_rank_that_is_stopped(tmp_path, caplog):
    """A stopped rank writes no file, as with PyTorch; the analyzer reports that."""
    body = """
if late:
    os.kill(os.getpid(), signal.SIGSTOP)
comm.barrier()
"""
    result = run(tmp_path, body)
    assert "perhaps not arrived at barrier #2: rank 1" in result.stderr
    assert missed(folder_of(result, tmp_path), caplog) == {1}


def test_a_rank_that_dies_where_mpi_goes_on_without_it(tmp_path, caplog):
    if "Open MPI" not in watched([find_mpirun(), "--version"], environment(), 60).stdout:
        pytest.skip("needs Open MPI, which continues without a rank that has died")
    script = tmp_path / "script.py"
    body = """
plan = comm.plan("all_reduce", x, algorithm="one_shot")
plan()
if late:
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    plan()
"""
    script.write_text(BEGIN.format(check=True) + body)
    env = environment() | {"COLLECTIVES_CALLS": str(tmp_path / "calls")}
    result = watched([find_mpirun(), "--with-ft", "ulfm", "-n", 3, sys.executable, script], env, 60)
    assert re.search(r"RankFailure: all_reduce one_shot.*: rank 1 has died", result.stderr)
    folders = [*(tmp_path / "calls").iterdir()]
    assert len({path.name for folder in folders for path in folder.iterdir()} - {"rank_1"}) > 0
    assert any(missed(folder, caplog) >= {1} for folder in folders)


def missed(folder: Path, caplog) -> set[int]:
    """Return the ranks whose files the analyzer reports as missing."""
    with caplog.at_level(logging.INFO):
        analyzed(folder, "--allow-incomplete-ranks")
    return {
        int(rank)
        for ranks in re.findall(r"missed FR dumps from ranks \(\{(.*?)\}\)", caplog.text)
        for rank in ranks.split(", ")
    }


def test_a_signal_has_all_ranks_write_and_go_on(tmp_path):
    body = """
comm.split(0).all_reduce(x, algorithm="ring")
print("waiting", flush=True)
deadline = time.monotonic() + 60
while not os.path.exists(sys.argv[1]) and time.monotonic() < deadline:
    time.sleep(0.05)
world.barrier()
print("ended", flush=True)
"""
    script, go_on, calls = tmp_path / "script.py", tmp_path / "go_on", tmp_path / "calls"
    script.write_text(BEGIN.format(check=True) + body)
    env = environment() | {"COLLECTIVES_CALLS": str(calls)}
    command = [find_mpirun(), "-n", "2", sys.executable, str(script), str(go_on)]
    ends = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env=env, text=True, **ends) as job:
        for _ in range(2):
            assert job.stdout.readline() == "waiting\n"
        assert not calls.exists()
        job.send_signal(signal.SIGUSR2)
        deadline = time.monotonic() + 30
        while len([*calls.glob("*/rank_*")]) < 4 and time.monotonic() < deadline:
            time.sleep(0.05)
        go_on.touch()
        stdout, stderr = job.communicate(timeout=60)
    assert (job.returncode, stdout) == (0, "ended\n" * 2)
    folders = [*calls.iterdir()]
    assert sorted(stderr.splitlines()) == sorted(
        f"rank {rank} has written its last calls to {folder}" for folder in folders for rank in range(2)
    )
    for folder in folders:
        assert analyzed(folder) == []


def test_nothing_is_written_of_a_job_that_ends_well_or_by_an_error(tmp_path):
    assert run(tmp_path, "comm.all_reduce(x)").returncode == 0
    assert run(tmp_path, "comm.all_reduce(x[:4] if late else x)").returncode == 2
    assert not (tmp_path / "calls").exists()


def test_a_folder_that_cannot_be_written_to(tmp_path):
    """The job still ends with its report."""
    (tmp_path / "calls").mkdir()
    (tmp_path / "calls").chmod(0o500)
    if os.access(tmp_path / "calls", os.W_OK):  # root can always write
        body = f"os.rmdir({str(tmp_path / 'calls')!r}) if comm.rank == 0 else None\ncomm.barrier()\n"
        body += f"open({str(tmp_path / 'calls')!r}, 'w') if comm.rank == 0 else None\n"
    else:
        body = ""
    result = run(tmp_path, f"{body}\nif not late: comm.barrier()")
    assert "not arrived at barrier" in result.stderr
    assert re.search(
        r"^rank \d cannot write its last calls to .*: (Not a directory|Permission denied|File exists)$",
        result.stderr,
        re.MULTILINE,
    )
