"""What benchmarks/peers.py has measured, as results of the benchmark: medians, without samples.

A contestant there is an algorithm and its memory, "auto symmetric", or its dtype, "auto bfloat16"; or a peer; or
"copy", which is no collective.
"""

from collections.abc import Iterator
from typing import Any

from collectives.algorithms import ROOTED
from collectives.arguments import REDUCTIONS
from collectives.bench.bound import bus_factor
from collectives.bench.document import PEERS, Document, Group, Row, bandwidth, positive
from collectives.tuning import MEMORIES, take

IN_PLACE = frozenset({"all_reduce", "broadcast"})


def is_peer_run(data: Any) -> bool:
    results = data.get("results") if isinstance(data, dict) else None
    return isinstance(results, list) and bool(results) and all(isinstance(r, dict) and "seconds" in r for r in results)


def parse_peer_run(data: Any, path: str) -> Document:
    ranks = take(data, "ranks", int)
    environment = {name: value for name, value in data.items() if name not in ("ranks", "results")}
    return Document(path, ranks, (ranks,), environment, tuple(rows(data["results"], ranks)))


def rows(results: list[dict[str, Any]], ranks: int) -> Iterator[Row]:
    for result in results:
        collective, nbytes = take(result, "collective", str), take(result, "bytes", int)
        for contestant, seconds in take(result, "seconds", dict).items():
            if contestant != "copy":
                median_us = positive(seconds, contestant) * 1e6
                busbw = bus_factor(collective, ranks) * nbytes / median_us / 1e3
                yield Row(group(collective, contestant), nbytes, (median_us,), median_us, bandwidth(busbw), None)


def group(collective: str, contestant: str) -> Group:
    name, _, of = contestant.partition(" ")
    memory = of if of in MEMORIES else "ordinary" if name in PEERS else "symmetric"
    dtype = of if of and of not in MEMORIES else "float32"
    op, root = "sum" if collective in REDUCTIONS else None, 0 if collective in ROOTED else None
    return Group(collective, name, memory, "cpu", dtype, op, root, collective in IN_PLACE)
