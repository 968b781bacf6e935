"""A progress bar on the terminal of the job."""

import shutil
import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

from collectives.job import environment


def progress_bar(steps: Iterable[Any] | int, unit: str, rank: int = 0) -> tqdm:
    """Return a bar over an iterable, or over so many calls of `update()`, in `with`.

    Rank 0 draws it, and only on a terminal.
    """
    iterable, total = (None, steps) if isinstance(steps, int) else (steps, None)
    # A rank's terminal may be mpirun's pseudo-terminal, without width and height; this is then 80 x 24.
    width, height = shutil.get_terminal_size()
    is_hidden = rank > 0 or not environment.on_terminal()
    look = {"file": sys.stdout, "disable": is_hidden, "leave": False, "ncols": width, "nrows": height}
    return tqdm(iterable, total=total, unit=unit, **look)


def show(*lines: str) -> None:
    """Print lines above the bar, if there is one."""
    with tqdm.external_write_mode(file=sys.stdout):
        print(*lines, sep="\n", flush=True)
