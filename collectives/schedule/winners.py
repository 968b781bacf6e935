"""A map of the fastest algorithms: a row for each number of ranks, a column for each size, a letter for each winner."""

import string
from collections.abc import Callable, Iterator, Sequence

from collectives.algorithms import Algorithm
from collectives.job.settings import size_in_words
from collectives.schedule.network import Nodes
from collectives.schedule.results import COLUMNS, Times, ranking

SYMBOLS = string.ascii_uppercase + string.ascii_lowercase
FEW_NODES = 4  # on which an algorithm shows what it is worth on more
HOPELESS = 3  # times as long as the fastest at all sizes: not predicted for twice the ranks, either
CELL = 5  # columns

Candidates = Callable[[Nodes], Sequence[Algorithm]]
Price = Callable[[Algorithm, int, Nodes], float]


def numbers_of_ranks(length: int, ranks: int) -> list[int]:
    """Return a node's number of ranks, doubled until there are `ranks`.

    >>> numbers_of_ranks(8, 64), numbers_of_ranks(8, 40)
    ([8, 16, 32, 64], [8, 16, 32, 40])
    """
    numbers = [min(length, ranks)]
    while numbers[-1] < ranks:
        numbers.append(min(2 * numbers[-1], ranks))
    return numbers


def times_by_ranks(
    numbers: Sequence[int], nodes_of: Callable[[int], Nodes], sizes: Sequence[int], candidates: Candidates, price: Price
) -> Iterator[tuple[int, Times]]:
    """Predict the algorithms for ascending numbers of ranks, without those that are hopeless for fewer."""
    hopeless: set[str] = set()
    for ranks in numbers:
        nodes = nodes_of(ranks)
        rows = [row for row in candidates(nodes) if row.name not in hopeless]
        times = {row.name: [price(row, nbytes, nodes) for nbytes in sizes] for row in rows}
        yield ranks, times
        if len(nodes) < FEW_NODES:
            continue
        least = [min(of_size) for of_size in zip(*times.values(), strict=True)]
        for name, seconds in times.items():
            if all(own > HOPELESS * best for own, best in zip(seconds, least, strict=True)):
                hopeless.add(name)


class WinnerMap:
    """The map's lines, of which each can be printed as soon as its number of ranks is predicted.

    >>> lines = WinnerMap([8, 1 << 20])
    >>> print(lines.head(), lines.row(8, {"ring": [3e-5, 4e-4], "binomial": [1e-5, 9e-4]}), *lines.legend(), sep="\\n")
      ranks    8   1M bytes
          8    A    B
      A binomial
      B ring
    """

    def __init__(self, sizes: Sequence[int]):
        self.sizes = sizes
        self.symbols: dict[str, str] = {}

    def head(self) -> str:
        return f"{'ranks':>7}" + "".join(f"{size_in_words(nbytes):>{CELL}}" for nbytes in self.sizes) + " bytes"

    def row(self, ranks: int, times: Times) -> str:
        """Format a line; `-` where no algorithm can run."""
        winners = [next((name for name, _ in ranking(times, index)), "") for index in range(len(self.sizes))]
        for name in filter(None, winners):
            self.symbols.setdefault(name, SYMBOLS[len(self.symbols) % len(SYMBOLS)])
        return f"{ranks:>7}" + "".join(f"{self.symbols.get(name, '-'):>{CELL}}" for name in winners)

    def legend(self) -> Iterator[str]:
        for name, symbol in self.symbols.items():
            yield f"  {symbol} {name}"


MOST_SIZES = (COLUMNS - 7 - len(" bytes")) // CELL
