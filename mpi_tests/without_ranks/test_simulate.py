"""Simulations: compared with a plain one defined here and with closed forms, and from the command line."""

import json
import random
import re
import shlex
import subprocess
import sys

import pytest

from collectives.algorithms import REGISTRY, Access, Algorithm, find, variants_of
from collectives.runtime.backends.messages import SEGMENT_BYTES
from collectives.runtime.choose.auto import parse_network
from collectives.runtime.choose.network_file import from_toml, to_toml
from collectives.schedule.cost import predict, predict_best, price, sample, tally, works
from collectives.schedule.events import simulate
from collectives.schedule.fabrics import FABRICS, in_nodes
from collectives.schedule.moves import Barrier, GetReduce, Put, Recv, RecvReduce, Send
from collectives.schedule.network import Link, Network, Tier, on_device
from collectives.schedule.results import best_table, figure, whole_table
from collectives.schedule.simulate import main, parse
from collectives.schedule.winners import times_by_ranks
from mpi_tests.helpers.algorithm_costs import nodes_of
from mpi_tests.helpers.documents import blocks
from mpi_tests.helpers.launch import ROOT

ACROSS = [row for row in REGISTRY if row.access <= Access.INTRA_NODE]
NETWORK = Network(Link(3e-6, 7e-10), Link(3e-5, 7e-9), 4e-10, 5e-10, 2e-6, nic=Link(2e-6, 4e-9))
each_across = pytest.mark.parametrize("row", ACROSS, ids=lambda row: f"{row.collective}-{row.name}")


def same(seconds):
    return pytest.approx(seconds, rel=1e-9, abs=0)


class Plain:
    """Plain simulation of all ranks' moves; times are integers, so that simultaneous events are exactly equal."""

    def __init__(self, row, nodes, network, chunk, root=0):
        self.size, self.network, self.chunk = sum(map(len, nodes)), network, chunk
        self.node_of = {rank: number for number, node in enumerate(nodes) for rank in node}
        self.nodes = nodes
        self.schedules = [row.rounds(rank, self.size, root, nodes) for rank in range(self.size)]
        self.ends = [0] * self.size  # end time of each rank's rounds so far
        self.free = {}  # time from which each outgoing and incoming port is free
        self.events = []
        self.posted = {}  # time at which both ends of a round's message are posted
        self.open = {}  # (rank, round): missing messages; arrival of the last of the others; reductions
        self.barriers = {}

    def run(self):
        for rank in range(self.size):
            self.go_on(rank, 0)
        while self.events:
            event = min(self.events)
            self.events.remove(event)
            self.handle(*event)
        assert not self.open
        return self.ends

    def crowd(self, rank, number):
        busy = sum(bool(self.schedules[other][number]) for other in self.nodes[self.node_of[rank]])
        return max(1, busy / self.network.cores)

    def go_on(self, rank, number):
        while number < len(self.schedules[rank]):
            moves, crowd, net = self.schedules[rank][number], self.crowd(rank, number), self.network
            for move in moves:
                match move:
                    case GetReduce(sources, _, run):
                        self.ends[rank] += crowd * len(sources) * len(run) * self.chunk * net.gamma_s_per_byte
                    case Send() | Recv() | RecvReduce() | Barrier():
                        pass
                    case _:
                        self.ends[rank] += crowd * len(move.run) * self.chunk * net.copy_s_per_byte
            if moves and isinstance(moves[0], Barrier):
                self.synchronize(rank, number, moves[0].ranks, crowd)
                return
            wires = {}
            for move in moves:
                if isinstance(move, Send | Recv | RecvReduce):
                    ends = (rank, move.to) if isinstance(move, Send) else (move.source, rank)
                    length, reduced = wires.get(ends, (0, 0))
                    wires[ends] = length + len(move.run), reduced + len(move.run) * isinstance(move, RecvReduce)
            if wires:
                self.open[rank, number] = [len(wires), self.ends[rank], 0, 0]
                for ends, (length, reduced) in wires.items():
                    self.post(number, *ends, length, reduced, self.ends[rank])
                return
            number += 1

    def synchronize(self, rank, number, ranks, crowd):
        here = self.barriers.setdefault((number, ranks), [])
        here.append(self.ends[rank])
        if len(here) == len(ranks):
            for other in ranks:
                self.ends[other] = max(here) + crowd * self.network.meet_s
            for other in ranks:
                self.go_on(other, number + 1)

    def post(self, number, source, dest, length, reduced, time):
        key = number, source, dest
        if key not in self.posted:
            self.posted[key] = length, reduced, time
            return
        other_length, other_reduced, other_time = self.posted.pop(key)
        assert length == other_length
        self.events.append((max(time, other_time), source, dest, length, reduced + other_reduced, number))

    def handle(self, time, source, dest, length, reduced, number):
        net, nbytes, homes = self.network, length * self.chunk, (self.node_of[source], self.node_of[dest])
        if homes[0] == homes[1]:
            takes = self.crowd(source, number) * (net.within.alpha_s + nbytes * net.within.beta_s_per_byte)
            used, latency = [("rank", (source, dest), takes, 0)], 0
        else:
            link, gates = net.between, [("node", homes, net.nic)]
            for tier in net.tiers:
                groups = homes[0] // tier.nodes, homes[1] // tier.nodes
                if groups[0] != groups[1]:
                    link = tier.link
                    gates += [(tier, groups, tier.port)] if tier.port else []
            used = [(level, ends, nbytes * gate.beta_s_per_byte, gate.alpha_s) for level, ends, gate in gates]
            used.append(("port", (source, dest), nbytes * link.beta_s_per_byte, 0))
            latency = link.alpha_s
        latest = 0
        for level, ends, takes, pause in used:
            for key in (("out", level, ends[0]), ("in", level, ends[1])):
                end = max(time, self.free.get(key, 0)) + takes
                self.free[key], latest = end + pause, max(latest, end)
        self.arrive(source, number, latest + latency, 0, 0)
        far = homes[0] != homes[1]
        self.arrive(dest, number, latest + latency, reduced * (not far), reduced * far)

    def arrive(self, rank, number, time, near, far):
        state = self.open[rank, number]
        state[:] = state[0] - 1, max(state[1], time), state[2] + near, state[3] + far
        if state[0] == 0:
            del self.open[rank, number]
            net = self.network
            early = min(state[3] * self.chunk, net.segment_bytes)
            late = (state[3] * self.chunk - early) * max(0, net.gamma_s_per_byte - net.between.beta_s_per_byte)
            reducing = (state[2] * self.chunk + early) * net.gamma_s_per_byte + late
            self.ends[rank] = state[1] + self.crowd(rank, number) * reducing
            self.go_on(rank, number + 1)


def whole_network(rng, cores=1 << 20):
    """Return a network with times in whole seconds, without slow-down by oversubscription."""
    within, between, nic, *others = (Link(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(6))
    tiers = rng.choice([(), (Tier(2, others[0], None),), (Tier(1, *others[:2]), Tier(2, others[2], others[0]))])
    more = {"nic": nic, "tiers": tiers, "segment_bytes": rng.randint(1, 40), "cores": cores}
    return Network(within, between, *(rng.randint(1, 9) for _ in range(3)), **more)


@each_across
def test_every_rank_ends_when_a_plain_simulation_says(row):
    rng = random.Random(row.name)
    for lengths in ((1,), (4,), (1, 1, 1), (2, 2, 2, 2), (3, 1, 2), (4, 4), (2,) * 8, (5, 5, 2)):
        nodes, size = nodes_of(*lengths), sum(lengths)
        if not row.precondition.holds(size, True):
            continue
        for cores in (1 << 20, 1):
            network, chunk, root = whole_network(rng, cores), rng.randint(0, 5), rng.randrange(size)
            expected = Plain(row, nodes, network, chunk, root).run()
            nbytes = chunk * row.num_chunks(size, nodes)
            assert simulate(row, nbytes, nodes, network, root).ends == expected, (lengths, network)


def test_a_message_without_a_counterpart_is_told():
    lone = Algorithm("all_reduce", "lone", lambda rank, size: iter([(Send(1, range(1)),) if rank == 0 else ()]))
    with pytest.raises(AssertionError, match="lone on 2 ranks: rank 0 waits forever in round 0"):
        simulate(lone, 8, nodes_of(2), NETWORK)


@pytest.mark.parametrize("p", [1, 2, 5, 8, 16])
def test_closed_forms_between_nodes(p):
    nodes, n, far = nodes_of(*[1] * p), 1 << 16, NETWORK.between
    ring = 2 * (p - 1) * (far.alpha_s + n / p * far.beta_s_per_byte) + n * (p - 1) / p * NETWORK.gamma_s_per_byte
    tree = (p - 1).bit_length() * (far.alpha_s + n * far.beta_s_per_byte)
    for by in (lambda row: simulate(row, n, nodes, NETWORK).seconds, lambda row: predict(row, n, p, nodes, 0, NETWORK)):
        assert by(find("all_reduce", "ring")) == same(ring)
        assert by(find("broadcast", "binomial")) == same(tree)


SYNCHRONOUS = [("all_reduce", "ring"), ("all_reduce", "recursive_doubling"), ("all_reduce", "rabenseifner")]
SYNCHRONOUS += [("all_gather", "neighbor"), ("all_gather", "bruck"), ("barrier", "dissemination")]
SYNCHRONOUS += [("all_to_all", "pairwise"), ("reduce", "binomial"), ("all_reduce", "two_shot"), ("scatter", "direct")]


@pytest.mark.parametrize(("collective", "name"), SYNCHRONOUS)
def test_by_round_is_exact_where_all_wait_for_each_other(collective, name):
    row, nodes = find(collective, name), nodes_of(16)
    for cores in (2, 1 << 20):
        network = NETWORK._replace(cores=cores)
        exact = simulate(row, 1 << 24, nodes, network).seconds
        if name != "binomial" or cores > 16:  # there, no rank waits for one that shares its core
            assert exact == same(predict(row, 1 << 24, 16, nodes, 0, network))


@each_across
def test_by_round_is_not_faster_and_not_much_slower(row):
    if row.collective == "barrier":
        return
    for lengths in ((8, 8, 8, 8), (1,) * 16, (4,) * 8):
        nodes, size = nodes_of(*lengths), sum(lengths)
        exact = simulate(row, 1 << 22, nodes, NETWORK).seconds
        least = {"leaders": 0.6, "double_tree": 0.9}.get(
            row.name, 0.95
        )  # their messages of a round go to several nodes
        assert least * exact <= predict(row, 1 << 22, size, nodes, 0, NETWORK) <= 2.1 * exact, lengths


def shift_by_4(rank, size):
    """Send from every rank of 2 nodes of 4 to the other node."""
    peer = (rank + 4) % 8
    yield Send(peer, range(8)), Recv(peer, range(8))


def test_messages_share_a_node_s_way_out_and_in():
    row, n = Algorithm("all_reduce", "shift", shift_by_4), 8000
    outcome = simulate(row, n, nodes_of(4, 4), NETWORK)
    own, gate, latency = NETWORK.between.beta_s_per_byte * n, NETWORK.nic, NETWORK.between.alpha_s
    ends = [latency + max(own, nth * gate.alpha_s + (nth + 1) * n * gate.beta_s_per_byte) for nth in range(4)]
    assert sorted(set(outcome.ends)) == [same(end) for end in ends]
    assert predict(row, n, 8, nodes_of(4, 4), 0, NETWORK) == same(ends[-1])
    a_port_each = NETWORK._replace(nic=Link(0.0, NETWORK.between.beta_s_per_byte / 4))
    assert simulate(row, n, nodes_of(4, 4), a_port_each).seconds == same(own + latency)
    assert predict(row, n, 8, nodes_of(4, 4), 0, a_port_each) == same(own + latency)
    one_pair_fills_it = NETWORK._replace(nic=None)
    seconds = simulate(row, n, nodes_of(4, 4), one_pair_fills_it).seconds
    assert seconds == same(NETWORK.between.alpha_s + 4 * n * NETWORK.between.beta_s_per_byte)


def shift_by(number, size):
    """Return an algorithm that sends the whole vector from every rank to one so many ranks further."""

    def schedule(rank, size):
        yield Send((rank + number) % size, range(size)), Recv((rank - number) % size, range(size))

    return Algorithm("all_reduce", f"shift_by_{number}", schedule), size


SWITCHES = NETWORK._replace(  # 2 nodes on a switch, 4 in a pod
    tiers=(
        Tier(2, Link(5e-5, 8e-9), Link(1e-6, 3e-9)),
        Tier(4, Link(9e-5, 9e-9), Link(2e-6, 6e-9)),
    )
)


@pytest.mark.parametrize("shift", [2, 4, 8])
def test_messages_of_a_pod_share_its_port(shift):
    """Of 16 ranks in 2 pods, the last so many of each pod send to the other; the others' messages are faster."""
    row, size = shift_by(shift, 16)
    nodes, n, (_, pod) = nodes_of(*[2] * 8), 16_000, SWITCHES.tiers
    waits = (shift - 1) * pod.port.alpha_s + shift * n * pod.port.beta_s_per_byte
    expected = same(pod.link.alpha_s + max(n * pod.link.beta_s_per_byte, waits))
    assert simulate(row, n, nodes, SWITCHES).seconds == expected
    assert predict(row, n, size, nodes, 0, SWITCHES) == expected


@pytest.mark.parametrize(("slow", "ahead"), [("nic", 1), ("switch", 3), ("pod", 7), ("", 0)])
def test_messages_wait_at_the_slowest_of_the_ports_on_their_way(slow, ahead):
    """All ranks send to the other pod: 2 messages leave each node, 4 each switch, 8 each pod."""
    row, size = shift_by(8, 16)
    nodes, n, port, free = nodes_of(*[2] * 8), 16_000, Link(2e-6, 6e-9), Link(0.0, 0.0)
    ports = {"nic": free, "switch": None, "pod": free} | ({slow: port} if slow else {})
    tiers = (SWITCHES.tiers[0]._replace(port=ports["switch"]), SWITCHES.tiers[1]._replace(port=ports["pod"]))
    network = SWITCHES._replace(nic=ports["nic"], tiers=tiers)
    waits, link = ahead * port.alpha_s + (ahead + 1) * n * port.beta_s_per_byte, SWITCHES.tiers[1].link
    expected = same(link.alpha_s + max(n * link.beta_s_per_byte, waits if slow else 0))
    assert simulate(row, n, nodes, network).seconds == expected
    assert predict(row, n, size, nodes, 0, network) == expected


@pytest.mark.parametrize(("peers", "link"), [((0, 2), 0), ((0, 4), 1), ((0, 8), 2), ((3, 15), 2)])
def test_a_lone_message_takes_the_link_of_the_outermost_group_that_it_leaves(peers, link):
    source, dest = peers

    def lone(rank, size):
        yield ((Send(dest, range(size)),) if rank == source else (Recv(source, range(size)),) * (rank == dest))

    row = Algorithm("all_reduce", "lone", lone)
    expected = same((NETWORK.between, *(tier.link for tier in SWITCHES.tiers))[link].seconds(5000))
    assert simulate(row, 5000, nodes_of(*[2] * 8), SWITCHES).seconds == expected
    assert predict(row, 5000, 16, nodes_of(*[2] * 8), 0, SWITCHES) == expected


@each_across
def test_with_tiers_by_round_is_not_faster_and_not_much_slower(row):
    for lengths in ((2,) * 8, (1,) * 16) if row.collective != "barrier" else ():
        exact = simulate(row, 1 << 20, nodes_of(*lengths), SWITCHES).seconds
        assert 0.55 * exact <= predict(row, 1 << 20, 16, nodes_of(*lengths), 0, SWITCHES) <= 2.1 * exact, lengths


@pytest.mark.parametrize("name", ["ring", "recursive_doubling", "hierarchical"])
def test_of_many_ranks_in_groups_some_stand_for_all(name):
    """Ports of groups carry one message of a ring, and of recursive doubling as many as there are ranks."""
    nodes, row = nodes_of(*[2] * 64), find("all_reduce", name)
    network = SWITCHES._replace(tiers=(Tier(8, *SWITCHES.tiers[0][1:]), Tier(32, *SWITCHES.tiers[1][1:])))
    exact = simulate(row, 1 << 22, nodes, network).seconds
    everyone = [works(row.rounds(rank, 128, 0, nodes), rank, nodes, (8, 32)) for rank in range(128)]
    whole = price(tally(dict(enumerate(everyone)), nodes, (8, 32)), (1 << 22) / 128, network)
    some = sample(nodes, 0, 16, (8, 32), 2)
    estimated = price(tally({rank: everyone[rank] for rank in some}, nodes, (8, 32)), (1 << 22) / 128, network)
    assert len(some) <= 40
    assert estimated == pytest.approx(whole, rel=0.1)
    assert 0.95 * exact <= whole <= 2.1 * exact


def test_no_tiers_and_tiers_that_nobody_leaves_cost_the_same():
    inside, nodes = NETWORK._replace(tiers=(Tier(4, Link(1.0, 1.0), Link(1.0, 1.0)),)), nodes_of(2, 2, 2, 2)
    for row in REGISTRY:  # in a node, also in segments
        by_tier = predict(row, 1 << 26, 8, nodes_of(8), 0, inside)
        assert by_tier == same(predict(row, 1 << 26, 8, nodes_of(8), 0, NETWORK))
    for row in ACROSS:
        if row.precondition.holds(8, True):
            ends, inside_ends = (simulate(row, 999, nodes, network).ends for network in (NETWORK, inside))
            assert ends == inside_ends
            assert predict(row, 999, 8, nodes, 0, NETWORK) == predict(row, 999, 8, nodes, 0, inside)


def test_most_of_a_long_reduction_goes_on_while_its_message_comes():
    n = 64 << 20
    seconds = simulate(find("reduce", "binomial"), n, nodes_of(1, 1), NETWORK).seconds
    message = NETWORK.between.alpha_s + n * NETWORK.between.beta_s_per_byte
    assert seconds == same(message + SEGMENT_BYTES * NETWORK.gamma_s_per_byte)
    assert Network().segment_bytes == SEGMENT_BYTES
    slow = NETWORK._replace(gamma_s_per_byte=2 * NETWORK.between.beta_s_per_byte)
    seconds = simulate(find("reduce", "binomial"), n, nodes_of(1, 1), slow).seconds
    first = SEGMENT_BYTES * NETWORK.between.beta_s_per_byte
    assert seconds == same(NETWORK.between.alpha_s + first + n * slow.gamma_s_per_byte)


@pytest.mark.parametrize("p", [4096, 16384])
def test_thousands_of_ranks_exactly(p):
    nodes, n = nodes_of(*[8] * (p // 8)), 1000
    near, far = (link.alpha_s + n * link.beta_s_per_byte for link in (NETWORK.within, NETWORK.between))
    outcome = simulate(find("broadcast", "binomial"), n, nodes, NETWORK)
    assert outcome.seconds == same(3 * near + ((p - 1).bit_length() - 3) * far)
    assert predict(find("broadcast", "binomial"), n, p, nodes, 0, NETWORK) == same(outcome.seconds)


def run(capsys, *words):
    status = main([str(word) for word in words])
    streams = capsys.readouterr()
    return status, streams.out, streams.err


def times_by_hand(collective, sizes, *lengths):
    """Return the microseconds of each algorithm at each size, on the default network."""
    rows = [row for row in ACROSS if row.collective == collective]
    times = {row.name: [simulate(row, n, nodes_of(*lengths), Network()).seconds * 1e6 for n in sizes] for row in rows}
    fastest = [sorted(times, key=lambda name: times[name][index]) for index in range(len(sizes))]
    return times, fastest


TWO_SIZES = shlex.split("all_gather --topology 4x2 -b 8 -e 1M -f 1024")


def test_the_best_of_each_size_have_times_and_bandwidths(capsys):
    status, out, _ = run(capsys, *TWO_SIZES, "--best", 2)
    times, fastest = times_by_hand("all_gather", (8, 8192), 2, 2, 2, 2)
    head, *rows = out.splitlines()[2:]
    assert status == 0
    assert head.split() == ["bytes", "algorithm", "us", "GB/s", "bus", "GB/s", "ratio"]
    assert len(rows) == 4
    for index, (nbytes, words) in enumerate([(8, "8"), (8192, "8K")]):
        first, second = (row.split() for row in rows[2 * index : 2 * index + 2])
        assert [first[0], first[1], second[0]] == [words, *fastest[index][:2]]
        us, next_us = (times[name][index] for name in fastest[index][:2])
        assert float(first[2]) == pytest.approx(us, abs=0.051)
        assert float(first[3]) == pytest.approx(nbytes / us / 1e3, rel=5e-3)
        assert float(first[4]) == pytest.approx(nbytes / us / 1e3 * 7 / 8, rel=5e-3)
        assert float(second[4]) == pytest.approx(next_us / us, abs=0.0051)


def test_the_whole_table_has_each_algorithm_and_the_fastest_of_each_size(capsys):
    _, out, _ = run(capsys, *TWO_SIZES, "--all")
    times, fastest = times_by_hand("all_gather", (8, 8192), 2, 2, 2, 2)
    head, *rows = out.splitlines()[2:]
    assert head.split() == ["us", "8", "8K"]
    assert [row.split()[0] for row in rows] == [*times]
    for row in rows:
        name, *cells = row.split()
        assert [float(cell.rstrip("<")) for cell in cells] == pytest.approx(times[name], abs=0.051)
        assert [cell.endswith("<") for cell in cells] == [of_size[0] == name for of_size in fastest]


@pytest.mark.parametrize("words", ["", "--all", "--all -f 2 -e 1G", "--map -f 4 -e 4G", "--best 100"])
def test_no_line_is_longer_than_100_columns(capsys, words):
    _, out, _ = run(capsys, "--ranks", 64, "--by-round", *shlex.split(words))
    assert max(map(len, out.splitlines())) <= 100


def test_tables_of_an_interrupted_prediction_mark_what_is_missing():
    times = {"a_long_name": [1e-6, 2e-6], "short": [3e-6], "none": []}
    best = list(best_table("broadcast", 4, [8, 64], times, 3))
    assert [line.split()[0] for line in best[1:]] == ["8", "short", "-", "64", "-"]
    assert [line.split()[1:] for line in whole_table([8, 64], times)] == [
        ["8", "64"], ["1.0<", "2.0<"], ["3.0", "-"], ["-", "-"]
    ]  # fmt: skip


def test_the_map_has_the_winner_of_each_size_and_number_of_ranks(capsys):
    sizes, numbers = (8, 32 << 10, 128 << 20), (4, 8, 16, 24)
    status, out, _ = run(capsys, "--topology", "6x4", "--map", "-f", 4096)
    legend = dict(line.split() for line in out.splitlines() if line.startswith("  ") and len(line.split()) == 2)
    head, *rows = out.splitlines()[2 : 3 + len(numbers)]
    assert (status, head.split()) == (0, ["ranks", "8", "32K", "128M", "bytes"])
    for row, ranks in zip(rows, numbers, strict=True):
        nodes = nodes_of(*[4] * (ranks // 4))
        access = Access.DIRECT if ranks == 4 else Access.INTRA_NODE
        rivals = [row for row in REGISTRY if row.collective == "all_reduce" and row.access <= access]
        rivals = [
            each
            for row in rivals
            if row.precondition.holds(ranks, True)
            for each in (variants_of(row) if ranks > 4 else [row])
        ]
        winners = [min(rivals, key=lambda row: predict_best(row, n, ranks, nodes)[1]).name for n in sizes]
        assert [legend[symbol] for symbol in row.split()[1:]] == winners
        assert row.split()[0] == str(ranks)


def test_the_map_marks_where_nothing_can_run(capsys):
    _, out, _ = run(capsys, "all_gather", "--topology", "4x3", "--map", "--algorithms", "neighbor", "-b", 8, "-e", 8)
    assert [row.split() for row in out.splitlines()[3:]] == [["3", "-"], ["6", "A"], ["12", "A"], ["A", "neighbor"]]


def test_what_is_hopeless_is_not_priced_for_more_ranks():
    rows = [find("all_reduce", name) for name in ("ring", "recursive_doubling")]
    prices = {"ring": lambda ranks: 1.0 if ranks < 4 else 11.0, "recursive_doubling": lambda ranks: 1.0}
    seen = [
        (ranks, list(times))
        for ranks, times in times_by_ranks(
            [2, 4, 8], lambda n: nodes_of(*[1] * n), [8], lambda nodes: rows,
            lambda row, nbytes, nodes: prices[row.name](len(nodes)),
        )
    ]  # fmt: skip
    both = ["ring", "recursive_doubling"]
    assert seen == [(2, both), (4, both), (8, both[1:])]


def test_json_has_every_prediction(capsys, tmp_path):
    file = tmp_path / "times.json"
    status, out, _ = run(capsys, *TWO_SIZES, "--json", file)
    assert (status, "bus GB/s" in out) == (0, True)
    data = json.loads(file.read_text())
    times, _ = times_by_hand("all_gather", (8, 8192), 2, 2, 2, 2)
    assert {name: data[name] for name in ("collective", "nodes", "ranks_per_node", "predicted")} == {
        "collective": "all_gather", "nodes": 4, "ranks_per_node": 2, "predicted": "exactly",
    }  # fmt: skip
    assert parse_network(data["network"]) == Network()
    rows = {(row["algorithm"], row["bytes"]): row for row in data["results"]}
    assert {row["ranks"] for row in data["results"]} == {8}
    for name, own in times.items():
        for nbytes, us in zip((8, 8192), own, strict=True):
            row = rows.pop((name, nbytes))
            assert row["us"] == same(us)
            assert row["algbw_gbps"] == same(nbytes / us / 1e3)
            assert row["busbw_gbps"] == same(nbytes / us / 1e3 * 7 / 8)
    assert rows == {}


def test_json_instead_of_tables(capsys):
    data = json.loads(run(capsys, *TWO_SIZES, "--json", "-")[1])
    assert len(data["results"]) == 2 * len([row for row in ACROSS if row.collective == "all_gather"])
    data = json.loads(run(capsys, "--topology", "2x2", "--map", "--json", "-", "-e", "8")[1])
    assert {row["ranks"] for row in data["results"]} == {2, 4}


def test_a_plot_is_a_picture_with_the_fastest_named(capsys, tmp_path):
    file = tmp_path / "times.png"
    status, out, _ = run(capsys, *TWO_SIZES, "--plot", file)
    assert (status, "algorithm" in out) == (0, True)
    assert file.read_bytes().startswith(b"\x89PNG")
    chart = figure("all_gather", 8, [8, 64], {"ring": [2e-6, 2e-6], "bruck": [1e-6, 1e-6], "slow": [9e-6]}, 1)
    left, right = chart.axes
    assert [line.get_label() for line in left.lines if not line.get_label().startswith("_")] == ["bruck"]
    assert [list(line.get_ydata()) for line in left.lines] == [[2.0, 2.0], [1.0, 1.0], [9.0]]
    assert right.lines[1].get_ydata() == pytest.approx([8 / 1e3 * 7 / 8, 64 / 1e3 * 7 / 8])


def test_flags_set_the_network(capsys):
    speeds = shlex.split("--within 1 10 --between 5 2 --nic 1 4")
    words = ["--topology", "2x2", "--algorithms", "ring", "-b", "1M", "-e", "1M"]
    links = Link(1e-6, 1e-10), Link(5e-6, 5e-10)
    network = Network(*links, nic=Link(1e-6, 2.5e-10))
    seconds = simulate(find("all_reduce", "ring"), 1 << 20, nodes_of(2, 2), network).seconds
    assert f" {seconds * 1e6:.1f} " in run(capsys, *words, *speeds)[1]


def test_flags_set_the_levels_beyond_the_node(capsys):
    words = ["--topology", "2x2x3x2", "--algorithms", "recursive_doubling", "-b", "1M", "-e", "1M"]
    speeds = shlex.split("--between 5 2 --nic 1 4 --tier 7 2 --tier 9 1 3")
    _, out, _ = run(capsys, *words, *speeds)
    tiers = Tier(3, Link(7e-6, 5e-10)), Tier(6, Link(9e-6, 1e-9), Link(0.0, 1 / 3e9))
    network = Network(between=Link(5e-6, 5e-10), nic=Link(1e-6, 2.5e-10), tiers=tiers)
    seconds = simulate(find("all_reduce", "recursive_doubling"), 1 << 20, nodes_of(*[2] * 12), network).seconds
    assert "24 ranks of 12 nodes" in out
    assert f" {seconds * 1e6:.1f} " in out


def random_network(rng):
    """Return a network of random speeds, with 0 to 3 tiers, some of them without a port."""
    links = [Link(rng.uniform(0, 1e-4), rng.uniform(0, 1) * 10.0 ** rng.randint(-12, -8)) for _ in range(10)]
    tiers = tuple(Tier(2 * 3**i, links[i], rng.choice([None, links[3 + i]])) for i in range(rng.randint(0, 3)))
    rates = {f"{name}_s_per_byte": rng.uniform(0, 1e-9) for name in ("gamma", "copy", "staged", "pull")}
    more = {"cores": rng.randint(1, 99), "segment_bytes": rng.randint(1, 99), "meet_s": rng.uniform(0, 1e-5)}
    return Network(*links[7:9], nic=rng.choice([None, links[9]]), system=links[6], tiers=tiers, **rates, **more)


def test_a_network_is_read_as_it_was_written(tmp_path, capsys):
    rng = random.Random(5)
    networks = [fabric.network for fabric in FABRICS.values()] + [random_network(rng) for _ in range(200)]
    for network in [*networks, Network(), on_device(Network())]:
        nodes = in_nodes(rng.randint(1, 200), rng.randint(1, 9))
        assert from_toml(to_toml(nodes, network)) == (nodes, network)
    file = tmp_path / "pods.toml"
    file.write_text(run(capsys, "--topology", "pods", "--ranks", 6144, "--describe")[1])
    written = run(capsys, "--topology", file, "--describe")
    assert written == (0, file.read_text(), "")
    words = ["-f", 4096, "--algorithms", "rabenseifner", "leaders"]
    by_file, by_name = (run(capsys, "--topology", name, "--ranks", 6144, *words)[1] for name in (file, "pods"))
    assert by_file.partition("predicted")[2] == by_name.partition("predicted")[2]


LEVEL = "[[levels]]\nsize = 2\nlatency_us = 3\ngb_per_s = 50.0\n"


def test_a_short_file_has_the_default_speeds_of_ranks():
    nodes, network = from_toml(LEVEL + LEVEL + "port_gb_per_s = 80\n" + LEVEL)
    link = Link(3e-6, 2e-11)
    assert nodes == nodes_of(2, 2, 2, 2)
    assert network == Network(within=link, between=link, nic=Link(0.0, 1.25e-11), tiers=(Tier(2, link),))


def test_the_file_of_the_guide_is_the_network_of_its_flags():
    (block,) = [block.text for block in blocks("docs/guide/tools.md") if block.language == "toml"]
    nodes, network = from_toml(block)
    flags = parse(shlex.split("--topology 4x32x8 --between 2 25 --nic 0 100 --tier 3 25 1600 --within 3.4 370.8"))
    assert nodes == flags.nodes
    assert network.tiers == (Tier(32, *(Link(*map(same, link)) for link in flags.network.tiers[0][1:])),)
    assert network[:2] == tuple(Link(*map(same, link)) for link in flags.network[:2])
    assert network.nic == Link(*map(same, flags.network.nic))
    assert (1 / network.gamma_s_per_byte, network.meet_s) == (same(1.1e12), same(3.4e-6))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("levels = ", " is not TOML (Invalid value (at end of document)): see --describe for the form"),
        ("", ": there are no levels: write a table [[levels]] for a node's ranks, one for nodes, ..."),
        (
            LEVEL + "latancy_us = 3",
            ": level 1: latancy_us is not a key (nearest: latency_us): use size, latency",
        ),
        (
            LEVEL + "port_gb_per_s = 3",
            ": level 1: port_gb_per_s is not a key (nearest: gb_per_s): use size",
        ),
        (
            LEVEL.replace("50.0", "-1.5"),
            ": level 1: gb_per_s=-1.5 must be a number above 0 and at most 1000000000 GB/s",
        ),
        (LEVEL.replace("50.0", "nan"), ": level 1: gb_per_s=NaN must be a number above 0 and at most"),
        (LEVEL.replace("3", '"3"'), ": level 1: latency_us=3 must be a number from 0 to 1000000000 us"),
        (LEVEL.replace("size = 2", "size = 0"), ": level 1: size=0 must be a whole number from 1 to 131072 ranks"),
        (LEVEL.replace("size = 2", ""), ": level 1: size=nothing must be a whole number from 1 to 131072 ranks"),
        ("ranks = 0\n" + LEVEL, ": ranks=0 must be a whole number from 1 to 131072 ranks"),
        (LEVEL.replace("= 2", "= 999") * 2, ": ranks=998001 must be a whole number from 1 to 131072 ranks"),
        (LEVEL + "[rank]\ncores = 0", ": rank: cores=0 must be a whole number from 1 to"),
        (LEVEL + "[rank]\ncopies = 0", ": rank: copies is not a key"),
        ("rank = 3\n" + LEVEL, ": rank=3 must be a table [rank]: write one, or remove it"),
        (None, " can't be read (No such file or directory): pass the path of a network in TOML"),
    ],
)
def test_a_bad_file_is_one_line(capsys, tmp_path, text, why):
    file = tmp_path / "net.toml"
    if text is not None:
        file.write_text(text)
    status, out, err = run(capsys, "--topology", file)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {file}{why}")


def test_by_round_beyond_a_hundred_ranks(capsys):
    status, out, _ = run(capsys, "broadcast", "--ranks", 65536, "--algorithms", "binomial", "hierarchical", "-b", "1K")
    assert status == 0
    assert "65536 ranks of 8192 nodes" in out
    assert "by round" in out
    assert "predicted exactly" in run(capsys, "broadcast", "--ranks", 256, "--algorithms", "binomial", "--exact")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sum"], "argument collective: invalid choice: 'sum' (choose from "),
        (
            ["--algorithms", "rings"],
            "algorithm 'rings' is unknown: use one of auto, ring, recursive_doubling",
        ),
        (["all_gather", "--algorithms", "neighbor", "--topology", "3x1"], "algorithm 'neighbor' needs an even number"),
        (
            ["--algorithms", "two_shot", "--topology", "2x2"],
            "algorithm 'two_shot' needs shared memory, which",
        ),
        (
            ["--topology", "2y2"],
            "--topology '2y2': write nodes x ranks, as 512x8 or 4x128x8, a FILE.toml, or ndr",
        ),
        (
            ["--topology", "2x2x2"],
            "--topology 2x2x2 has 1 level beyond the node's, but --tier is there 0 times: write",
        ),
        (["--tier", "1", "2"], "--topology ndr has 0 levels beyond the node's, but --tier is there 1 times: write it"),
        (
            ["--topology", "2x2x2", "--tier", "1"],
            "--tier 1: write US GB/s of a message, and the GB/s of a group's port",
        ),
        (["--topology", "2x2x2", "--tier", "1", "-2"], "--tier 1 -2: -2 must be above 0 and at most 1000000000 GB/s"),
        (["--topology", "2x2x2", "--tier", "1", "2", "0"], "--tier 1 2 0: 0 must be above 0 and at most 1000000000"),
        (["--topology", "2x2", "--ranks", "5"], "--topology 2x2 has 4 ranks, but --ranks is 5: omit --ranks"),
        (["--topology", "measured"], "--topology measured: no measurements are saved: run python -m collectives.bench"),
        (["--ranks", "0"], "argument --ranks: '0' must be a whole number from 1 to 131072 ranks; see --help"),
        (["--ranks", "9" * 14], f"argument --ranks: '{'9' * 14}' must be a whole number from 1 to 131072 ranks"),
        (["--topology", "99999x99999"], "--topology 99999x99999 means 9999800001 ranks: use 131072 at most"),
        (
            ["-b", "9" * 400],
            f"argument -b/--begin: '{'9' * 400}' is not a size: write one like 8, 64K, 1M or 1G, at most",
        ),
        (["--root", "8"], "--root 8: there are ranks 0 to 7"),
        (["-b", "2M", "-e", "1M"], "--begin 2097152 is above --end 1048576: exchange them"),
        (["-f", "1"], "argument -f/--factor: '1' must be a whole number from 2 to 1073741824; see --help"),
        (["--between", "1", "0"], "--between 1 0: 0 must be above 0 and at most 1000000000 GB/s"),
        (["--between", "nan", "1"], "--between nan 1: nan must be from 0 to 1000000000 us"),
        (["-b", "x"], "argument -b/--begin: 'x' is not a size: write one like 8, 64K, 1M or 1G"),
        (["--within", "a", "3"], "argument --within: invalid float value: 'a'; see --help"),
        (["--exact", "--ranks", "65536"], "--exact simulates every one of 65536 ranks, at most 4096: omit it"),
        (["--best", "0"], "argument --best: '0' must be a whole number from 1 to 100 algorithms; see --help"),
        (["--all", "--map"], "argument --map: not allowed with argument --all"),
        (["--map", "--exact"], "--map prices by round: omit --exact"),
        (["--map", "--plot", "a.png"], "--plot draws the times of one number of ranks: omit --map"),
        (
            ["broadcast", "--map", "--ranks", "64", "--root", "9"],
            "--root 9: the map begins at 8 ranks: use a root of 0",
        ),
        (["--map", "-f", "2"], "--factor 2 makes 26 sizes: use 17 at most"),
        (["--json", "no/such/x"], "--json no/such/x can't be written (No such file or directory): pass a path in an"),
        (["--plot", "no/such/x"], "--plot no/such/x can't be written (No such file or directory): pass a path in an"),
        (["barrier", "--plot", "a.png"], "--plot has logarithmic scales, without 0 bytes and without 1"),
        (["--exact", "--by-round"], "argument --by-round: not allowed with argument --exact"),
    ],
)
def test_bad_input_is_one_line(capsys, words, message):
    status, out, err = run(capsys, *words)
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


def test_every_fabric_has_sources():
    text = (ROOT / "collectives" / "schedule" / "fabrics.py").read_text()
    for name, fabric in FABRICS.items():
        assert fabric.network.gate.beta_s_per_byte <= fabric.network.between.beta_s_per_byte, name
        assert f'"{name}": Fabric(' in text
    assert len(re.findall(r"# .*(nvidia|nersc|gist\.github|arXiv|NCCL|DGX|datasheet)", text, re.IGNORECASE)) >= 7


def test_no_mpi_is_needed():
    main = "from collectives.schedule.simulate import main; main(['barrier'])"
    code = f"import sys; sys.modules['mpi4py'] = None; {main}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "dissemination" in result.stdout


def test_a_push_counts_as_a_copy():
    def pushes(rank, size):
        yield (Put(1 - rank, range(1), range(1)),) if rank == 0 else ()

    row = Algorithm("all_reduce", "pushes", pushes)
    assert simulate(row, 2000, nodes_of(2), NETWORK).seconds == same(1000 * NETWORK.copy_s_per_byte)
