"""The page that steps through schedules: its states are the prover's, its lines the generators', and it is small."""

import re
import subprocess
import sys
from importlib.resources import files
from itertools import pairwise, product

import numpy as np
import pytest

from collectives.algorithms import find, ring, rows
from collectives.schedule.cost import predict
from collectives.schedule.moves import GetReduce, RecvReduce, Send
from collectives.schedule.network import NETWORK
from collectives.schedule.proof import ContractError
from mpi_tests.helpers import page as reference
from mpi_tests.helpers.algorithm_costs import LARGEST, each_algorithm
from mpi_tests.helpers.launch import environment
from parallelism.pipeline.schedule import registry
from parallelism.step.actions import parse
from teaching.page import __main__ as command
from teaching.page.assemble import packed, unpacked
from teaching.page.scenes import attention, pipelines, zero
from teaching.page.scenes.collectives import (
    KINDS,
    LENGTHS,
    SourceTable,
    algorithm_data,
    busiest,
    catalog,
    hosts_for,
    own_row,
    prices,
)
from teaching.page.source import function, yield_lines
from teaching.page.states import record

OWN = "mpi_tests.helpers.own_schedules"


def decoded(data, size):
    """Return all ranks' vectors before each round and at the end, decoded like in the page's collectives.js."""

    def absolute(number, rank):
        return number - number % size + (number + rank) % size

    def value(number, chunk, rank):
        turned = number & 0xFFFF
        return ((number >> 16) + chunk) % size << 16 | (turned << rank | turned >> size - rank) & (1 << size) - 1

    vectors = []
    for rank, pairs in enumerate(data["start"]):
        chunks = [absolute(number, rank) for number in pairs[::2]]
        vectors.append({c: value(number, c, rank) for c, number in zip(chunks, pairs[1::2], strict=True)})
    exceptions = {index: values for index, *values in data["values"]}
    transfers = zip(*(data[name] for name in ("kinds", "sources", "dests", "theirs", "here", "lengths")), strict=True)
    numbered, states = enumerate(transfers), [[dict(vector) for vector in vectors]]
    for first in range(0, len(data["counts"]), size):
        before = [dict(vector) for vector in vectors]
        for rank, count in enumerate(data["counts"][first : first + size]):
            for _ in range(count):
                index, (kind, sources, dest, theirs, here, length) = next(numbered)
                sources, dest = np.atleast_1d(sources), (dest + rank) % size
                theirs, here = absolute(theirs, rank), absolute(here, rank)
                for nth in range(length):
                    terms = [before[(source + rank) % size].get(theirs + nth, 0) for source in sources.tolist()]
                    terms += [before[dest].get(here + nth, 0)] * (KINDS[kind] == "RecvReduce")
                    total = np.bitwise_or.reduce(terms).item()
                    own = exceptions.get(index)
                    vectors[dest][here + nth] = value(own[nth], here + nth, dest) if own else total
        states.append([dict(vector) for vector in vectors])
    return [";".join(map(text, ranks)) for ranks in states]


def text(vector):
    return " ".join(str(vector.get(chunk, -1)) for chunk in range(max(vector, default=-1) + 1))


@each_algorithm
def test_the_states_are_the_prover_s(row):
    """They are equal after every round on 1 to 9 ranks (`make proof`: 16), for hierarchies on the page's hosts."""
    data = unpacked(packed(algorithm_data(row, SourceTable())))
    assert {tuple(map(int, key.split("x"))) for key in data["runs"]} == set(reference.runs(row))
    for size, hosts in [run for run in reference.runs(row) if run[0] <= 9 or LARGEST >= 64]:
        states = decoded(data["runs"][f"{size}x{hosts}"], size)
        assert states == reference.prover_states(row, size, hosts), f"{row.name} on {size} ranks of {hosts} hosts"


@each_algorithm
def test_the_goal_is_reached_and_costs_are_counted(row):
    for size, hosts in [run for run in reference.runs(row) if run[0] in (1, 6)]:
        run = record(row, size, reference.nodes(size, hosts))
        for vector, goal in zip(run.states()[-1], run.goal, strict=True):
            assert goal.items() <= vector.items()
        moves = [[move for moves in rounds for move in moves] for rounds in run.programs]
        sent = [sum(len(m.run) for m in own if isinstance(m, Send)) for own in moves]
        reduced = [sum(weight(m) for m in own) for own in moves]
        costs = busiest(run)
        assert len(costs) == len(run.rounds)
        assert not costs or (costs[-1][0], costs[-1][2]) == (max(sent), max(reduced))


def weight(move):
    """Return the number of chunks that a move reduces."""
    return len(move.run) * len(getattr(move, "sources", "1")) if isinstance(move, RecvReduce | GetReduce) else 0


def test_an_algorithm_that_is_wrong_is_not_shown():
    def half(rank, size):
        yield from list(ring.all_reduce(rank, size))[: size - 1]

    with pytest.raises(ContractError, match="must be chunk"):
        record(find("all_reduce", "ring")._replace(schedule=half), 4, reference.nodes(4, 1))


def test_values_that_do_not_follow_from_what_was_held_are_packed():
    """A barrier is such a case: its ranks learn of all others without a message."""
    row = find("barrier", "direct")
    run = algorithm_data(row, SourceTable())["runs"]["3x1"]
    assert len(run["values"]) == 3
    assert decoded(run, 3) == ["1;2;4", "7;7;7"]


@each_algorithm
def test_the_lines_are_where_the_generators_are(row):
    """Lines are those of the running generators, through each `yield from`; and each line has a yield."""
    for size, hosts in ((4, 1), (6, 2)):
        groups = reference.nodes(size, hosts)
        for rank in range(size):
            lines = yield_lines(row, rank, size, 0, groups)
            schedule = row.rounds_of(rank, size, 0, groups)
            for number, _ in enumerate(schedule):
                chain, generator = [], schedule
                while hasattr(generator, "gi_frame"):
                    if generator.gi_code.co_name != "<genexpr>":
                        chain.append((generator.gi_code, generator.gi_frame.f_lineno))
                    generator = generator.gi_yieldfrom
                assert list(lines[number][: len(chain)]) == chain
            for code, line in {call for chain in lines for call in chain}:
                source = dict(function(code).lines)
                assert "yield" in source[line], (row.name, code.co_name, line)


def test_lines_go_through_lists_and_loops():
    """The hierarchy keeps its inner rounds in lists, and yields new rounds made from them."""
    row = find("all_reduce", "hierarchical")
    names = [[code.co_name for code, _ in chain] for chain in yield_lines(row, 0, 4, 0, reference.nodes(4, 2))]
    inside = ["all_reduce", "within_groups", "interleave", "embed", "ring_pass"]
    assert names == [inside, *[["all_reduce", "interleave", "embed", "all_reduce", "ring_pass"]] * 2, inside]
    barriers = yield_lines(find("all_to_all", "hierarchical_direct"), 0, 4, 0, reference.nodes(4, 2))
    last = [chain[-1] for chain in barriers if chain[-1][0].co_name == "collected"]
    assert [b[1] - a[1] for a, b in pairwise(last)] == [1, 1]  # one barrier object, yielded twice


def test_a_source_has_the_first_line_of_its_docstring_only():
    source = function(ring.all_gather.__code__)
    assert source.file == "collectives/algorithms/ring.py"
    assert [line for _, line in source.lines] == [
        "def all_gather(rank: int, size: int) -> Schedule:",
        '    """Rank r starts owning chunk r; every rank ends with all."""',
        "    return ring_pass(rank, size, first=rank, take=Recv)",
    ]


def test_the_catalog_has_each_algorithm_s_own_words():
    rows = catalog(SourceTable())["collectives"]
    assert rows["all_reduce"]["hierarchical_direct"]["words"] == rows["all_reduce"]["hierarchical"]["words"]
    assert rows["reduce_scatter"]["staged"]["words"] == "Rank r reduces chunk r of all."
    assert rows["all_gather"]["neighbor"]["needs"] == "an even number of ranks, or one"
    assert [*rows["all_gather"]["neighbor"]["hosts"]] == [1, 2, 4, 6, 8, 10, 12, 14, 16]


@pytest.mark.parametrize(("collective", "name"), [("all_reduce", "exchange"), ("broadcast", "line")])
def test_a_schedule_from_outside(collective, name):
    row, sources = own_row(f"{collective}={OWN}:{name}"), SourceTable()
    runs = algorithm_data(row, sources)["runs"]
    shown = catalog(sources, [row])
    sizes = [1, 2, 4, 8, 16] if name == "exchange" else range(1, 17)
    assert [*runs] == [f"{size}x1" for size in sizes]
    assert [*shown["collectives"][collective][name]["hosts"]] == [*sizes]
    assert [each["name"] for each in shown["functions"]] == [name]


def test_prices_are_the_cost_model_s():
    table = prices(rows("broadcast"))
    row = find("broadcast", "hierarchical")
    expected = predict(row, LENGTHS[2], 6, reference.nodes(6, 2), 0, NETWORK) * 1e6
    assert table["6x2"]["hierarchical"][0][2] == pytest.approx(expected, rel=5e-3)
    assert "direct" in table["6x1"]
    assert "direct" not in table["6x2"]  # it needs a single host
    assert 4 not in hosts_for(find("broadcast", "hierarchical_direct"), 4)  # nor hosts of one rank


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--out"),
        (
            ["--out", "no/such/folder/page.html"],
            "--out no/such/folder/page.html can't be written (No such file or directory): pass",
        ),
        (["--out", "."], "--out . can't be written (not a regular file): pass"),
        (["--out", "page.html", "--color", "red"], "unrecognized arguments: --color red"),
        (
            ["--out", "page.html", "--schedule", "all_reduce=ring"],
            "--schedule all_reduce=ring: write COLLECTIVE=MODULE:",
        ),
        (
            ["--out", "page.html", "--schedule", f"all_reduce={OWN}:deadlock"],
            f"{OWN}:deadlock is wrong: deadlock: rank 0",
        ),
    ],
)
def test_bad_input_is_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command.main(arguments) == 2
    output = capsys.readouterr()
    assert output.err.startswith("error: ")
    assert message in output.err
    assert output.err.count("\n") == 1
    assert not output.out
    assert not list(tmp_path.iterdir())


def test_the_command_writes_the_page(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "scenes", lambda own: [zero.scene()])
    out = tmp_path / "page.html"
    assert command.main(["--out", str(out)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert 'id="data-zero.3"' in out.read_text()
    assert f"{len(out.read_bytes()) / 1000:.0f} kB" in capsys.readouterr().out


def test_without_torch_the_page_has_what_does_without(tmp_path):
    program = """
import sys
sys.modules["torch"] = None
from teaching.page import __main__, assemble, scenes
scenes.collectives.scene = lambda own: assemble.Scene("collectives", {"catalog": {}})  # the real one takes long
sys.exit(__main__.main(["--out", sys.argv[1]]))
"""
    out = tmp_path / "page.html"
    result = subprocess.run([sys.executable, "-c", program, out], env=environment(), text=True, capture_output=True)
    assert result.returncode == 0, result.stderr
    assert result.stderr == "torch is not installed: the page is without ring attention and ZeRO\n"
    names = re.findall(r'id="data-(\w+)|^addScene\({\n  name: "(\w+)"', out.read_text(), re.MULTILINE)
    assert {data or script for data, script in names} == {"collectives", "pipelines"}


def test_pipelines_have_every_schedule_and_every_action():
    data = pipelines.scene().data
    for name in registry.names():
        for size, orders in data[name].items():
            ranks, micro_batches = map(int, size.split("x"))
            schedule = registry.make_schedule(name, ranks, micro_batches)
            assert [tuple(map(parse, order.split())) for order in orders] == list(schedule.orders)
        assert data["catalog"][name]


@pytest.mark.parametrize("order", attention.ORDERS)
def test_every_query_meets_each_key_up_to_its_own_once(order):
    """They meet on the rank of the query, in the step in which the keys of the key's rank are there."""
    for size in attention.RANKS:
        data = attention.ring_data(size, order)
        owners, count = data["owners"], size * attention.TOKENS
        assert [owners.count(rank) for rank in range(size)] == [attention.TOKENS] * size
        for query, key in product(range(count), range(count)):
            digit = data["steps"][query][key]
            assert (digit != ".") == (key <= query)
            if digit != ".":
                assert data["sources"][owners[query]][int(digit, 36)] == owners[key]


def test_zigzag_gives_all_ranks_as_much_to_do_in_each_step():
    data = attention.ring_data(8, "zigzag")
    for step in map(str, range(8)):
        work = np.zeros(8, int)
        for owner, row in zip(data["owners"], data["steps"], strict=True):
            work[owner] += row.count(step)
        assert len(set(work.tolist())) == 1


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("size", "count"), [(2, 1), (4, 2), (8, 1)])
def test_zero_holds_and_sends_what_the_papers_say(zero_stage, size, count):
    """Source: Rajbhandari et al., 2020, sections 5 and 7; stages 2 and 3 send Psi elements for each micro-batch."""
    events = zero.trace(zero_stage, size, count)
    psi = zero.LAYERS * zero.SHARD_LENGTH * size
    sent = events[-1][3] * size / (size - 1) / psi
    reuse = 2 * (2 * count - 1) / zero.LAYERS  # a pass begins with the last two layers of the previous one
    assert sent == {0: 2, 1: 2, 2: count + 1, 3: 3 * count - reuse}[zero_stage]
    states = [states for _, _, states, _ in events]
    own = zero.WHOLE if zero_stage == 0 else zero.SHARD
    assert all(each.optimizer == [own] * zero.LAYERS for each in states)
    most_layers = max(sum(state >= zero.MOVING for state in each.parameters) for each in states)
    assert most_layers == (2 if zero_stage == 3 else zero.LAYERS)
    most_gradients = max(sum(state >= zero.MOVING for state in each.gradients) for each in states)
    assert most_gradients == (zero.LAYERS if zero_stage < 2 else 3)  # two buckets in reduction, and one being filled
    whole = next(each for what, _, each, _ in events if what == "optimizer updates")
    assert whole.gradients == [own] * zero.LAYERS
    assert states[-1].parameters == [zero.SHARD if zero_stage == 3 else zero.WHOLE] * zero.LAYERS
    assert states[-1].gradients == [zero.NONE] * zero.LAYERS


def test_zero_computes_with_whole_layers_only():
    for size, count in ((2, 1), (4, 2)):
        computes = [e for e in zero.trace(3, size, count) if e[0] in ("forward", "backward")]
        assert [(what, layer) for what, layer, _, _ in computes] == [
            *(("forward", layer) for layer in range(4)),
            *(("backward", layer) for layer in reversed(range(4))),
        ] * count
        assert all(states.parameters[layer] == zero.WHOLE for _, layer, states, _ in computes)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_has_contrast(theme):
    """The contrast is at least 4.5 to 1 by the formula of WCAG 2, section 1.4.3."""
    style = (files("teaching.page") / "style.css").read_text()
    colors = dict(
        re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", style.split("prefers-color-scheme: dark")[theme].split("}")[0])
    )

    def luminance(name):
        parts = [int(colors[name][i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return np.dot(linear, (0.2126, 0.7152, 0.0722))

    pairs = [*product(("ink", "soft"), ("ground", "panel")), ("ink", "cell"), ("ink", "mark"), ("soft", "mark")]
    pairs += [("ink", "bar"), ("on-accent", "accent"), ("good", "ground")]
    colors |= {"bar-text": ("#ffffff", "#10151c")[theme]}
    pairs += [("bar-text", name) for name in ("forward", "backward", "inputs", "weights")]
    for text_color, ground in pairs:
        dark, light = sorted((luminance(text_color), luminance(ground)))
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (text_color, ground)
