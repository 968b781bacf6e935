"""The training runs of mpi_tests.gpu_check, on the CPU."""

from functools import cache, partial

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from mpi_tests.gpu_check.layouts import numbers
from mpi_tests.gpu_check.mixes import MIXES, RANKS
from mpi_tests.helpers.ranks import from_first

ITERATIONS = 2


@cache
def one_rank_run(settings):
    """Return the numbers of a run of one process with these settings."""
    with Communicator(MPI.COMM_SELF) as alone:
        mix = next(mix for mix in MIXES.values() if mix.settings == settings)
        return numbers(alone, mix, "cpu", ITERATIONS)


@pytest.mark.parametrize("name", [name for name, mix in MIXES.items() if "--compile" not in mix.layout])
@pytest.mark.sizes(RANKS)
def test_every_mix_has_the_losses_of_one_rank(comm, name):
    mix = MIXES[name]
    rtol = 1e-3 if mix.settings.startswith("--dtype") else 1e-5
    want = from_first(comm.mpi, partial(one_rank_run, mix.settings))
    actual = numbers(comm, mix, "cpu", ITERATIONS)
    assert len(actual["losses"]) == ITERATIONS
    for what in ("losses", "norm"):
        np.testing.assert_allclose(actual[what], want[what], rtol=rtol)
