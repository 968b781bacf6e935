"""Schedules from outside this package: generators of rounds, proved for a number of ranks before they run there.

A schedule of a program's own is a function `f(rank, size)` that yields rounds, tuples of the moves in
`collectives.schedule.moves`.  It also takes `root`, for collectives that have one; it may take `groups`, the ranks of
each node, and `num_chunks`, into which it cuts the vector, a multiple of `size` where ranks own chunks.  Without that,
the vector has one chunk for each rank, or as many as an attribute `num_chunks` of the function says.  It may access the
memory of its own node's ranks: chunks of the vector, between barriers of the whole node.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

from collectives.algorithms.algorithm import (
    EQUAL_CHUNKS,
    NOTHING,
    Algorithm,
    Precondition,
    Unit,
    each_rank,
    whole_vector,
)
from collectives.schedule.moves import Round
from collectives.schedule.spec import COLLECTIVES, Chunks


@dataclass(frozen=True)
class OwnSchedule:
    """A program's function as a schedule of the registry, which passes on the arguments that it takes."""

    function: Callable[..., Iterable[Round]]
    takes: frozenset[str]

    def __call__(self, rank: int, size: int, **options: Any) -> Iterator[Round]:
        """Yield a rank's rounds.

        Raises: ValueError for whatever the function raises, and for a result that is not rounds.
        """
        name, takes = name_of(self.function), self.takes
        try:
            rounds = self.function(rank, size, **{key: value for key, value in options.items() if key in takes})
            if not isinstance(rounds, Iterable):
                raise TypeError(f"it returns {rounds!r}: write a generator that yields rounds")
            yield from rounds
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
            raise ValueError(f"algorithm {name} fails for rank {rank} of {size}: {words}") from error


@dataclass(frozen=True)
class ProvedRounds:
    """The rounds of one rank that have been proved, as the schedule that it runs."""

    rounds: tuple[Round, ...]

    def __call__(self, rank: int, size: int, **options: Any) -> Iterable[Round]:
        return self.rounds


def name_of(algorithm: Any) -> str:
    """Return an algorithm's name, as `module:function` for a function, which `named` imports."""
    if isinstance(algorithm, str):
        return algorithm
    function = algorithm
    while hasattr(function, "func"):  # of a partial
        function = function.func
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', None) or type(function).__module__}:{name}".replace(" ", "_")


def named(name: str) -> Any:
    """Import the function `module:function`.

    Raises: ValueError with the remedy.
    """
    module_name, _, function_name = name.partition(":")
    if "" not in sys.path:
        sys.path.append("")  # as programs that pip installs start without the current folder
    try:
        function: Any = sys.modules.get(module_name) or import_module(module_name)
    except Exception as error:  # whatever the module raises
        words = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise ValueError(
            f"algorithm {name!r}: can't import {module_name!r} ({words}): run in its folder, or set PYTHONPATH"
        ) from None
    for part in function_name.split("."):
        if not hasattr(function, part):
            raise ValueError(f"algorithm {name!r}: module {module_name!r} has no {part!r}: check the name")
        function = getattr(function, part)
    return function


@lru_cache(maxsize=256)
def own_row(collective: str, function: Any, precondition: Precondition = NOTHING) -> Algorithm:
    """Return the row of a schedule of one's own.

    Raises: ValueError for what cannot be called as one.
    """
    name, spec = name_of(function), COLLECTIVES[collective]
    arguments = "rank, size, root" if spec.rooted else "rank, size"
    try:
        parameters = inspect.signature(function).parameters
        options = [name for name in ("groups", "num_chunks") if name in parameters] + ["root"] * spec.rooted
        inspect.signature(function).bind(0, 1, **dict.fromkeys(options))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"algorithm {name} can't be called ({error}): pass a name, or a function of {arguments} that yields rounds"
        ) from None
    takes = frozenset(("root", "groups", "num_chunks") if has_any_keyword(parameters) else parameters)
    unit: Unit | None = None
    cut = 0
    if spec.exchanges:
        precondition = EQUAL_CHUNKS
    elif "num_chunks" in takes or hasattr(function, "num_chunks"):
        cut = fixed_cut(name, function)
        unit = each_rank if Chunks.OWN in (spec.gives, spec.gets) and not cut else whole_vector
    return Algorithm(
        collective, name, OwnSchedule(function, takes), precondition, over_nodes="groups" in takes, unit=unit, cut=cut
    )


def has_any_keyword(parameters: Any) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def fixed_cut(name: str, function: Any) -> int:
    """Return the number of chunks that a function's attribute, or a partial's keyword, prescribes; 0 without one."""
    num_chunks = getattr(function, "num_chunks", getattr(function, "keywords", {}).get("num_chunks"))
    if num_chunks is None:
        return 0
    if not isinstance(num_chunks, int) or num_chunks < 1:
        raise ValueError(f"algorithm {name}: num_chunks {num_chunks!r} is out of range: use an integer from 1 on")
    return num_chunks


def is_own(row: Algorithm) -> bool:
    return isinstance(row.schedule, OwnSchedule)
