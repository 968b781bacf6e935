"""The findings of collectives.doctor on the device, and arrays of a single process."""

from __future__ import annotations

from mpi_tests.gpu_check.child import CannotRunError
from mpi_tests.gpu_check.rows import Row, Setting, verdict


def check(setting: Setting) -> list[Row]:
    """Check that the device adds numbers."""
    if setting.device == "cpu":
        raise CannotRunError("the check needs a GPU")
    from collectives.doctor import cuda

    findings = list(cuda(100.0))
    good = bool(findings) and all(finding.verdict == "ok" for finding in findings)
    return [Row("doctor", "ok", "; ".join(finding.text for finding in findings), verdict(good))]
