"""The planner measures a cluster: on a rig whose second host has half of the CPU time and a third of the link."""

import shlex
import sys

import pytest

from mpi_tests.helpers.launch import launch, refusal
from mpi_tests.rig import Rig, UnavailableError
from parallelism.planner.__main__ import main
from parallelism.planner.cluster import read

MODEL = "--block_size 64 --n_embd 128 --num_micro_batches 8 --micro_batch_size 1"
PROGRAM = (sys.executable, "-m", "parallelism.planner", *MODEL.split())


def test_a_slow_host_is_measured_and_gets_less(tmp_path, capsys):
    path = tmp_path / "cluster.toml"
    try:
        with Rig(hosts=2, slots=1, rate="1gbit,300mbit", cpu="1,0.3") as rig:
            result = rig.launch(*PROGRAM, "--measure", "--cluster", path)
    except UnavailableError as error:
        pytest.skip(str(error))
    assert result.returncode == 0, result.stderr
    cluster = read(path)
    fast, slow = cluster.hosts
    assert (fast.name, slow.name) == ("rig1", "rig2")
    assert (fast.ranks, slow.ranks) == (1, 1)
    assert slow.tflops < 0.8 * fast.tflops
    assert 0.1 < slow.gbit < 0.5  # a pair of hosts is as fast as the slower one
    assert cluster.network.between.beta_s_per_byte > 8e-9
    assert main(["--cluster", str(path), *MODEL.split(), *shlex.split("--pp 1 --tp 1 --sp 1")]) == 0
    planned = capsys.readouterr().out
    assert "of the sum of the hosts' speeds" in planned
    assert "of the sum of the hosts' speeds" in result.stdout


@pytest.mark.shares_cores
@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--cluster nowhere.toml", "2 ranks plan nothing: pass --measure --cluster FILE, or start without mpirun"),
        ("--measure --cluster no/where.toml", "--cluster no/where.toml: there is no folder no, so make it first"),
    ],
)
def test_what_ranks_cannot_plan_is_refused_once(flags, why):
    assert why in refusal(launch(2, *PROGRAM, *flags.split()))
