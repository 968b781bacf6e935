"""Horovod programs, as their users start them."""

import pytest

from mpi_tests.helpers.launch import launch

pytestmark = pytest.mark.shares_cores

BEGIN = "import torch, collectives.horovod.torch as hvd; hvd.init(); "


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_example_learns(ranks):
    result = launch(ranks, "python", "examples/horovod_digits.py")
    lines = [f"rank {rank} of {ranks} reads 100% of the digits" for rank in range(ranks)]
    assert sorted(result.stdout.splitlines()) == lines, result.stderr


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("hvd.elastic.run", "hvd.elastic is not supported: write checkpoints, and start again from the last"),
        ("hvd.allreduce(torch.ones(1), name='ab'[hvd.rank()])", "ranks disagree: rank 0 waits for allreduce 'a' of"),
        (
            "hvd.allreduce(torch.ones(1 + hvd.rank()))",
            "ranks disagree: rank 0 calls allreduce 'noname.1' of float32 (1,)",
        ),
    ],
)
def test_a_job_ends_with_one_line(code, words):
    result = launch(2, "python", "-c", BEGIN + code)
    assert result.returncode == 2
    own = [line for line in result.stderr.splitlines() if "error" in line or "Traceback" in line]
    assert len(own) == 1, result.stderr
    assert own[0].startswith(f"error: {words}")


def test_a_refusal_that_joined_ranks_do_not_hear_of_ends_the_job():
    result = launch(2, "python", "-c", f"{BEGIN}hvd.allgather(torch.ones(1)) if hvd.rank() else hvd.join()")
    assert result.returncode != 0
    assert "rank 1 of 2 failed and ends the job" in result.stderr
    assert "rank 0 has joined, and zeros are no part of it" in result.stderr
