"""The planner on hosts that differ: times and memory against sums by hand, and the cluster file that describes them."""

import itertools
import re
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from collectives.schedule.fabrics import in_nodes
from collectives.schedule.network import Link, Network
from models.config import ModelConfig
from parallelism.pipeline.balance import balance
from parallelism.planner import Machine, ParallelLayout, TrainingJob, best, ranks
from parallelism.planner.__main__ import main
from parallelism.planner.cluster import Cluster, ClusterHost, read
from parallelism.planner.counts import param_counts
from parallelism.planner.division import divisions
from parallelism.planner.flops import block_flops, head_flops
from parallelism.planner.memory import memory, model_shards, rank_params
from parallelism.planner.place import Host, RankPlacement
from parallelism.planner.ranks import rounds_of_pairs
from parallelism.planner.search import search
from training.settings import layout
from training.settings.config import Config

MODEL = ModelConfig(vocab_size=101, block_size=32, n_layer=6, n_head=4, n_embd=64)
FREE = Network(Link(0, 0), Link(0, 0), 0, 0, 0)  # links that take no time
DP = {"pp": 1, "sp": 1, "tp": 1, "micro_batch_size": 1, "recompute": "none", "zero_stage": 0}
PP = {**DP, "pp": 2, "schedule": "1f1b", "virtual_stages": 1}
MICRO_BATCH_S = 3 * MODEL.block_size * (6 * block_flops(MODEL) + head_flops(MODEL)) / 1e12


def hosts_at(*speeds, network=FREE, memory_bytes=1e9, **more):
    """Return hosts of one rank each at fractions of 1 TFLOP/s."""
    hosts = [Host(speed, **{name: values[rank] for name, values in more.items()}) for rank, speed in enumerate(speeds)]
    return Machine(in_nodes(len(speeds), 1), network, 1e12, memory_bytes, hosts=tuple(hosts))


@pytest.mark.parametrize("speeds", [(1, 0.5), (1, 1, 0.5, 0.25), (0.3, 1, 0.7)])
def test_replicas_get_the_micro_batches_with_which_the_slowest_ends_soonest(speeds):
    """No other numbers, of all that there are, would be faster."""
    total = 4 * len(speeds)
    planned = best(TrainingJob(MODEL, total), hosts_at(*speeds), DP)
    every = [numbers for numbers in itertools.product(range(1, total), repeat=len(speeds)) if sum(numbers) == total]
    least = min(max(number / speed for number, speed in zip(numbers, speeds, strict=True)) for numbers in every)
    slowest = max(number / speed for number, speed in zip(planned.numbers, speeds, strict=True))
    assert sum(planned.numbers) == total
    assert slowest == least
    assert planned.time.total == pytest.approx(slowest * MICRO_BATCH_S)


@pytest.mark.parametrize("fixed", [{"zero_stage": 3}, {"sp": 2}, {"tp": 2}])
def test_where_micro_batches_cannot_move_all_wait_for_the_slowest_host(fixed):
    job = TrainingJob(MODEL, 8)
    equal = best(job, hosts_at(1, 1, 1, 1), DP | fixed)
    planned = best(job, hosts_at(1, 1, 1, 0.25), DP | fixed)
    assert planned.numbers == ()
    assert planned.time.compute == pytest.approx(4 * equal.time.compute)


def test_moving_micro_batches_costs_the_exact_sum_of_gradients():
    """Nothing moves if the reading and writing of integers takes longer than waiting for a host."""
    slow_copies = FREE._replace(copy_s_per_byte=1e-6)
    job = TrainingJob(MODEL, 12)
    assert best(job, hosts_at(1, 0.5), DP).numbers == (8, 4)
    assert best(job, hosts_at(1, 0.5, network=slow_copies), DP).numbers == ()
    moved, plain = (best(job, hosts_at(1, 0.5), DP, moves) for moves in (True, False))
    assert moved.memory.gradients == 2 * plain.memory.gradients


def test_a_slow_host_gets_fewer_layers_of_a_pipeline():
    job, number = TrainingJob(MODEL, 8), 8
    planned = best(job, hosts_at(1, 0.5), PP)
    head = head_flops(MODEL) / block_flops(MODEL)
    parts = balance([1, 1, 1, 1, 1, 1 + head], 2, [1, 0.5])
    assert planned.layers == tuple(map(len, parts)) == (4, 2)
    block_s = MICRO_BATCH_S / (6 + head)
    first_s, last_s = 4 * block_s, (2 + head) * block_s / 0.5
    # The last stage waits for the first one's forward pass, and the first one for the last backward pass, two thirds.
    assert planned.time.total == pytest.approx(first_s / 3 + number * last_s + first_s * 2 / 3)


def test_stages_are_cut_for_the_slowest_replica_of_each_pipeline_rank():
    """Ranks 0 and 1 are one pipeline, ranks 2 and 3 another, whose last rank is slow."""
    planned = best(TrainingJob(MODEL, 8), hosts_at(1, 1, 1, 0.5), PP | {"dp": 2})
    assert planned.layers == (4, 2)
    a, b = planned.numbers or (4, 4)
    assert a >= b


def test_hosts_within_15_percent_get_equal_stages():
    assert best(TrainingJob(MODEL, 8), hosts_at(1, 0.9), PP).layers == ()


def test_a_layout_fits_if_each_stage_fits_into_its_host():
    """Without the limit of the host with the head, both hosts would be as full as the other one."""
    job, layout = TrainingJob(MODEL, 8), ParallelLayout(pp=2, num_micro_batches=8)
    shards = model_shards(job, layout)
    first, last = (memory(job, layout, [shard, shard], 1).total for shard in shards)
    for of_first, of_last, fits in ((1.01, 1.01, True), (0.99, 1.01, False), (1.01, 0.99, False), (0.99, 9, False)):
        limits = [first * of_first, last * of_last]
        machine = hosts_at(1, 1, memory_bytes=max(limits), memory=[limit / max(limits) for limit in limits])
        result = search(job, machine, PP)
        assert bool(result.best) == fits
        if not fits:
            assert result.nearest[0][1].limit == pytest.approx(limits[0] if of_first < 1 else limits[1])


def test_a_group_has_the_rate_of_its_slowest_link():
    network = FREE._replace(between=Link(0, 1e-9), nic=Link(0, 1e-9))
    machine = hosts_at(1, 1, 1, 1, network=network, rate=[1, 1, 1, 0.5])
    pairs = RankPlacement(ParallelLayout(dp=2, tp=2), machine)
    assert pairs.samples.network.between.beta_s_per_byte == pytest.approx(2e-9)  # 0 with 2, and 1 with 3
    pipelines = RankPlacement(ParallelLayout(pp=4), machine)
    seconds = [pipelines.to_stage(stage, stage + 1).seconds(1e9) for stage in range(3)]
    assert seconds == pytest.approx([1, 1, 2])


def test_gradients_that_do_not_overlap_are_added_up_after_the_passes():
    """Their time is all of a reduction's, which none of the backward pass hides."""
    network = FREE._replace(between=Link(0, 2e-11), nic=Link(0, 2e-11))
    job, machine = TrainingJob(MODEL, 16, bucket_mb=0.01), hosts_at(1, 1, 1, 1, network=network)
    hidden, shown = (best(job, machine._replace(overlaps=overlaps), DP).time for overlaps in (True, False))
    whole_s = 2 * (1 - 1 / 4) * 4 * rank_params(job, ParallelLayout(dp=4))[0] * 2e-11
    assert shown.dp == pytest.approx(whole_s, rel=0.01)
    assert hidden.dp < 0.6 * shown.dp
    assert shown.compute == hidden.compute


def test_equal_hosts_are_planned_as_one_kind_of_host():
    job, plain = TrainingJob(MODEL, 8), hosts_at(1, 1)._replace(hosts=())
    assert search(job, hosts_at(1, 1), number=4) == search(job, plain, number=4)


def test_every_rank_of_a_host_has_its_speed():
    """Two hosts of two ranks: tp in a host leaves the fast one waiting, dp over both does not."""
    hosts = Host(), Host(speed=0.5)
    machine = Machine(in_nodes(4, 2), FREE, 1e12, 1e9, hosts=hosts)
    assert machine.sum_of_speeds == 3e12
    placement = RankPlacement(ParallelLayout(dp=2, pp=2), machine)
    assert placement.speeds == [(1, 1), (0.5, 0.5)]
    assert placement.stage_speeds == (1, 1)
    (equal, moved) = divisions(TrainingJob(MODEL, 6), ParallelLayout(dp=2, pp=2, num_micro_batches=3), placement, True)
    assert equal.setting.speeds == moved.setting.speeds == (0.5, 0.5)
    assert moved.numbers == (4, 2)
    assert (equal.setting.layout.num_micro_batches, moved.setting.layout.num_micro_batches) == (3, 2)


# The cluster file

HOST = "[[hosts]]\nname = 'a'\nranks = 2\ntflops = 2.0\nmemory = 8\n"
OTHER = HOST.replace("'a'", "'b'").replace("2.0", "1.0")


def test_a_file_holds_what_was_measured(tmp_path):
    network = Network(Link(3e-6, 3e-10), Link(3e-5, 1e-9), cores=2, nic=Link(1e-6, 1e-9))
    hosts = [ClusterHost("node 1", 4, 0.125, 12.5, 1.5), ClusterHost("node2", 2, 0.5, 8.0)]
    cluster = Cluster(hosts, network, 1.5e-5, overlaps=False, update_s=3e-9, sync_s=2e-5)
    (tmp_path / "cluster.toml").write_text(str(cluster))
    assert read(tmp_path / "cluster.toml") == cluster
    assert cluster.nodes == ((0, 1, 2, 3), (4, 5))


def test_the_machine_of_a_cluster():
    hosts = [ClusterHost("a", 1, 4.0, 10.0, 1.0), ClusterHost("b", 2, 1.0, 20.0, 4.0)]
    machine = Cluster(hosts).machine(Network(between=Link(1e-5, 3e-9), nic=Link(1e-6, 1e-9)), spare=0.5)
    assert machine.hosts == (Host(1.0, 0.5, 0.25), Host(0.25, 1.0, 1.0))
    assert (machine.flops_per_s, machine.memory_bytes, machine.nodes) == (4e12, 1e10, ((0,), (1, 2)))
    assert machine.network.nic == (1e-6, pytest.approx(2e-9))  # 4 Gbit/s
    assert machine.network.between == (1e-5, pytest.approx(6e-9))  # of one rank, a third


def test_the_plan_says_what_each_host_gets_and_what_is_lost(capsys, tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text((HOST + OTHER).replace("ranks = 2", "ranks = 1"))
    dp = "--pp 1 --tp 1 --sp 1 --micro_batch_size 8 --num_micro_batches 6"
    assert main(["--cluster", str(path), *dp.split()]) == 0
    out = capsys.readouterr().out
    assert "a: 1 x 2.0 TFLOP/s, 8.0 GB" in out
    assert "micro-batches of its dp ranks: 8, 4" in out
    fraction = float(re.search(r"computes at ([\d.]+)% of the sum of the hosts' speeds; lost: ", out)[1])
    assert 50 < fraction < 100
    assert out.splitlines()[-1].endswith("--reproducible --balance_load")
    assert main(["--cluster", str(path), "--pp", "2"]) == 0
    out = capsys.readouterr().out
    assert "blocks of its pp ranks: 3, 1" in out
    assert out.splitlines()[-1].endswith("--balance measured")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "there are no hosts: write a table [[hosts]] for each"),
        ("hosts = ['a']", "there are no hosts: write a table [[hosts]] for each"),
        (HOST.replace("2.0", "0"), "host a: tflops=0 must be above 0 and at most 1000000 TFLOP/s"),
        (HOST.replace("2.0", "nan"), "host a: tflops=nan must be above 0"),
        (HOST.replace("= 2\n", "= 0\n"), "host a: ranks=0 must be from 1 to 131072 ranks"),
        (HOST.replace("= 2\n", "= 1.5\n"), "host a: ranks=1.5 must be of type int"),
        (HOST.replace("memory = 8\n", ""), "host a: memory is missing: add it"),
        (HOST.replace("tflops", "tflop"), "host a: tflop is not a key (nearest: tflops): use name, ranks, tflops, "),
        (HOST + "gbit = 0\n", "host a: gbit=0 must be above 0 and at most 1000000 Gbit/s"),
        (HOST + HOST, "host a is there twice: write one table, with all of its ranks"),
        ("overlaps = 1\n" + HOST, "overlaps=1 must be of type bool"),
        ("least_pass = -1\n" + HOST, "least_pass=-1 must be from 0 to 1000000000 us"),
        ("links = 1\n" + HOST, "links is not a key: use hosts, network, least_pass, sync, update, overlaps"),
        ("sync = -1\n" + HOST, "sync=-1 must be from 0 to 1000000000 us"),
        ("update = 'long'\n" + HOST, "update='long' must be of type float"),
        ("network = 1\n" + HOST, "network=1 must be a table [network]: write one, or remove it"),
        (HOST + "[network]\nwithin = 1", "'within'"),
        ("hosts", "not TOML"),
        (HOST.replace("= 2\n", "= 131072\n") + OTHER, "131074 ranks: use 131072 at most"),
    ],
)
def test_bad_cluster_files(capsys, tmp_path, text, why):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    assert main(["--cluster", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {path}: ")
    assert why in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--hosts 2", "--hosts 2 has no effect with --cluster, which states it: omit one of them"),
        ("--tflops 1.5", "--tflops 1.5 has no effect with --cluster"),
        ("--efficiency 0.9", "--efficiency 0.9 has no effect with --cluster"),
        ("--hostfile lacks", "cluster: host b is not in lacks, which has a: remove it, or add it there"),
        ("--hostfile more", "cluster: host c of more is missing: add it, or measure the cluster again"),
        ("--hostfile nowhere", "nowhere: can't be read"),
        ("--tp 3", "no layout of 4 ranks: none has tp=3"),
    ],
)
def test_flags_that_a_cluster_contradicts(capsys, tmp_path, monkeypatch, flags, why):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster").write_text(HOST + OTHER)
    (tmp_path / "lacks").write_text("# two slots\na slots=2\n")
    (tmp_path / "more").write_text("a:2\nb:2\n\nc:2\n")
    assert main(["--cluster", "cluster", *flags.split()]) == 2
    err = capsys.readouterr().err
    assert why in err
    assert err.count("\n") == 1


def test_a_hostfile_with_the_hosts_of_a_cluster(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster").write_text(HOST + OTHER)
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    assert main(["--cluster", "cluster", "--hostfile", "hosts"]) == 0
    assert "mpirun --hostfile hosts -n 4 " in capsys.readouterr().out


@pytest.mark.parametrize("number", [2, 3, 4, 5, 8, 13])
def test_no_host_is_taken_for_slow_because_another_one_is(number):
    """With one slow host in any place, the others' best exchange is a fast one; each has one partner at a time."""
    for slow in range(number):
        rates = dict.fromkeys(range(number), 0.0)
        for pairs in rounds_of_pairs(number):
            assert len({host for pair in pairs for host in pair}) == 2 * len(pairs)
            for pair in pairs:
                rates |= {host: max(rates[host], 0.1 if slow in pair else 1.0) for host in pair}
        assert rates == {host: 0.1 if host == slow or number == 2 else 1.0 for host in range(number)}


def test_hosts_that_are_equally_fast_but_for_noise_are_planned_as_equal(monkeypatch):
    """`--layout auto` measures shortly; a file has what was measured."""
    each = np.array([[1.0e12, 8e9, 1e-4, 1e-9], [0.9e12, 8e9, 1e-4, 1e-9], [0.5e12, 8e9, 1e-4, 2e-9]])
    nodes = ((0,), (1,), (2,))
    monkeypatch.setattr(ranks, "own_speed", lambda *_: each)
    monkeypatch.setattr(ranks, "sync_s", lambda *_: 1e-5)
    comm = SimpleNamespace(topology=SimpleNamespace(nodes=nodes), host_names=lambda: ["a", "b", "c"], network=FREE)
    machine = ranks.machine(comm, TrainingJob(MODEL, 8))
    assert [host.speed for host in machine.hosts] == pytest.approx([1, 1, (1 + 1 / 0.9) / 2 / 2])
    assert machine.flops_per_s == 0.9e12
    assert (machine.update_s, machine.sync_s) == (1e-9, 1e-5)
    assert [host.tflops for host in ranks.cluster_of(["a", "b", "c"], nodes, each, "cpu").hosts] == [1.0, 0.9, 0.5]


def test_what_no_host_can_hold_is_said_with_the_limit_of_its_host():
    """The second host has half of the memory, and is the one that is too small."""
    machine = hosts_at(1, 1, memory_bytes=2e6, memory=[1, 0.5])
    with pytest.raises(ValueError, match=r"fits into (2\.0|1\.0) MB a rank; the nearest, ") as refusal:
        best(TrainingJob(MODEL, 8), machine, DP)
    assert "fits into 1.0 MB a rank" in str(refusal.value)


def test_an_update_takes_as_long_as_measured():
    job, machine = TrainingJob(MODEL, 8), hosts_at(1, 1)
    params = rank_params(job, ParallelLayout())[0]
    for stage, owners in ((0, 1), (1, 2)):
        update_s = best(job, machine._replace(update_s=1e-3), DP | {"zero_stage": stage}).time.update
        assert update_s == pytest.approx(params * 1e-3 / owners)
    copying = hosts_at(1, 1, network=FREE._replace(copy_s_per_byte=1e-9))  # weights and states, which takes longer
    assert best(job, copying._replace(update_s=1e-12), DP).time.update == best(job, copying, DP).time.update > 0


def test_busy_ranks_wait_for_each_other_in_each_collective():
    """Two ranks of tp add up activations twice in a block and pass, after the embedding, and in the loss twice.

    ZeRO's groups within nodes and across wait, too.
    """
    job, fixed = (
        TrainingJob(MODEL, 2),
        {"tp": 2, "sequence_parallel": False, "recompute": "none", "micro_batch_size": 1},
    )
    machine = Machine(((0, 1),), FREE, 1e12, 1e12, overlaps=False)
    alone, waiting = (best(job, machine._replace(sync_s=sync_s), fixed).time.tp for sync_s in (0.0, 1.0))
    assert waiting - alone == pytest.approx(2 * (4 * MODEL.n_layer + 1 + 1 + 2))  # of 2 micro-batches, in the head once
    four = Machine(in_nodes(4, 2), FREE, 1e12, 1e12, sync_s=1.0)
    owners = RankPlacement(ParallelLayout(dp=4), four).owners
    assert [group.seconds("all_reduce", 8) for group in (*owners["node"], owners["all"][0])] == [1.0, 1.0, 1.0]


def test_communication_shows_where_it_does_not_overlap():
    """With stage 3 all gathers and reductions of blocks, at a byte a second, are on top of the computation."""
    slow = Link(0.0, 1.0)
    network = Network(slow, slow, 0, 0, 0, nic=slow)
    job, fixed = TrainingJob(MODEL, 2), {"dp": 2, "zero_stage": 3, "recompute": "none", "micro_batch_size": 1}
    machine = Machine(((0,), (1,)), network, 1.0, 1e12)
    hidden, shown = (best(job, machine._replace(overlaps=overlaps), fixed).time for overlaps in (True, False))
    params, block = rank_params(job, ParallelLayout())[0], param_counts(MODEL).block
    in_blocks = (3 * MODEL.n_layer - 1) * block  # the last one is not gathered again
    rest = 2 * (params - MODEL.n_layer * block)  # gathered once
    assert shown.zero == pytest.approx((in_blocks + rest) * 4 / 2, rel=1e-6)  # half is the other rank's
    assert hidden.zero < shown.zero


@pytest.mark.parametrize(("layers", "balance"), [((4, 2), "measured"), ((), "counted")])
def test_stages_of_an_automatic_layout_are_cut_as_they_were_planned(monkeypatch, layers, balance):
    plan = SimpleNamespace(layout=ParallelLayout(pp=2, num_micro_batches=4), layers=layers)
    monkeypatch.setattr(layout, "best_layout", lambda *_: plan)
    comm = SimpleNamespace(size=2, rank=1, agreed=lambda _: nullcontext())
    config = layout.planned(Config(data=["LICENSE"], out_dir="", layout="auto"), comm)
    assert (config.pp, config.balance, config.layout) == (2, balance, "given")
