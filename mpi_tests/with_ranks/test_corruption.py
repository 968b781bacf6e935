"""Checks for wrong numbers: one bit is flipped in one place of a run, which names its rank and its parameter."""

import math
import platform
import re

import pytest

from collectives import InputError
from mpi_tests.helpers import bit_flips
from mpi_tests.helpers.bit_flips import TARGETS
from mpi_tests.helpers.ranks import IS_PROOF
from mpi_tests.helpers.trained import GLOBAL_BATCH, alone, check_bits, on
from parallelism.numerics.exact import Rounding

RANK = 1  # with the wrong bit
SETTINGS = {
    "reproducible": True, "global_batch_size": GLOBAL_BATCH, "micro_batch_size": 2, "n_layer": 2, "max_iters": 4,
    "eval_interval": 4, "eval_iters": 1, "dropout": 0.1, "hash_interval": 4, "check_interval": 2,
}  # fmt: skip
SPLIT = {"n_embd": 128, "n_head": 4, "tiles": 4, "dropout": 0.0}
CHECKED, BETWEEN = 4, 3  # the step with a wrong gradient, and the one after which a weight or state is wrong
FIRST = {"sum": CHECKED, "gradient": CHECKED, "message": CHECKED, "weight": BETWEEN, "state": BETWEEN}


def plant(comm, monkeypatch, kind, times=1, first=None):
    if comm.rank == RANK:
        bit_flips.plant(kind, first or FIRST[kind], times, monkeypatch.setattr)


def words(kind):
    return f"^step {CHECKED}: {TARGETS[kind].words.format(rank=RANK)}"


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize(("kind", "zero_stage"), [*((kind, 0) for kind in FIRST), ("sum", 1), ("message", 1)])
def test_a_wrong_bit(comm, monkeypatch, kind, zero_stage):
    plant(comm, monkeypatch, kind)
    with pytest.raises(InputError, match=words(kind)):
        on(comm, **SETTINGS, zero_stage=zero_stage)


@pytest.mark.sizes(4)
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("sum", {"pp": 2}),
        ("message", {"pp": 2, "schedule": "zb_h1", "zero_stage": 1}),
        ("gradient", {"tp": 2, **SPLIT}),
        *[(kind, {"pp": 2}) for kind in ("gradient", "message") if IS_PROOF],
        *[(kind, {"pp": 2, "schedule": "zb_h1", "zero_stage": 1}) for kind in ("sum", "gradient") if IS_PROOF],
        *[(kind, {"tp": 2, **SPLIT}) for kind in ("sum", "message") if IS_PROOF],
    ],
)
def test_a_wrong_bit_of_a_stage_or_a_tile(comm, monkeypatch, kind, layout):
    plant(comm, monkeypatch, kind)
    with pytest.raises(InputError, match=words(kind)):
        on(comm, **{**SETTINGS, **layout})


@pytest.mark.sizes(2, 3)
def test_weights_that_differ_between_replicas(comm, monkeypatch):
    """Two replicas cannot tell which of them is wrong."""
    plant(comm, monkeypatch, "weight", first=2)
    what = "differs between ranks 0 and 1" if comm.size == 2 else "on rank 1 differs from that on ranks 0 and 2"
    with pytest.raises(InputError, match=rf"^step 4: parameter of \S+ {what}: .* of step 2 or before"):
        on(comm, **SETTINGS)


@pytest.mark.sizes(2, 3)
def test_a_rank_that_always_computes_wrongly(comm, monkeypatch):
    plant(comm, monkeypatch, "gradient", times=1_000_000)
    with pytest.raises(InputError, match=words("gradient")):
        on(comm, **SETTINGS)


def unchecked(comm, **changes):
    """Return the outcome without checks, which is that of one rank."""
    return alone(comm, **{**SETTINGS, "check_interval": 0, **changes})


@pytest.mark.sizes(3, proof=(2,))
@pytest.mark.parametrize("kind", ["sum", "gradient", "message"])
def test_a_step_is_computed_again(comm, monkeypatch, kind):
    expected = unchecked(comm)
    plant(comm, monkeypatch, kind)
    outcome = on(comm, **SETTINGS, on_corruption="redo")
    assert outcome.losses == expected.losses
    check_bits(outcome.weights, expected.weights)
    if comm.rank == 0:
        changes = [record["health"] for record in outcome.records if "health" in record]
        begun, ended = [change for change in changes if change["kind"] == kind]
        assert re.match(words(kind), begun["words"])
        assert ended["words"] == "step 4: the step has been computed again"


@pytest.mark.sizes(4)
@pytest.mark.parametrize(
    "layout",
    [{}, {"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3}, {"pp": 2, "schedule": "interleaved", "n_layer": 4},
     {"tp": 2, **SPLIT}, {"sp": 2, "sequence_parts": 4, "dropout": 0.0}],
)  # fmt: skip
def test_checks_change_no_bit(comm, layout):
    changes = {name: value for name, value in layout.items() if name in (*SPLIT, "sequence_parts", "n_layer")}
    outcome, expected = on(comm, **{**SETTINGS, **layout}), unchecked(comm, **changes)
    assert outcome.losses == expected.losses
    check_bits(outcome.weights, expected.weights)


@pytest.mark.sizes(2)
def test_gradients_that_are_not_finite(comm, monkeypatch):
    """They are named as such, by the verdict on every step."""
    own = Rounding.add
    factor = math.nan if comm.rank == RANK else 1
    monkeypatch.setattr(Rounding, "add", lambda rounding, gradient: own(rounding, gradient * factor))
    with pytest.raises(InputError, match=r"rank 1 has a gradient of \S+ that is not finite"):
        on(comm, **{**SETTINGS, "check_interval": 1})


@pytest.mark.sizes(2)
def test_without_exact_sums(comm, monkeypatch):
    plant(comm, monkeypatch, "weight")
    with pytest.raises(InputError, match=words("weight")):
        on(comm, **{**SETTINGS, "reproducible": False})


@pytest.mark.sizes(3)
def test_ranks_with_another_python_are_named(comm, monkeypatch, capfd):
    if comm.rank == RANK:
        monkeypatch.setattr(platform, "python_version", lambda: "3.99.1")
    on(comm, max_iters=1)
    words = r"Python 3\.\S+ and torch \S+ on ranks? 0\b.*; Python 3\.99\.1 and torch \S+ on rank 1"
    printed = re.search(
        f"ranks run different software, and may compute different numbers: {words}", capfd.readouterr().out
    )
    assert printed or comm.rank


@pytest.mark.sizes(1)
def test_without_replicas(comm, capfd):
    on(comm, **SETTINGS)
    assert "checks: only whether memory keeps its weights and states, as dp=1 has no replicas" in capfd.readouterr().out
