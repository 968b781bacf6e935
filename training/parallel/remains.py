"""What ranks hold of a run in which others have died: perhaps its whole state."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from parallelism.checkpoint import Extent, TensorShard


class Remains(NamedTuple):
    """A rank's shards after `step`, and what a checkpoint has beside them; `names` are the whole model's tensors.

    A rank that had not yet reported its last update, or had not begun, offers nothing: step 0.
    """

    step: int = 0
    shards: Sequence[TensorShard] = ()
    whole: Mapping[str, Any] | None = None
    names: frozenset[str] = frozenset()

    def weights(self) -> list[tuple[str, Extent, int]]:
        """Return the name, the extent, and the elements without padding of each shard of the weights."""
        weights = [shard for shard in self.shards if shard.kind == "parameter"]
        return [(shard.name, shard.extent, int(shard.extent.runs()[:, 2].sum())) for shard in weights]


def are_whole(names: frozenset[str], of_ranks: Iterable[Iterable[tuple[str, Extent, int]]]) -> bool:
    """Return whether the weights of all ranks together are all elements of these tensors.

    Two ranks hold the same elements of a tensor, or none in common.
    """
    counts: dict[str, int] = defaultdict(int)
    lengths: dict[str, int] = {}
    for name, extent, count in {each for weights in of_ranks for each in weights}:
        counts[name] += count
        lengths[name] = math.prod(extent.shape)
    return names == lengths.keys() and all(counts[name] == length for name, length in lengths.items())
