"""Lines about what takes long before the first step."""

from __future__ import annotations

from functools import cache

KERNELS = "collectives.runtime.kernels"


@cache
def tell_compiling() -> None:
    """From now on say, once, when the kernels of collectives are compiled, as they are not on disk."""
    from numba.core import event  # after MPI, without which a program says so and ends

    class FirstCompilation(event.Listener):
        is_said = False

        def on_start(self, event: event.Event) -> None:
            if event.data["dispatcher"].py_func.__module__ == KERNELS and not self.is_said:
                self.is_said = True
                print("compiling the collectives' kernels, which stay on disk", flush=True)

        def on_end(self, event: event.Event) -> None:
            pass

    event.register("numba:compile", FirstCompilation())
