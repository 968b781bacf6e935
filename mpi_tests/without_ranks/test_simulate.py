"""Simulations: compared with a plain one defined here and with closed forms, and from the command line."""

import random
import re
import shlex
import subprocess
import sys

import pytest

from collectives.algorithms import REGISTRY, Access, Algorithm, find
from collectives.runtime.backends.messages import SEGMENT_BYTES
from collectives.schedule.cost import Link, Network, predict
from collectives.schedule.events import simulate
from collectives.schedule.fabrics import FABRICS
from collectives.schedule.moves import Barrier, GetReduce, Put, Recv, RecvReduce, Send
from collectives.schedule.simulate import main
from mpi_tests.helpers.algorithm_costs import nodes_of
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
        self.events.append((max(time, other_time), "1 out", source, dest, length, reduced + other_reduced, number))

    def handle(self, time, way, source, dest, length, reduced, number):
        net, nbytes = self.network, length * self.chunk
        if self.node_of[source] == self.node_of[dest]:
            takes = self.crowd(source, number) * (net.within.alpha_s + nbytes * net.within.beta_s_per_byte)
            gate, keeps = (way, "rank", source if way == "1 out" else dest), takes
        else:
            takes = net.between.alpha_s + nbytes * net.between.beta_s_per_byte
            gate = way, "node", self.node_of[source if way == "1 out" else dest]
            keeps = net.nic.alpha_s + nbytes * net.nic.beta_s_per_byte
        begin = max(time, self.free.get(gate, 0))
        self.free[gate] = begin + keeps
        if way == "1 out":
            self.events.append((begin, "2 in", source, dest, length, reduced, number))
        else:
            self.arrive(source, number, begin + takes, 0, 0)
            far = self.node_of[source] != self.node_of[dest]
            self.arrive(dest, number, begin + takes, reduced * (not far), reduced * far)

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
    within, between, nic = (Link(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(3))
    more = {"nic": nic, "segment_bytes": rng.randint(1, 40), "cores": cores}
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
            assert simulate(row, chunk * size, nodes, network, root).ends == expected, (lengths, network)


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
        least = 0.6 if row.name == "leaders" else 0.95  # its messages of a round go to several nodes
        assert least * exact <= predict(row, 1 << 22, size, nodes, 0, NETWORK) <= 2.1 * exact, lengths


def shift_by_4(rank, size):
    """Send from every rank of 2 nodes of 4 to the other node."""
    peer = (rank + 4) % 8
    yield Send(peer, range(8)), Recv(peer, range(8))


def test_messages_share_a_node_s_way_out_and_in():
    row, n = Algorithm("all_reduce", "shift", shift_by_4), 8000
    outcome = simulate(row, n, nodes_of(4, 4), NETWORK)
    queue = NETWORK.nic.alpha_s + n * NETWORK.nic.beta_s_per_byte
    alone = NETWORK.between.alpha_s + n * NETWORK.between.beta_s_per_byte
    assert sorted(set(outcome.ends)) == [same(nth * queue + alone) for nth in range(4)]
    assert predict(row, n, 8, nodes_of(4, 4), 0, NETWORK) == same(3 * queue + alone)
    one_pair_fills_it = NETWORK._replace(nic=None)
    seconds = simulate(row, n, nodes_of(4, 4), one_pair_fills_it).seconds
    assert seconds == same(NETWORK.between.alpha_s + 4 * n * NETWORK.between.beta_s_per_byte)


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


def test_the_table_has_each_algorithm_and_the_fastest_of_each_size(capsys):
    status, out, _ = run(capsys, "all_gather", "--topology", "4x2", "-b", "8", "-e", "1M", "-f", "1024")
    head, *rows = out.splitlines()[2:]
    assert status == 0
    assert head.split()[1:] == [row.name for row in ACROSS if row.collective == "all_gather"]
    assert [row.split()[0] for row in rows] == ["8", "8K"]
    nodes = nodes_of(2, 2, 2, 2)
    for row, nbytes in zip(rows, (8, 8192), strict=True):
        seconds = [simulate(find("all_gather", name), nbytes, nodes, Network()).seconds for name in head.split()[1:]]
        assert [float(word) for word in row.replace("<", "").split()[1:]] == pytest.approx(
            [s * 1e6 for s in seconds], abs=0.051
        )
        assert float(re.search(r"([\d.]+) <", row)[1]) == pytest.approx(min(seconds) * 1e6, abs=0.051)


def test_flags_set_the_network(capsys):
    speeds = shlex.split("--within 1 10 --between 5 2 --nic 1 4")
    words = ["--topology", "2x2", "--algorithms", "ring", "-b", "1M", "-e", "1M"]
    links = Link(1e-6, 1e-10), Link(5e-6, 5e-10)
    network = Network(*links, nic=Link(1e-6, 2.5e-10))
    seconds = simulate(find("all_reduce", "ring"), 1 << 20, nodes_of(2, 2), network).seconds
    assert f"{seconds * 1e6:.1f} <" in run(capsys, *words, *speeds)[1]


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
        (["--topology", "2y2"], "--topology '2y2': write nodes x ranks, as 512x8, or ndr, 100gbe, slingshot, measured"),
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
