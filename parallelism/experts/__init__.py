"""Expert parallelism: the experts of a mixture are sharded, and tokens are sent to them."""

from typing import TYPE_CHECKING

from parallelism.lazy import lazily

if TYPE_CHECKING:
    from parallelism.experts.exchange import ExpertExchange
    from parallelism.experts.expert_parallel import MixtureLayer

__all__ = ["ExpertExchange", "MixtureLayer"]
__getattr__, __dir__ = lazily(__name__)
