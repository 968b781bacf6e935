"""Load the stand-in and redirect CuPy to it, before CuPy is imported."""

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import sys
from functools import cache
from pathlib import Path

from mpi_tests.helpers.cuda_on_host.build import DRIVER, HERE, NVRTC, CannotBuildError, build, compiler, kernels_folder
from mpi_tests.helpers.cuda_on_host.patch import patch

SITE = HERE / "site"  # with this folder in their PYTHONPATH, processes load the stand-in when they import CuPy
WHEEL = "cupy-cuda12x"
FUNCTION_COUNTS = {421: "CUDA 12.9"}  # the number of functions in CUDA's runtime, and the version that has it


class CannotLoadError(Exception):
    """The stand-in cannot be loaded here; the message gives the reason."""


@cache
def load() -> ctypes.CDLL:
    """Redirect CuPy to the stand-in for the rest of the process; return the stand-in's library.

    Raises: CannotLoadError
    """
    check_machine()
    try:
        os.environ["CUDA_ON_HOST_COMPILER"] = compiler()
        driver, _ = (ctypes.CDLL(str(build(name)), mode=ctypes.RTLD_GLOBAL) for name in (DRIVER, NVRTC))
    except CannotBuildError as error:
        raise CannotLoadError(str(error)) from None
    kernels = kernels_folder()
    os.environ |= {"CUDA_ON_HOST_SOURCES": str(HERE), "CUDA_ON_HOST_CACHE": str(kernels)}
    os.environ |= {"CUPY_CACHE_DIR": str(kernels / "cupy"), "CUPY_ACCELERATORS": ""}  # CUB's kernels are precompiled
    supported, unsupported = patch(load_runtime(), driver)
    if len(supported | unsupported) not in FUNCTION_COUNTS:
        versions = ", ".join(f"{number} of {name}" for number, name in FUNCTION_COUNTS.items())
        version = importlib.metadata.version(WHEEL)
        raise CannotLoadError(
            f"{WHEEL} {version} has {len(supported | unsupported)} functions of CUDA's runtime; known: {versions}"
        )
    return driver


def check_machine() -> None:
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise CannotLoadError("it is for Linux on x86-64")
    if importlib.util.find_spec("cupy_backends") is None:
        raise CannotLoadError(f"CuPy is not installed: pip install {WHEEL}")
    if "cupy_backends" in sys.modules:
        raise CannotLoadError("CuPy has been imported before")
    try:
        importlib.metadata.version(WHEEL)
    except importlib.metadata.PackageNotFoundError:
        raise CannotLoadError(f"the installed CuPy is not {WHEEL}") from None


def load_runtime() -> Path:
    """Load CuPy's extension module that has the CUDA runtime linked in; return its path."""
    package = importlib.util.find_spec("cupy_backends")
    assert package is not None
    assert package.origin is not None
    (path,) = (Path(package.origin).parent / "cuda" / "api").resolve().glob("runtime.*.so")
    ctypes.CDLL(str(path))
    return path


class Finder:
    """Import hook that loads the stand-in when CuPy is imported."""

    def find_spec(self, name, path=None, target=None):
        if name == "cupy":
            sys.meta_path.remove(self)
            try:
                load()
            except CannotLoadError as error:
                raise ImportError(f"CUDA on the host: {error}", name=name) from None


def load_when_imported() -> None:
    sys.meta_path.insert(0, Finder())
