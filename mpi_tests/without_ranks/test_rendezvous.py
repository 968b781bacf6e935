"""Detection of inconsistent numbers of ranks in launchers' variables."""

import pytest

from collectives.torch_backend.rendezvous import misfits


@pytest.mark.parametrize(
    ("numbers", "odd"),
    [
        ([(1, 2), (0, 2)], []),
        ([(0, 3), (1, 3), (0, 3)], [2]),
        ([(0, 1), (0, 1)], [0, 1]),
        ([(0, 2), (-1, -1)], [1]),
        ([(0, 2), (2, 2)], [1]),
    ],
)
def test_numbers_of_ranks_that_misfit(numbers, odd):
    assert misfits(numbers) == odd
