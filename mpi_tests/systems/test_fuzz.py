"""Fuzz collectives for seconds; `make test-all` does so for minutes, with other seeds."""

import re

import pytest

from mpi_tests.helpers.launch import launch


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_collectives(num_ranks):
    result = launch(num_ranks, "python", "-m", "mpi_tests.fuzz", "--seconds", "5")
    assert result.returncode == 0, result.stderr
    count = re.fullmatch(rf"(\d+) collectives on up to {num_ranks} ranks as NumPy's, --seed 0\n", result.stdout)
    assert count
    assert int(count[1]) >= 20


def test_a_wrong_result_is_found_and_its_case_repeats_it():
    """The test makes the reference of sums wrong."""
    program = (
        "import numpy as np; from mpi_tests import fuzz\n"
        "from mpi_tests.helpers import reference\n"
        "reference.UFUNCS['sum'] = np.maximum\n"
        "fuzz.main()\n"
    )
    result = launch(2, "python", "-c", program, "--seconds", "30")
    assert result.returncode != 0
    match = re.search(
        r"^case (\d+) of --seed 0, rank \d: wrong in \d+ of \d+ elements, the first at \d+: Case\(", result.stderr, re.M
    )
    assert match
    again = launch(2, "python", "-c", program, "--only", match[1])
    assert f"case {match[1]} of --seed 0, rank " in again.stderr
