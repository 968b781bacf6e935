"""Lines about what takes long before the first step."""

from __future__ import annotations

from functools import cache

from numba.core import event

from collectives.runtime import kernels


class FirstCompilation(event.Listener):
    """Says once that the kernels of collectives are compiled, where they are not on disk."""

    def __init__(self) -> None:
        self.is_said = False

    def on_start(self, event: event.Event) -> None:
        if event.data["dispatcher"] is kernels.run and not self.is_said:
            self.is_said = True
            print("compiling the collectives' kernels, which stay on disk", flush=True)

    def on_end(self, event: event.Event) -> None:
        pass


@cache
def tell_compiling() -> None:
    """From now on say when the kernels are compiled."""
    event.register("numba:compile", FirstCompilation())
