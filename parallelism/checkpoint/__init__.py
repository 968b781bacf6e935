"""Layout-independent distributed checkpoints: each rank writes and reads its own shards."""

from typing import TYPE_CHECKING

from parallelism.lazy import lazily

if TYPE_CHECKING:
    from parallelism.checkpoint.checkpoints import Checkpoints
    from parallelism.checkpoint.extent import Extent
    from parallelism.checkpoint.hashes import StateHash, hash_state
    from parallelism.checkpoint.part import TensorShard, make_states, model_parts, state_parts
    from parallelism.checkpoint.reading import Checkpoint, CheckpointLoader, fingerprint
    from parallelism.checkpoint.snapshots import Snapshots
    from parallelism.checkpoint.stop import Stop

__all__ = [
    "Checkpoint",
    "CheckpointLoader",
    "Checkpoints",
    "Extent",
    "Snapshots",
    "StateHash",
    "Stop",
    "TensorShard",
    "fingerprint",
    "hash_state",
    "make_states",
    "model_parts",
    "state_parts",
]
__getattr__, __dir__ = lazily(__name__)
