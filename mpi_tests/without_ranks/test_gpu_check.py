"""mpi_tests.gpu_check: its time limits, and its verdicts on speeds."""

from mpi_tests.gpu_check import all_reduce_speed
from mpi_tests.gpu_check.__main__ import CHECKS
from mpi_tests.gpu_check.rows import Setting


def test_each_half_is_within_a_run_of_10_minutes_with_room():
    for half in (1, 2):
        assert sum(check.limit_s for check in CHECKS.values() if check.half == half) <= 510


def test_the_limit_of_memory():
    setting = Setting("cuda", 0.0)
    measurements = {"copy_s": 0.1, "ours_s": {"auto": 0.5, "two_shot": 0.25}, "mpi_s": 0.5, "why_no_mpi": ""}
    limit, beside = all_reduce_speed.rows(setting, 2, measurements)  # the limit is 0.2 s, the best time 0.25 s
    assert limit.measured.startswith("80.0%: two_shot")
    assert (limit.verdict, beside.verdict) == ("passed", "failed")
    assert beside.measured.startswith("2.0 times")
    _, beside = all_reduce_speed.rows(setting, 2, measurements | {"mpi_s": None, "why_no_mpi": "it is blind"})
    assert (beside.measured, beside.verdict) == ("it is blind", "skipped")
