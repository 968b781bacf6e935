"""Sequence parallelism: tokens are sharded; ranks communicate in attention only."""

from typing import TYPE_CHECKING

from parallelism.lazy import lazily

if TYPE_CHECKING:
    from parallelism.sequence.sequence_parallel import SequenceAttention, SequenceLoss, SequenceParallel
    from parallelism.sequence.token_shards import TokenShards

__all__ = ["SequenceAttention", "SequenceLoss", "SequenceParallel", "TokenShards"]
__getattr__, __dir__ = lazily(__name__)
