"""Numba, the compiler of kernels: whether this process can use it, decided in one place.

It may be missing, refuse this NumPy, be switched off, or have no room on disk for what it compiles.
"""

import sys
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from textwrap import shorten
from types import ModuleType
from typing import Any, NamedTuple

FOLDER = "set NUMBA_CACHE_DIR to a folder with room for what Numba compiles"
INSTALL = "install a Numba for this Python and NumPy"
LONGEST_WORDS = 300  # of an error


class Kernels(NamedTuple):
    """A module of compiled kernels, or None and the reason."""

    module: ModuleType | None
    failure: str = ""


@cache
def load(name: str) -> Kernels:
    """Import a module of kernels, and run its function `check`, if it has one."""
    try:
        if import_module("numba").config.DISABLE_JIT:
            return Kernels(None, "NUMBA_DISABLE_JIT is set: unset it")
        module = import_module(name)
        getattr(module, "check", bool)()
    except Exception as error:  # whichever a broken installation raises
        lacks_room = getattr(error, "errno", None) or "no locator" in str(error)  # for files of the cache
        words = shorten(f"{type(error).__name__}: {error}", LONGEST_WORDS)
        return Kernels(None, f"{words}: {FOLDER if lacks_room else INSTALL}")
    return Kernels(module)


def failure() -> str:
    """Return why the kernels of the collectives cannot be used here, or nothing."""
    return load("collectives.runtime.backends.kernels").failure


def run_unkept(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Let a compiled function also run where Numba has just compiled it, but has no room to keep it on disk."""

    @wraps(compiled)
    def run(*arguments: Any) -> Any:
        try:
            return compiled(*arguments)
        except OSError:
            return compiled(*arguments)

    return run


@cache
def warn(words: str) -> None:
    """Print a line on stderr, once."""
    print(f"collectives: {words}", file=sys.stderr, flush=True)
