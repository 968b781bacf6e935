"""Predicted times of algorithms as tables of at most 100 columns, as JSON, and as a picture."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from collectives.job.settings import size_in_words
from collectives.schedule.spec import bus_factor

COLUMNS = 100
Times = dict[str, list[float]]  # seconds by algorithm, for each size; of an interrupted one fewer

PALETTE = [f"C{number}" for number in range(10)]


def ranking(times: Times, index: int) -> list[tuple[str, float]]:
    """Return the algorithms and seconds of the size at an index, the fastest first; of equal ones, the first."""
    there = [(name, seconds[index]) for name, seconds in times.items() if index < len(seconds)]
    return sorted(there, key=lambda pair: pair[1])


def best_table(collective: str, ranks: int, sizes: Sequence[int], times: Times, number: int) -> Iterator[str]:
    """Format lines for the fastest algorithms of each size: time, bandwidths, and the ratio to the fastest time.

    >>> times = {"ring": [3e-5, 4e-4], "binomial": [1e-5, 9e-4]}
    >>> print("\\n".join(best_table("all_reduce", 8, [8, 1 << 20], times, 2)))
      bytes  algorithm          us      GB/s  bus GB/s    ratio
          8  binomial         10.0  0.000800   0.00140
             ring             30.0  0.000267  0.000467     3.00
         1M  ring            400.0      2.62      4.59
             binomial        900.0      1.17      2.04     2.25
    """
    rankings = [ranking(times, index) for index in range(len(sizes))]
    shown = [name for of_size in rankings for name, _ in of_size[:number]]
    width, factor = max(9, *map(len, [*shown, ""])), bus_factor(collective, ranks)
    yield f"{'bytes':>7}  {'algorithm':<{width}} {'us':>11} {'GB/s':>9} {'bus GB/s':>9} {'ratio':>8}"
    for nbytes, of_size in zip(sizes, rankings, strict=True):
        words = f"{size_in_words(nbytes):>7}"
        for name, seconds in of_size[:number]:
            rate = rate_of(nbytes, seconds)
            ratio = "" if seconds == of_size[0][1] else f"{seconds / of_size[0][1]:.2f}"
            cells = f"{in_us(seconds):>11} {in_digits(rate):>9} {in_digits(rate * factor):>9} {ratio:>8}"
            yield f"{words}  {name:<{width}} {cells}".rstrip()
            words = " " * 7
        if len(of_size) < len(times):
            yield f"{words}  {'-':<{width}} {'-':>11} {'-':>9} {'-':>9} {'-':>8}"


def rate_of(nbytes: int, seconds: float) -> float:
    """Return the vector's GB/s; 0 for what takes no time."""
    return nbytes / seconds / 1e9 if seconds else 0.0


def in_digits(rate: float) -> str:
    """Format a positive number in three digits; nothing for none.

    >>> [in_digits(rate) for rate in (0.0, 0.000267, 2.6214, 48.31, 1234.5)]
    ['', '0.000267', '2.62', '48.3', '1234']
    """
    if not rate:
        return ""
    return f"{rate:.0f}" if rate >= 100 else f"{rate:#.3g}"


def whole_table(sizes: Sequence[int], times: Times) -> Iterator[str]:
    """Format a line for each algorithm, with a column for each size; one below the other what is too wide.

    >>> print("\\n".join(whole_table([8, 1 << 20], {"ring": [3e-5, 4e-4], "binomial": [1e-5]})))
    us             8       1M
    ring        30.0    400.0<
    binomial    10.0<       -
    """
    label = max(map(len, ["us", *times]))
    columns = [column(size_in_words(nbytes), times, index) for index, nbytes in enumerate(sizes)]
    while columns:
        widths = accumulate((len(cells[0]) for cells in columns), initial=label)
        at_once = max(1, sum(width <= COLUMNS for width in widths) - 1)
        for name, *cells in zip(["us", *times], *columns[:at_once], strict=True):
            yield f"{name:<{label}}{''.join(cells)}".rstrip()
        columns = columns[at_once:]


def column(head: str, times: Times, index: int) -> list[str]:
    """Format the times of one size below its head, in one width; `<` marks the fastest."""
    fastest = next((name for name, _ in ranking(times, index)), "")
    cells = [in_us(seconds[index]) if index < len(seconds) else "-" for seconds in times.values()]
    width = max(6, *map(len, [head, *cells]))
    marks = ["<" if name == fastest else " " for name in times]
    return [f"  {cell:>{width}}{mark}" for cell, mark in zip([head, *cells], [" ", *marks], strict=True)]


def in_us(seconds: float) -> str:
    """Format a time in microseconds, with a digit after the point while there are few before it.

    >>> in_us(7.7432e-5), in_us(0.0125)
    ('77.4', '12500')
    """
    return f"{seconds * 1e6:.1f}" if seconds < 0.01 else f"{seconds * 1e6:.0f}"


def rows_of(collective: str, ranks: int, sizes: Sequence[int], times: Times) -> Iterator[dict[str, Any]]:
    """Yield a result of each algorithm and size, with the names that the benchmark's have.

    >>> next(rows_of("all_gather", 2, [1000], {"ring": [1e-6]}))
    {'ranks': 2, 'bytes': 1000, 'algorithm': 'ring', 'us': 1.0, 'algbw_gbps': 1.0, 'busbw_gbps': 0.5}
    """
    for name, of_sizes in times.items():
        for nbytes, seconds in zip(sizes, of_sizes, strict=False):
            rate = rate_of(nbytes, seconds)
            rates = {"algbw_gbps": rate, "busbw_gbps": rate * bus_factor(collective, ranks)}
            yield {"ranks": ranks, "bytes": nbytes, "algorithm": name, "us": seconds * 1e6, **rates}


def to_json(conditions: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Write results as JSON, with a line for each."""
    head = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in conditions.items()]
    results = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    head.insert(0, f' "command": {json.dumps(sys.orig_argv)}')
    return "{\n" + ",\n".join(head) + f',\n "results": [\n{results}\n ]\n}}\n'


def figure(collective: str, ranks: int, sizes: Sequence[int], times: Times, number: int) -> Any:
    """Draw times and bus bandwidths over sizes: a matplotlib figure, on which the `number` fastest have names."""
    from matplotlib.figure import Figure  # takes half a second, paid only for drawing

    best = {name for index in range(len(sizes)) for name, _ in ranking(times, index)[:number]}
    chart = Figure(figsize=(11.0, 5.0), layout="constrained")
    factor, colors = bus_factor(collective, ranks), iter(PALETTE * (1 + len(best) // len(PALETTE)))
    left, right = chart.subplots(1, 2)
    for name, seconds in times.items():
        if not seconds:
            continue
        look = {"color": next(colors), "marker": "o", "zorder": 3} if name in best else {"color": "0.85"}
        rates = [rate_of(nbytes, s) * factor for nbytes, s in zip(sizes, seconds, strict=False)]
        left.plot(sizes[: len(seconds)], [s * 1e6 for s in seconds], label=name if name in best else None, **look)
        right.plot(sizes[: len(seconds)], rates, **look)
    for axes, label in ((left, "time (us)"), (right, "bus bandwidth (GB/s)")):
        axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel=label)
        axes.set_xticks(sizes, [size_in_words(nbytes) for nbytes in sizes], minor=False, rotation=45)
        axes.set_xticks([], minor=True)
        axes.grid(color="0.95")
    chart.legend(loc="outside lower center", ncols=4)
    chart.suptitle(f"{collective} on {ranks} ranks, predicted")
    return chart
