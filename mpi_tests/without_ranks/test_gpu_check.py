"""mpi_tests.gpu_check: its time limits, its mixes, and its verdicts on speeds and losses."""

import json
import time

import pytest

from mpi_tests.gpu_check import all_reduce_speed, child, training
from mpi_tests.gpu_check.__main__ import CHECKS, SECONDS, limit_s
from mpi_tests.gpu_check.child import BadEndError
from mpi_tests.gpu_check.mixes import BATCH, MIXES, RANKS
from mpi_tests.gpu_check.rows import Setting


@pytest.mark.parametrize("used", [1.0, 0.3])
@pytest.mark.parametrize("seconds", [SECONDS, 60.0])
def test_the_checks_fit_the_time_and_leave_theirs_to_later_ones(used, seconds):
    names, left_s, limits = list(CHECKS), seconds, []
    for nth in range(len(names)):
        limits.append(limit_s(names[nth:], left_s))
        left_s -= used * limits[-1]
    assert left_s == pytest.approx((1 - used) * limits[-1])
    fractions = [limit / check.budget_s for limit, check in zip(limits, CHECKS.values(), strict=True)]
    assert fractions[0] == pytest.approx(seconds / SECONDS)
    assert fractions == (pytest.approx([fractions[0]] * len(names)) if used == 1 else sorted(fractions))


def test_a_check_has_time_to_say_what_was_late():
    assert [child.spare_s(limit) for limit in (600, 100, 10)] == [20, 20, 2]


@pytest.mark.parametrize("name", MIXES)
def test_every_layout_has_the_batch_of_one_rank(name):
    mix = MIXES[name]
    for size, dp in ((1, 1), (RANKS, mix.dp)):
        words = mix.words(size)
        numbers = {word: int(words[words.index(word) + 1]) for word in ("--micro_batch_size", "--num_micro_batches")}
        assert dp * numbers["--micro_batch_size"] * numbers["--num_micro_batches"] == BATCH
        assert set(mix.settings.split()) <= set(words)
        assert (size == RANKS) >= any(word in words for word in ("--tp", "--pp", "--sp", "--zero_stage", "--compile"))


def test_after_a_mix_that_ends_the_job_the_others_run_in_another(monkeypatch):
    jobs = []

    def lines_on_ranks(setting, ranks, *words, silent_s):
        names = list(words[4:])
        jobs.append((ranks, names))
        yield "a line of a library\n"
        for name in names:
            if name == "masters" and ranks > 1:
                raise BadEndError("crashed", "exit status 1: an illegal address")
            losses = [3.0, 2.1 if (ranks, name) == (RANKS, "muon") else 2.0]
            norm = [2.3 if (ranks, name) == (RANKS, "bf16_sp") else 2.1]
            result = {"refused": "no"} if name == "dp" else {"losses": losses, "norm": norm}
            yield json.dumps({"mix": name, **result}) + "\n"

    monkeypatch.setattr(training, "lines_on_ranks", lines_on_ranks)
    monkeypatch.setattr(training, "need", lambda setting: None)
    names = ("autocast", "masters", "muon", "tp", "dp", "bf16_sp")
    rows = list(training.check(Setting("cpu", time.monotonic() + 60, names)))
    alone = ["bf16_sp", "masters", "muon", "dp"]
    assert jobs == [(1, alone), (RANKS, list(names)), (RANKS, ["muon", "tp", "dp", "bf16_sp"])]
    assert [row.verdict for row in rows] == ["passed", "crashed", "failed", "skipped", "failed", "failed"]
    assert rows[0].measured == "within 0.0e+00 of 2 losses, and 0.0e+00 of the first norm"
    assert rows[-1].measured == "within 0.0e+00 of 2 losses, and 9.5e-02 of the first norm"
    assert rows[1].measured == "exit status 1: an illegal address"
    assert rows[3].measured == "nothing to compare with: no"


def test_mixes_for_which_there_is_no_time_are_said(monkeypatch):
    monkeypatch.setattr(training, "need", lambda setting: None)
    rows = list(training.check(Setting("cpu", time.monotonic(), ("tp", "muon"))))
    assert [(row.verdict, row.measured) for row in rows] == [("skipped", training.OUT_OF_TIME)] * 2


def test_the_limit_of_memory():
    setting = Setting("cuda", 0.0)
    measurements = {"copy_s": 0.1, "ours_s": {"auto": 0.5, "two_shot": 0.25}, "mpi_s": 0.5, "why_no_mpi": ""}
    limit, beside = all_reduce_speed.rows(setting, 2, measurements)  # the limit is 0.2 s, the best time 0.25 s
    assert limit.measured.startswith("80.0%: two_shot")
    assert (limit.verdict, beside.verdict) == ("passed", "failed")
    assert beside.measured.startswith("2.0 times")
    _, beside = all_reduce_speed.rows(setting, 2, measurements | {"mpi_s": None, "why_no_mpi": "it is blind"})
    assert (beside.measured, beside.verdict) == ("it is blind", "skipped")
