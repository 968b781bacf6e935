"""A message on first use, when the kernels are compiled."""

import sys

from numba.core import event

KERNELS = "collectives.runtime.kernels"


class FirstCompilation(event.Listener):
    """Message on stderr, once, that a kernel of the collectives is compiled, as it is not on disk."""

    is_said = False

    def on_start(self, event: event.Event) -> None:
        if event.data["dispatcher"].py_func.__module__ == KERNELS and not self.is_said:
            self.is_said = True
            print("collectives: compiling kernels, once; they stay on disk", file=sys.stderr, flush=True)

    def on_end(self, event: event.Event) -> None:
        pass


def tell_compiling() -> None:
    """Print the message at the first compilation from now on."""
    event.register("numba:compile", FirstCompilation())
