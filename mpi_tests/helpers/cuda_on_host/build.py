"""Compile the stand-in's C++ once, into a folder of the user's cache."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-pthread")
# The names that CuPy looks up: the dynamic loader returns the library of that name that was loaded first.
DRIVER, NVRTC = "libcuda.so.1", "libnvrtc.so.12"


class CannotBuildError(Exception):
    """The stand-in cannot be compiled on this machine; the message gives the reason."""


def compiler() -> str:
    """Return a C++ compiler that supports float16."""
    for name in ("g++", "clang++"):
        if shutil.which(name):
            probe = [name, "-xc++", "-fsyntax-only", "-"]
            if subprocess.run(probe, input="_Float16 x;", text=True, capture_output=True).returncode == 0:
                return name
    raise CannotBuildError("no C++ compiler supports _Float16")


def cache_folder(kind: str, sources: Iterable[Path]) -> Path:
    """Return the cache folder for builds of exactly these sources."""
    digest = hashlib.sha256()
    for path in sorted(sources):
        digest.update(path.read_bytes())
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = base / "collectives-cuda-on-host" / f"{kind}-{digest.hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def kernels_folder() -> Path:
    """Return the folder of the kernels that nvrtc.cc compiles."""
    return cache_folder("kernels", [HERE / "runtime/blocks.h", HERE / "nvrtc.cc", *(HERE / "device").rglob("*.h")])


def build(name: str) -> Path:
    """Compile a library unless it is cached; return its path.  Concurrent processes wait for the first one.

    Raises: CannotBuildError
    """
    sources = sorted((HERE / "runtime").glob("*.cc")) if name == DRIVER else [HERE / "nvrtc.cc"]
    library = cache_folder(name, [*sources, *(HERE / "runtime").glob("*.h")]) / name
    with open(library.with_suffix(".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not library.exists():
            link(sources, library)
    return library


def link(sources: list[Path], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as part:
        output = Path(part) / library.name
        command = [compiler(), *FLAGS, f"-Wl,-soname,{library.name}", *map(str, sources), "-o", str(output), "-ldl"]
        result = subprocess.run(command, text=True, capture_output=True)
        if result.returncode:
            raise CannotBuildError(result.stderr)
        output.rename(library)
