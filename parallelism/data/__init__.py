"""Data parallelism: gradients are averaged in buckets while the backward pass goes on."""

from typing import TYPE_CHECKING

from parallelism.lazy import lazily

if TYPE_CHECKING:
    from parallelism.data.loop import DataParallel
    from parallelism.data.replica import Replica
    from parallelism.data.sampler import DistributedSampler
    from parallelism.data.units import ShardGroups

__all__ = ["DataParallel", "DistributedSampler", "Replica", "ShardGroups"]
__getattr__, __dir__ = lazily(__name__)
