"""Networks of several levels in the planner: placement on pods of nodes, prices of axes that leave them, and plans."""

import re
from itertools import product

import numpy as np
import pytest

from collectives.algorithms import find
from collectives.runtime.choose.network_file import to_toml
from collectives.schedule.cost import predict
from collectives.schedule.events import Simulation, summary
from collectives.schedule.fabrics import FABRICS, in_nodes
from collectives.schedule.moves import embed
from collectives.schedule.network import Link, Network, Tier, contended, with_rate
from parallelism.planner import __main__ as planner
from parallelism.planner.cluster import Cluster, ClusterHost, read
from parallelism.planner.layout import ParallelLayout
from parallelism.planner.place import AxisGroup, Machine, RankPlacement, most_leaving

NDR = FABRICS["ndr"].network
FREE = Network(Link(0, 0), Link(0, 1e-9), 0, 0, 0, nic=Link(0, 2.5e-10))  # four ranks fill a node's link
MODEL = ["--depth", "2", "--tflops", "1", "--memory", "4", "--global_batch_size", "64", "--number", "20"]


def same(expected):
    return pytest.approx(expected, rel=1e-9)


def on(ranks, length, network):
    return Machine(in_nodes(ranks, length), network, 1e12, 1e9)


def pods_of(nodes, link, port=None, network=FREE):
    return network._replace(tiers=(Tier(nodes, link, port),))


# Prices by hand


def test_an_axis_that_leaves_its_pods_takes_as_much_longer_as_the_upper_level_is_slower():
    """Two ranks in two pods exchange halves, twice; four such pairs fill the node's link."""
    layout, nbytes = ParallelLayout(dp=2, tp=8), 8000
    for slower in (1, 3, 10):
        placement = RankPlacement(layout, on(16, 4, pods_of(2, Link(0, slower * 1e-9))))
        assert placement.samples.seconds("all_reduce", nbytes) == same(2 * 4000 * slower * 1e-9)


def test_an_axis_within_a_pod_does_not_notice_the_upper_level():
    layout = ParallelLayout(dp=2, pp=2, tp=4)  # a pipeline on two nodes, which are a pod
    flat, pods = (RankPlacement(layout, on(16, 4, net)) for net in (FREE, pods_of(2, Link(1, 1))))
    assert pods.to_stage(0, 1) == flat.to_stage(0, 1)
    assert pods.tp.seconds("all_reduce", 4096) == flat.tp.seconds("all_reduce", 4096)
    assert pods.samples.seconds("all_reduce", 4096) > 1


def test_groups_share_the_port_of_their_pod():
    """All eight pairs leave their pod of two nodes by one port, of which each has an eighth of the rate."""
    layout, nbytes = ParallelLayout(dp=2, tp=8), 8000
    for port, slowest in ((1e-9, 8e-9), (1e-11, 1e-9)):  # before a wide port, the ranks' own are the slowest
        placement = RankPlacement(layout, on(16, 4, pods_of(2, Link(0, 1e-9), Link(0, port))))
        assert placement.samples.leaving == (8,)
        assert placement.samples.seconds("all_reduce", nbytes) == same(2 * 4000 * slowest)


def test_a_hop_between_stages_has_its_part_of_the_port():
    layout = ParallelLayout(dp=2, pp=2, tp=4)  # dp is outermost: stages of a pipeline are two nodes
    placement = RankPlacement(layout, on(16, 4, pods_of(1, Link(0, 5e-9), Link(0, 3e-9))))
    assert placement.to_stage(0, 1) == Link(0, same(4 * 3e-9))
    assert placement.to_stage(0, 1) == contended(placement.network, 4, (4,)).routes[1]


# Prices beside whole schedules, message by message


def simulated(name, placement, axes, nbytes):
    """Return the seconds until all groups of an axis, which begin at once, have run an algorithm, by every message."""
    machine, groups = placement.machine, placement.mesh.groups(*axes)
    row = find("all_gather", name)
    size = len(groups[0])
    rounds = {}
    for ranks in groups:
        for number, rank in enumerate(ranks):
            schedule = row.rounds(number, size, 0, in_nodes(size, 1))
            runs = [range(chunk, chunk + 1) for chunk in range(size)]
            rounds[rank] = [summary(moves, rank) for moves in embed(schedule, ranks, runs)]
    by_rank = [rounds[rank] for rank in range(len(rounds))]
    simulation = Simulation(by_rank, machine.nodes, placement.network, nbytes / size)
    simulation.run()
    return max(simulation.clock)


@pytest.mark.parametrize("name", ["ring", "recursive_doubling"])
@pytest.mark.parametrize("layout", [ParallelLayout(dp=8, tp=2), ParallelLayout(dp=4, tp=4), ParallelLayout(dp=2, tp=8)])
def test_the_price_is_that_of_all_groups_at_once(name, layout):
    """One rank on each node: the groups share the nodes' links and the pods' ports, and none has messages in nodes."""
    nbytes = 1 << 20
    ports = (None, Link(0, 4e-10), Link(0, 2e-9))
    for port, outer in product(ports, (None, Link(0, 3e-9))):
        tiers = (Tier(2, Link(1e-6, 1e-9), port), *((Tier(4, Link(2e-6, 2e-9), outer),) if outer else ()))
        network = FREE._replace(between=Link(1e-6, 1e-9), nic=Link(0, 1e-9), tiers=tiers)
        placement = RankPlacement(layout, on(16, 1, network))
        group = placement.samples
        shared = contended(group.network, group.groups, group.leaving)
        price = predict(find("all_gather", name), nbytes, group.size, group.nodes, network=shared)
        exact = simulated(name, placement, ("dp", "sp"), nbytes)
        assert 0.75 * exact <= price <= 1.35 * exact  # ports take messages in another order than by rounds


# Placement


def test_tiers_count_the_nodes_of_a_group():
    network = FREE._replace(tiers=(Tier(4, Link(0, 1e-9)), Tier(16, Link(0, 2e-9))))
    placement = RankPlacement(ParallelLayout(dp=32, tp=8), on(256, 4, network))  # every second of 64 nodes
    assert [tier.nodes for tier in placement.samples.network.tiers] == [2, 8]
    assert placement.samples.leaving == (8, 8)
    assert placement.tp.network.tiers == ()
    uneven = RankPlacement(ParallelLayout(dp=8, tp=3), on(24, 1, pods_of(4, Link(0, 1e-9))))
    assert [tier.nodes for tier in uneven.samples.network.tiers] == [1]  # nodes 0 3 | 6 | 9 | 12 15 | ...


def test_the_port_that_most_groups_leave_counts():
    assert most_leaving(np.array([[0, 0, 0], [0, 1, 1], [2, 1, 0], [1, 1, 1]])) == 2


def test_a_group_goes_by_pods_where_that_is_faster():
    """Sums inside pods of 64 nodes, and then of 1/64 across, are as few bytes at the ports, in fewer rounds."""
    tier = Tier(64, NDR.between, Link(0.0, 7 / (64 * 400e9)))
    group = AxisGroup(in_nodes(1024, 1), NDR._replace(tiers=(tier,)), 8, (8,))
    nbytes = 1 << 24
    ring = predict(
        find("all_reduce", "ring"), nbytes, 1024, group.nodes, network=contended(group.network, 8, group.leaving)
    )
    inside, across = group.pods
    assert (inside.size, across.size, across.leaving) == (64, 16, (512,))
    assert across.network.tiers[0].nodes == 1
    assert group.seconds("all_reduce", nbytes) == same(group.in_two(group.pods, "all_reduce", nbytes))
    assert group.seconds("all_reduce", nbytes) < ring / 2


def test_a_slower_host_slows_what_leaves_its_pod_too():
    network = pods_of(2, Link(1e-6, 3e-9), Link(0, 1e-9))
    half = with_rate(network, 0.5)
    assert (half.between, half.nic) == (Link(0, 2e-9), Link(0, 5e-10))
    assert half.tiers == (Tier(2, Link(1e-6, 6e-9), Link(0, 1e-9)),)


# Plans


def levels(*values):
    return "".join(
        f"[[levels]]\nsize = {n}\nlatency_us = {us}\ngb_per_s = {rate}\n{more}\n" for n, us, rate, more in values
    )


def plan(capsys, path, text, *flags):
    path.write_text(text)
    assert planner.main([*MODEL, "--fabric", path.name, *flags]) == 0
    return capsys.readouterr().out


def test_two_levels_written_as_three_have_the_same_plan(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    node, port = (4, 3, 100, ""), "port_gb_per_s = 40"
    flat = plan(capsys, tmp_path / "net.toml", levels(node, (8, 10, 10, port)))
    pods = plan(capsys, tmp_path / "net.toml", levels(node, (2, 10, 10, port), (4, 10, 10, "")))
    assert flat == pods
    assert flat.startswith("8 x 4 ranks: net.toml\n")
    slow = plan(capsys, tmp_path / "net.toml", levels(node, (2, 10, 10, port), (4, 10, 0.1, "")))
    assert slow != flat


def test_a_plan_on_a_fabric_with_pods(capsys, tmp_path):
    """One pod of 384 nodes is as none; two take longer for sums of gradients, the narrower the port."""
    flags = ["--model", "llama-8b", "--global_batch_size", "6144", "--dtype", "bfloat16", "--master_weights"]
    flags += [
        "--tp",
        "8",
        "--pp",
        "1",
        "--sp",
        "1",
        "--zero_stage",
        "1",
        "--recompute",
        "none",
        "--accelerator",
        "h100",
    ]

    def planned(fabric, hosts):
        assert planner.main([*flags, "--hosts", str(hosts), "--fabric", str(fabric)]) == 0
        first, rest = capsys.readouterr().out.split("\n", 1)
        assert first.startswith(f"{hosts} x 8 ranks: ")
        return rest

    def percent_of_gradients(times):
        tier = pods.tiers[0]
        port = Link(0.0, times * tier.port.beta_s_per_byte)
        narrow = pods._replace(tiers=(tier._replace(port=port),))
        (tmp_path / "pods.toml").write_text(to_toml(in_nodes(768 * 8, 8), narrow))
        percent = re.search(
            r"gradients and parameters between replicas ([\d.]+)%", planned(tmp_path / "pods.toml", 768)
        )
        return float(percent[1])

    pods = FABRICS["pods"].network
    assert planned("pods", 384) == planned("ndr", 384)
    percents = [percent_of_gradients(times) for times in (1, 30, 100)]
    assert percents == sorted({*percents})


def test_a_cluster_file_has_tiers(tmp_path):
    tiers = (Tier(2, Link(1e-5, 1e-9), Link(0.0, 5e-10)), Tier(4, Link(2e-5, 2e-9)))
    network = Network(nic=Link(0.0, 1e-9), tiers=tiers)
    hosts = [ClusterHost(f"n{number}", 2, 1.0, 1.0, 4.0) for number in range(8)]
    (tmp_path / "cluster.toml").write_text(str(Cluster(hosts, network)))
    cluster = read(tmp_path / "cluster.toml")
    assert cluster.network == network
    machine = cluster.machine(network, 0.1)
    assert machine.network.nic == (0.0, same(2e-9))  # 4 Gbit/s, half of the network's
    assert [tier.link.beta_s_per_byte for tier in machine.network.tiers] == [same(2e-9), same(4e-9)]
    assert machine.network.tiers[0].port == Link(0.0, 5e-10)
