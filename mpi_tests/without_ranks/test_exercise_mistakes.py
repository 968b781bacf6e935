"""Typical mistakes of students: the judge names rank, round, chunk, reason, and the line of the file."""

import random
import re
from collections import Counter
from contextlib import nullcontext

import pytest

from collectives.schedule.moves import Copy, Recv, RecvReduce, Send
from collectives.schedule.proof import ContractError, check
from teaching.exercise import catalogue
from teaching.exercise.__main__ import main
from teaching.exercise.exercise import MistakeError
from teaching.exercise.message_exercise import MessageExercise, rank_instance

EXERCISES = {exercise.name: exercise for exercise in catalogue.EXERCISES}
MOVES = "from collectives.schedule.moves import Copy, Recv, RecvReduce, Send, chunk"

# mistake: the exercise, the function, its line named by the judge, and the reported position and error
MISTAKES = {
    "never passes on what came": (
        "ring",
        """
def all_gather(rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    for _ in range(size - 1):
        yield Send(right, chunk(rank, size)), Recv(left, chunk(left, size))
""",
        4,
        (
            "3 ranks: after round 1, rank 0's chunk 1 holds nothing; it should hold chunk 1 of rank 1: rank 1's "
            "never arrives; it gets as far as rank 2, in round 0"
        ),
    ),
    "a round too few": (
        "ring",
        """
def all_gather(rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 2):
        yield Send(right, chunk(rank - step, size)), Recv(left, chunk(left - step, size))
""",
        1,
        (
            "2 ranks: without any round, rank 0's chunk 1 holds nothing; it should hold chunk 1 of rank 1: rank "
            "1's never arrives, nor leaves rank 1"
        ),
    ),
    "receives from the side to which it sends": (
        "ring",
        """
def all_gather(rank, size):
    right = (rank + 1) % size
    for step in range(size - 1):
        yield Send(right, chunk(rank - step, size)), Recv(right, chunk(right + step, size))
""",
        4,
        (
            "3 ranks: in round 0, rank 0 would send [0] to rank 1, but rank 1 receives nothing more from it in "
            "that round: deadlock"
        ),
    ),
    "receives where it sends from": (
        "ring",
        """
def all_gather(rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):
        run = chunk(rank - step, size)
        yield Send(right, run), Recv(left, run)
""",
        5,
        ("2 ranks: rank 0 in round 0 writes [0] while it would send [0] to rank 1"),
    ),
    "passes on what has not come yet": (
        "ring",
        """
def all_gather(rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    for step in range(1, size):
        yield Send(right, chunk(rank - step, size)), Recv(left, chunk(left - step, size))
""",
        4,
        ("2 ranks: in round 0, rank 0 would send [1] to rank 1, but holds nothing in [1] yet"),
    ),
    "starts at the own chunk": (
        "ring_reduce_scatter",
        """
def reduce_scatter(rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):
        yield Send(right, chunk(rank - step, size)), RecvReduce(left, chunk(left - step, size))
""",
        4,
        (
            "2 ranks: after round 0, rank 0's chunk 0 holds the contribution of rank 0; it should hold those of "
            "ranks 0 and 1: rank 1's never arrives, nor leaves rank 1"
        ),
    ),
    "replaces where it should add": (
        "ring_reduce_scatter",
        """
def reduce_scatter(rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    for step in range(1, size):
        yield Send(right, chunk(rank - step, size)), Recv(left, chunk(left - step, size))
""",
        4,
        (
            "2 ranks: after round 0, rank 0's chunk 0 holds the contribution of rank 1; it should hold those of "
            "ranks 0 and 1: rank 0's was on rank 0 until round 0, when what came from rank 1 replaced it"
        ),
    ),
    "adds one chunk to another": (
        "ring_reduce_scatter",
        """
def reduce_scatter(rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    for step in range(1, size):
        yield Send(right, chunk(rank - step, size)), RecvReduce(left, chunk(rank - step, size))
""",
        4,
        (
            "2 ranks: in round 0, rank 0 would receive and reduce [1] from rank 1, but [1] holds chunk 1, and "
            "what comes is chunk 0"
        ),
    ),
    "goes round once too often": (
        "ring_all_reduce",
        """
def all_reduce(rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    for step in range(size):
        yield Send(right, chunk(rank - step, size)), RecvReduce(left, chunk(left - step, size))
    for step in range(size - 1):
        yield Send(right, chunk(rank - step, size)), Recv(left, chunk(left - step, size))
""",
        4,
        ("1 rank: in round 0, rank 0 would send [0] to rank 0, which is itself"),
    ),
    "adds when it gathers": (
        "ring_all_reduce",
        """
def all_reduce(rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    for step in range(2 * size - 2):
        yield Send(right, chunk(rank - step, size)), RecvReduce(left, chunk(left - step, size))
""",
        4,
        (
            "2 ranks: after round 1, rank 0's chunk 0 holds the contributions of ranks 0 (twice) and 1; it should"
            " hold those of ranks 0 and 1: in round 1, rank 0 adds rank 0's a second time, with what came from "
            "rank 1"
        ),
    ),
    "gathers a round too few": (
        "ring_all_reduce",
        """
def all_reduce(rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):
        yield Send(right, chunk(rank - step, size)), RecvReduce(left, chunk(left - step, size))
    for step in range(size - 2):
        yield Send(right, chunk(rank + 1 - step, size)), Recv(left, chunk(rank - step, size))
""",
        4,
        (
            "2 ranks: after round 0, rank 0's chunk 0 holds the contribution of rank 0; it should hold those of "
            "ranks 0 and 1: rank 1's never arrives, nor leaves rank 1"
        ),
    ),
    "ignores the root": (
        "broadcast",
        """
def broadcast(rank, size, root):
    for bit in range((size - 1).bit_length()):
        reach = 1 << bit
        if rank < reach and rank + reach < size:
            yield (Send(rank + reach, range(size)),)
        elif reach <= rank < 2 * reach:
            yield (Recv(rank - reach, range(size)),)
        else:
            yield ()
""",
        5,
        ("2 ranks, root 1: in round 0, rank 0 would send [0-1] to rank 1, but holds nothing in [0] yet"),
    ),
    "sends half of the chunks": (
        "broadcast",
        """
def broadcast(rank, size, root):
    place, half = (rank - root) % size, range((size + 1) // 2)
    for bit in range((size - 1).bit_length()):
        reach = 1 << bit
        if place < reach and place + reach < size:
            yield (Send((rank + reach) % size, half),)
        elif reach <= place < 2 * reach:
            yield (Recv((rank - reach) % size, half),)
        else:
            yield ()
""",
        8,
        (
            "2 ranks, root 0: after round 0, rank 1's chunk 1 holds nothing; it should hold chunk 1 of rank 0: "
            "rank 0's never arrives, nor leaves rank 0"
        ),
    ),
    "sends beyond the last rank": (
        "broadcast",
        """
def broadcast(rank, size, root):
    place = (rank - root) % size
    for bit in range((size - 1).bit_length()):
        reach = 1 << bit
        if place < reach:
            yield (Send(rank + reach, range(size)),)
        elif reach <= place < 2 * reach:
            yield (Recv((rank - reach) % size, range(size)),)
        else:
            yield ()
""",
        6,
        ("2 ranks, root 1: in round 0, rank 1 would send [0-1] to rank 2: there are ranks 0 to 1"),
    ),
    "skips idle rounds": (
        "broadcast",
        """
def broadcast(rank, size, root):
    place = (rank - root) % size
    for bit in range((size - 1).bit_length()):
        reach = 1 << bit
        if place < reach and place + reach < size:
            yield (Send((rank + reach) % size, range(size)),)
        elif reach <= place < 2 * reach:
            yield (Recv((rank - reach) % size, range(size)),)
""",
        8,
        (
            "3 ranks, root 0: in round 0, rank 2 would receive [0-2] from rank 0, but rank 0 sends nothing more "
            "to it in that round: deadlock; rank 0 does in round 1: a message has both its ends in one round"
        ),
    ),
    "leaves the last rank out": (
        "reduce",
        """
def reduce(rank, size, root):
    everything = range(size)
    place, last = (rank - root) % size, size - 1
    for other in range(1, last):
        if place == 0:
            yield (RecvReduce((root + other) % size, everything),)
        else:
            yield (Send(root, everything),) if place == other else ()
""",
        1,
        (
            "2 ranks, root 0: without any round, rank 0's chunk 0 holds the contribution of rank 0; it should "
            "hold those of ranks 0 and 1: rank 1's never arrives, nor leaves rank 1"
        ),
    ),
    "lets the root replace": (
        "reduce",
        """
def reduce(rank, size, root):
    everything, place = range(size), (rank - root) % size
    for other in range(1, size):
        if place == 0:
            yield (Recv((root + other) % size, everything),)
        else:
            yield (Send(root, everything),) if place == other else ()
""",
        5,
        (
            "2 ranks, root 0: after round 0, rank 0's chunk 0 holds the contribution of rank 1; it should hold "
            "those of ranks 0 and 1: rank 0's was on rank 0 until round 0, when what came from rank 1 replaced it"
        ),
    ),
    "exchanges with the same rank twice": (
        "doubling",
        """
def all_reduce(rank, size):
    for _ in range(size.bit_length() - 1):
        peer = rank ^ 1
        yield Send(peer, range(size)), RecvReduce(peer, range(size))
""",
        4,
        (
            "4 ranks: after round 1, rank 0's chunk 0 holds the contributions of ranks 0 (twice) and 1 (twice); "
            "it should hold those of ranks 0, 1, 2 and 3: in round 1, rank 0 adds rank 0's a second time, with "
            "what came from rank 1"
        ),
    ),
    "counts a bit too many": (
        "doubling",
        """
def all_reduce(rank, size):
    for bit in range(size.bit_length()):
        peer = rank ^ 1 << bit
        yield Send(peer, range(size)), RecvReduce(peer, range(size))
""",
        4,
        ("1 rank: in round 0, rank 0 would send [0] to rank 1: there are ranks 0 to 0"),
    ),
    "talks to itself": (
        "doubling",
        """
def all_reduce(rank, size):
    for bit in range(size.bit_length() - 1):
        peer = rank | 1 << bit
        yield Send(peer, range(size)), RecvReduce(peer, range(size))
""",
        4,
        ("2 ranks: in round 0, rank 1 would send [0-1] to rank 1, which is itself"),
    ),
    "gathers in the wrong order": (
        "halving_doubling",
        """
def all_reduce(rank, size):
    bits = range(size.bit_length() - 1)
    for bit in reversed(bits):
        peer = rank ^ 1 << bit
        yield Send(peer, block(peer, bit)), RecvReduce(peer, block(rank, bit))
    for bit in reversed(bits):
        peer = rank ^ 1 << bit
        yield Send(peer, block(rank, bit)), Recv(peer, block(peer, bit))


def block(rank, bit):
    first = rank >> bit << bit
    return range(first, first + (1 << bit))
""",
        8,
        (
            "4 ranks: after round 3, rank 0's chunk 3 holds the contributions of ranks 0 and 2; it should hold "
            "those of ranks 0, 1, 2 and 3: those of ranks 1 and 3 are not in what came from rank 2 in round 2"
        ),
    ),
    "rounds log2 p down": (
        "bruck",
        """
def all_gather(rank, size):
    for bit in range(size.bit_length() - 1):
        reach = 1 << bit
        left, right = (rank - reach) % size, (rank + reach) % size
        yield (
            *(Send(left, chunk(rank + i, size)) for i in range(reach)),
            *(Recv(right, chunk(right + i, size)) for i in range(reach)),
        )
""",
        5,
        (
            "3 ranks: after round 0, rank 0's chunk 2 holds nothing; it should hold chunk 2 of rank 2: rank 2's "
            "never arrives; it gets as far as rank 1, in round 0"
        ),
    ),
    "runs past the end of the vector": (
        "bruck",
        """
def all_gather(rank, size):
    for bit in range((size - 1).bit_length()):
        reach = 1 << bit
        length = min(reach, size - reach)
        left, right = (rank - reach) % size, (rank + reach) % size
        yield Send(left, range(rank, rank + length)), Recv(right, range(right, right + length))
""",
        6,
        (
            "4 ranks: in round 1, rank 1 would receive [3-4] from rank 3: there are chunks [0-3]; chunk(i, size) "
            "counts them round the ring"
        ),
    ),
    "forgets the own chunk": (
        "pairwise",
        """
def all_to_all(rank, size):
    for step in range(1, size):
        dest, source = (rank + step) % size, (rank - step) % size
        yield Send(dest, chunk(dest, size)), Recv(source, range(size + source, size + source + 1))
""",
        1,
        (
            "1 rank: without any round, rank 0's chunk 1 holds nothing; it should hold chunk 0 of rank 0: rank "
            "0's never arrives, nor leaves rank 0"
        ),
    ),
    "sends the same chunk to all": (
        "pairwise",
        """
def all_to_all(rank, size):
    yield (Copy(chunk(rank, size), range(size + rank, size + rank + 1)),)
    for step in range(1, size):
        dest, source = (rank + step) % size, (rank - step) % size
        yield Send(dest, chunk(rank, size)), Recv(source, range(size + source, size + source + 1))
""",
        5,
        (
            "2 ranks: after round 1, rank 0's chunk 3 holds chunk 1 of rank 1; it should hold chunk 0 of rank 1: "
            "that came from rank 1 in round 1"
        ),
    ),
    "writes over what is still to be sent": (
        "pairwise",
        """
def all_to_all(rank, size):
    yield (Copy(range(size), range(size, 2 * size)),)
    for step in range(1, size):
        dest, source = (rank + step) % size, (rank - step) % size
        yield Send(dest, chunk(dest, size)), Recv(source, chunk(source, size))
""",
        5,
        ("2 ranks: rank 0 in round 1 writes [1] while it would send [1] to rank 1"),
    ),
    "stays inside the nodes": (
        "two_level",
        """
def all_reduce(rank, size, nodes):
    node = next(node for node in nodes if rank in node)
    for other in node:
        if rank == node[0] != other:
            yield (RecvReduce(other, range(size)),)
        elif rank == other != node[0]:
            yield (Send(node[0], range(size)),)
        else:
            yield ()
    if rank == node[0]:
        yield tuple(Send(other, range(size)) for other in node[1:])
    else:
        yield (Recv(node[0], range(size)),)
""",
        11,
        (
            "2 ranks in nodes of 1: after round 1, rank 0's chunk 0 holds the contribution of rank 0; it should "
            "hold those of ranks 0 and 1: rank 1's never arrives, nor leaves rank 1"
        ),
    ),
    "makes too little room": (
        "two_level",
        """
def all_reduce(rank, size, nodes):
    node = next(node for node in nodes if rank in node)
    peer = node[(node.index(rank) + 1) % len(node)]
    if peer != rank:
        yield Send(peer, range(size)), RecvReduce(node[node.index(rank) - 1], range(size - 1))
""",
        5,
        (
            "2 ranks in nodes of 2: in round 0, rank 0 would send [0-1] to rank 1, but rank 1 would receive and "
            "reduce [0] from rank 0: the runs must be as long as each other"
        ),
    ),
    "all forward passes but one": (
        "1f1b",
        """
def one_f_one_b(stage, num_stages, num_micro_batches):
    for micro_batch in range(num_micro_batches):
        yield f"{stage}F{micro_batch}"
    for micro_batch in range(1, num_micro_batches):
        yield f"{stage}B{micro_batch}"
""",
        1,
        ("1 stage and 1 micro-batch: 0B0 is missing, of stages 0 to 0 and micro-batches 0 to 0"),
    ),
    "counts micro-batches from 1": (
        "1f1b",
        """
def one_f_one_b(stage, num_stages, num_micro_batches):
    for micro_batch in range(1, num_micro_batches + 1):
        yield f"{stage}F{micro_batch}"
        yield f"{stage}B{micro_batch}"
""",
        3,
        ("1 stage and 1 micro-batch: action 0 of stage 0 is 0F1: there are micro-batches 0 to 0"),
    ),
    "runs ahead most on the last stage": (
        "1f1b",
        """
def one_f_one_b(stage, num_stages, num_micro_batches):
    ahead = min(stage + 1, num_micro_batches)
    yield from (f"{stage}F{micro_batch}" for micro_batch in range(ahead))
    for micro_batch in range(num_micro_batches):
        yield f"{stage}B{micro_batch}"
        if micro_batch + ahead < num_micro_batches:
            yield f"{stage}F{micro_batch + ahead}"
""",
        5,
        (
            "2 stages and 2 micro-batches: action 1 of stage 0: 0B0 of rank 0 waits for the gradient of micro-"
            "batch 0 for stage 0, rank 1 to 0; 1F1 of rank 1 waits for the activation of micro-batch 1 for stage "
            "1, rank 0 to 1"
        ),
    ),
    "releases too early": (
        "zero3",
        """
def zero3(rank, size, num_blocks):
    for block in range(num_blocks):
        yield from (f"gather {block}", f"forward {block}", f"release {block}")
    for block in reversed(range(num_blocks)):
        yield from (f"backward {block}", f"reduce_scatter {block}")
""",
        5,
        ("2 ranks and 1 block: in step 3, rank 0 would backward 0, but that block is not gathered"),
    ),
    "keeps gradients": (
        "zero3",
        """
def zero3(rank, size, num_blocks):
    for block in range(num_blocks):
        yield from (f"gather {block}", f"forward {block}")
    for block in reversed(range(num_blocks)):
        yield from (f"backward {block}", f"release {block}")
""",
        1,
        ("2 ranks and 1 block: rank 0 ends without reduce_scatter 0: gradients stay each rank's own"),
    ),
    "gathers in another order on rank 1": (
        "zero3",
        """
def zero3(rank, size, num_blocks):
    blocks = range(num_blocks)
    yield from (f"gather {block}" for block in (reversed(blocks) if rank == 1 else blocks))
    yield from (f"forward {block}" for block in blocks)
    for block in reversed(blocks):
        yield from (f"backward {block}", f"reduce_scatter {block}", f"release {block}")
""",
        3,
        ("2 ranks and 2 blocks: in step 0, rank 1 would gather 1, where rank 0 would gather 0: deadlock"),
    ),
    "one rank replaces where it should add": (
        "ring_all_reduce",
        """
def all_reduce(rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    take = Recv if rank == 1 and size > 2 else RecvReduce
    for step in range(size - 1):
        yield Send(right, chunk(rank - step, size)), take(left, chunk(left - step, size))
    for step in range(size - 1):
        yield Send(right, chunk(rank + 1 - step, size)), Recv(left, chunk(rank - step, size))
""",
        5,
        (
            "3 ranks: after round 3, rank 2's chunk 0 holds the contributions of ranks 0 and 2; it should hold those "
            "of ranks 0, 1 and 2: rank 1's was on rank 1 until round 0, when what came from rank 0 replaced it"
        ),
    ),
    "leaves rank 0 out of what the last rank sends to all": (
        "ring_all_reduce",
        """
def all_reduce(rank, size):
    last, everything = size - 1, range(size)
    for other in range(1, last):
        yield (RecvReduce(other, everything),) if rank == last else (Send(last, everything),) if rank == other else ()
    for other in range(last):
        yield (Send(other, everything),) if rank == last else (Recv(last, everything),) if rank == other else ()
""",
        6,
        (
            "2 ranks: after round 0, rank 1's chunk 0 holds the contribution of rank 1; it should hold those of ranks "
            "0 and 1: rank 0's never arrives, nor leaves rank 0"
        ),
    ),
    "leaves the last micro-batch out": (
        "1f1b",
        """
def one_f_one_b(stage, num_stages, num_micro_batches):
    for micro_batch in range(max(1, num_micro_batches - 1)):
        yield f"{stage}F{micro_batch}"
        yield f"{stage}B{micro_batch}"
""",
        1,
        "1 stage and 2 micro-batches: 0F1 is missing, and so is all of that micro-batch",
    ),
    "counts stages from 1": (
        "1f1b",
        """
def one_f_one_b(stage, num_stages, num_micro_batches):
    for micro_batch in range(num_micro_batches):
        yield f"{stage + 1}F{micro_batch}"
""",
        3,
        "1 stage and 1 micro-batch: action 0 of stage 0 is 1F0, of another stage",
    ),
    "gathers what is gathered": (
        "zero3",
        """
def zero3(rank, size, num_blocks):
    for step in ("forward", "backward"):
        yield from ("gather 0", f"{step} 0")
""",
        3,
        "2 ranks and 1 block: in step 2, rank 0 would gather 0, but that block is gathered already",
    ),
    "keeps parameters": (
        "zero3",
        """
def zero3(rank, size, num_blocks):
    yield from ("gather 0", "forward 0", "backward 0", "reduce_scatter 0")
""",
        1,
        "2 ranks and 1 block: rank 0 ends without release 0: it keeps that block's parameters",
    ),
    "counts blocks from 1": (
        "zero3",
        """
def zero3(rank, size, num_blocks):
    for block in range(1, num_blocks + 1):
        yield from (f"gather {block}", f"forward {block}")
""",
        3,
        "2 ranks and 1 block: in step 0, rank 0 would gather 1, but there are blocks 0 to 0",
    ),
    "reduces gradients on rank 0 only": (
        "zero3",
        """
def zero3(rank, size, num_blocks):
    yield from ("gather 0", "forward 0", "backward 0")
    if rank == 0:
        yield "reduce_scatter 0"
    yield "release 0"
""",
        1,
        "2 ranks and 1 block: rank 1 takes part in 1 collective, rank 0 in 2: deadlock",
    ),
}


@pytest.mark.parametrize(("name", "code", "line", "why"), MISTAKES.values(), ids=MISTAKES)
def test_the_mistake_is_named(name, code, line, why, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(MOVES + code)  # the code begins with the end of that line
    assert main([name, "my.py"]) == 1
    assert capsys.readouterr().out.splitlines()[0] == f"my.py:{line + 1}: wrong on {why}"


def test_the_picture_follows(tmp_path, capsys):
    name, code, _, _ = MISTAKES["adds when it gathers"]
    (tmp_path / "my.py").write_text(MOVES + code)
    main([name, str(tmp_path / "my.py")])
    picture = ["round 0:  0->1 [0]+   1->0 [1]+", "round 1:  0->1 [1]+   1->0 [0]+"]
    assert capsys.readouterr().out.splitlines()[1:] == picture


def mutated(programs, draws):
    """Change one end of a message: its chunks, or whether it reduces."""
    programs = [[list(moves) for moves in rounds] for rounds in programs]
    ends = [
        (rank, index, at)
        for rank, rounds in enumerate(programs)
        for index, moves in enumerate(rounds)
        for at in range(len(moves))
    ]
    rank, index, at = draws.choice(ends)
    move = programs[rank][index][at]
    if isinstance(move, Send | Copy) or draws.random() < 0.5:
        start = draws.randrange(len(programs) - len(move.run) + 1)
        move = move._replace(run=range(start, start + len(move.run)))
    else:
        move = {Recv: RecvReduce, RecvReduce: Recv}[type(move)](*move)
    programs[rank][index][at] = move
    return [[tuple(moves) for moves in rounds] for rounds in programs]


def simulated(programs):
    """Simulate an all-reduce; return for each rank and chunk how often it contains each rank's contribution."""
    size = len(programs)
    vectors = [[(chunk, Counter([rank])) for chunk in range(size)] for rank in range(size)]
    for rounds in zip(*programs, strict=True):
        sent = {
            (rank, move.to): [vectors[rank][chunk] for chunk in move.run]
            for rank, moves in enumerate(rounds)
            for move in moves
            if isinstance(move, Send)
        }
        for rank, moves in enumerate(rounds):
            for move in moves:
                if not isinstance(move, Send):
                    for chunk, (what, counts) in zip(move.run, sent[move.source, rank], strict=True):
                        more = vectors[rank][chunk][1] if isinstance(move, RecvReduce) else Counter()
                        vectors[rank][chunk] = what, counts + more
    return vectors


HOLDS = re.compile(r"rank (\d+)'s chunk (\d+) holds the contributions? of ranks? (.*?)(?: to chunk (\d+))?; it should")


def read_counts(words):
    """Read "0 (twice), 1 and 3 (4 times)"."""
    counts = re.findall(r"(\d+)(?: \((twice|\d+ times)\))?", words)
    return Counter({int(rank): 2 if n == "twice" else int(n.split()[0]) if n else 1 for rank, n in counts})


def mistake_in(exercise, instance, schedules):
    try:
        exercise.check(instance, schedules)
    except MistakeError as mistake:
        return mistake
    return None


ON_RANKS = [each.name for each in catalogue.EXERCISES if isinstance(each, MessageExercise) and not each.nodes]


@pytest.mark.parametrize("name", ON_RANKS)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_what_is_named_is_what_a_simulation_finds(name, size):
    """One random move of a schedule is changed; the judge's report matches the simulation, its verdict the prover's."""
    exercise, draws, num_named = EXERCISES[name], random.Random(f"{name} {size}"), 0
    instance = rank_instance(size, 0 if exercise.spec.rooted else None)
    textbook = [list(exercise.algorithm(rank, *instance.arguments)) for rank in range(size)]
    for _ in range(60):
        programs = mutated(textbook, draws)
        mistake = mistake_in(exercise, instance, programs)
        with pytest.raises(ContractError) if mistake else nullcontext():
            check(exercise.collective, lambda rank, size, programs=programs: programs[rank], size)
        if mistake and (named := HOLDS.search(mistake.why)):
            rank, chunk, words, other = named.groups()
            what, counts = simulated(programs)[int(rank)][int(chunk)]
            assert (what, counts) == (int(other or chunk), read_counts(words))
            assert (what, counts) != (int(chunk), Counter(range(size)))
            num_named += 1
    assert num_named > 10 or name not in ("ring_all_reduce", "halving_doubling")


@pytest.mark.parametrize("name", ["ring", "reduce", "doubling", "pairwise", "two_level"])
def test_any_rounds_get_a_verdict(name):
    """Moves are random, some with ranks or chunks that do not exist."""
    exercise, draws, whys = EXERCISES[name], random.Random(name), set()
    instance = next(instance for instance in exercise.instances if instance.num_ranks == 4)

    def move():
        start, length = draws.randint(-1, 4), draws.choice([0, 1, 1, 2, 4])
        run, peer = range(start, start + length), draws.randint(-1, 4)
        other = range(max(0, start - 1), max(0, start - 1) + draws.choice([length, 1]))
        return draws.choice([Send(peer, run), Recv(peer, run), RecvReduce(peer, run), Copy(other, run)])

    for _ in range(500):
        schedules = [
            [tuple(move() for _ in range(draws.randint(0, 1))) for _ in range(draws.randint(0, 2))] for _ in range(4)
        ]
        mistake = mistake_in(exercise, instance, schedules)
        assert mistake
        assert f"rank {mistake.rank}" in mistake.why
        whys.add(re.sub(r"\d+", "0", mistake.why))
    assert len(whys) > 20
