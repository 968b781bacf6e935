"""Tensor parallelism: a plan says how each module of a plain model is divided over ranks."""

from typing import TYPE_CHECKING

from parallelism.lazy import lazily

if TYPE_CHECKING:
    from parallelism.tensor.sharding_plan import (
        Attention,
        ColumnParallel,
        ExpertParallel,
        HeadRegion,
        Loss,
        RowParallel,
        SequenceRegion,
        Strategy,
        Vocabulary,
        parallelize,
    )

__all__ = [
    "Attention",
    "ColumnParallel",
    "ExpertParallel",
    "HeadRegion",
    "Loss",
    "RowParallel",
    "SequenceRegion",
    "Strategy",
    "Vocabulary",
    "parallelize",
]
__getattr__, __dir__ = lazily(__name__)
