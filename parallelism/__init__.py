"""Parallel training on torch: data, tensor, sequence, expert and pipeline parallelism, ZeRO, and checkpoints.

    import collectives
    from parallelism import DataParallel, Mesh, RowParallel, parallelize

Each package exports more.  Names are imported on their first use, so that what needs no torch does without.
"""

from typing import TYPE_CHECKING

from parallelism.lazy import lazily

if TYPE_CHECKING:
    from parallelism.checkpoint.checkpoints import Checkpoints
    from parallelism.checkpoint.part import model_parts
    from parallelism.data.loop import DataParallel
    from parallelism.data.sampler import DistributedSampler
    from parallelism.data.units import ShardGroups
    from parallelism.experts.exchange import ExpertExchange
    from parallelism.mesh import Mesh, Within
    from parallelism.numerics.clipping import GradientClip
    from parallelism.numerics.non_finite import StepGuard
    from parallelism.numerics.recomputation import recompute
    from parallelism.pipeline.pipeline_parallel import PipelineParallel
    from parallelism.pipeline.schedule.registry import make_schedule
    from parallelism.pipeline.stage import Batch, Layer
    from parallelism.placement import Replicate, Shard, place
    from parallelism.sequence.sequence_parallel import SequenceAttention, SequenceLoss, SequenceParallel
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
    from parallelism.zero.sharded import Sharded

__all__ = [
    "Attention",
    "Batch",
    "Checkpoints",
    "ColumnParallel",
    "DataParallel",
    "DistributedSampler",
    "ExpertExchange",
    "ExpertParallel",
    "GradientClip",
    "HeadRegion",
    "Layer",
    "Loss",
    "Mesh",
    "PipelineParallel",
    "Replicate",
    "RowParallel",
    "SequenceAttention",
    "SequenceLoss",
    "SequenceParallel",
    "SequenceRegion",
    "Shard",
    "ShardGroups",
    "Sharded",
    "StepGuard",
    "Strategy",
    "Vocabulary",
    "Within",
    "make_schedule",
    "model_parts",
    "parallelize",
    "place",
    "recompute",
]
__getattr__, __dir__ = lazily(__name__)
