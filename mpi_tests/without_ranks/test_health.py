"""The judge of a run's health names the ranks that hold the others up, from given times, and nobody else."""

import math

import numpy as np
import pytest

from parallelism.data.load import ReplicaSeconds, numbers_by_time, rebalanced
from parallelism.mesh import mesh_shape
from training.health.judge import FIRST, TOGETHER, WINDOW, Judge, StepSeconds
from training.health.links import Links

NUM_RANKS = 4
USUAL = StepSeconds(computing=0.05, cpu=0.049, waiting=0.004, input=0.001, whole=0.055, passes=0.045)


class Run:
    """A run whose ranks take the given times, with noise."""

    def __init__(self, hosts="aabb", stages=(0, 0, 0, 0), cores=2, noise=0.005, lasting_s=0):
        self.judge = Judge(list(hosts), stages, [cores] * len(hosts), lasting_s)
        self.draw, self.noise = np.random.default_rng(0), noise
        self.step, self.num_ranks, self.together = 0, len(hosts), []

    def steps(self, number, usual=USUAL, **of_ranks):
        """Let steps pass, in which ranks have other times: rank 2's by `rank2`; return what changes."""
        changes = []
        for _ in range(number):
            self.step += 1
            rows = [of_ranks.get(f"rank{rank}", usual) for rank in range(self.num_ranks)]
            noise = self.draw.uniform(1 - self.noise, 1 + self.noise, (self.num_ranks, 1))
            self.together.append(np.array(rows) * noise)
            if len(self.together) == TOGETHER:
                changes += self.judge.take(self.step, np.stack(self.together))
                self.together = []
        return changes


def slower(ratio, core=0.98):
    """Return the times of a rank that takes longer to compute, and gets a fraction of a core."""
    computing = ratio * USUAL.computing
    return USUAL._replace(computing=computing, cpu=core * computing)


def test_nothing_is_said_of_equal_ranks():
    assert Run(noise=0.15).steps(300) == []


@pytest.mark.parametrize(
    ("times", "kind", "core"), [(slower(1.9), "slow", 98), (slower(1.9, 0.52), "load", 52), (slower(1.43), "slow", 98)]
)
def test_a_slow_rank_is_named_within_20_steps_with_the_core_that_it_gets(times, kind, core):
    run = Run()
    assert run.steps(40) == []
    [begin] = run.steps(20, rank2=times)
    assert (begin.finding.kind, begin.finding.ranks, begin.begins) == (kind, (2,), True)
    ratio = times.computing / USUAL.computing
    words = f"rank 2 (b) computes {ratio:.1f} times as long as the median of 20 steps; it gets {core}% of a core"
    assert str(begin) == f"step {begin.step}: {words}"
    assert run.steps(100, rank2=times) == []
    [end] = run.steps(20)
    assert str(end) == f"step {end.step}: rank 2 (b) computes as fast as the others again"
    assert run.steps(100) == []


def test_a_rank_that_is_slow_from_the_start_is_named_in_the_first_verdict():
    [begin] = Run().steps(FIRST + WINDOW + TOGETHER, rank0=slower(2.0))
    assert begin.finding.ranks == (0,)


def test_where_ranks_share_cores_a_slow_one_is_told_by_its_cpu_time():
    run = Run(hosts="aaaa")
    usual = slower(1.0, 0.5)
    run.steps(40, usual=usual)
    [begin] = run.steps(20, usual=usual, rank1=slower(1.25, 0.6))
    assert (begin.finding.kind, begin.finding.ranks) == ("slow", (1,))
    assert run.steps(60, usual=usual, rank1=usual._replace(cpu=1.5 * usual.cpu))[0].begins is False


def test_a_rank_that_is_slow_for_a_second_is_not_named():
    run = Run(lasting_s=2)
    run.steps(40)
    assert run.steps(25, rank1=slower(2.0)) == []
    assert run.steps(40) == []
    assert run.steps(30, rank1=slower(2.0)) == []
    assert [each.finding.ranks for each in run.steps(30, rank1=slower(2.0))] == [(1,)]


def test_the_seconds_for_which_a_rank_is_slow_begin_with_its_first_slow_step():
    """In long steps, the window alone shows that it lasts: the first verdict that can tell names the rank."""
    run = Run(lasting_s=2)
    run.steps(40)
    times = slower(2.0)._replace(whole=0.2)
    assert run.steps(10, usual=USUAL._replace(whole=0.2), rank1=times) == []
    [begin] = run.steps(5, usual=USUAL._replace(whole=0.2), rank1=times)
    assert begin.finding.ranks == (1,)


def test_why_a_rank_is_slow_may_change_without_a_word():
    run = Run()
    assert len(run.steps(40, rank1=slower(2.0))) == 1
    assert run.steps(100, rank1=slower(2.0, 0.5)) == []


def test_a_rank_without_others_of_its_stage_is_compared_with_its_own_past():
    """Its stage may have more to compute than others, but not more than before."""
    run = Run(stages=(0, 1, 2, 3))
    assert run.steps(60, rank1=slower(3.0)) == []
    [begin] = run.steps(20, rank1=slower(6.0))
    words = f"step {begin.step}: rank 1 (a) computes 2.0 times as long as before; it gets 98% of a core"
    assert str(begin) == words


def test_what_slows_all_ranks_names_none_of_them():
    run = Run()
    run.steps(40)
    [begin] = run.steps(25, usual=slower(2.0))
    assert begin.finding.kind == "all"
    assert str(begin).startswith(f"step {begin.step}: all ranks compute 2.0 times as long as before step ")
    assert str(begin).endswith("; they get 98% of a core, 98% before")
    [end] = run.steps(25)
    assert str(end) == f"step {end.step}: all ranks compute as fast as before again"


def test_of_two_ranks_the_slower_one_is_named():
    run = Run(hosts="ab", stages=(0, 0))
    run.steps(40)
    [begin] = run.steps(20, rank1=slower(1.9))
    assert (begin.finding.kind, begin.finding.ranks) == ("slow", (1,))


def test_a_host_whose_ranks_do_not_get_their_cores_is_named_as_loaded():
    run = Run()
    run.steps(40)
    [begin] = run.steps(25, rank2=slower(1.9, 0.5), rank3=slower(1.9, 0.5))
    assert begin.finding.kind == "load"
    assert begin.finding.ranks == (2, 3)
    words = "the 2 ranks of b get 50% of a core each: other processes use them, or a limit holds"
    assert str(begin) == f"step {begin.step}: {words}"


def test_ranks_that_share_cores_are_not_loaded_but_by_other_processes():
    run = Run(hosts="aaaa")
    assert run.steps(60, usual=slower(1.0, 0.5)) == []
    assert [each.finding.kind for each in run.steps(30, usual=slower(1.3, 0.3))] == ["load"]


def test_a_late_input_is_named():
    run = Run()
    run.steps(40)
    [begin] = run.steps(20, rank3=USUAL._replace(input=0.02))
    assert (begin.finding.kind, begin.finding.ranks) == ("input", (3,))
    assert str(begin) == f"step {begin.step}: rank 3 (b) waits 20 ms for its input in a step of 55 ms"
    [end] = run.steps(25)
    assert str(end) == f"step {end.step}: rank 3 (b) gets its input in time again"


def test_what_costs_the_others_nothing_is_not_named():
    """Twice as long for a twentieth of the step."""
    brief = StepSeconds(computing=0.001, cpu=0.001, waiting=0.05, input=0, whole=0.055, passes=0)
    assert Run().steps(60, usual=brief, rank1=brief._replace(computing=0.002, cpu=0.002)) == []


def test_a_step_that_does_not_count_for_one_rank_counts_for_none():
    run = Run()
    run.steps(40)
    unusual = StepSeconds(*[math.nan] * len(StepSeconds._fields))
    for _ in range(30):
        assert run.steps(1, rank0=unusual, rank1=slower(3.0)) == []


LINKS = [(0, 1), (1, 2), (2, 3), (0, 3)]


def test_links_are_measured_at_first_and_where_all_wait_longer():
    run = Run(hosts="abcd")
    num_measured = 0
    for number in range(200):
        run.steps(1, usual=USUAL._replace(waiting=0.004 if number < 100 else 0.04))
        if run.judge.wants_links:
            num_measured += 1
            run.judge.take_links(run.step, [])
            assert run.step < 30 or run.step > 100
    assert num_measured > 2


def test_links_are_not_measured_where_a_rank_is_slow_or_there_is_one_host():
    run, of_one = Run(hosts="abcd"), Run(hosts="aaaa")
    of_one.steps(60)
    of_one.steps(60, usual=USUAL._replace(waiting=0.04))
    assert not of_one.judge.wants_links
    run.steps(40)
    run.judge.take_links(run.step, [])
    run.steps(60, usual=USUAL._replace(waiting=0.04), rank1=slower(2.0)._replace(waiting=0.04))
    assert not run.judge.wants_links


def links_of(hosts, **axes):
    return Links(mesh_shape(len(hosts), **axes), list(hosts))


@pytest.mark.parametrize(
    ("hosts", "axes", "pairs"),
    [
        ("abcd", {"dp": 4}, [(0, 1), (0, 3), (1, 2), (2, 3)]),
        ("aabb", {"dp": 2, "tp": 2}, [(0, 2)]),
        ("abcd", {"dp": 2, "pp": 2}, [(0, 1), (0, 2), (1, 3), (2, 3)]),
        ("aaaa", {"dp": 4}, []),
    ],
)
def test_neighbouring_hosts_are_measured_once_and_one_at_a_time(hosts, axes, pairs):
    links = links_of(hosts, **axes)
    assert sorted(links.pairs) == pairs
    for together in links.rounds:
        ends = [hosts[rank] for pair in together for rank in pair]
        assert len(ends) == len(set(ends))


def slow_links(links, slow, ratio=3.0):
    seconds = np.array([0.002 * (ratio if pair in slow else 1) for pair in links.pairs])
    return [(each.ranks, each.words) for each in links.slow(seconds)]


def test_a_slow_link_is_named_beside_others_or_beside_its_past():
    links = links_of("abcd", dp=4)
    assert slow_links(links, []) == []
    words = "messages between b and c take 3.0 times as long as those between other hosts"
    assert slow_links(links, [(1, 2)]) == [((1, 2), words)]
    alone = links_of("ab", dp=2)
    assert slow_links(alone, [], 1.0) == []
    assert slow_links(alone, [(0, 1)]) == [((0, 1), "messages between a and b take 3.0 times as long as before")]
    assert slow_links(alone, []) == []


@pytest.mark.parametrize("hosts", ["abcd", "abc"])
def test_a_host_with_slow_links_alone_is_named(hosts):
    links = links_of(hosts, dp=len(hosts))
    slow = [pair for pair in links.pairs if 1 in pair]
    assert slow_links(links, slow) == [
        ((1,), "messages from and to b take 3.0 times as long as those between other hosts")
    ]


@pytest.mark.parametrize("seed", range(20))
def test_micro_batches_go_to_the_replicas_so_that_the_slowest_ends_soonest(seed):
    """Beside all ways to divide them."""
    draw = np.random.default_rng(seed)
    replicas = [ReplicaSeconds(*each) for each in draw.uniform(0.1, 1, (3, 2))]
    ways = [(a, b, 9 - a - b) for a in range(1, 8) for b in range(1, 9 - a)]
    ends_s = [max(map(ReplicaSeconds.end_s, replicas, way)) for way in ways]
    numbers = numbers_by_time(replicas, 9)
    assert sum(numbers) == 9
    assert max(map(ReplicaSeconds.end_s, replicas, numbers)) == pytest.approx(min(ends_s))


def test_micro_batches_stay_where_little_would_be_gained():
    near, far = [ReplicaSeconds(1), ReplicaSeconds(1.05)], [ReplicaSeconds(1), ReplicaSeconds(3)]
    assert rebalanced([5, 5], near) == [5, 5]
    assert rebalanced([5, 5], far) == [8, 2]  # which ends after 8 s, 7 and 3 after 9
