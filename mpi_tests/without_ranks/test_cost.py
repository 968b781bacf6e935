"""The cost model of schedules: it equals their cost lines if a node has enough cores."""

from collections.abc import Iterator

import pytest

from collectives import algorithms
from collectives.algorithms import Algorithm, chain, find, tree
from collectives.algorithms.algorithm import STAGED_BYTES
from collectives.schedule.cost import predict, price, profile, sample
from collectives.schedule.moves import Barrier, Copy, Get, GetReduce, Put, Recv, RecvReduce, Round, Send
from collectives.schedule.network import Link, Network
from collectives.schedule.spec import COLLECTIVES
from mpi_tests.helpers.algorithm_costs import COSTS, count, each_algorithm, nodes_of, sizes, tally

ALPHA, BETA, GAMMA, COPY, BARRIER = 3e-6, 7e-10, 4e-10, 5e-10, 2e-6
FAR = 10  # factor of times between nodes
NETWORK = Network(Link(ALPHA, BETA), Link(FAR * ALPHA, FAR * BETA), GAMMA, COPY, BARRIER)


def same(seconds: float):
    return pytest.approx(seconds, rel=1e-12, abs=0)


def seconds(name: str, nbytes: int, *lengths: int, collective: str = "all_reduce", root: int = 0, **changes) -> float:
    """Return the predicted seconds of a row of the registry on nodes of the given sizes."""
    nodes = nodes_of(*lengths)
    return predict(find(collective, name), nbytes, sum(lengths), nodes, root, NETWORK._replace(**changes))


@each_algorithm
def test_in_a_node_the_time_is_the_cost_line(row):
    row = row._replace(apart=False, segmented=False)
    a, b, network = (BARRIER, COPY, NETWORK) if row.access else (ALPHA, BETA, NETWORK._replace(copy_s_per_byte=0.0))
    for size in sizes(row):
        if (size, row.name) == (1, "leaders"):  # no barriers, but a copy
            continue
        alpha, beta, gamma = COSTS[row.collective, row.name](size)
        for nbytes in (0, 1, 1000, 1 << 20):
            line = alpha * a + nbytes / size * (beta * b + gamma * GAMMA)
            predicted = predict(row, nbytes, size, nodes_of(size), network=network)
            if row.schedule in (tree.double_all_reduce, chain.all_reduce):  # a rank sends two messages in a round
                assert alpha * ALPHA <= predicted <= line + alpha * ALPHA + nbytes / size * BETA
            else:
                assert predicted == same(line), (size, nbytes)


def test_of_segments_that_follow_each_other_the_slowest_rank_counts():
    """The root copies each segment to its staging buffer while the others read the previous one."""
    for num_segments in (1, 4, 100):
        nbytes = num_segments * 4 * STAGED_BYTES
        copy, first = nbytes * COPY, nbytes / num_segments * COPY
        assert seconds("staged", nbytes, 4, collective="broadcast") == same(num_segments * BARRIER + copy + first)


@pytest.mark.parametrize("p", [1, 2, 3, 8, 33])
def test_the_ring(p):
    for n in (0, 8, 1 << 26):
        line = 2 * (p - 1) * ALPHA + 2 * n * (p - 1) / p * BETA + n * (p - 1) / p * GAMMA
        assert seconds("ring", n, p) == same(line)
        assert seconds("ring", n, p, cores=p) == same(line)


def test_ranks_of_a_node_share_its_cores():
    assert seconds("ring", 1000, 8, cores=2) == same(4 * seconds("ring", 1000, 8))
    alone = seconds("binomial", 1000, 8, collective="broadcast")
    oversubscribed = seconds("binomial", 1000, 8, collective="broadcast", cores=2)
    assert oversubscribed == same((1 + 2 + 4) / 3 * alone)  # 2, 4 and 8 ranks are active in its three rounds
    assert seconds("ring", 1000, 2, 2, 2, cores=2) == seconds("ring", 1000, 2, 2, 2)


def test_a_node_shares_its_way_out():
    """With recursive doubling on two nodes of 4, all ranks of a node send to the other node in the last round."""
    n = 4000
    near, far = ALPHA + n * BETA, FAR * (ALPHA + 4 * n * BETA)
    assert seconds("recursive_doubling", n, 4, 4) == same(2 * near + far + 3 * n * GAMMA)


def test_a_hierarchy_wins_where_nodes_are_far_apart():
    for nbytes in (1 << 10, 1 << 20, 1 << 26):
        assert seconds("hierarchical", nbytes, *[8] * 8) < seconds("ring", nbytes, *[8] * 8)


def test_a_root_may_be_anywhere():
    """A scatter from rank 0 leaves its node in the first round; from rank 4, alone on its node, in all three."""
    near, far = (
        seconds("binomial", 0, 4, 1, collective="scatter"),
        seconds("binomial", 0, 4, 1, collective="scatter", root=4),
    )
    assert near == same((FAR + 1 + 1) * ALPHA)
    assert far == same((FAR + FAR + FAR) * ALPHA)
    for row in algorithms.REGISTRY:
        if COLLECTIVES[row.collective].rooted and row.schedule != chain.reduce:  # one round less to rank p-1
            costs = {predict(row, 1 << 20, 8, nodes_of(8), root, NETWORK) for root in range(8)}
            assert max(costs) == same(min(costs))


def shared(rank: int, size: int) -> Iterator[Round]:
    """Return a round with each shared-memory move, and a copy."""
    everyone = tuple(range(size))
    yield (Barrier(everyone),)
    yield (GetReduce(everyone, range(rank, rank + 1), range(rank, rank + 1)),)
    yield (Barrier(everyone),)
    if rank == 0:
        yield (Get(1, range(1, 3), range(1, 3)),)
        yield (Put(1, range(1), range(4, 5)),)
        yield (Copy(range(3), range(4, 7)),)
    else:
        yield ()
        yield (Put(0, range(2), range(4, 6)),)
        yield ()


def test_moves_of_shared_memory():
    row, n = Algorithm("all_reduce", "shared", shared), 4000
    assert count(profile(row, 4, nodes_of(4))) == (0, 0, 4, 2 + 2 + 3, 2)
    assert predict(row, n, 4, nodes_of(4), network=NETWORK) == same(2 * BARRIER + n * GAMMA + n / 4 * 7 * COPY)
    oversubscribed = predict(row, n, 4, nodes_of(4), network=NETWORK._replace(cores=2))
    get, put, copy = 2, 2 * 2, 3  # chunks; only in the round of the put are more ranks active than there are cores
    assert oversubscribed == same(2 * (2 * BARRIER + n * GAMMA) + n / 4 * (get + put + copy) * COPY)


def test_runs_for_one_peer_are_one_message_and_two_peers_wait_for_each_other():
    rounds = {
        0: [(Send(1, range(1)), Send(1, range(2, 4)))],
        1: [(Recv(0, range(1)), Recv(0, range(2, 4)), Send(2, range(1, 2)))],
        2: [(RecvReduce(1, range(1, 2)),)],
    }
    two_peers = {0: [(Send(1, range(1)), Send(2, range(2)))], 1: [(Recv(0, range(1)),)], 2: [(Recv(0, range(2)),)]}
    for schedules, expected in ((rounds, ALPHA + 3 * BETA), (two_peers, 2 * ALPHA + 3 * BETA)):
        row = Algorithm("broadcast", "odd", lambda rank, size, root, schedules=schedules: schedules[rank])
        assert predict(row, 3, 3, nodes_of(3), network=NETWORK) == same(expected)


@each_algorithm
@pytest.mark.parametrize("lengths", [(48,), (8,) * 6, (5, 16, 9) * 3], ids=["a node", "even", "uneven"])
def test_some_ranks_stand_for_all(row, lengths):
    size, nodes = sum(lengths), nodes_of(*lengths)
    schedules = {rank: row.rounds(rank, size, 0, nodes) for rank in range(size)}
    some = sample(nodes, 0, limit=20)
    assert len(some) < size / 2
    exact, estimated = (tally({rank: schedules[rank] for rank in ranks}, nodes) for ranks in (schedules, some))
    for chunk_bytes in (1, 1 << 20):
        whole = price(exact, chunk_bytes, NETWORK)
        assert 0.5 * whole <= price(estimated, chunk_bytes, NETWORK) <= 1.5 * whole
        if row.name in ("ring", "pairwise", "neighbor", "dissemination"):
            assert price(estimated, chunk_bytes, NETWORK) == same(whole)


@pytest.mark.parametrize("name", ["ring", "rabenseifner", "two_shot", "hierarchical_direct"])
def test_of_many_ranks_only_some_are_counted(name):
    """A prediction for 4,096 ranks then takes seconds; benchmarks measure it."""
    row, ranks = find("all_reduce", name), set()

    def schedule(rank, *words, **more):
        ranks.add(rank)
        return row.schedule(rank, *words, **more)

    size = 1024
    assert predict(row._replace(schedule=schedule), 1 << 20, size, nodes_of(*[8] * 128), network=NETWORK) > 0
    assert len(ranks) < size / 2
