"""Variants of an algorithm, of which the price decides: numbers of chunks, algorithms in nodes and across them."""

from collections.abc import Callable, Iterator, Sequence
from itertools import count

from collectives.algorithms import Algorithm, variants_of
from collectives.algorithms.algorithm import LEAST_CHUNK_BYTES, Groups

Price = Callable[[Algorithm], float]  # in seconds
MOST_TRIED = 512  # times the unit of chunks

# Of algorithms over nodes for long vectors, the first that costs at most so many times the least is taken, a ring: by
# TCP, an exchange with one host takes up to 1.7 times as long as a message to one host and one from another.
ABOUT_AS_MUCH, LONG_BYTES = 1.1, 1 << 20


def margin(nbytes: int) -> float:
    """Return the factor up to which prices of algorithms over nodes are taken to be the same."""
    return ABOUT_AS_MUCH if nbytes >= LONG_BYTES else 1.0


def best(
    row: Algorithm, nbytes: int, nodes: Groups, price: Price, num_nodes: Sequence[int] = ()
) -> tuple[Algorithm, float]:
    """Return the variant of a row with the least price for a vector of `nbytes`, and that price.

    Of those whose prices are taken to be the same, it is the first.  `num_nodes` are those of the groups of nodes that
    the network has, as behind one switch.

    >>> from functools import partial
    >>> from collectives.algorithms import find
    >>> from collectives.schedule.cost import predict
    >>> row, nodes = find("broadcast", "chain"), (tuple(range(4)),)
    >>> [best(row, n, nodes, lambda each: predict(each, n, 4, nodes))[0].name for n in (8, 1 << 18, 1 << 22)]
    ['chain/1', 'chain/8', 'chain/32']
    """
    levels = [number for number in num_nodes if 1 < number < len(nodes)]
    priced = [cheapest_cut(variant, nbytes, nodes, price) for variant in variants_of(row, levels)]
    least_s = min(seconds for _, seconds in priced)
    return next((variant, seconds) for variant, seconds in priced if seconds <= margin(nbytes) * least_s)


def is_open(row: Algorithm) -> bool:
    """Return whether a row has several variants.

    >>> from collectives.algorithms import find
    >>> [is_open(find("broadcast", name)) for name in ("chain", "chain/4", "binomial", "hierarchical")]
    [True, False, False, True]
    """
    return (row.unit is not None and not row.cut) or variants_of(row) != (row,)


def cheapest_cut(row: Algorithm, nbytes: int, nodes: Groups, price: Price) -> tuple[Algorithm, float]:
    """Return a row with the best number of chunks, twice as many until that costs more."""
    candidates = cuts(row, nbytes, nodes)
    cheapest = next(candidates)
    least_s = price(cheapest)
    for candidate in candidates:
        seconds = price(candidate)
        if seconds >= least_s:
            break
        cheapest, least_s = candidate, seconds
    return cheapest, least_s


def cuts(row: Algorithm, nbytes: int, nodes: Groups) -> Iterator[Algorithm]:
    """Yield a row with 1, 2, 4 ... times its unit of chunks, none of few bytes; itself if it has no unit, or a cut."""
    if row.unit is None or row.cut:
        yield row
        return
    unit = row.unit(sum(map(len, nodes)), nodes)
    for cut in (1 << power for power in count()):
        if cut > 1 and (nbytes < cut * unit * LEAST_CHUNK_BYTES or cut > MOST_TRIED):
            return
        yield row.cut_into(cut)
