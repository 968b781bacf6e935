"""Jobs that go on without ranks that die, under Open MPI's `mpirun --with-ft ulfm`."""

import json
import random
import re
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

from mpi_tests.helpers import survival
from mpi_tests.helpers.bit_flips import TARGETS
from mpi_tests.helpers.launch import environment, find_mpirun, launch, watched
from parallelism.checkpoint.folders import MEMORY, snapshot_folder

pytestmark = [
    pytest.mark.shares_cores,
    pytest.mark.skipif(
        not survival.is_open_mpi(), reason="needs Open MPI, which continues without a rank that has died"
    ),
]

RUN = "--micro_batch_size 2 --max_iters 20"
BATCH = "--global_batch_size 24"  # of every run

# Ranks 2 and 0 die one after the other, in the middle of calls.
SCRIPT = """
import os, signal, threading
import numpy as np
import collectives

comm = collectives.world()
deaths = [2, 0]
name = comm.rank
while True:
    part = comm.split(comm.rank % 2)
    x = {array}
    plan = comm.plan("all_reduce", x, op="max")
    step = 0
    try:
        while deaths or step < 20:
            x[:] = comm.rank
            {call}
            step += 1
            if step == 20 and deaths and name == deaths[0]:
                threading.Timer(0.003, os.kill, (os.getpid(), signal.SIGKILL)).start()
        break
    except collectives.RankFailure:
        old, comm = comm, comm.shrink()
        dead = deaths.pop(0)
        y = comm.empty(5)
        y[:] = comm.rank
        comm.all_reduce(y)
        assert (y == sum(range(comm.size))).all()
        try:
            old.barrier()
        except RuntimeError:
            print(f"rank {{name}} is rank {{comm.rank}} of {{comm.size}}", flush=True)
print(f"rank {{name}} is done", flush=True)
"""
CALLS = {
    "a plan in symmetric memory": ('comm.empty(1 << 16, "float32")', "plan()"),
    "a started plan": ("np.ones(1 << 16, np.float32)", "plan.start(); plan.wait()"),
    "a call": ("np.ones(1 << 16, np.float32)", 'comm.all_reduce(x, op="max")'),
    "messages": ("np.ones(1 << 16, np.float32)", 'comm.all_reduce(x, op="max", algorithm="ring")'),
    "the library's own": ("np.ones(1 << 16, np.float32)", 'comm.all_reduce(x, op="max", algorithm="mpi")'),
    "a part": ("np.ones(1 << 16, np.float32)", 'part.all_reduce(x, op="max"); comm.barrier()'),
    "objects": ("np.ones(8)", "comm.all_gather_object(name)"),
}


def surviving(ranks, *command, **variables):
    words = [find_mpirun(), "--with-ft", "ulfm", "-n", ranks, sys.executable, *command]
    return watched(words, environment() | variables, 90)


@pytest.mark.parametrize("way", CALLS)
def test_ranks_die_in_the_middle_of_calls_and_the_others_go_on(tmp_path, way):
    script, (array, call) = tmp_path / "script.py", CALLS[way]
    script.write_text(SCRIPT.format(array=array, call=call))
    result = surviving(4, script)
    lines = sorted(result.stdout.splitlines())
    expected = ["rank 0 is rank 0 of 3", "rank 1 is done", "rank 1 is rank 0 of 2", "rank 1 is rank 1 of 3"]
    expected += ["rank 3 is done", "rank 3 is rank 1 of 2", "rank 3 is rank 2 of 3"]
    assert lines == expected, result.stderr


@pytest.mark.parametrize(("ranks", "nodes"), [(4, "2x2"), pytest.param(3, "", marks=pytest.mark.proof)])
def test_a_rank_that_is_stopped_is_killed_if_that_is_asked_for(tmp_path, ranks, nodes):
    """By a rank of its node, which is not the one that asks: the first that has waited too long."""
    script = tmp_path / "script.py"
    script.write_text("""
import os, signal
import numpy as np
import collectives
comm = collectives.world()
rank, last = comm.rank, comm.size - 1
try:
    while True:
        if rank == last:
            os.kill(os.getpid(), signal.SIGSTOP)
        comm.barrier()
except collectives.RankFailure:
    os.environ.pop("COLLECTIVES_FAKE_NODES", None)
    left = comm.shrink()
print(rank, left.size, left.all_reduce(np.ones(3))[0], flush=True)
""")
    variables = {"COLLECTIVES_TIMEOUT_S": "10", "COLLECTIVES_KILL_SILENT": "1"}
    result = surviving(ranks, script, **variables, **({"COLLECTIVES_FAKE_NODES": nodes} if nodes else {}))
    size = ranks - 1
    assert sorted(result.stdout.splitlines()) == [f"{rank} {size} {size}.0" for rank in range(size)], result.stderr
    limit = "has waited for 10 s, the limit by COLLECTIVES_TIMEOUT_S or timeout_s"
    assert f"{limit}; ranks that do not answer are killed:\n" in result.stderr
    assert f"rank {size} of {ranks} does not answer: it is stopped, " in result.stderr


@pytest.mark.proof
def test_where_no_rank_of_its_node_answers_a_rank_that_is_stopped_ends_the_job(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import os, signal
import collectives
comm = collectives.world()
if comm.rank == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
comm.barrier()
""")
    variables = {"COLLECTIVES_TIMEOUT_S": "10", "COLLECTIVES_KILL_SILENT": "1", "COLLECTIVES_FAKE_NODES": "2x2"}
    result = surviving(3, script, **variables)
    assert "; this ends the job:\n" in result.stderr
    assert "rank 2 of 3 does not answer: it is stopped, " in result.stderr


def test_the_example():
    result = surviving(4, "examples/survive.py")
    sums = [(10, 4)] * 3 + [(7, 3)] * 3
    assert result.stdout.splitlines() == [f"step {n}: {x} on {size} ranks" for n, (x, size) in enumerate(sums, 1)]


def test_a_part_shrinks_by_itself(tmp_path):
    """Ranks 0 and 2 are a part of which a rank dies, and 1 and 3 one of which none does."""
    script = tmp_path / "script.py"
    script.write_text("""
import os, signal
import numpy as np
import collectives
comm = collectives.world()
part = comm.split(comm.rank % 2)
try:
    comm.barrier()  # each rank has its part before one dies
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        comm.barrier()
except collectives.RankFailure:
    left = part.shrink()
print(comm.rank, left.rank, left.size, left.all_reduce(np.ones(3))[0], flush=True)
""")
    result = surviving(4, script)
    assert sorted(result.stdout.splitlines()) == ["0 0 1 1.0", "1 0 2 2.0", "3 1 2 2.0"], result.stderr


def test_where_no_rank_has_died_all_are_left(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import numpy as np
import collectives
comm = collectives.world()
for _ in range(2):
    comm = comm.shrink()
    print(comm.rank, comm.size, comm.all_reduce(np.ones(1))[0], flush=True)
""")
    result = surviving(3, script)
    assert sorted(result.stdout.splitlines()) == sorted(2 * [f"{rank} 3 3.0" for rank in range(3)]), result.stderr


def test_a_job_that_ends_with_its_ranks_says_how_to_start_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import collectives
comm = collectives.world()
try:
    comm.shrink()
except RuntimeError as error:
    print(error, flush=True)
comm.barrier()
""")
    result = launch(2, "python", script)
    words = r"Open MPI v[\d.]+ ends with a rank that dies here: start it by mpirun --with-ft ulfm, of Open MPI 5"
    assert result.returncode == 0
    for line in result.stdout.splitlines():
        assert re.fullmatch(words, line)


@pytest.fixture
def folder():
    """Yield a folder in memory, as checkpoints are written often."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


@cache
def undisturbed(flags):
    """Return the last loss of a run of one rank, of which none dies."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        return survival.train(1, f"{RUN} {BATCH} {flags}", Path(path), way="shrink-forked").val_loss


def test_a_rank_with_wrong_numbers_is_left_out(folder):
    """The others end with the loss of a run without the fault."""
    flags = f"{survival.TINY} --checkpoint_dir {folder}/saved {RUN} --reproducible {BATCH}"
    checks = "--check_interval 4 --on_corruption leave_out"
    command = [find_mpirun(), "--with-ft", "ulfm", "-n", 3, sys.executable, "-m"]
    faulty = [*command, "mpi_tests.helpers.faults", "gradient", 1, 16, 1, *flags.split(), *checks.split()]
    result = watched(faulty, environment(), survival.LIMIT_S)
    assert result.returncode == 0, result.stdout + result.stderr
    words = TARGETS["gradient"].words.format(rank=1)
    assert re.search(rf"step 16: {words} ranks 0 and 2: the job leaves it out", result.stdout), result.stdout
    assert "2 of 3 ranks continue" in result.stdout
    assert float(re.findall(r"val loss (\S+)", result.stdout)[-1]) == undisturbed("--reproducible")


@pytest.mark.parametrize(
    ("ranks", "layout", "planned", "then"),
    [
        (4, "--tp 2", ["2"], "training on 2 ranks, tp 2; without ranks 2, which wait"),
        (2, "--tp 2", [], "training on 1 ranks, dp"),
        pytest.param(3, "--dp 3", ["2"], "training on 2 ranks, ", marks=pytest.mark.proof),
        pytest.param(4, "", ["3"], "training on 3 ranks, ", marks=pytest.mark.proof),
    ],
)
def test_a_planned_layout_is_planned_again_for_the_ranks_left(folder, ranks, layout, planned, then):
    """With the axes that the settings have, if the ranks that are left can have these."""
    flags = f"{RUN} --layout auto {BATCH} {layout}"
    outcome = survival.train(ranks, flags, folder, [12], random.Random(1), "shrink-forked")
    words = "\n".join(outcome.lines)
    assert re.findall(r"layout .* is the best for (\d) ranks", words) == [str(ranks), *planned], words
    assert then in words
    assert outcome.val_loss == pytest.approx(undisturbed(""), abs=2e-3)


@pytest.mark.parametrize(
    ("ranks", "flags", "layout", "kill_after"),
    [
        pytest.param(4, "", "--num_micro_batches 6 --tp 2 --zero_stage 3", [7, 12], marks=pytest.mark.proof),
        (3, "--reproducible", f"{BATCH} --zero_stage 1 --checkpoint_interval 0 --snapshot_interval 5", [12]),
        (4, "--reproducible", f"{BATCH} --pp 2 --schedule zb_h1 --zero_stage 1", [13]),
    ],
)
def test_training_goes_on_without_ranks_that_die(folder, ranks, flags, layout, kill_after):
    draw, way = random.Random(ranks), "shrink-forked"
    outcome = survival.train(ranks, f"{RUN} {flags} {layout}", folder, kill_after, draw, way)
    assert not snapshot_folder(Path(MEMORY), folder).exists()
    assert len(outcome.kills) == len(kill_after), "\n".join(outcome.lines)
    for kill in outcome.kills:
        assert kill.after % 5 == 1  # the one after a checkpoint or a snapshot, the newest that was complete
        assert 0 < kill.saved < kill.after <= kill.before + 1
    assert outcome.val_loss == pytest.approx(undisturbed(flags), abs=0 if flags else 2e-3)


DYING = """
import os, signal, sys, time
import collectives
from training import loop

own, comm, (ranks, moment) = loop.step, collectives.world(), sys.argv[1:3]
dies = str(comm.rank) in ranks.split(",")
sys.argv[1:] = sys.argv[3:]

def die(*_):
    time.sleep(3)  # the others come as far as they can
    os.kill(os.getpid(), signal.SIGKILL)

def step(run, iteration, batches):
    if dies and iteration == 7 and moment == "before an update":
        die()
    if dies and iteration == 7:
        run.optimizer.step = die
    return own(run, iteration, batches)

loop.step = step
loop.main()
"""


@pytest.mark.parametrize(
    ("moment", "layout"),
    [
        ("before an update", BATCH),
        ("in an update", "--pp 2 --num_micro_batches 6"),
        pytest.param("in an update", BATCH, marks=pytest.mark.proof),
        pytest.param("before an update", "--pp 2 --num_micro_batches 6", marks=pytest.mark.proof),
        pytest.param("in an update", "--tp 2 --num_micro_batches 6", marks=pytest.mark.proof),
        pytest.param("before an update", "--tp 2 --num_micro_batches 6", marks=pytest.mark.proof),
    ],
)
def test_a_step_is_done_again_where_the_ranks_left_hold_the_state(tmp_path, folder, moment, layout):
    """Half of the ranks die in step 7, before anything is saved; the others have done its update, or have not."""
    ranks, last = ("0,1", 6) if moment == "before an update" else ("2,3", 7)
    script, log = tmp_path / "script.py", tmp_path / "metrics.jsonl"
    script.write_text(DYING)
    words = f"{survival.TINY}{tmp_path} --micro_batch_size 2 --max_iters 10 --checkpoint_interval 0 {layout}".split()
    words += ["--checkpoint_dir", folder]
    result = surviving(4, script, ranks, moment, *words)
    assert f"step {last} is saved: the ranks left hold all of it\n" in result.stdout, result.stdout + result.stderr
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [record["iter"] for record in records if "loss" in record] == [*range(1, 11)]
    assert records[-1]["val_loss"] == pytest.approx(undisturbed("--max_iters 10"), abs=1e-3)


@pytest.mark.proof
def test_where_ranks_die_after_the_last_step_its_checkpoint_and_validation_follow(tmp_path, folder):
    script = tmp_path / "script.py"
    script.write_text(
        DYING.replace(
            "loop.main()",
            """
validate = loop.validate
def dying(run):
    return die() if dies and run.mesh.comm.size == 3 else validate(run)
loop.validate = dying
loop.main()
""",
        )
    )
    words = f"{survival.TINY}{tmp_path} --micro_batch_size 2 {BATCH} --max_iters 6 --snapshot_interval 4"
    words += " --checkpoint_interval 0"
    result = surviving(3, script, "1", "after the last step", *words.split(), "--checkpoint_dir", folder)
    assert "after step 4\n" in result.stdout, result.stdout + result.stderr
    assert "val loss" in result.stdout
    assert survival.newest_step(folder) == 6


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.proof)])
def test_groups_of_torch_go_on_without_a_rank(tmp_path, victim):
    """Also without rank 0, which serves torch's store."""
    script = tmp_path / "script.py"
    script.write_text(Path("examples/torch_survive.py").read_text().replace("name == 1", f"name == {victim}"))
    result = surviving(3, script)
    means = [(2, 3)] * 3 + [(sum({1, 2, 3} - {victim + 1}) / 2, 2)] * 3
    expected = [f"step {n}: mean gradient {x:g} of {size} ranks" for n, (x, size) in enumerate(means, 1)]
    assert result.stdout.splitlines() == expected, result.stderr
    assert victim != 1 or result.stdout in Path("docs/torch.md").read_text()


def test_a_replica_of_torchft_dies():
    pytest.importorskip("torchft")
    result = surviving(3, "examples/torchft_ddp.py")
    lines = re.findall(r"^step \d: mean .*$", result.stdout, re.MULTILINE)
    assert len(lines) == 6, result.stdout + result.stderr
    assert "\n".join(lines) in Path("docs/torch.md").read_text()


LAST = """
import atexit, ctypes, os, signal, sys
{imports}
from collectives.job import launch
comm = collectives.world()
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    comm.barrier()
except collectives.RankFailure:
    print(f"rank {{comm.rank}} ends", flush=True)
{end}
"""


def test_where_a_rank_has_died_the_others_end_as_programs_do(tmp_path):
    script = tmp_path / "script.py"
    imports = "import time, collectives\natexit.register(print, 'at exit')\natexit.register(time.sleep, 2)"
    end = "launch.ENDING_S = 1\nfile = open(f'{sys.argv[1]}{comm.rank}', 'w')\nfile.write('x')\nsys.exit(3)"
    script.write_text(LAST.format(imports=imports, end=end))
    result = surviving(3, script, tmp_path / "file")
    assert result.returncode == 3
    assert sorted(result.stdout.splitlines()) == ["at exit", "at exit", "rank 0 ends", "rank 2 ends"]
    assert [(tmp_path / name).read_text() for name in ("file0", "file2")] == ["x", "x"]


def test_where_rank_0_has_died_another_reports_what_all_refuse(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import os, signal
import collectives
comm = collectives.world()
if comm.rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    comm.barrier()
except collectives.RankFailure:
    comm.shrink()
raise collectives.InputError("all refuse")
""")
    result = surviving(3, script)
    assert result.stderr.count("error: all refuse\n") == 1


def test_where_a_rank_has_died_mpi4py_ends_mpi_within_a_limit(tmp_path):
    """MPI waits for the dead rank in some jobs, for ever; here `pause` does, just before."""
    script = tmp_path / "script.py"
    imports = "from mpi4py import MPI\nimport collectives\nctypes.pythonapi.Py_AtExit(ctypes.CDLL(None).pause)"
    script.write_text(LAST.format(imports=imports, end="launch.ENDING_S = 2"))
    result = surviving(3, script)
    assert sorted(result.stdout.splitlines()) == ["rank 0 ends", "rank 2 ends"]


@pytest.mark.parametrize("end", ["dist.destroy_process_group()", pytest.param("", marks=pytest.mark.proof)])
def test_a_rank_that_leaves_a_group_of_torch_ends(tmp_path, end):
    script = tmp_path / "script.py"
    script.write_text(f"""
from types import SimpleNamespace
import torch
import torch.distributed as dist
import collectives.torch_backend
dist.init_process_group("collectives")
group, name, x = dist.group.WORLD, dist.get_rank(), torch.ones(1)
handles = [""] * 3
dist.all_gather_object(handles, group.get_reconfigure_handle())
if name < 2:
    group.reconfigure(SimpleNamespace(uuid=1, handles=handles[:2])).wait()
    dist.all_reduce(x)
print(name, x.item(), flush=True)
{end}
""")
    result = surviving(3, script)
    assert sorted(result.stdout.splitlines()) == ["0 2.0", "1 2.0", "2 1.0"], result.stderr
    assert result.returncode == 0, result.stderr


@pytest.mark.proof
def test_the_benchmark(tmp_path):
    words = ["--kills", "1", "--way", "shrink-forked", "--seed", "3", "--output", tmp_path / "out.json"]
    watched([sys.executable, "benchmarks/survival.py", *words], environment(), 200)
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert results["survived"] == results["of"] == len(results["kills"]) > 0
    assert results["losses_within"] < 1e-3


def test_a_rank_that_dies_before_mpi_has_started_ends_the_job(tmp_path):
    """Open MPI's mpirun goes on, and its ranks would wait for ever."""
    script = tmp_path / "script.py"
    script.write_text("""
import os, signal
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
import collectives
collectives.world()
""")
    result = surviving(3, script, COLLECTIVES_TIMEOUT_S="2")
    words = "has waited 2 s, the limit by COLLECTIVES_TIMEOUT_S, for MPI to start, as if a rank has died before"
    for rank in (0, 2):
        assert f"rank {rank} of 3 {words}: start the job again\n" in result.stderr


def test_training_without_checkpoints_ends(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import os, signal, sys, threading
import collectives
from training.loop import main
sys.argv[1:] = "--max_iters 100000 --eval_interval 100000 --warmup_iters 1 --out_dir=".split()
if collectives.world().rank == 1:
    threading.Timer(2, os.kill, (os.getpid(), signal.SIGKILL)).start()
main()
""")
    result = surviving(2, script)
    assert "rank 0 of 2 failed and ends the job:" in result.stderr  # mpirun's own status may be 0
    assert "RankFailure: " in result.stderr
