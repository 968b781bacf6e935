"""A stand-in for CuPy, which runs kernels on NumPy's memory: their very source, compiled as C++."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

HEADER = Path(__file__).with_suffix(".h")
FLAGS = ("-std=c++17", "-O0", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC")
ENTRY = (
    'extern "C" void run_{i}(const Task* task, unsigned grid, unsigned block) {{ launch({name}, task, grid, block); }}'
)


def compiler() -> str:
    """A C++ compiler that knows float16; without one the test is skipped."""
    for name in ("g++", "clang++"):
        if shutil.which(name):
            known = subprocess.run(
                [name, "-xc++", "-fsyntax-only", "-"], input="_Float16 x;", text=True, capture_output=True
            )
            if known.returncode == 0:
                return name
    pytest.skip("no C++ compiler that knows _Float16")


def build(source: str, names: Iterable[str], folder: Path) -> "CuPy":
    """CuPy with those instances of templates."""
    names = list(names)
    entries = [ENTRY.format(i=i, name=name) for i, name in enumerate(names)]
    code, library = folder / "kernels.cc", folder / "kernels.so"
    code.write_text("\n".join([f'#include "{HEADER}"', source, *entries]))
    built = subprocess.run([compiler(), *FLAGS, code, "-o", library], text=True, capture_output=True)
    assert built.returncode == 0, built.stderr
    loaded = ctypes.CDLL(str(library))
    return CuPy({name: getattr(loaded, f"run_{i}") for i, name in enumerate(names)}, loaded.misaligned)


class CuPy:
    """Of a device of one multiprocessor.  `launches` are the names and grids of what has run, and on which stream."""

    def __init__(self, entries: dict, misaligned: Callable[[], int]):
        self.entries, self.misaligned = entries, misaligned
        self.launches: list[tuple[str, int, object]] = []
        self.stream: object = None
        self.full, self.asarray, self.asnumpy = np.full, np.asarray, np.array
        attributes = {"MultiProcessorCount": 1}
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(getDevice=lambda: 0), Device=lambda index: SimpleNamespace(attributes=attributes)
        )

    def RawModule(self, code: str, options: tuple[str, ...], name_expressions: tuple[str, ...]):  # noqa: N802  # as CuPy's
        assert "--fmad=false" in options
        return SimpleNamespace(get_function=lambda name: self.kernel(name, name_expressions))

    def kernel(self, name: str, compiled: tuple[str, ...]):
        assert name in compiled

        def launch(grid, block, args):
            (task,) = args
            assert isinstance(task, np.ndarray)
            assert task.size == 1  # CuPy passes it by value
            self.launches.append((name, grid[0], self.stream))
            self.entries[name](ctypes.c_void_p(task.ctypes.data), *grid, *block)
            assert not self.misaligned()

        return launch

    @contextmanager
    def on(self, stream: object):
        self.stream = stream
        yield
        self.stream = None
