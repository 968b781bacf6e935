"""The lines of the algorithms' sources that yield each round."""

import inspect
import sys
from collections import deque
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from collectives.algorithms import Algorithm
from collectives.algorithms.algorithm import Groups
from collectives.algorithms.own import OwnSchedule
from collectives.schedule.moves import Round

PACKAGE = Path(__file__).resolve().parent.parent.parent
Frames = tuple[tuple[FrameType, int], ...]  # generators and the lines at which they yield, outermost first


NOTHING: Any = (None, None, ())


class Function(NamedTuple):
    """A function's source: the file and its lines, without those of the docstring after the first."""

    name: str
    file: str
    lines: list[tuple[int, str]]  # by number


class YieldWatch:
    """Watcher of generators, which records for each of their rounds the lines that yielded it.

    A round passes several generators: `yield from` forwards it, a list keeps it for later, and a loop over another's
    rounds, whose variable this package calls `moves`, makes a new one of it.
    """

    def __init__(self, outermost: FrameType):
        self.outermost = outermost
        self.lines: list[Frames] = []  # of each round of the outermost generator
        self._frames: dict[int, deque[Frames]] = {}  # by round, that is, by the identity of its tuple
        self._alive: list[Any] = []  # so that no identity is used again
        self._latest: tuple[Any, FrameType | None, Frames] = NOTHING  # a round, the frame it goes to, its frames so far

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        """Record the end of a call, or of a generator's round."""
        if event != "return" or not frame.f_code.co_flags & inspect.CO_GENERATOR:
            return
        if value is None:
            self._latest = NOTHING  # earlier rounds are in a list, if kept
        elif type(value) is tuple:
            frames: Frames = ((frame, frame.f_lineno), *self._inner(frame, value))
            if value:  # all empty rounds are one object
                self._frames.setdefault(id(value), deque()).append(frames)
                self._alive.append(value)
            self._latest = value, frame.f_back, frames
            if frame is self.outermost:
                self.lines.append(frames)

    def _inner(self, frame: FrameType, value: Round) -> Frames:
        """Return the frames that a round passed before `frame` yields it."""
        queue = self._frames.get(id(value))
        if self._latest[0] is value and self._latest[1] is frame:
            return queue.pop() if queue else self._latest[2]
        if not value:
            return ()
        if queue and all(frame is not other for other, _ in queue[0]):
            return queue.popleft()
        moves = frame.f_locals.get("moves")
        for candidate in (moves, *moves) if type(moves) is tuple else ():
            queue = self._frames.get(id(candidate))
            if queue and all(frame is not other for other, _ in queue[0]):
                return queue[0]
        return ()


Lines = tuple[tuple[CodeType, int], ...]
EXPRESSION = "<genexpr>"  # the name of a generator expression's code, which is in a line of another function


def yield_lines(row: Algorithm, rank: int, size: int, root: int, groups: Groups) -> list[Lines]:
    """Return for each round of a rank the functions that yield it, outermost first, and their lines."""
    schedule: Any = row.rounds_of(rank, size, root, groups)  # a generator
    watch = YieldWatch(schedule.gi_frame)
    sys.setprofile(watch)
    try:
        num_rounds = sum(1 for _ in schedule)
    finally:
        sys.setprofile(None)
    assert len(watch.lines) == num_rounds, f"{row.name} yields other than rounds"
    return [
        tuple((frame.f_code, line) for frame, line in frames if frame.f_code.co_name != EXPRESSION)
        for frames in watch.lines
    ]


def registered_function(row: Algorithm) -> Any:
    """Return the function of an algorithm's row, of which it may be a partial."""
    schedule: Any = row.schedule
    while isinstance(schedule, partial | OwnSchedule):
        schedule = schedule.func if isinstance(schedule, partial) else schedule.function
    return schedule


def function(code: CodeType) -> Function:
    """Read the source of a function."""
    lines, first = inspect.getsourcelines(code)
    indent = len(lines[0]) - len(lines[0].lstrip())
    numbered = [(first + i, line[indent:].rstrip()) for i, line in enumerate(lines)]
    path = Path(code.co_filename).resolve()
    file = path.relative_to(PACKAGE) if path.is_relative_to(PACKAGE) else path.name
    return Function(code.co_name, str(file), without_details(numbered))


def without_details(lines: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Remove a docstring's lines after its first one."""
    begin = next((i for i, (_, text) in enumerate(lines) if text.lstrip().startswith('"""')), None)
    if begin is None or lines[begin][1].count('"""') > 1:
        return lines
    end = next(i for i in range(begin + 1, len(lines)) if '"""' in lines[i][1])
    number, text = lines[begin]
    return [*lines[:begin], (number, f'{text}"""'), *lines[end + 1 :]]
