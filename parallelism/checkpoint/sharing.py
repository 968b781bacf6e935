"""Who writes which of the parts that several ranks have."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from parallelism.checkpoint.part import TensorShard

if TYPE_CHECKING:
    from collectives import Communicator


def shared_out(comm: Communicator, parts: Iterable[TensorShard]) -> list[TensorShard]:
    """Of the parts that each rank has, those that it is to write.  Collective."""
    offers = {identity(part): part for part in parts}
    rows = np.array([[key, part.extent.length * part.tensor.element_size()] for key, part in offers.items()], np.int64)
    counts = comm.all_gather_object(rows.size)
    every = comm.all_gather(rows.ravel(), counts=counts)
    by_rank = [dict(flat.reshape(-1, 2).tolist()) for flat in np.split(every, np.cumsum(counts)[:-1])]
    return [offers[key] for key in writers(by_rank)[comm.rank]]


def identity(part: TensorShard) -> int:
    """A number that two parts have in common if, but for the odds of 2^-63, they are the same part of the same."""
    text = json.dumps([part.name, part.kind, part.extent])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def writers(offers: Sequence[Mapping[int, int]]) -> list[list[int]]:
    """Which of the parts that ranks have each of them writes: each part by one rank, all of them about as much.

    `offers` are the sizes of each rank's parts, by what identifies them.

    >>> writers([{1: 100, 2: 60, 3: 30}, {1: 100, 2: 60, 4: 10}])
    [[1, 3], [2, 4]]
    """
    holders: dict[int, list[int]] = defaultdict(list)
    for rank, sizes in enumerate(offers):
        for key in sizes:
            holders[key].append(rank)
    load = [0] * len(offers)
    mine: list[list[int]] = [[] for _ in offers]
    for key in sorted(holders, key=lambda key: (-offers[holders[key][0]][key], key)):
        rank = min(holders[key], key=load.__getitem__)
        load[rank] += offers[rank][key]
        mine[rank].append(key)
    return mine
