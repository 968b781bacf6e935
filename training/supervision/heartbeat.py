"""The step that a run has begun, or that it has ended, in a file for each host, from which a supervisor reads it."""

from __future__ import annotations

import platform
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from collectives.job import environment

if TYPE_CHECKING:
    import collectives

ENDED = "ended"


def beat(comm: collectives.Communicator, step: int | str) -> None:
    """Write the number of a step that begins, or `ENDED`, as this host's first rank, if a supervisor wants it."""
    folder = environment.heartbeat_folder()
    if folder and any(comm.rank == ranks[0] for ranks in comm.topology.nodes):
        with suppress(OSError):  # a run does not depend on its supervisor
            (folder / platform.node()).write_text(str(step))


def newest_step(folder: Path) -> int:
    """Return the last step that a host has begun; a file that is being written counts for nothing."""
    return max((int(text) for text in texts(folder) if text.isdigit()), default=0)


def has_ended(folder: Path) -> bool:
    """Return whether a run has come to its end, or has begun no step."""
    begun = texts(folder)
    return ENDED in begun or not begun


def texts(folder: Path) -> list[str]:
    with suppress(OSError):
        return [path.read_text() for path in folder.iterdir()]
    return []
