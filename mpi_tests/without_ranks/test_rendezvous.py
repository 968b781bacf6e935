"""Detection of inconsistent numbers of ranks in launchers' variables."""

import pytest

from collectives.torch_backend.rendezvous import misfit


@pytest.mark.parametrize(
    ("numbers", "odd"),
    [
        ([(1, 2), (0, 2)], None),
        ([(0, 3), (1, 3), (0, 3)], 2),
        ([(0, 1), (0, 1)], 0),
        ([(0, 2), (-1, -1)], 1),
        ([(0, 2), (2, 2)], 1),
    ],
)
def test_the_first_rank_that_misfits(numbers, odd):
    assert misfit(numbers) == odd
