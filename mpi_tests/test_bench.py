"""The parts of the benchmark, without ranks."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from collectives.bench import flags
from collectives.bench.measure import Result
from collectives.bench.trial import Trial, element_counts
from collectives.tuning import Case
from mpi_tests.reference import COLLECTIVES, expected, same


def trials(collective: str, size: int) -> list[Trial]:
    count = element_counts(collective, size, sizes=[100])[0]
    comms = [SimpleNamespace(rank=rank, size=size, empty=np.empty) for rank in range(size)]
    return [Trial(comm, collective, count, memory) for comm in comms for memory in ("symmetric",)]


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_what_a_trial_wants_is_what_the_collective_does(collective):
    for size in (1, 2, 3, 8):
        ranks = trials(collective, size)
        given = [ranks[0].given if trial.given is None else trial.given for trial in ranks]
        for trial in ranks:
            trial.fill()
            want = expected(collective, given, trial.rank)
            same(trial.wanted, want)
            trial.check(want)
            if want is not None:
                for wrong in (want + 1, want[::-1], trial.arguments.get("out", -want - 1)):
                    with pytest.raises(AssertionError, match=f"{collective} of .* bytes has a wrong result on rank"):
                        trial.check(wrong)


def test_the_fastest_is_ours_and_the_first_of_equals():
    def fastest(**seconds):
        return Result(Case("all_reduce", "ordinary", 2, 1), 8, seconds).fastest

    assert fastest(ring=1.0, binomial=0.9, mpi=0.1) == "binomial"
    assert fastest(ring=1.0, binomial=0.98) == "ring"
    assert fastest(mpi=1.0) == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-b", "1X"], "argument -b/--begin: '1X' is no size: write one like 8, 64K, 1M or 1G; see --help"),
        (["-b", "2K", "-e", "1K"], "--begin 2048 is above --end 1024: exchange them"),
        (["-n", "0"], "argument -n/--repeats: '0' must be a whole number above 0; see --help"),
        (["--collectives", "barrier", "--algorithms", "ring"], "--algorithms ring: there are dissemination, "),
        (["--collectives", "allreduce"], "argument --collectives: invalid choice: 'allreduce'"),
    ],
)
def test_flags_that_make_no_sense(monkeypatch, words, message):
    monkeypatch.setattr("sys.argv", ["bench", *words])
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        flags.parse("")


def test_default_flags(monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench"])
    given = flags.parse("")
    assert (given.begin, given.end, given.factor, given.tune) == (8, 64 << 20, 4, None)
