"""Errors that a caller may want to catch, and the exit status of an interrupted program."""

from signal import SIGINT

INTERRUPTED = 128 + SIGINT  # as shells have it


class InputError(ValueError):
    """Bad input, raised on every rank together: none of them hangs, and all give the same reason."""


class LoneInputError(InputError):
    """Bad input, raised on one rank only, as ranks do not compare their calls: it ends the job."""


class CommunicationError(RuntimeError):
    """A failure of MPI in the middle of a collective; names the round, and the operation waited for."""


class RankFailure(CommunicationError):  # noqa: N818  as MPI calls it
    """Ranks have died, in a job that goes on without them: see `Communicator.shrink`."""
