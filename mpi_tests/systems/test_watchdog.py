"""Deadlocked jobs: each exits non-zero, with a report of every rank's position."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpi_tests.helpers.launch import environment, find_mpirun, launch, watched

pytestmark = pytest.mark.shares_cores

# Start-up and compilation may take longer, so `world` has the default time limit.
BEGIN = """
import os, signal, sys, threading, time, ctypes
import numpy as np
import collectives

world = collectives.world()
x = world.empty(8)
world.plan("all_reduce", x, algorithm="one_shot")()
world.barrier()
comm = collectives.Communicator(world.mpi, check={check}, timeout_s=2)
late = world.rank == 1
def load():
    time.sleep(60)  # load
"""
HEAD = (
    r"rank \d+ (has waited for 2 s, the limit by COLLECTIVES_TIMEOUT_S or timeout_s.*|"
    "waits for a rank that has ended its program); this ends the job:"
)
TIME = r"\d+ s"


def run(folder: Path, body: str, check: bool = True, **env: str):
    script = folder / "script.py"
    script.write_text(BEGIN.format(check=check) + body)
    return launch(3, "python", script, env=env)


def line_of(folder: Path, text: str) -> str:
    """Return a pattern of the position in reports for the script's line that contains `text`."""
    lines = (folder / "script.py").read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if text in line]
    return re.escape(f"{folder / 'script.py'}:{number}")


def report(result) -> list[str]:
    """Return the lines of the report, without its head; check that there is only one."""
    assert result.returncode != 0, result.stdout
    lines = result.stderr.splitlines()
    heads = [number for number, line in enumerate(lines) if re.fullmatch(HEAD, line)]
    assert len(heads) == 1, result.stderr
    words = ("rank ", "ranks disagree", "not arrived", "perhaps not arrived")
    return [line for line in lines[heads[0] + 1 :] if line.startswith(words)]


def matches(lines: list[str], *patterns: str) -> None:
    assert len(lines) == len(patterns), lines
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(pattern, line), f"{line}\nis not\n{pattern}"


def test_a_rank_that_does_not_enter_a_call(tmp_path):
    body = """
for _ in range(3):
    comm.broadcast(x)  # before
if not late:
    comm.all_reduce(x)  # call
"""
    result = run(tmp_path, body)
    before, call = line_of(tmp_path, "# before"), line_of(tmp_path, "# call")
    where = "where the ranks agree on it, a barrier that rank 1 has not come to"
    waits = rf"waits {TIME} in all_reduce #5 \(32 bytes of float32, {call}\), {where}"
    rest = rf"; before: broadcast staged #2-#4 \({before}\), Communicator #1 \(.*\)"
    matches(
        report(result),
        rf"rank 0 of 3 {waits}{rest}",
        rf"rank 1 of 3 has ended its program; its last: broadcast staged #4 \(32 bytes of float32, {before}\), "
        rf"ended {TIME} ago; before: broadcast staged #2-#3 .*",
        rf"rank 2 of 3 {waits}{rest}",
        "not arrived at all_reduce #5: rank 1",
    )


def test_a_rank_that_sleeps_in_its_own_code(tmp_path):
    body = """
plan = comm.plan("all_reduce", x, algorithm="ring")
plan()  # before
if late:
    load()
plan()  # call
"""
    result = run(tmp_path, body)
    waits = rf"waits {TIME} in all_reduce ring #4 \(32 bytes of float32, {line_of(tmp_path, '# call')}\)"
    matches(
        report(result),
        rf"rank 0 of 3 {waits}, round 1: receive and reduce \[0\] from rank 2; before: .*",
        rf"rank 1 of 3 is not in a collective, but at {line_of(tmp_path, '# load')}; its last: all_reduce ring #3 "
        rf"\(32 bytes of float32, {line_of(tmp_path, '# before')}\), ended {TIME} ago; before: plan all_reduce #2 .*",
        rf"rank 2 of 3 {waits}, round 0: receive and reduce \[0\] from rank 1; before: .*",
        "not arrived at all_reduce ring #4: rank 1",
    )


def test_plans_that_a_rank_runs_in_another_order(tmp_path):
    """A plan never receives the messages of another one with the same signature."""
    body = """
plans = [comm.plan("all_reduce", np.ones(5), algorithm="ring") for _ in range(2)]
for plan in plans[:: -1 if late else 1]:
    plan()  # call
print("ended")
"""
    result = run(tmp_path, body)
    assert "ended" not in result.stdout
    waits = rf"waits {TIME} in all_reduce ring #4 \(40 bytes of float64, {line_of(tmp_path, '# call')}\), round \d: .*"
    *ranks, last = report(result)
    matches(ranks, *(rf"rank {rank} of 3 {waits}" for rank in range(3)))
    call = "all_reduce(5 elements, float64, op=sum, algorithm=ring)"
    assert last == f"ranks disagree: call #4 is {call} by plan #2 on ranks 0,2, {call} by plan #3 on rank 1"


@pytest.mark.parametrize("algorithm", ["ring", "one_shot"])
def test_a_plan_that_a_rank_runs_where_others_make_the_call(tmp_path, algorithm):
    body = f"""
plan = comm.plan("all_reduce", x, algorithm="{algorithm}")
for _ in range(2):
    comm.all_reduce(x, algorithm="{algorithm}")
if late:
    plan()
else:
    comm.all_reduce(x, algorithm="{algorithm}")
"""
    *ranks, last = report(run(tmp_path, body))
    matches(ranks, *(rf"rank {rank} of 3 waits {TIME} in all_reduce {algorithm} #5 .*" for rank in range(3)))
    call = f"all_reduce(8 elements, float32, op=sum, algorithm={algorithm})"
    assert last == f"ranks disagree: call #5 is {call} on ranks 0,2, {call} by plan #2 on rank 1"


def test_a_direct_algorithm(tmp_path):
    body = """
plan = comm.plan("all_reduce", x, algorithm="one_shot")
for _ in range(50):
    plan()
if late:
    load()
plan()  # call
"""
    result = run(tmp_path, body)
    waits = rf"waits {TIME} in all_reduce one_shot #53 \(32 bytes of float32, {line_of(tmp_path, '# call')}\), "
    matches(
        report(result),
        rf"rank 0 of 3 {waits}a barrier that rank 1 has not come to; before: .*",
        rf"rank 1 of 3 is not in a collective, but at {line_of(tmp_path, '# load')}; its last: "
        rf"all_reduce one_shot #52 \(32 bytes of float32, .*\), ended {TIME} ago.*",
        rf"rank 2 of 3 {waits}a barrier that rank 1 has not come to; before: .*",
        "not arrived at all_reduce one_shot #53: rank 1",
    )


def test_ranks_that_call_different_things_unchecked(tmp_path):
    body = """
if late:
    comm.broadcast(x, algorithm="binomial", root=2)
else:
    comm.all_reduce(x, algorithm="ring")
"""
    *ranks, last = report(run(tmp_path, body, check=False))
    assert len(ranks) == 3
    assert re.match(rf"rank 1 of 3 waits {TIME} in broadcast binomial #2 .*, round \d: receive ", ranks[1])
    assert re.match(rf"rank 2 of 3 waits {TIME} in all_reduce ring #2 ", ranks[2])
    assert last == (
        "ranks disagree: call #2 is all_reduce(8 elements, float32, op=sum, algorithm=ring) on ranks 0,2, "
        "broadcast(8 elements, float32, root=2, algorithm=binomial) on rank 1"
    )


def test_a_part_from_split(tmp_path):
    body = """
part = comm.split(0 if comm.rank else 1)
plan = part.plan("barrier", algorithm="dissemination")
if not late:
    plan()
"""
    zero, one, two, verdict = report(run(tmp_path, body))
    assert "rank 0 of 3 has ended its program; its last: barrier dissemination #2 of split(color=1) #2 (" in zero
    assert "rank 1 of 3 has ended its program; its last: plan barrier #1 of split(color=0) #2 (" in one
    assert re.match(rf"rank 2 of 3 waits {TIME} in barrier dissemination #2 of split\(color=0\) #2 ", two)
    assert ", round 0: receive [] from rank 0" in two  # rank 0 of the part
    assert verdict == "not arrived at barrier dissemination #2 of split(color=0) #2: rank 1"


def test_a_message_that_nobody_sends(tmp_path):
    body = """
if late:
    comm.recv(x, source=2, tag=7)  # recv
"""
    result = run(tmp_path, body)
    zero, one, two = report(result)
    assert re.match(rf"rank 1 of 3 waits {TIME} in recv from rank 2 with tag 7 \({line_of(tmp_path, '# recv')}\)", one)
    assert "has ended its program" in zero
    assert "has ended its program" in two


def test_a_call_of_the_mpi_library(tmp_path):
    body = """
plan = comm.plan("barrier", algorithm="mpi")
if late:
    load()
plan()
"""
    zero, _, _, verdict = report(run(tmp_path, body))
    assert ", in the MPI library's own; before: plan barrier #2 (" in zero
    assert verdict == "not arrived at barrier mpi #3: rank 1"


def test_a_rank_that_is_stopped(tmp_path):
    body = """
if late:
    os.kill(os.getpid(), signal.SIGSTOP)
comm.barrier()
"""
    _, one, _, verdict = report(run(tmp_path, body))
    assert one == "rank 1 of 3 does not answer: it is stopped, has died, or is in code that lets no other thread run"
    assert verdict == "perhaps not arrived at barrier #2: rank 1"


def test_without_threads_in_mpi_a_rank_tells_of_itself_only(tmp_path):
    body = """
import mpi4py
mpi4py.rc.thread_level = "serialized"
from mpi4py import MPI
import collectives

comm = collectives.world()
if comm.rank != 1:
    comm.barrier()
"""
    script = tmp_path / "script.py"
    script.write_text(body)
    result = launch(3, "python", script, env={"COLLECTIVES_TIMEOUT_S": "2"})
    assert result.returncode != 0
    assert "the others cannot be asked, since MPI was not started with THREAD_MULTIPLE; this ends the job:" in (
        result.stderr
    )
    assert re.search(rf"^rank [02] of 3 waits {TIME} in barrier #2 \(", result.stderr, re.MULTILINE)


def test_a_rank_that_comes_while_the_others_ask_for_it(tmp_path):
    """The rank's C code holds the GIL, so that the rank cannot answer earlier."""
    body = """
if late:
    ctypes.PyDLL(None).sleep(4)
comm.barrier()
"""
    result = run(tmp_path, body)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_a_job_that_ends_well_prints_nothing_and_leaves_no_thread(tmp_path):
    body = """
def watchdogs():
    return [thread for thread in threading.enumerate() if "watchdog" in thread.name]
assert len(watchdogs()) == 2
silent = collectives.Communicator(world.mpi, timeout_s=0)
silent.barrier()
assert len(watchdogs()) == 2
comm.split(0).all_reduce(x)
comm.free()
deadline = time.monotonic() + 30
while len(watchdogs()) > 1 and time.monotonic() < deadline:
    time.sleep(0.1)
assert len(watchdogs()) == 1
if late:
    time.sleep(3)  # where the others have ended
"""
    result = run(tmp_path, body)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_a_job_ends_with_memory_that_is_not_freed(tmp_path):
    """Rank 0 has freed a window of its own, so that the ranks' MPI handles differ."""
    body = """
alone = world.split(0 if world.rank == 0 else None)
own = alone.empty(1 << 20) if alone else None
first = world.empty(1 << 20)
del own
if alone:
    alone.free()
second = world.empty(1 << 20)
"""
    result = run(tmp_path, body)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_mpi_is_ended_where_mpi4py_is_told_not_to_start_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
import collectives
if collectives.world().rank == 0:
    print("started")
""")
    result = launch(2, "python", script)
    assert (result.returncode, result.stdout, result.stderr) == (0, "started\n", "")


def test_a_program_ends_the_mpi_that_it_has_started(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import atexit, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
MPI.Init()
atexit.register(MPI.Finalize)
import collectives
if collectives.world().rank == 0:
    print("started")
""")
    result = launch(2, "python", script)
    assert (result.returncode, result.stdout, result.stderr) == (0, "started\n", "")


@pytest.mark.parametrize("first", ["collectives", "mpi4py"])
def test_a_process_that_is_forked_from_a_rank_ends_by_itself(tmp_path, first):
    """If mpi4py initialized MPI, it would also finalize it in the child: that is refused."""
    imports = "from mpi4py import MPI\n" * (first == "mpi4py")
    script = tmp_path / "script.py"
    script.write_text(
        imports
        + """
import os, sys
import numpy as np
import collectives

comm = collectives.world()
x = comm.empty(1 << 16)
comm.all_reduce(x, blocking=False).wait()
if (child := os.fork()) == 0:
    sys.exit(3)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
comm.all_reduce(x)
if comm.rank == 0:
    print(status)
"""
    )
    result = launch(2, "python", script)
    assert result.returncode == 0
    if first == "collectives":
        assert (result.stdout, result.stderr) == ("3\n", "")
    else:
        assert result.stdout == "1\n"
        assert result.stderr.count("was forked from an MPI rank, and its end would be that of MPI: end it by ") == 2


FORKED = """
import os, signal, sys
from multiprocessing import get_context
import numpy as np
import collectives

comm = collectives.world()
x, part = comm.empty(1000), comm.split(0)
x[:] = comm.rank
plan, by_messages = part.plan("all_reduce", x), comm.plan("all_reduce", np.ones(3), algorithm="ring")
for run in (plan, by_messages):
    run()
uses = [plan, plan.start, plan.wait, plan.done, lambda: plan.free(), by_messages, by_messages.start, comm.free]
all_reduce, probe = comm.all_reduce, comm.probe
all_reduce(x)
uses += [lambda: all_reduce(x), comm.barrier, lambda: comm.all_reduce(x, blocking=False)]
uses += [lambda: comm.plan("all_reduce", x)]
uses += [lambda: comm.send(x, 0), lambda: comm.recv(x, 0), lambda: probe(0, blocking=False), lambda: comm.split(0)]
uses += [lambda: comm.empty(3), lambda: comm.broadcast_object(3), lambda: collectives.Communicator(comm.mpi)]
uses += [collectives.world]
if comm.rank == 0:  # which waits for rank 1 when it forks
    call, message = comm.all_reduce(np.ones(100_000), blocking=False), comm.recv(np.ones(3), 1, blocking=False)
    uses += [call.wait, call.done, message.wait, message.done]

def child():
    refusals, num_barriers = [], comm.dispatcher.comparator.channel.num_barriers
    for use in uses:
        try:
            use()
        except RuntimeError as error:
            refusals.append(f"was forked from rank {comm.rank}, and only ranks" in str(error))
    os.kill(os.getpid(), signal.SIGUSR2)  # by which a rank writes a file
    x[:] *= 2
    if comm.dispatcher.comparator.channel.num_barriers > num_barriers:
        return False
    return len(refusals) == len(uses) and all(refusals) and "2" in repr(comm) and repr(plan)

statuses = []
for end in (lambda: sys.exit(3), lambda: os._exit(4), lambda: 1 / 0):
    if (forked := os.fork()) == 0:
        if child():
            end()
        os._exit(9)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]))
process = get_context("fork").Process(target=child)
process.start()
process.join()
if comm.rank:
    call = comm.all_reduce(np.ones(100_000), blocking=False)
    comm.send(np.ones(3), 0)
else:
    message.wait()
call.wait()
assert x[0] == 32  # each child has doubled it
x[:] = 1
for run in (plan, by_messages):
    run()
if comm.rank == 0:
    print(statuses, process.exitcode, x[0])
"""


def test_a_forked_process_is_refused_all_calls(tmp_path):
    """It leaves the job's memory, messages and files alone, in whichever way it ends."""
    script = tmp_path / "script.py"
    script.write_text(FORKED)
    result = launch(2, "python", script, env={"COLLECTIVES_CALLS": str(tmp_path / "calls")})
    assert (result.returncode, result.stdout) == (0, "[3, 4, 1] 0 2.0\n"), result.stderr
    assert not (tmp_path / "calls").exists()
    assert result.stderr.count("ZeroDivisionError: division by zero") == 2
    assert "ends the job" not in result.stderr


def test_a_rank_that_dies_where_mpi_goes_on_without_it(tmp_path):
    """The others wait in shared memory, where MPI cannot notify them."""
    if "Open MPI" not in watched([find_mpirun(), "--version"], environment(), 60).stdout:
        pytest.skip("needs Open MPI, which continues without a rank that has died")
    script = tmp_path / "script.py"
    script.write_text("""
import os, signal, time
import collectives

comm = collectives.world()
plan = comm.plan("all_reduce", comm.empty(8), algorithm="one_shot")
plan()
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    plan()
""")
    result = watched([find_mpirun(), "--with-ft", "ulfm", "-n", 3, sys.executable, script], environment(), 60)
    assert result.returncode != 0
    assert re.search(r"rank [02] of 3 failed and ends the job:\n", result.stderr)
    assert re.search(r"RankFailure: all_reduce one_shot.*: rank 1 has died", result.stderr)
    deadline = time.monotonic() + 10
    while pids := subprocess.run(["pgrep", "-f", str(script)], text=True, capture_output=True).stdout.split():
        assert time.monotonic() < deadline, f"ranks are still running after mpirun has ended: processes {pids}"
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("statement", "how"),
    [
        ('raise collectives.InputError("n=3 must be 4")', r" by InputError at {line} \(n=3 must be 4\)"),
        ("sys.exit(7)", ""),
    ],
)
def test_a_rank_whose_program_ends_alone(tmp_path, statement, how):
    """The others wait for it no longer, though the limit is 600 s."""
    script = tmp_path / "script.py"
    script.write_text(f"""
import sys
import collectives

comm = collectives.world()
comm.barrier()
if comm.rank == 1:
    {statement}
comm.barrier()
print("continues")
""")
    result = launch(3, "python", script, timeout=60)
    assert result.returncode != 0
    assert "continues" not in result.stdout
    assert re.search(r"^rank [02] waits for a rank that has ended its program; this ends", result.stderr, re.M)
    line = line_of(tmp_path, statement)
    assert re.search(rf"^rank 1 of 3 has ended its program{how.format(line=line)}; its last: ", result.stderr, re.M)
    assert "\nnot arrived at barrier direct #3: rank 1\n" in result.stderr


def test_a_rank_that_receives_from_one_that_has_failed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import numpy as np
import collectives

comm = collectives.world()
if comm.rank == 1:
    raise collectives.InputError("nothing to send")
comm.recv(np.zeros(1), source=1)
""")
    result = launch(2, "python", script, timeout=60)
    assert result.returncode != 0
    assert re.search(r"^rank 1 of 2 has ended its program by InputError at .* \(nothing to send\)", result.stderr, re.M)


def test_ranks_without_one_that_has_ended_its_program(tmp_path):
    """They may wait for each other for longer than it takes to learn of its end."""
    script = tmp_path / "script.py"
    script.write_text("""
import time
import collectives

comm = collectives.world()
part = comm.split(comm.rank == 1)
if comm.rank == 0:
    time.sleep(7)
part.barrier()
print("ends")
""")
    result = launch(3, "python", script, timeout=60)
    assert (result.returncode, result.stdout) == (0, "ends\n" * 3), result.stderr


def test_without_checks_a_rank_that_is_refused_ends_the_job(tmp_path):
    result = run(tmp_path, "world.all_reduce([1.0] if late else x)", COLLECTIVES_CHECK="0")
    assert result.returncode != 0
    assert "rank 1 of 3 failed and ends the job:" in result.stderr
    assert (
        "LoneInputError: all_reduce: list is not an array: pass a NumPy or CuPy array or a torch tensor"
        in result.stderr
    )


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("COLLECTIVES_CHECK", "maybe", "error: COLLECTIVES_CHECK='maybe': write 1, or 0 to compare nothing"),
        (
            "COLLECTIVES_TIMEOUT_S",
            "x",
            "error: COLLECTIVES_TIMEOUT_S='x': write seconds, as in 600, or 0 for no limit (at most 100000000)",
        ),
    ],
)
def test_settings_that_cannot_be(tmp_path, name, value, words):
    result = run(tmp_path, "", **{name: value})
    assert result.returncode == 2
    assert [line for line in result.stderr.splitlines() if "error" in line.lower()] == [words]
