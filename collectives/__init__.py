"""Hand-written collective communication over MPI, on NumPy, CuPy and torch arrays.

    import collectives

    comm = collectives.world()
    comm.all_reduce(x)

The pure half (schedules, algorithms, contract) imports neither MPI nor an array library; the rest is loaded on use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collectives.communicator import Communicator, InputError, world
    from collectives.executor import CommunicationError, Plan

__all__ = ["CommunicationError", "Communicator", "InputError", "Plan", "algorithms", "world"]

HOMES = {
    "algorithms": "collectives.algorithms",
    "CommunicationError": "collectives.executor",
    "Plan": "collectives.executor",
    "Communicator": "collectives.communicator",
    "InputError": "collectives.communicator",
    "world": "collectives.communicator",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'collectives' has no attribute {name!r}")
    module = import_module(HOMES[name])
    return module if name == "algorithms" else getattr(module, name)
