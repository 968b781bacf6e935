"""The optimizer that a replica runs on its weights."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Protocol


class Optimizer(Protocol):
    """Interface of optimizers; torch's conform to it, except for `skipped`."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups, each with "params" and "lr", which may be changed between steps."""

    @property
    def state(self) -> MutableMapping[Any, Any]:
        """State tensors of each parameter, by name."""

    def step(self, skipped: Any = None) -> Any: ...
