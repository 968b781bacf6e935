"""Exercises: correct solutions and their cost next to the textbook's, files that cannot be judged, and the command."""

import subprocess
import sys

import pytest

from mpi_tests.helpers.algorithm_costs import COSTS
from mpi_tests.helpers.launch import environment
from teaching.exercise import catalogue, student
from teaching.exercise.__main__ import main

EXERCISES = {exercise.name: exercise for exercise in catalogue.EXERCISES}
MOVES = "from collectives.schedule.moves import Copy, Recv, RecvReduce, Send, chunk\n"

# name: a correct solution, and the row of algorithm_costs.py that its cost must equal
RIGHT = {
    "ring": ("from collectives.algorithms.ring import all_gather", ("all_gather", "ring")),
    "ring_reduce_scatter": ("from collectives.algorithms.ring import reduce_scatter", ("reduce_scatter", "ring")),
    "ring_all_reduce": ("from collectives.algorithms.ring import all_reduce", ("all_reduce", "ring")),
    "broadcast": ("from collectives.algorithms.tree import broadcast", ("broadcast", "binomial")),
    "reduce": ("from collectives.algorithms.tree import reduce", ("reduce", "binomial")),
    "doubling": ("from collectives.algorithms.recursive import all_reduce", ("all_reduce", "recursive_doubling")),
    "halving_doubling": (
        "from collectives.algorithms.recursive import rabenseifner as all_reduce",
        ("all_reduce", "rabenseifner"),
    ),
    "bruck": ("from collectives.algorithms.bruck import all_gather", ("all_gather", "bruck")),
    "pairwise": ("from collectives.algorithms.pairwise import all_to_all", ("all_to_all", "pairwise")),
    "two_level": ("from collectives.algorithms.hierarchical import all_reduce", None),
    "1f1b": (
        """
from parallelism.pipeline.schedule import basic

def one_f_one_b(stage, num_stages, num_micro_batches):
    return basic.one_f_one_b(num_stages, num_micro_batches).orders[stage]
""",
        None,
    ),
    "zero3": (
        """
from teaching.exercise.zero_exercise import textbook_steps

def zero3(rank, size, num_blocks):
    return textbook_steps(num_blocks)
""",
        None,
    ),
}


@pytest.fixture
def judge(tmp_path, monkeypatch, capsys):
    """Return a function that judges a file with this text; it returns the command's exit status and output."""
    monkeypatch.chdir(tmp_path)

    def run_command(name, text):
        (tmp_path / "my.py").write_text(text)
        status = main([name, "my.py"])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return run_command


def test_there_are_twelve(capsys):
    assert main([]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[:-2]] == list(RIGHT)
    assert len(RIGHT) == 12


@pytest.mark.parametrize("name", RIGHT)
def test_the_librarys_own_are_right_and_no_dearer(judge, name):
    status, text = judge(name, RIGHT[name][0])
    assert (status, text.splitlines()[0]) == (0, f"right on {EXERCISES[name].tried}")
    rows = [line.split()[-2:] for line in text.splitlines()[2:]]
    assert len(rows) >= 3
    assert all(own == book for own, book in rows)


@pytest.mark.parametrize("name", [name for name, (_, row) in RIGHT.items() if row])
def test_prices_are_the_cost_lines(name):
    exercise = EXERCISES[name]
    _, num_messages, num_chunks, _ = exercise.costs(exercise.book())
    assert (num_messages, num_chunks) == COSTS[RIGHT[name][1]](8)[:2]


@pytest.mark.parametrize("name", EXERCISES)
def test_the_stub_can_be_judged_and_is_wrong(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([name, "--stub"]) == 0
    assert main([name, f"my_{name}.py"]) == 1
    assert f"my_{name}.py:" in capsys.readouterr().out
    assert main([name, f"my_{name}.py", "--stub"]) == 2
    assert capsys.readouterr().err == f"error: my_{name}.py exists: name another file, which --stub writes\n"


@pytest.mark.parametrize("name", EXERCISES)
def test_the_task_says_what_to_write_and_the_cost_to_keep(name, capsys):
    exercise = EXERCISES[name]
    assert main([name]) == 0
    task = " ".join(capsys.readouterr().out.split())
    assert f"Write {exercise.function}({exercise.parameters})." in task
    for measure, cost in zip(exercise.measures, exercise.costs(exercise.book()), strict=True):
        noun = measure.one or measure.noun if cost == 1 else measure.noun
        assert f"{measure.verb} {cost:g} {noun}" in task


def test_the_task_shows_what_ranks_hold(capsys):
    assert main(["reduce"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "before  rank 1  b0        b1        b2" in lines
    assert "after   rank 0  a0+b0+c0  a1+b1+c1  a2+b2+c2" in lines
    assert "after   rank 1  anything" in lines


def test_they_need_neither_mpi_nor_array_libraries():
    blocked = "import sys; sys.modules |= dict.fromkeys(['mpi4py', 'numpy', 'numba', 'torch', 'cupy', 'ml_dtypes'])"
    program = f"{blocked}; from teaching.exercise.__main__ import main; sys.exit(main())"
    result = subprocess.run([sys.executable, "-c", program], env=environment(), text=True, capture_output=True)
    assert (result.returncode, len(result.stdout.splitlines())) == (0, len(EXERCISES) + 2), result.stderr


# --- correct, but expensive ---

DEAR = {
    "everything goes through rank 0": (
        "ring_all_reduce",
        """
def all_reduce(rank, size):
    everything = range(size)
    for other in range(1, size):
        yield (RecvReduce(other, everything),) if rank == 0 else (Send(0, everything),) if rank == other else ()
    for other in range(1, size):
        yield (Send(other, everything),) if rank == 0 else (Recv(0, everything),) if rank == other else ()
""",
        "sends 112 MiB one after another where the ring sends 14; "
        "connects a rank with 7 others where the ring connects a rank with 2",
    ),
    "a chain": (
        "broadcast",
        """
def broadcast(rank, size, root):
    place = (rank - root) % size
    for step in range(1, size):
        if place == step - 1:
            yield (Send((rank + 1) % size, range(size)),)
        else:
            yield (Recv((rank - 1) % size, range(size)),) if place == step else ()
""",
        "takes 7 rounds where the binomial tree takes 3; "
        "sends 7 messages one after another where the binomial tree sends 3; "
        "sends 56 MiB one after another where the binomial tree sends 24",
    ),
    "a ring over all nodes": (
        "two_level",
        """
from collectives.algorithms import ring

def all_reduce(rank, size, nodes):
    return ring.all_reduce(rank, size)
""",
        "takes 14 rounds where the hierarchy takes 8; "
        "sends 14 messages one after another where the hierarchy sends 8; "
        "sends 14 MiB out of a node where the hierarchy sends 8",
    ),
    "GPipe": (
        "1f1b",
        """
def one_f_one_b(stage, num_stages, num_micro_batches):
    for kind in "FB":
        yield from (f"{stage}{kind}{micro_batch}" for micro_batch in range(num_micro_batches))
""",
        "keeps 8 activations on a rank where 1F1B keeps 4; keeps 32 activations on all ranks where 1F1B keeps 10",
    ),
    "every block stays": (
        "zero3",
        """
def zero3(rank, size, num_blocks):
    yield from (f"gather {block}" for block in range(num_blocks))
    yield from (f"forward {block}" for block in range(num_blocks))
    yield from (f"backward {block}" for block in reversed(range(num_blocks)))
    yield from (f"reduce_scatter {block}" for block in range(num_blocks))
    yield from (f"release {block}" for block in range(num_blocks))
""",
        "holds 4 blocks at a time where ZeRO 3 holds 2; holds 4 blocks' gradients at a time where ZeRO 3 holds 1",
    ),
    "no gather ahead": (
        "zero3",
        """
def zero3(rank, size, num_blocks):
    for block in range(num_blocks):
        yield from (f"gather {block}", f"forward {block}", f"release {block}")
    for block in reversed(range(num_blocks)):
        yield from (f"gather {block}", f"backward {block}", f"reduce_scatter {block}", f"release {block}")
""",
        "gathers 8 blocks where ZeRO 3 gathers 7; waits for 8 gathers where ZeRO 3 waits for 1",
    ),
}


@pytest.mark.parametrize(("name", "code", "but"), DEAR.values(), ids=DEAR)
def test_what_is_right_but_dearer_says_so(judge, name, code, but):
    status, text = judge(name, MOVES + code)
    assert (status, text.splitlines()[0]) == (0, f"right on {EXERCISES[name].tried}, but {but}")


def test_a_rank_that_has_nothing_more_to_do_may_end(judge):
    code = """
def reduce(rank, size, root):
    place = (rank - root) % size
    for bit in range((size - 1).bit_length()):
        reach = 1 << bit
        if place & reach:
            yield (Send((rank - reach) % size, range(size)),)
            return
        yield (RecvReduce((rank + reach) % size, range(size)),) if place + reach < size else ()
"""
    assert judge("reduce", MOVES + code)[1].startswith("right on 1 to 16 ranks\n")


# --- files that cannot be judged ---

REFUSED = {
    "no function": ("x = 1\n", "my.py has no function all_gather(rank, size); --stub writes a file to begin with"),
    "not a function": (
        "all_gather = 3\n",
        "my.py has no function all_gather(rank, size); --stub writes a file to begin with",
    ),
    "a syntax error": ("x = 1\nx = = 2\n", "my.py:2: syntax error: invalid syntax"),
    "a null byte": ("x = 1\n\0", "my.py:1: syntax error: source code string cannot contain null bytes"),
    "an exception in the file": ("\n\nx = 1 / 0\n", "my.py:3: ZeroDivisionError: division by zero"),
    "an exception in a round": (
        "def all_gather(rank, size):\n    for step in range(size):\n        yield helper(step)\n\n"
        "def helper(step):\n    return [][step]\n",
        "my.py:6: IndexError: list index out of range",
    ),
    "an exception in the library": (
        "def all_gather(rank, size):\n    yield ()\n    yield (Send(rank),)\n",
        "my.py:3: TypeError: Send.__new__() missing 1 required positional argument: 'run'",
    ),
    "other parameters": (
        "\ndef all_gather(rank):\n    yield ()\n",
        "my.py:2: TypeError: all_gather() takes 1 positional argument but 2 were given",
    ),
    "another end": ("raise GeneratorExit\n", "my.py:1: GeneratorExit"),
    "a rank that is a truth": (
        "def all_gather(rank, size):\n    yield (Send(True, range(1)),)\n",
        "my.py:2: Send's to is True: use the number of a rank",
    ),
    "the end of the process": ("import sys\nsys.exit('bye')\n", "my.py:2: SystemExit: bye"),
    "no rounds": (
        "def all_gather(rank, size):\n    x = rank\n",
        "my.py:1: returns NoneType: yield the rounds one by one",
    ),
    "endless rounds": (
        "def all_gather(rank, size):\n    while True:\n        yield ()\n",
        "my.py:3: is endless: it yields more than 1000 times",
    ),
    "endless rounds of another generator": (
        "def all_gather(rank, size):\n    yield from rounds()\n\ndef rounds():\n    while True:\n        yield ()\n",
        "my.py:6: is endless: it yields more than 1000 times",
    ),
    "an endless loop": (
        "def all_gather(rank, size):\n    while True: rank = 0\n    yield ()\n",
        "my.py:2: is endless: it has not ended after 0.2 s",
    ),
    "an endless loop in the file": ("x = 1\nwhile True: x = 2\n", "my.py:2: is endless: it has not ended after 0.2 s"),
    "a move by itself": (
        "def all_gather(rank, size):\n    yield Send(1, range(1))\n",
        "my.py:2: yields Send(...) by itself: a round is a tuple of moves, as in yield (Send(to, run),)",
    ),
    "no round": (
        "def all_gather(rank, size):\n    yield 'send'\n",
        "my.py:2: yields 'send': a round is a tuple of moves, as in yield (Send(to, run),)",
    ),
    "no move": (
        "def all_gather(rank, size):\n    yield (rank,)\n",
        "my.py:2: 0 is not a move of this exercise: use Send, Recv, RecvReduce, Copy",
    ),
    "a move of another kind": (
        "from collectives.schedule.moves import Barrier\ndef all_gather(rank, size):\n    yield (Barrier((0, 1)),)\n",
        "my.py:3: Barrier(ranks=(0, 1)) is not a move of this exercise: use Send, Recv, RecvReduce, Copy",
    ),
    "a chunk's number for a run": (
        "def all_gather(rank, size):\n    yield (Send(1, rank),)\n",
        "my.py:2: Send's run is 0: use a range of consecutive chunks, as chunk(0, size)",
    ),
    "a run with gaps": (
        "def all_gather(rank, size):\n    yield [Send(1, range(0, 4, 2))]\n",
        "my.py:2: Send's run is range(0, 4, 2): use a range of consecutive chunks, as chunk(0, size)",
    ),
    "a rank that is not a number": (
        "def all_gather(rank, size):\n    yield (Recv(rank / 2, range(1)),)\n",
        "my.py:2: Recv's source is 0.0: use the number of a rank",
    ),
}


@pytest.mark.parametrize(("code", "why"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_judged_is_refused_in_a_line(judge, monkeypatch, code, why):
    monkeypatch.setattr(student, "LIMIT_S", 0.2)
    status, text = judge("ring", code if "syntax" in why else code + MOVES)  # appended, so that line numbers start at 1
    assert (status, text.count("\n")) == (2, 1)
    assert text == f"error: {why}\n"


SLOW = """
import time
from collectives.algorithms import ring

def all_gather(rank, size):
    time.sleep(0.09)
    return ring.all_gather(rank, size)
"""


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import time\nwhile True:\n    try: time.sleep(60)\n    except: pass\n", "is endless, and catches what would"),
        ("sum(range(10**15))\n", "is endless, and catches what would end it"),
        ("import os\nos._exit(0)\n", "ends the process that judges it, with status 0"),
        ("import ctypes\nctypes.string_at(0)\n", "ends the process that judges it, by SIGSEGV"),
        (SLOW, "takes too long: judging it was stopped"),
    ],
    ids=["waits", "computes", "ends", "crashes", "slow"],
)
def test_code_is_judged_apart(code, why, tmp_path):
    """Whatever the code does, the judge prints a line, and exits with the status of files that cannot be judged."""
    (tmp_path / "my.py").write_text(code)
    call_s, judge_s = (10, 1) if code == SLOW else (0.1, 30)
    limits = f"student.LIMIT_S, student.END_S, apart.JUDGE_S = {call_s}, 0.3, {judge_s}"
    program = f"import sys; from teaching.exercise import __main__, apart, student; {limits}"
    program += "; sys.exit(__main__.main(['ring', 'my.py']))"
    words = [sys.executable, "-c", program]
    result = subprocess.run(words, cwd=tmp_path, env=environment(), timeout=60, text=True, capture_output=True)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith(f"error: my.py {why}")


def test_a_file_is_a_module_with_a_folder(judge, tmp_path):
    """It may have dataclasses, import neighbouring files, and use NumPy integers as ranks."""
    (tmp_path / "neighbour.py").write_text("from collectives.schedule.moves import Recv, Send, chunk\n")
    code = """from __future__ import annotations
import dataclasses
import numpy as np
from neighbour import Recv, Send, chunk

@dataclasses.dataclass
class Ring:
    rank: int
    size: int

def all_gather(rank, size):
    ring = Ring(rank, size)
    for step in range(size - 1):
        to, source = np.int64((ring.rank + 1) % size), np.int64((ring.rank - 1) % size)
        yield Send(to, chunk(rank - step, size)), Recv(source, chunk(rank - step - 1, size))
"""
    status, text = judge("ring", code)
    assert (status, text[:5]) == (0, "right"), text


@pytest.mark.parametrize(
    ("name", "code", "why"),
    [
        (
            "1f1b",
            "def one_f_one_b(stage, num_stages, num_micro_batches):\n    yield 'F0'\n",
            "my.py:2: 'F0' is not an action: write stage, kind (F, B, I, W) and micro-batch, as in 2F0",
        ),
        (
            "zero3",
            "def zero3(rank, size, num_blocks):\n    yield 'gather'\n",
            "my.py:2: yields 'gather': write a verb (gather, forward, backward, reduce_scatter, release) and a block, "
            "as in gather 0",
        ),
    ],
)
def test_steps_of_parallelism_that_are_none(judge, name, code, why):
    assert judge(name, code) == (2, f"error: {why}\n")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("ring missing.py", "missing.py: No such file or directory"),
        ("ring .", ".: Is a directory"),
        ("rings", f"no exercise is called 'rings': use {', '.join(RIGHT)}"),
        ("ring a.py b.py", "unrecognized arguments: b.py; see --help"),
        ("ring missing/my.py --stub", "missing/my.py: No such file or directory"),
    ],
)
def test_arguments_that_are_refused(words, why, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    assert capsys.readouterr().err == f"error: {why}\n"
