"""Packages, settings and files that the library uses."""

import difflib
import os
import platform
from collections.abc import Iterator
from importlib.metadata import distributions

from collectives import environment
from collectives.doctor import child
from collectives.doctor.finding import Finding, Setting, note, ok, problem
from collectives.tuning import parse_tuning, read_tuning

NEEDED = ("mpi4py", "numpy", "ml_dtypes", "numba")
WELCOME = ("torch",)
PREFIX = "COLLECTIVES_"


def installed() -> dict[str, str]:
    """The version of each distribution, by a name with underscores."""
    return {str(found.metadata["Name"]).replace("-", "_").lower(): found.version for found in distributions()}


def versions(setting: Setting) -> Iterator[Finding]:
    found = installed()
    there = [f"{name} {found[name]}" for name in (*NEEDED, *WELCOME) if name in found]
    yield ok(", ".join([f"Python {platform.python_version()}", *there]))
    for name in NEEDED:
        if name not in found:
            yield problem(f"{name} is not installed", "pip install . in the project's folder")
    if len(cupy := sorted(name for name in found if name.startswith("cupy"))) > 1:
        yield problem(f"{' and '.join(cupy)} overwrite each other", "pip uninstall all of them, then install one")


def numba(setting: Setting) -> Iterator[Finding]:
    """Whether it compiles, and may keep what it has compiled."""
    ended = child.run(child.probe("numba"), setting.limit_s, child.fresh_environment())
    keep = "set NUMBA_CACHE_DIR to a folder that can be written, the same on all hosts if they share it"
    message = next(iter(ended.messages()), {})
    if "cannot cache" in ended.errors:
        yield problem("finds no folder for what it compiles, and the direct algorithms do not load", keep)
    elif ended.timed_out:
        yield note(f"has not compiled within {setting.limit_s:g} s", "see that Python's packages are on a fast disk")
    elif ended.how or "cache" not in message:
        yield problem(f"does not compile: {ended}", "reinstall numba; until then, direct algorithms do not work")
    elif not os.access(message["cache"], os.W_OK):
        yield note(f"cannot write to {message['cache']}, and compiles anew in each process", keep)
    else:
        yield ok(f"compiles, and keeps that in {message['cache']}")


def settings(setting: Setting) -> Iterator[Finding]:
    """Environment variables of ours: those that are set, and what is wrong with them."""
    ours = sorted(name for name in os.environ if name.startswith(PREFIX))
    wrong = [finding for name in ours for finding in refused(name)]
    yield from wrong
    if not wrong:
        yield ok(", ".join(f"{name}={os.environ[name]}" for name in ours) or f"no {PREFIX}... is set")


def refused(name: str) -> Iterator[Finding]:
    """What is wrong with a variable: the environment's reader of it says so."""
    if name not in environment.SETTINGS:
        close = difflib.get_close_matches(name, environment.SETTINGS, 1)
        yield problem(f"{name} is no setting", f"did you mean {close[0]}?" if close else "unset it")
        return
    try:
        environment.SETTINGS[name]()
    except ValueError as error:
        yield problem(*halves(error))


def halves(error: Exception) -> tuple[str, str]:
    """What is wrong, and the remedy after the last colon, as the library's errors have them."""
    said, _, remedy = str(error).rpartition(": ")
    return said, remedy


def tuning(setting: Setting) -> Iterator[Finding]:
    """The tuning file, where one is named."""
    path = environment.tuning_file()
    if path is None:
        yield ok("no file: COLLECTIVES_TUNING is not set, and the cost model's own constants decide")
        return
    try:
        found = parse_tuning(read_tuning(path), str(path))
    except ValueError as error:
        yield problem(*halves(error))
        return
    jobs = sorted({f"{case.ranks} ranks on {case.nodes} node{'s' * (case.nodes > 1)}" for case in found.fastest})
    yield ok(f"{path} was measured with {', '.join(jobs) or 'no ranks'}")


def threads(setting: Setting) -> Iterator[Finding]:
    """How many threads a rank may compute with, by OMP_NUM_THREADS."""
    try:
        number = environment.stated_threads()
    except ValueError as error:
        yield problem(*halves(error))
        return
    if number is None:
        remedy = "set OMP_NUM_THREADS=1 where there is a rank for each core; mpirun -x takes it to other hosts"
        yield note("OMP_NUM_THREADS is not set, NumPy's linear algebra takes all cores in each rank", remedy)
    else:
        yield ok(f"OMP_NUM_THREADS={number}")
