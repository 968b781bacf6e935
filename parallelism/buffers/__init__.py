"""Parameters and gradients in flat symmetric arrays, and collectives on tensors."""

from typing import TYPE_CHECKING

from parallelism.lazy import lazily

if TYPE_CHECKING:
    from parallelism.buffers.arena import Arena
    from parallelism.buffers.tensor_collectives import TensorCollectives

__all__ = ["Arena", "TensorCollectives"]
__getattr__, __dir__ = lazily(__name__)
