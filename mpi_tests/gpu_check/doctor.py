"""What collectives.doctor finds of the device, and the arrays of one process there."""

from __future__ import annotations

from mpi_tests.gpu_check.child import CannotRunError
from mpi_tests.gpu_check.rows import Row, Setting, verdict


def check(setting: Setting) -> list[Row]:
    """The device works, and another process reads its memory; what MPI does with it is as it may be."""
    if setting.device == "cpu":
        raise CannotRunError("it looks at GPUs")
    from collectives.doctor import cuda
    from collectives.doctor.finding import Setting as Looking

    findings = list(cuda.cuda(Looking(limit_s=100)))
    good = len(findings) >= 3 and all(finding.verdict == "ok" for finding in findings[:-1])
    return [Row("doctor", "ok, but for MPI's part", "; ".join(finding.text for finding in findings), verdict(good))]
