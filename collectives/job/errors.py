"""The errors that a caller may want to catch, and the exit status of a program that is interrupted."""

from signal import SIGINT

INTERRUPTED = 128 + SIGINT  # as shells have it


class InputError(ValueError):
    """Bad input, raised on every rank together: none of them hangs, and all say the same."""


class LoneInputError(InputError):
    """The same raised on one rank only, since ranks were told not to compare what they call: it ends the job."""


class CommunicationError(RuntimeError):
    """A failure of MPI in the middle of a collective; says in which round, and what this rank was waiting for."""
