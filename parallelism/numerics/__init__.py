"""Precision, clipping, steps that are not finite, dropout, and recomputation."""

from typing import TYPE_CHECKING

from parallelism.lazy import lazily

if TYPE_CHECKING:
    from parallelism.numerics.clipping import GradientClip
    from parallelism.numerics.dropout import BatchPosition, Dropout
    from parallelism.numerics.master_weights import MasterWeights
    from parallelism.numerics.non_finite import StepGuard
    from parallelism.numerics.precision import Precision
    from parallelism.numerics.recomputation import recompute

__all__ = ["BatchPosition", "Dropout", "GradientClip", "MasterWeights", "Precision", "StepGuard", "recompute"]
__getattr__, __dir__ = lazily(__name__)
