"""Routes of tokens to experts on several hosts, simulated in one process: arriving tokens, traffic between hosts."""

import numpy as np
import pytest

from models.config import ModelConfig
from models.decoder import Decoder
from parallelism.experts.expert_parallel import check_experts
from parallelism.experts.route import make_route
from parallelism.planner.layout import ParallelLayout, TrainingJob, meshes
from parallelism.planner.memory import rank_params

HOSTS = {
    "one rank": [(0,)],
    "one host": [(0, 1, 2, 3)],
    "a rank each": [(0,), (1,), (2,), (3,)],
    "2 x 2": [(0, 1), (2, 3)],
    "4 x 2": [(0, 1), (2, 3), (4, 5), (6, 7)],
    "uneven": [(0, 1, 2), (3,)],
    "in turn": [(0, 2), (1, 3)],
}
each_hosts = pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)


def choices_of(num_ranks, num_tokens, num_experts, num_choices, skew=0.0, dropped=0.0, seed=0):
    """Draw the choices of each rank's tokens; `skew` favours the first quarter of experts; some choices are dropped."""
    draws = np.random.default_rng(seed)
    scores = draws.random((num_ranks, num_tokens, num_experts))
    scores[..., : max(1, num_experts // 4)] += skew
    experts = np.argsort(-scores, axis=-1)[..., :num_choices]
    experts[draws.random(experts.shape) < dropped] = -1
    return experts.astype(np.int16)


def routes_of(experts, lengths, num_experts, hosts):
    return [make_route(rank, experts, lengths, num_experts, hosts) for rank in range(len(experts))]


def tables_of(routes, lengths):
    """Simulate the transfers; return each rank's table of tokens, identified by rank and number."""
    tables = [[(rank, token) for token in range(length)] for rank, length in enumerate(lengths)]
    for rank, route in enumerate(routes):
        assert [row for _, rows in route.receives for row in rows] == [*range(lengths[rank], route.table_length)]
        for peer, rows in route.receives:
            (sent,) = [sent for to, sent in routes[peer].sends if to == rank]
            assert len(sent) == len(rows)
            tables[rank] += [(peer, token) for token in sent.tolist()]
        assert len(tables[rank]) == route.table_length
    return tables


@each_hosts
@pytest.mark.parametrize("options", [{}, {"skew": 1.0}, {"skew": 9.0, "num_choices": 1}, {"dropped": 0.4}], ids=str)
def test_experts_read_each_token_that_has_chosen_them(hosts, options):
    num_ranks = sum(map(len, hosts))
    num_experts, lengths = 3 * num_ranks, [4 + rank % 3 for rank in range(num_ranks)]
    experts = choices_of(num_ranks, 6, num_experts, **{"num_choices": min(3, num_experts), **options})
    for rank, length in enumerate(lengths):
        experts[rank, length:] = -1
    routes = routes_of(experts, lengths, num_experts, hosts)
    tables = tables_of(routes, lengths)
    host_of = {rank: host for host in hosts for rank in host}
    for rank, route in enumerate(routes):
        slots = [None] * sum(route.counts)
        for block in route.reads:
            names = [tables[host_of[rank][block.table]][row] for row in block.rows]
            slots[block.slots] = names
            (twin,) = [
                other
                for other in routes[host_of[rank][block.table]].combines
                if host_of[rank][other.owner] == rank and other.slots == block.slots
            ]
            assert np.array_equal(twin.rows, block.rows)
        expected = [[] for _ in range(3)]
        for source in range(num_ranks):
            for token, choices in enumerate(experts[source].tolist()):
                for choice, expert in enumerate(choices):
                    if expert // 3 == rank and expert >= 0:
                        expected[expert % 3].append((source, token, choice))
        with_choices = [(*name, choice) for name, choice in zip(slots, route.choices.tolist(), strict=True)]
        assert route.counts == [len(part) for part in expected]
        for count, part in zip(route.counts, expected, strict=True):
            assert sorted(with_choices[:count]) == part
            with_choices = with_choices[count:]
        assert route.longest_table == max(routes[other].table_length for other in host_of[rank])
        assert route.most_slots == max(sum(routes[other].counts) for other in host_of[rank])


@each_hosts
@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_each_token_crosses_once_to_each_host_of_its_experts(hosts, skew):
    num_ranks = sum(map(len, hosts))
    num_experts = 4 * num_ranks
    experts = choices_of(num_ranks, 50, num_experts, num_choices=min(8, num_experts), skew=skew)
    host_of = {rank: number for number, host in enumerate(hosts) for rank in host}
    crossing = {
        (rank, token, host_of[expert // 4])
        for (rank, token, _), expert in np.ndenumerate(experts)
        if host_of[expert // 4] != host_of[rank]
    }
    routes = routes_of(experts, [50] * num_ranks, num_experts, hosts)
    sends = [(rank, peer, rows.tolist()) for rank, route in enumerate(routes) for peer, rows in route.sends]
    sent = [(rank, token, host_of[peer]) for rank, peer, rows in sends for token in rows]
    assert sorted(sent) == sorted(crossing)
    assert all(host_of[peer] != host_of[rank] for rank, peer, _ in sends)


def test_uneven_choices_keep_no_rank_from_its_part():
    experts = np.zeros((4, 5, 1), np.int16)  # all tokens choose expert 0
    routes = routes_of(experts, [5] * 4, 8, HOSTS["2 x 2"])
    assert [route.counts for route in routes] == [[20, 0], [0, 0], [0, 0], [0, 0]]
    assert [route.longest_table for route in routes] == [10, 10, 5, 5]
    assert not routes[1].reads
    assert routes[1].combines


@pytest.mark.parametrize(("settings", "words"), [
    ((0, 2, 4), "ep=2 divides the experts of a mixture: set num_experts to a multiple of 2, or ep=1"),
    ((6, 4, 8), "num_experts=6 is not divisible by ep=4: use an ep of 1, 2"),
    ((8, 4, 2), "ep=4 must divide dp=2, within which it lies: use an ep of 1, 2"),
    ((8, 4, 6), "ep=4 must divide dp=6, within which it lies: use an ep of 1, 2"),
])  # fmt: skip
def test_experts_that_ranks_cannot_divide_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        check_experts(*settings)


@pytest.mark.parametrize(("ep", "tp", "bias"), [(1, 1, True), (2, 1, False), (4, 2, True)])
def test_the_planner_counts_the_parameters_that_a_rank_holds(ep, tp, bias):
    config = ModelConfig(vocab_size=32, block_size=8, n_layer=2, n_head=2, n_embd=16, num_experts=8, bias=bias)
    layout = ParallelLayout(dp=ep, tp=tp, ep=ep)
    split = ("attn.c_attn", "attn.c_proj.weight", "mlp.c_fc", "mlp.c_proj", "wte")
    expected = 0
    for name, p in Decoder(config).named_parameters():
        parts = (tp if any(part in name for part in split) else 1) * (ep if "mlp.c_" in name else 1)
        expected += p.numel() // parts
    assert rank_params(TrainingJob(config, 8), layout) == (expected,)


def test_the_planner_divides_experts_over_ep_out_of_dp():
    plans = meshes(8, {}, num_experts=4)
    assert {(mesh.dp, mesh.ep) for mesh in plans if mesh.dp == 8} == {(8, 1), (8, 2), (8, 4)}
    assert all(mesh.ep == 1 for mesh in meshes(8, {}))
