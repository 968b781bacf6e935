"""Start of a job, before the slow imports."""

import signal

from collectives.job import environment


def tell_starting() -> None:
    """Print on rank 0 how many ranks are starting, if there are several."""
    if environment.launched_size() > 1 and environment.launched_rank() == 0:
        print(f"{environment.launched_size()} ranks are starting", flush=True)


def hold_signals() -> None:
    """Block SIGUSR1, by which a batch system announces the end, until a run can save; it would end the rank."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})


def ignore_late_signals() -> None:
    """Ignore SIGUSR1 after a run's last step, which is saved; the run is about to end.

    A handler that does nothing keeps blocked signals pending, which SIG_IGN would discard.
    """
    signal.signal(signal.SIGUSR1, lambda *_: None)


def take_signals() -> None:
    """Unblock SIGUSR1: deliver a signal that `hold_signals` has held back, and later ones."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
