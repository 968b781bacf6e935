"""Pipeline schedules without ranks: proofs, damaged schedules, and simulations in unit times."""

import os
import pkgutil
import random
import re
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest

from parallelism.pipeline import schedule as pipeline_schedule
from parallelism.pipeline.schedule import files
from parallelism.pipeline.schedule.actions import Schedule, num_alive
from parallelism.pipeline.schedule.basic import one_f_one_b
from parallelism.pipeline.schedule.messages import PostRecv, StartSend, WaitRecv, program
from parallelism.pipeline.schedule.proof import ActionPosition, ProofError, prove
from parallelism.pipeline.schedule.registry import make_schedule as make
from parallelism.pipeline.schedule.registry import names
from parallelism.step.actions import Action, StageMessage, parse

IS_PROOF = "LARGEST" in os.environ  # `make proof`
RANKS = range(1, 17) if IS_PROOF else (*range(1, 9), 16)
MICRO_BATCHES = range(1, 65) if IS_PROOF else (*range(1, 10), 15, 16, 17, 32, 33, 64)
SCHEDULES = [(name, None) for name in names()] + [("interleaved", 3), ("breadth_first", 3)]

each_schedule = pytest.mark.parametrize(("name", "virtual_stages"), SCHEDULES)


def parse_schedule(*orders, peaks=None):
    orders = tuple(tuple(map(parse, order.split())) for order in orders)
    return Schedule("written", orders, peaks or (99,) * len(orders))


def changed(schedule, rank, order):
    """Return the schedule with another order on one rank."""
    return replace(schedule, orders=(*schedule.orders[:rank], tuple(order), *schedule.orders[rank + 1 :]))


def play(schedule, **lengths):
    """Return the earliest end of each action in units; None if the schedule deadlocks."""
    lengths = {"F": 1, "B": 2, "I": 1, "W": 1} | lengths
    ready_s, ends, at, free = {}, {}, [0] * schedule.num_ranks, [0] * schedule.num_ranks
    goes_on = True
    while goes_on:
        goes_on = False
        for rank, order in enumerate(schedule.orders):
            while at[rank] < len(order) and all(
                what in ready_s for what in before(order[at[rank]], schedule.num_stages)
            ):
                action = order[at[rank]]
                begin = max([free[rank], *(ready_s[what] for what in before(action, schedule.num_stages))])
                ready_s[after(action)] = ends[action] = free[rank] = begin + lengths[action.kind]
                at[rank], goes_on = at[rank] + 1, True
    return ends if len(ends) == sum(map(len, schedule.orders)) else None


def after(action):
    return {"F": "output", "W": "weights"}.get(action.kind, "gradient"), action.stage, action.micro_batch


def before(action, num_stages):
    stage, kind, m = action
    if kind == "W":
        return [("gradient", stage, m)]
    if kind == "F":
        return [("output", stage - 1, m)] if stage > 0 else []
    return [("output", stage, m)] + ([("gradient", stage + 1, m)] if stage + 1 < num_stages else [])


def span(schedule, **lengths):
    return max(play(schedule, **lengths).values())


@each_schedule
def test_every_schedule_is_proved_and_reaches_its_peaks(name, virtual_stages):
    for p in RANKS:
        for m in MICRO_BATCHES:
            schedule = make(name, p, m, virtual_stages)
            prove(schedule)
            assert (schedule.num_ranks, schedule.num_micro_batches) == (p, m)
            assert schedule.peaks == tuple(max(num_alive(order)) for order in schedule.orders)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_of_gpipe_and_1f1b(name):
    for p in (1, 2, 4, 7):
        for m in (1, 3, 4, 20):
            schedule = make(name, p, m)
            busy = Fraction(3 * m, span(schedule))
            assert 1 - busy == Fraction(p - 1, m + p - 1)
            assert schedule.peaks == tuple(m if name == "gpipe" else min(p - stage, m) for stage in range(p))


@pytest.mark.parametrize("lengths", [{"B": 1}, {"B": 2}, {"F": 2, "B": 3}])
@pytest.mark.parametrize("name", ["interleaved", "breadth_first"])
def test_bubble_of_looped_schedules(name, lengths):
    for p in (1, 2, 3, 4, 8):
        for rounds in (1, 2, 4):
            for v in (2, 3, 4):
                m = rounds * p
                ideal = v * m * (lengths.get("F", 1) + lengths["B"])
                assert Fraction(span(make(name, p, m, v), **lengths) - ideal, ideal) == Fraction(p - 1, v * m)


def test_memory_of_looped_schedules():
    """The first rank of interleaved 1F1B has 1 + (p-1)/(p v) times the memory of 1F1B, in stages 1/v as large."""
    for p in (1, 2, 4, 8):
        for v in (2, 3, 4):
            assert Fraction(make("interleaved", p, 4 * p, v).peaks[0], v) == p * (1 + Fraction(p - 1, p * v))
            assert make("breadth_first", p, 4 * p, v).peaks == (4 * p * v,) * p


def test_interleaving_costs_no_more_with_micro_batches_left_over():
    for p in (2, 3, 4, 8):
        for m in range(1, 4 * p):
            whole = -(-m // p) * p
            assert span(make("interleaved", p, m, 2)) < span(make("interleaved", p, whole, 2)) or m == whole


def test_bubble_and_memory_of_zb_h1():
    for p in (1, 2, 4, 8):
        for m in (p, p + 1, 3 * p):
            bubble, of_1f1b = (span(make(name, p, m)) - 3 * m for name in ("zb_h1", "1f1b"))
            assert 3 * bubble == of_1f1b == 3 * (p - 1)
            assert make("zb_h1", p, m).peaks == (p,) * p
    assert span(make("zb_h1", 4, 8), F=10, I=12, W=9) == 8 * 31 + 3 * (10 + 12 - 9)


def test_zb_v_has_no_gaps_and_the_memory_of_1f1b_on_every_rank():
    for p in (1, 2, 3, 4, 8):
        for m in (2 * p - 1, 2 * p, 5 * p):
            schedule = make("zb_v", p, m)
            ends = play(schedule)
            for rank, order in enumerate(schedule.orders):
                assert schedule.stages(rank) == (rank, 2 * p - 1 - rank)
                assert [ends[action] for action in order] == list(range(rank + 1, rank + 1 + 6 * m))
            assert schedule.peaks == (2 * p,) * p


def test_naive_has_one_stage_at_work():
    for p, m in ((1, 3), (3, 4)):
        assert span(make("naive", p, m)) == 3 * p * m


class Peer(SimpleNamespace):
    """The attributes that torch's schedules read from themselves when they make a rank's actions."""

    def order(self, schedule, rank):
        actions = schedule._calculate_single_rank_operations(self, rank)
        return [str(action) for action in actions if action is not None]


@pytest.mark.parametrize(("p", "m", "v"), [(1, 3, 2), (2, 4, 2), (4, 4, 3), (4, 12, 2), (8, 16, 2)])
def test_interleaved_is_that_of_torch(p, m, v):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    peer = Peer(pp_group_size=p, n_local_stages=v, microbatches_per_round=p, _n_microbatches=m)
    for rank, order in enumerate(make("interleaved", p, m, v).orders):
        assert list(map(str, order)) == peer.order(schedules.ScheduleInterleaved1F1B, rank)


@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 4), (2, 1), (2, 4), (4, 3), (4, 7), (4, 8), (8, 20)])
def test_zb_v_is_that_of_torch(p, m):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    peer = Peer(pp_group_size=p, num_stages=2 * p, _n_microbatches=m)
    for rank, order in enumerate(make("zb_v", p, m).orders):
        assert list(map(str, order)) == peer.order(schedules.ScheduleZBVZeroBubble, rank)


def without(order, *positions):
    return [action for position, action in enumerate(order) if position not in positions]


def move(order, source, dest):
    rest = without(order, source)
    return [*rest[:dest], order[source], *rest[dest:]]


PLAIN = one_f_one_b(4, 8)  # rank 1: 1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1F6 1B4 1F7 1B5 1B6 1B7
H1 = make("zb_h1", 3, 4)  # rank 0: 0F0 0F1 0F2 0I0 0W0 0F3 ...
V = make("zb_v", 2, 3)  # rank 1: 1F0 2F0 1F1 2F1 2I0 2W0 ...
ONE, THREE = PLAIN.orders[1], PLAIN.orders[3]
DAMAGES = {
    "left out": (changed(PLAIN, 1, without(ONE, 5)), "1B1 is missing, of stages 0 to 3", ActionPosition(1, 15)),
    "left out: the weights' part": (changed(H1, 0, without(H1.orders[0], 4)), "0W0 is missing", ActionPosition(0, 11)),
    "left out: the inputs' part": (changed(H1, 0, without(H1.orders[0], 3)), "0I0 is missing", ActionPosition(0, 11)),
    "left out: a forward pass": (changed(PLAIN, 3, without(THREE, 2)), "3F1 is missing", ActionPosition(3, 15)),
    "a stage is not there": (
        parse_schedule("0F0 0B0", "2F0 2B0"),
        "1F0 is missing, of stages 0 to 2",
        ActionPosition(1, 0),
    ),
    "a far micro-batch": (parse_schedule("0F0 0B0 0F999999999 0B999999999"), "0F1 is missing", ActionPosition(0, 4)),
    "a far stage": (parse_schedule("0F0 0B0 999999999F0"), "1F0 is missing", ActionPosition(0, 2)),
    "twice": (changed(PLAIN, 1, [*ONE[:5], ONE[4], *ONE[5:]]), "1F3 appears twice", ActionPosition(1, 5)),
    "whole and part": (
        changed(PLAIN, 1, [*ONE[:6], parse("1W0"), *ONE[6:]]),
        "1W0 is a part of 1B0",
        ActionPosition(1, 6),
    ),
    "parts of another": (
        changed(PLAIN, 1, [*ONE[:3], parse("1I0"), *ONE[4:]]),
        "1W0 is missing",
        ActionPosition(1, 16),
    ),
    "on another rank": (
        changed(changed(PLAIN, 1, without(ONE, 5)), 2, [*PLAIN.orders[2][:3], ONE[5], *PLAIN.orders[2][3:]]),
        "1B1 is on rank 2, but stage 1 belongs to rank 1",
        ActionPosition(2, 3),
    ),
    "no action": (changed(PLAIN, 1, [*ONE, Action(1, "X", 0)]), "1X0 is not an action", ActionPosition(1, 16)),
    "below zero": (changed(PLAIN, 1, [*ONE, Action(1, "F", -1)]), "1F-1 is not an action", ActionPosition(1, 16)),
    "no actions": (
        replace(PLAIN, orders=(*PLAIN.orders, ()), peaks=(9,) * 5),
        "rank 4 has no action",
        ActionPosition(4, 0),
    ),
    "backward first, last stage": (
        changed(PLAIN, 3, move(THREE, 0, 1)),
        "3B0 needs 3F0, which has not",
        ActionPosition(3, 0),
    ),
    "weights first": (changed(H1, 0, move(H1.orders[0], 3, 4)), "0W0 needs 0I0, which has not", ActionPosition(0, 3)),
    "the turn of a V": (changed(V, 1, move(V.orders[1], 0, 1)), "2F0 needs 1F0, which has not", ActionPosition(1, 0)),
    "backward first": (
        changed(PLAIN, 1, move(ONE, 3, 0)),
        "1B0 of rank 1 waits for the gradient of micro-batch 0 for stage 1, rank 2 to 1; "
        "2F0 of rank 2 waits for the activation of micro-batch 0 for stage 2, rank 1 to 2",
        ActionPosition(1, 0),
        ActionPosition(2, 0),
    ),
    "a circle": (
        parse_schedule("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1"),
        "0B0 of rank 0 waits for the gradient of micro-batch 0 for stage 0, rank 1 to 0; "
        "1F1 of rank 1 waits for the activation of micro-batch 1 for stage 1, rank 0 to 1",
        ActionPosition(0, 1),
        ActionPosition(1, 1),
    ),
    "a lower peak": (
        replace(PLAIN, peaks=(4, 2, 2, 1)),
        "1F2 makes 3 live activations on rank 1, wh",
        ActionPosition(1, 2),
    ),
    "weights too late": (
        changed(H1, 2, move(H1.orders[2], 6, 7)),
        "2F3 makes 4 live activations on rank 2, which states 3",
        ActionPosition(2, 6),
    ),
}


@pytest.mark.parametrize(("schedule", "why", "positions"), [(d[0], d[1], d[2:]) for d in DAMAGES.values()], ids=DAMAGES)
def test_damage_is_found_and_its_cell_marked(schedule, why, positions):
    with pytest.raises(ProofError) as caught:
        prove(schedule)
    assert why in caught.value.why
    assert sorted(caught.value.positions) == sorted(positions)
    first, _, *lanes = str(caught.value).splitlines()
    assert first == f"schedule {schedule.name!r}: {caught.value.why}"
    for rank, lane in enumerate(lanes):
        orders = [(*order, "?") for order in schedule.orders]
        marked = [f">{orders[r][position]}<" for r, position in positions if r == rank]
        assert [cell for cell in lane.split()[2:] if ">" in cell] == marked


def test_there_are_ranks_and_a_peak_for_each():
    with pytest.raises(ProofError, match="no ranks"):
        prove(Schedule("empty", (), ()))
    with pytest.raises(ProofError, match="peaks of 3 ranks, and has 4"):
        prove(replace(PLAIN, peaks=(4, 3, 2)))


def test_the_picture_of_a_failure():
    with pytest.raises(ProofError) as caught:
        prove(DAMAGES["a circle"][0])
    assert str(caught.value).splitlines()[1:] == [
        "step     0     1     2     3     4     5     6     7",
        "rank 0  0F0    .     .     .   >0B0<  0F1    .    0B1",
        "rank 1   .    1F0    .     .   >1F1<  1B0   1B1    .",
        "rank 2   .     .    2F0   2B0   2F1   2B1    .     .",
    ]


def test_a_long_picture_is_cut_to_what_is_around_the_failure():
    long = make("1f1b", 3, 64)
    with pytest.raises(ProofError) as caught:
        prove(changed(long, 1, [*long.orders[1][:80], parse("1F3"), *long.orders[1][80:]]))
    steps, *lanes = (line.split() for line in str(caught.value).splitlines()[1:])
    assert lanes[1][2:][9] == ">1F3<"
    first = int(steps[1])
    assert steps[1:] == [str(step) for step in range(first, first + 14)]
    assert [len(lane) for lane in lanes] == [2 + 14] * 3


def test_any_order_is_refused_if_and_only_if_it_cannot_be_played():
    draws, outcomes = random.Random(0), set()
    for _ in range(1500):
        schedule = make(draws.choice(names()), draws.randint(1, 4), draws.randint(1, 5))
        schedule = replace(schedule, peaks=(99,) * schedule.num_ranks)
        for _ in range(draws.randint(1, 3)):
            rank = draws.randrange(schedule.num_ranks)
            order = schedule.orders[rank]
            near = draws.randrange(len(order) - 1)
            schedule = changed(schedule, rank, move(order, near, min(near + draws.randint(1, 3), len(order) - 1)))
        is_played = play(schedule) is not None
        outcomes.add(is_played)
        if is_played:
            prove(schedule)
        else:
            with pytest.raises(ProofError, match=r"waits for the|has not been done"):
                prove(schedule)
    assert outcomes == {True, False}


def left_out(kind, nth):
    """Return an edit that removes a rank's n-th operation of a kind."""

    def damaged(ops):
        at = [i for i, op in enumerate(ops) if isinstance(op, kind)][nth]
        return [*ops[:at], *ops[at + 1 :]]

    return damaged


def again(kind, nth):
    def damaged(ops):
        at = [i for i, op in enumerate(ops) if isinstance(op, kind)][nth]
        return [*ops[: at + 1], *ops[at:]]

    return damaged


def all_posts_first(ops):
    return sorted(ops, key=lambda op: not isinstance(op, PostRecv))


STRAY = StartSend(StageMessage(False, 2, 0, source=1, dest=0))
PROGRAMS = {  # of rank 1, between its neighbours
    "no activation is sent": (
        left_out(StartSend, 0),
        "2F0 of rank 2 waits for the activation of micro-batch 0 for stage 2",
    ),
    "no last gradient is sent": (
        left_out(StartSend, -1),
        "0B4 of rank 0 waits for the gradient of micro-batch 4 for stage 0",
    ),
    "no receive is posted": (left_out(PostRecv, 3), "is taken out of turn on rank 1"),
    "nobody waits": (left_out(WaitRecv, 0), "1F0 needs 0F0, which has not been done on rank 1"),
    "an action is not done": (lambda ops: without(ops, 4, 5), "the program has 1F1 here on rank 1"),
    "sent twice": (again(StartSend, 1), "is sent out of turn on rank 1"),
    "sent before it is made": (lambda ops: [ops[-1], *ops], "is sent out of turn on rank 1"),
    "sent to one who does not wait": (
        lambda ops: [*ops[:5], STRAY, *ops[5:]],
        "rank 1 to 0 is never taken on rank 0",
    ),
    "posted twice": (again(PostRecv, -1), "is posted out of turn on rank 1"),
    "posted for nothing": (lambda ops: [*ops, PostRecv(STRAY.message._replace(dest=1))], "is never taken on rank 1"),
    "taken twice": (again(WaitRecv, 3), "is taken out of turn on rank 1"),
    "posted too far ahead": (all_posts_first, "receives are posted together on rank 1"),
}


@pytest.mark.parametrize(("damaged", "why"), PROGRAMS.values(), ids=PROGRAMS)
def test_damage_of_what_ranks_do_is_found(damaged, why):
    def programs(schedule, rank):
        ops = list(program(schedule, rank))
        return damaged(ops) if rank == 1 else ops

    schedule = make("1f1b", 3, 5)
    prove(schedule)
    with pytest.raises(ProofError, match=re.escape(why)):
        prove(schedule, programs)


def test_a_program_that_ends_before_its_order_is_found():
    schedule = make("gpipe", 2, 2)
    with pytest.raises(ProofError, match="the program ends here on rank 0") as caught:
        prove(schedule, lambda schedule, rank: list(program(schedule, rank))[: -1 if rank == 0 else None])
    assert caught.value.positions == (ActionPosition(0, 3),)


@pytest.mark.parametrize("suffix", ["csv", "txt"])
@each_schedule
def test_files_give_back_what_was_written(name, virtual_stages, suffix, tmp_path):
    for p, m in ((1, 1), (2, 1), (3, 5), (4, 8)):
        schedule = make(name, p, m, virtual_stages)
        path = tmp_path / f"{name}.{suffix}"
        files.write(schedule, path)
        assert files.read(path) == schedule


@pytest.mark.parametrize(
    "text",
    [
        "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n",
        "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1",
        "0F0,0F1,,,0B0,,0B1\r\n,1F0,1B0,1F1,1B1,,\r\n",
        "# two ranks\n\n  0F0, 0F1   0B0 ,0B1,  # the first\n\t1F0\t1B0 1F1 1B1\n\n   \n# end",
        "\ufeff0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1",
    ],
)
def test_blanks_commas_and_comments(text, tmp_path):
    path = tmp_path / "1f1b.txt"
    path.write_bytes(text.encode())
    assert files.read(path) == one_f_one_b(2, 2)


BAD_FILES = {
    b"0F0 0B0\n1F0 1X0\n": ", line 2, cell 2: '1X0' is not an action: write stage, kind (F, B, I, W) and micro-batch",
    b"\n# one\n0F0,,0SEND_F0,0B0\n": ", line 3, cell 3: '0SEND_F0' is not an action: ",
    b"0F0;0B0": ", line 1, cell 1: '0F0;0B0' is not an action: ",
    b"0F0 0B0\n,,# idle\n": ", line 2: a rank without actions; write some, as 0F0 0F1 0B0 0B1, or no line",
    b"# nothing\n": " has no actions: write a line of them for each rank, as 0F0 0F1 0B0 0B1",
    b"": " has no actions: write a line of them for each rank, as 0F0 0F1 0B0 0B1",
    b"\x89PNG": " is not text (",
    b"#\n0F0 0B0\n\n,1F0,,1F1,1B0\n": ", line 2, behind the last cell: schedule 'given': 0F1 is missing, of",
    b"0F0 0B0\n,1B0,,1F0\n": ", line 2, cell 2: schedule 'given': 1B0 needs 1F0, which has not been done on rank 1",
    b"0F0,0B0,0F0": ", line 1, cell 3: schedule 'given': 0F0 appears twice",
    b"0F0 0F1 1B0 0B0 0B1\n# two\n1F0 1F1 1B1": ", line 1, cell 3: schedule 'given': 1B0 is on rank 0, but",
}


@pytest.mark.parametrize(("content", "why"), BAD_FILES.items(), ids=range(len(BAD_FILES)))
def test_bad_files_are_refused_by_line_and_cell(content, why, tmp_path):
    path = tmp_path / "given.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}{why}')}"):
        files.read(path)


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.csv"):
        files.read(tmp_path / "none.csv")


def test_files_are_those_of_torch(tmp_path):
    """Torch reads our file, and we read torch's, without a change of the schedule."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    multi = schedules.PipelineScheduleMulti
    peer = Peer(pipeline_order={}, _validate_and_set_stage_mapping=lambda order: None)
    for schedule in (make("zb_v", 3, 4), make("interleaved", 2, 4)):
        files.write(schedule, tmp_path / "ours.csv")
        multi._load_csv(peer, str(tmp_path / "ours.csv"))
        peer.pipeline_order[0][1:1] = [None, None]
        multi._dump_csv(peer, str(tmp_path / f"{schedule.name}.csv"))
        assert ",,," in (tmp_path / f"{schedule.name}.csv").read_text()
        assert files.read(tmp_path / f"{schedule.name}.csv") == schedule
        peer.pipeline_order.clear()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (
            ("1f2b", 2, 4),
            "no pipeline schedule is called '1f2b': use naive, gpipe, 1f1b, interleaved, breadth_first, zb_",
        ),
        (("1f1b", 0, 4), "a pipeline of 0 ranks: use 1 or more"),
        (("gpipe", 2, -1), "a pipeline of -1 micro-batches: use 1 or more"),
        (("interleaved", 2, 4, 0), "a pipeline of 0 stages a rank: use 1 or more"),
        (("1f1b", 2, 4, 2), "'1f1b' takes 1 stages a rank, not 2: for 2, use interleaved, breadth_first, zb_v"),
        (("interleaved", 2, 4, 1), "takes 2 or more stages a rank, not 1: for 1, use naive, gpipe, 1f1b, zb_h1"),
        (("zb_v", 2, 4, 3), "'zb_v' takes 2 stages a rank, not 3: for 3, use interleaved, breadth_first"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(arguments, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        make(*arguments)


def test_homes_and_names():
    assert names() == ["naive", "gpipe", "1f1b", "interleaved", "breadth_first", "zb_h1", "zb_v"]
    for name in names():
        assert make(name, 2, 3).name == name
    assert make("interleaved", 2, 2, 3).home == make("breadth_first", 2, 2, 3).home == {s: s % 2 for s in range(6)}
    assert make("zb_v", 2, 2).home == {0: 0, 3: 0, 1: 1, 2: 1}


def test_schedules_import_neither_torch_nor_mpi_nor_arrays():
    heavy = {"mpi4py", "numpy", "cupy", "torch", "matplotlib"}
    modules = [module.name for module in pkgutil.iter_modules(pipeline_schedule.__path__) if module.name != "__main__"]
    imports = ", ".join(f"{pipeline_schedule.__name__}.{name}" for name in modules)
    code = f"import sys, {imports}; print({heavy} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"
