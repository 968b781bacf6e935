"""The tuning file: its content, its effects, and the messages for an invalid one."""

import json
import random
import re

import pytest

from collectives import algorithms
from collectives.algorithms import Access
from collectives.runtime.choose import auto
from collectives.runtime.choose.auto import Question, Tuning, limits, parse_tuning, to_json
from collectives.schedule.network import NETWORK as DEFAULT
from collectives.schedule.network import Link, Network, Tier
from collectives.schedule.spec import COLLECTIVES
from mpi_tests.helpers.algorithm_costs import nodes_of
from mpi_tests.helpers.networks import MEASURED, NETWORK, TUNING

LINKS = ("within", "system")


def candidates(collective: str, size: int = 4, equal: bool = True, access=Access.MESSAGES) -> tuple:
    return auto.usable(algorithms.rows(collective, size, equal), access)


def test_a_file_says_what_was_measured():
    text = to_json(TUNING)
    read = parse_tuning(text, "t.json")
    assert (read.network, read.source, read.environment) == (NETWORK, "t.json", TUNING.environment)
    assert read.fastest == MEASURED
    assert json.loads(text)["fastest"][0] == {
        "collective": "all_reduce", "memory": "ordinary", "ranks": 4, "nodes": 1,
        "up_to_bytes": [[1000, "binomial"], [1 << 20, "double_tree"]],
    }  # fmt: skip
    assert parse_tuning(to_json(Tuning()), "").fastest == {}


def test_a_file_from_before_the_system_was_measured():
    old = json.loads(to_json(TUNING))
    new = {name: getattr(DEFAULT, name) for name in ("system", "staged_s_per_byte")}
    for name in new:
        del old["network"][name]
    assert parse_tuning(json.dumps(old), "t.json").network == NETWORK._replace(**new)


def test_a_file_has_the_levels_beyond_the_node():
    tiers = Tier(2, Link(1e-5, 1e-9)), Tier(8, Link(2e-5, 2e-9), Link(0.0, 1e-10))
    network = NETWORK._replace(nic=Link(0.0, 1e-10), tiers=tiers)
    assert parse_tuning(to_json(Tuning(network)), "t.json").network == network
    assert "tiers" not in json.loads(to_json(TUNING))["network"]


def test_a_size_counts_as_the_nearest_measured():
    assert limits([(8, "ring"), (800, "binomial"), (80_000, "binomial"), (8_000_000, "ring")]) == (
        (80, "ring"), (800_000, "binomial"), (16_000_000, "ring")
    )  # fmt: skip
    assert limits([(0, "dissemination")]) == ((0, "dissemination"),)


def choose(nbytes: int, collective: str = "all_reduce", lengths=(4,), equal=True, **more) -> str:
    rows = candidates(collective, sum(lengths), equal)
    return auto.choose(Question(collective, nbytes, rows, nodes_of(*lengths), TUNING, **more))


def model(nbytes: int, collective: str = "all_reduce", lengths=(4,), equal=True) -> str:
    rows = [row for row in candidates(collective, sum(lengths), equal) if len(lengths) > 1 or not row.over_nodes]
    return auto.ranking(nbytes, rows, nodes_of(*lengths), NETWORK)[0][0]


def test_what_was_measured_is_followed_and_nothing_else():
    assert [choose(nbytes) for nbytes in (0, 1000, 1001, 1 << 20)] == ["binomial"] * 2 + ["double_tree"] * 2
    assert choose(8, memory="symmetric") == "ring" != model(8)
    assert choose((1 << 20) + 1) == model((1 << 20) + 1) != "double_tree"
    for lengths in ((3,), (2, 2), (5,)):
        assert choose(8, lengths=lengths) == model(8, lengths=lengths) != "binomial"
    assert choose(8, "broadcast") == model(8, "broadcast")
    assert choose(1 << 19, "all_to_all") == "bruck" != choose(1 << 19, "all_to_all", equal=False)


def test_the_model_ranks_all_there_are():
    names = [name for name, _ in auto.ranking(1 << 20, candidates("all_gather", 3), nodes_of(3))]
    assert sorted(names) == sorted(row.name for row in candidates("all_gather", 3))
    assert "mpi" not in names
    assert model(64, lengths=(8,)) == "recursive_doubling"
    assert model(1 << 26, lengths=(8,)) in ("ring", "rabenseifner")
    ranked = [name.partition("/")[0] for name, _ in auto.ranking(1 << 26, candidates("all_reduce", 16), nodes_of(8, 8))]
    assert ranked.index("hierarchical") < ranked.index("ring")
    assert model(1 << 26, lengths=(1,)) == algorithms.names("all_reduce")[0]  # the first of equal ones


def test_ordinary_arrays_are_read_where_they_lie_if_the_system_is_fast():
    rows = tuple(algorithms.find("all_to_all", name) for name in ("staged", "direct"))

    def choose(system, memory="ordinary"):
        tuning = Tuning(NETWORK._replace(system=system))
        return auto.choose(Question("all_to_all", 1 << 22, rows, nodes_of(2), tuning, memory))

    slow, fast = Link(1e-6, 1e-9), Link(1e-6, 1e-12)
    assert (choose(slow), choose(fast), choose(slow, "symmetric")) == ("staged", "direct", "direct")


def test_staging_buffers_are_used_where_cores_share_a_cache():
    rows = tuple(algorithms.find("all_gather", name) for name in ("staged", "direct"))

    def choose(staged, memory="ordinary"):
        tuning = Tuning(NETWORK._replace(system=Link(1e-6, 1e-10), staged_s_per_byte=staged))
        return auto.choose(Question("all_gather", 1 << 20, rows, nodes_of(2), tuning, memory))

    assert (choose(1e-15), choose(1e-9), choose(1e-9, "symmetric")) == ("staged", "direct", "direct")


def test_vectors_go_by_messages_only_where_no_rank_reads_others_arrays():
    """Even where messages cost next to nothing; a measurement of them counts."""
    rows = candidates("all_gather", access=Access.DIRECT)
    tuning = Tuning(NETWORK._replace(within=Link(1e-12, 1e-15)))

    def access(nbytes, rows=rows, tuning=tuning):
        (collective,) = {row.collective for row in rows}
        name = auto.choose(Question(collective, nbytes, rows, nodes_of(4), tuning))
        return algorithms.find(collective, name).access

    assert Access.MESSAGES not in (access(auto.SHORT_BYTES), access(auto.SHORT_BYTES - 1), access(8))
    assert access(8, candidates("all_gather")) == Access.MESSAGES
    assert access(1 << 26, candidates("all_gather", access=Access.STAGED)) == Access.MESSAGES
    assert access(1 << 19, candidates("all_to_all", access=Access.DIRECT), TUNING) == Access.MESSAGES


@pytest.mark.parametrize("size", [2, 4, 64])
@pytest.mark.parametrize("memory", auto.MEMORIES)
def test_speeds_measured_on_a_busy_machine_choose_nothing_that_is_far_from_the_best(size, memory):
    """Whatever was measured, a choice costs at most ten times the least by default speeds."""
    nodes, draws = nodes_of(size), random.Random(size)
    for collective in COLLECTIVES:
        rows = candidates(collective, size, access=Access.DIRECT)
        for nbytes in (8, 1 << 12, 1 << 16, 1 << 24):
            ranking = auto.ranking(nbytes, rows, nodes, DEFAULT._replace(cores=2), memory)
            usual = {name.partition("/")[0]: seconds for name, seconds in ranking}
            for _ in range(4):
                busy = {
                    name: getattr(DEFAULT, name) * 2 ** draws.uniform(0, 9) for name in ("meet_s", "copy_s_per_byte")
                }
                links = {name: Link(*(x * 2 ** draws.uniform(0, 9) for x in getattr(DEFAULT, name))) for name in LINKS}
                tuning = Tuning(DEFAULT._replace(**busy, **links, cores=2), measured="earlier")
                choice = auto.choose(Question(collective, nbytes, rows, nodes, tuning, memory))
                assert usual[choice.partition("/")[0]] <= 10 * min(usual.values()), (collective, nbytes, choice)
                if nbytes < auto.SHORT_BYTES and algorithms.find(collective, choice).access == Access.MESSAGES:
                    assert usual[choice] == min(usual.values())


def test_a_choice_that_rests_on_measured_speeds_is_explained():
    rows = tuple(algorithms.find("all_gather", name) for name in ("staged", "direct"))
    tuning = Tuning(DEFAULT._replace(staged_s_per_byte=1e-15), measured="on 2026-11-26 07:15 UTC")
    question = Question("all_gather", 1 << 20, rows, nodes_of(2), tuning)
    assert auto.explain(question).splitlines()[1] == (
        "not measured (COLLECTIVES_TUNING names no file); by the cost model, with the speeds measured on these hosts "
        "on 2026-11-26 07:15 UTC, where default speeds choose direct (see python -m collectives.bench --links):"
    )
    same = question._replace(tuning=Tuning(DEFAULT, measured="on a day"))
    assert auto.explain(same).splitlines()[1].endswith("the speeds measured on these hosts on a day:")


def test_what_is_in_reach_is_usable():
    near, far = candidates("all_reduce", access=Access.DIRECT), candidates("all_reduce")
    assert [row.name for row in near] == algorithms.names("all_reduce", 4)
    assert {row.access for row in far} == {Access.MESSAGES} != {row.access for row in near}
    for nbytes in (8, 1 << 24):
        best = auto.ranking(nbytes, near, nodes_of(4))[0][0]
        assert algorithms.find("all_reduce", best).access
        assert auto.ranking(nbytes, near, nodes_of(1))[0] == ("ring", 0)


def test_explanations():
    def explain(nbytes, tuning):
        rows = candidates("broadcast") if tuning is None else candidates("all_reduce")
        collective = rows[0].collective
        return auto.explain(Question(collective, nbytes, rows, nodes_of(4), tuning or Tuning())).splitlines()

    lines = explain(1000, TUNING)
    assert lines[0] == "all_reduce of 1000 bytes on 4 ranks of 1 node: binomial"
    assert lines[1] == "measured to be the fastest (t.json); the cost model, with the speeds measured, says:"
    names = [line.split()[2] for line in lines[2:]]
    assert names == [name for name, _ in auto.ranking(1000, candidates("all_reduce"), nodes_of(4), NETWORK)]
    assert [line.split()[2] for line in lines if line.endswith(" <")] == ["binomial"]
    assert lines[2].split()[:2] == ["2.5", "us"]  # recursive doubling: 2 alpha + 2000 (beta + gamma)
    assert explain(1 << 24, TUNING)[1] == "not measured (t.json); by the cost model, with the speeds of that file:"
    lines = explain(8, None)
    assert lines[0] == "broadcast of 8 bytes on 4 ranks of 1 node: binomial"
    assert lines[1] == "not measured (COLLECTIVES_TUNING names no file); by the cost model, with default speeds:"


def change(*path, to):
    """Return an edit of TUNING's file that changes or removes one value."""
    data = json.loads(to_json(TUNING))
    parent = data
    for key in path[:-1]:
        parent = parent[key]
    if to is None:
        del parent[path[-1]]
    else:
        parent[path[-1]] = to
    return json.dumps(data)


BAD = {
    "no JSON": ("{,}", "not JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))"),
    "nothing": ("", "not JSON (Expecting value: line 1 column 1 (char 0))"),
    "another thing": ("[]", "'version' is missing"),
    "another version": (change("version", to=2), "version is 2, but must be 1"),
    "no network": (change("network", to=None), "'network' is missing"),
    "no speed": (change("network", "within", "alpha_s", to=None), "'alpha_s' is null, but must be a number above 0"),
    "a speed of 0": (change("network", "meet_s", to=0), "'meet_s' is 0, but must be a number above 0"),
    "a speed in words": (change("network", "cores", to="two"), "'cores' is \"two\", but must be a number above 0"),
    "tiers that do not divide": (
        change("network", "tiers", to=[{"nodes": n, "link": {"alpha_s": 1.0, "beta_s_per_byte": 1.0}} for n in (4, 6)]),
        "groups of 6 nodes must be of a multiple of 4 nodes, as those within",
    ),
    "a tier without a link": (change("network", "tiers", to=[{"nodes": 2}]), "'link' is missing"),
    "a port of negative speed": (
        change("network", "nic", to={"alpha_s": -1, "beta_s_per_byte": 1.0}),
        "'alpha_s' is -1, but must be a number of at least 0",
    ),
    "rows of another type": (change("fastest", to={}), "'fastest' is {}, but must be of type list"),
    "a row of another type": (change("fastest", 0, to=7), "'collective' is missing"),
    "ranks in words": (change("fastest", 0, "ranks", to="4"), "'ranks' is \"4\", but must be of type int"),
    "unknown algorithm": (
        change("fastest", 0, "up_to_bytes", 1, 1, to="rign"),
        f"all_reduce has no algorithm 'rign': it has {', '.join(algorithms.names('all_reduce'))}",
    ),
    "the MPI library's": (
        change("fastest", 3, "up_to_bytes", 0, 1, to="mpi"),
        f"barrier has no algorithm 'mpi': it has {', '.join(algorithms.names('barrier'))}",
    ),
    "unknown collective": (
        change("fastest", 1, "collective", to="allreduce"),
        "collective 'allreduce' is unknown: use one of all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, "
        "reduce, gather, scatter, scan, exscan, barrier",
    ),
    "no pair": (
        change("fastest", 0, "up_to_bytes", 0, to=[8]),
        "'up_to_bytes' has [8], but must have pairs of bytes and a name",
    ),
    "descending": (change("fastest", 0, "up_to_bytes", 1, 0, to=999), "'up_to_bytes' of all_reduce does not ascend"),
}


@pytest.mark.parametrize(("text", "reason"), BAD.values(), ids=BAD)
def test_a_bad_file(text, reason):
    words = (
        f"COLLECTIVES_TUNING=t.json: {reason}: make it anew by python -m collectives.bench --tune t.json, or unset it"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        parse_tuning(text, "t.json")


def test_over_nodes_the_first_of_about_equal_ones_is_taken_for_long_vectors(monkeypatch):
    prices = {"hierarchical_direct": 1.05, "leaders": 1.0}
    monkeypatch.setattr(auto, "predicted_s", lambda row, *_: prices[row.name])
    rows = tuple(algorithms.find("all_gather", name) for name in prices)
    taken = [auto.ranking(nbytes, rows, nodes_of(2, 2, 2), Network(meet_s=1e-9))[0][0] for nbytes in (1 << 24, 8)]
    assert taken == ["hierarchical_direct", "leaders"]
