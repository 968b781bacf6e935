"""Whether Numba can be used: what a broken installation raises is a reason, and no error."""

import sys
from functools import partial
from types import SimpleNamespace

import numba
import pytest
from numba.core.caching import IndexDataCacheFile

from collectives import doctor
from collectives.runtime.backends import compiler
from mpi_tests.helpers.doctor import examine

load = compiler.load.__wrapped__  # its results are kept for the process
KERNELS = (
    "collectives.runtime.backends.kernels",
    "parallelism.numerics.pointwise_kernels",
    "parallelism.numerics.exact_kernels",
)
ROOM = "set NUMBA_CACHE_DIR to a folder with room for what Numba compiles"
INSTALL = "install a Numba for this Python and NumPy"


def fail(error, *_):
    raise error


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_that_can_be_used(name):
    module, failure = load(name)
    assert (module.__name__, failure) == (name, "")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "raise ImportError('Numba needs NumPy 2.4 or less')",
            f"ImportError: Numba needs NumPy 2.4 or less: {INSTALL}",
        ),
        ("raise SystemError('initialization of _internal')", f"SystemError: initialization of _internal: {INSTALL}"),
        ("import no_llvm", f"ModuleNotFoundError: No module named 'no_llvm': {INSTALL}"),
        ("raise OSError('Could not find libllvmlite')", f"OSError: Could not find libllvmlite: {INSTALL}"),
        ("x = 1", f"AttributeError: module 'numba' has no attribute 'config': {INSTALL}"),
    ],
)
def test_a_numba_that_does_not_import(tmp_path, monkeypatch, source, words):
    (tmp_path / "numba.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "numba")
    assert load(KERNELS[0]) == (None, words)
    sys.modules.pop("numba", None)


def test_no_numba(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    module, failure = load(KERNELS[0])
    assert module is None
    assert failure.endswith(INSTALL)


@pytest.mark.parametrize("name", KERNELS)
def test_a_numba_that_is_switched_off(monkeypatch, name):
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    assert load(name) == (None, "NUMBA_DISABLE_JIT is set: unset it")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device"), f"OSError: [Errno 28] No space left on device: {ROOM}"),
        (
            RuntimeError("cannot cache: no locator available"),
            f"RuntimeError: cannot cache: no locator available: {ROOM}",
        ),
    ],
)
def test_no_room_for_compiled_kernels(monkeypatch, error, words):
    monkeypatch.setitem(sys.modules, "kernels_without_room", SimpleNamespace(check=partial(fail, error)))
    assert load("kernels_without_room") == (None, words)


def test_a_disk_that_fills_up_later(tmp_path, monkeypatch):
    """Numba has compiled a function when it cannot keep it."""
    path = tmp_path / "doubled.py"
    path.write_text("import numba\n\n@numba.njit(cache=True)\ndef double(x):\n    return 2 * x\n")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(IndexDataCacheFile, "save", partial(fail, OSError(28, "No space left on device")))
    from doubled import double

    with pytest.raises(OSError, match="No space left"):
        double(3)
    assert compiler.run_unkept(double)(1.5) == 3.0


def test_the_doctor_has_kernels_compiled(tmp_path, monkeypatch):
    (finding,) = examine(doctor.compiled_kernels, 60)
    assert finding.verdict == "ok"
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    (finding,) = examine(doctor.compiled_kernels)
    assert (finding.verdict, finding.remedy) == ("problem", "unset it")
    assert finding.text == "there are none, and all data go by messages: NUMBA_DISABLE_JIT is set"
