"""A student's file: load it, call its function, and collect the values that it yields, with their lines.

A fault of the file as a program, rather than as a schedule, raises a `FileError`: it can't be judged.
"""

import inspect
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from traceback import walk_tb
from types import GeneratorType, ModuleType
from typing import Any, NamedTuple, TypeVar

LIMIT_S = 10.0  # for a call of the student's code, imports included; a schedule takes milliseconds
END_S = 20.0  # of computing, or after the limit, until a signal ends the process, even if the code catches exceptions
MOST_ROUNDS = 1000
MODULE = "exercise_file"

T = TypeVar("T")


class FileError(Exception):
    """A file that can't be judged, in one line with the file's name and, where there is one, the line's number."""


class OutOfTimeError(BaseException):
    """The student's code takes too long; no `except Exception` of that code catches it."""


class Yielded(NamedTuple):
    """A value that the student's function yields, and the line of the file that does."""

    value: Any
    line: int


class Student:
    """The function of a student's file."""

    def __init__(self, path: Path, name: str, parameters: str):
        self.path, self.line = path, 1
        module = sys.modules[MODULE] = ModuleType(MODULE)  # dataclasses look there for it
        module.__file__ = str(path)
        code = self._compiled()
        self._run(lambda: exec(code, module.__dict__))
        self.function = getattr(module, name, None)
        if not callable(self.function):
            raise FileError(f"{path} has no function {name}({parameters}); --stub writes a file to begin with")
        if inspect.isfunction(self.function) and self.function.__code__.co_filename == str(path):
            self.line = self.function.__code__.co_firstlineno

    def yields(self, *arguments: Any) -> list[Yielded]:
        """Call the function and collect the values that it yields, or the items of the list that it returns.

        Raises: FileError where that fails, takes too long or never ends.
        """
        return self._run(lambda: list(self._collect(*arguments)))

    def error(self, why: str, line: int) -> FileError:
        return FileError(f"{self.path}:{line}: {why}")

    def _collect(self, *arguments: Any) -> Iterator[Yielded]:
        assert self.function
        result = self.function(*arguments)
        if not isinstance(result, Iterable):
            raise self.error(f"returns {type(result).__name__}: yield the rounds one by one", self.line)
        for count, value in enumerate(islice(result, MOST_ROUNDS + 1)):
            line = current_line(result, self.path) or self.line
            if count == MOST_ROUNDS:
                raise self.error(f"is endless: it yields more than {MOST_ROUNDS} times", line)
            yield Yielded(value, line)

    def _compiled(self) -> Any:
        try:
            return compile(self.path.read_bytes(), str(self.path), "exec", dont_inherit=True)
        except OSError as error:
            raise FileError(f"{self.path}: {error.strerror or error}") from error
        except (SyntaxError, ValueError) as error:
            why, line = getattr(error, "msg", error), getattr(error, "lineno", 0) or 1
            raise self.error(f"syntax error: {why}", line) from error

    def _run(self, call: Callable[[], T]) -> T:
        """Run the student's code, and convert its exceptions to a `FileError`."""
        try:
            with time_limit(LIMIT_S):
                return call()
        except OutOfTimeError as error:
            why = f"is endless: it has not ended after {LIMIT_S:g} s"
            raise self.error(why, self._line_of(error)) from None
        except BaseException as error:
            if isinstance(error, FileError):
                raise
            why = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
            raise self.error(why, self._line_of(error)) from error

    def _line_of(self, error: BaseException) -> int:
        """Return the last line of the student's file that an error passed."""
        lines = [line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == str(self.path)]
        return lines[-1] if lines else self.line


def current_line(iterator: Any, path: Path) -> int:
    """Return the line of a file at which a generator, or the one that it delegates to, yields; 0 if there is none."""
    line = 0
    while isinstance(iterator, GeneratorType) and iterator.gi_frame:
        if iterator.gi_code.co_filename == str(path):
            line = iterator.gi_frame.f_lineno
        iterator = iterator.gi_yieldfrom
    return line


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTimeError in code that runs longer, in the main thread; end the process if it continues."""

    def stop(number: int, frame: Any) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, END_S)
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_VIRTUAL, END_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGALRM, before)
