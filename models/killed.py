"""Plot of a run that is killed: on Ctrl-C, Open MPI's mpirun gives its ranks 0.2 s."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from collectives.job.system import python

WAITING = """
import signal, sys
signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # which Slurm sends to all processes of a step
if not sys.stdin.buffer.read(1):  # the run has ended without a word
    from models.report import draw_recorded
    draw_recorded(sys.argv[1], int(sys.argv[2]))
"""


@contextmanager
def drawn_if_killed(out_dir: str | None, vocab_size: int) -> Iterator[None]:
    """Let a separate process draw loss.png from metrics.jsonl if this one ends within the block for any reason."""
    if out_dir is None:
        yield
        return
    waiting = subprocess.Popen(
        python(WAITING, str(Path(out_dir).absolute()), str(vocab_size)),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # shields it from signals of the terminal and of mpirun
    )
    try:
        yield
    finally:
        waiting.communicate(b".")  # returns even if that was killed, too
