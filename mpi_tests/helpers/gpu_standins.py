"""Run mpi_tests.gpu_check with substitute checks, one for each possible outcome.

python -m mpi_tests.helpers.gpu_standins --device cpu
"""

import os
import signal
import sys
import time

from mpi_tests.gpu_check import __main__ as gpu_check
from mpi_tests.gpu_check import child
from mpi_tests.gpu_check.rows import PASSED, Row, verdict


def passes(setting):
    return [
        Row("sum", "equal", f"on {setting.device} | or not", PASSED),
        Row("speed", "none", "1", setting.speed(False)),
    ]


def fails(setting):
    return [Row("order", "equal", "1 wrong", verdict(False))]


def lacks(setting):
    raise child.CannotRunError("no such thing here")


def raises(setting):
    yield Row("half", "kept", "before the error", PASSED)
    raise RuntimeError("first line\nlast line")


def dies(setting):
    os.kill(os.getpid(), signal.SIGKILL)


def stays(setting):
    yield Row("first", "kept", "before the end", PASSED)
    time.sleep(setting.left_s + 600)


if __name__ == "__main__":
    gpu_check.CHECKS = {
        check.__name__: gpu_check.ListedCheck(f"mpi_tests.helpers.gpu_standins:{check.__name__}", 10)
        for check in (passes, fails, lacks, raises, dies, stays)
    }
    child.SPARE = 0.0
    sys.exit(gpu_check.main(module="mpi_tests.helpers.gpu_standins"))
