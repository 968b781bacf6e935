"""What a job does ahead of all that takes long to import."""

import signal

from collectives.job import environment


def tell_starting() -> None:
    """Say on rank 0 how many ranks are starting, where there are several."""
    if environment.launched_size() > 1 and environment.launched_rank() == 0:
        print(f"{environment.launched_size()} ranks are starting", flush=True)


def hold_signals() -> None:
    """Let SIGUSR1, by which a batch system announces the end, wait until a run can save, instead of ending a rank."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})


def ignore_late_signals() -> None:
    """Let a SIGUSR1 change nothing after the run has stopped listening: its last step is saved, and it ends by itself.

    Signals that wait until then are kept, which they would not be if the system ignored them.
    """
    signal.signal(signal.SIGUSR1, lambda *_: None)


def take_signals() -> None:
    """Take the SIGUSR1 that `hold_signals` let wait, and those that follow."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
