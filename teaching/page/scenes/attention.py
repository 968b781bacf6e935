"""Ring attention scene: the keys and values that each rank holds in each step, and the pairs that attend."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from parallelism.sequence.ring_attention import Ring
from parallelism.sequence.token_shards import ORDERS, TokenShards
from teaching.page.assemble import Scene

RANKS = range(1, 17)
TOKENS = 4  # per rank
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
NEVER = "."


def scene() -> Scene:
    data = {order: {size: ring_data(size, order) for size in RANKS} for order in ORDERS}
    return Scene("attention", data)


def ring_data(size: int, order: str) -> dict[str, Any]:
    """Return the rank of each token, each rank's sources by step, and the step in which a query attends to a key."""
    shards = TokenShards(size * TOKENS, size, order=order)
    shards.check()
    owners = np.empty(shards.length, int)
    steps = np.full((shards.length, shards.length), -1)
    sources = []
    for rank in range(size):
        owners[shards.positions(rank)] = rank
        ring = Ring(SimpleNamespace(size=size, rank=rank), order)  # type: ignore[arg-type]
        sources.append(list(ring.sources()))
        for step, source in enumerate(sources[rank]):
            if pair := ring.pair(source, TOKENS):
                queries, keys = shards.positions(rank)[pair.queries], shards.positions(source)[pair.keys]
                attends = np.tri(len(queries), len(keys), dtype=bool) if pair.causal else np.s_[:, :]
                block = np.full((len(queries), len(keys)), -1)
                block[attends] = step
                steps[np.ix_(queries, keys)] = np.maximum(steps[np.ix_(queries, keys)], block)
    rows = ["".join(NEVER if step < 0 else DIGITS[step] for step in row) for row in steps]
    return {"owners": owners.tolist(), "sources": sources, "steps": rows}
