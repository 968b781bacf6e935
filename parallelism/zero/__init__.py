"""ZeRO: optimizer states, gradients and parameters are sharded over data-parallel ranks."""

from typing import TYPE_CHECKING

from parallelism.lazy import lazily

if TYPE_CHECKING:
    from parallelism.zero.matrices import MatrixOwners
    from parallelism.zero.sharded import Sharded

__all__ = ["MatrixOwners", "Sharded"]
__getattr__, __dir__ = lazily(__name__)
