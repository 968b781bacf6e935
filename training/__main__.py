"""Start training: `python -m training`, and train.py."""

import os
import signal

from collectives.job import environment


def main() -> None:
    hold_signals()
    if environment.launched_size() > 1 and environment.launched_rank() == 0:
        print(f"{environment.launched_size()} ranks are starting", flush=True)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler writes lines where it begins and ends
    from training.loop import main as train  # imports torch, which takes long on many ranks

    train()
    hold_signals()  # on exit, Python restores the system's handlers, which end the process


def hold_signals() -> None:
    """Block SIGUSR1, by which a batch system announces the end, unless a run can save; it would end the rank."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})


if __name__ == "__main__":
    main()
