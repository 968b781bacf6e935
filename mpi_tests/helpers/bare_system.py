"""Run a program as on a system with POSIX and MPI, but without Linux's extensions.

python -m mpi_tests.helpers.bare_system -m training --max_iters 2
python -m mpi_tests.helpers.bare_system examples/sum.py

It disables the features that macOS lacks: binding to cores, reading another process's memory, /proc, and /dev/shm.
"""

import ctypes
import os
import runpy
import sys

MISSING_FOLDERS = ("/proc", "/dev/shm")
MISSING_FUNCTIONS = ("process_vm_readv", "process_vm_writev")
CALLS_OF_OS = ("sched_getaffinity", "sched_setaffinity", "sched_yield")


class Library(ctypes.CDLL):
    """The C library without the functions that only Linux has."""

    def __getattr__(self, name):
        if name in MISSING_FUNCTIONS:
            raise AttributeError(name)
        return super().__getattr__(name)


def refuse_missing_folders(event: str, arguments: tuple) -> None:
    """Raise, as an audit hook, if Python opens a file in one of the missing folders."""
    if event == "open" and str(arguments[0]).startswith(MISSING_FOLDERS):
        raise FileNotFoundError(2, "No such file or directory", str(arguments[0]))


def take_away() -> None:
    for name in CALLS_OF_OS:
        delattr(os, name)
    isdir = os.path.isdir
    os.path.isdir = lambda path: not str(path).startswith(MISSING_FOLDERS) and isdir(path)
    ctypes.CDLL = Library
    sys.addaudithook(refuse_missing_folders)


if __name__ == "__main__":
    take_away()
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
