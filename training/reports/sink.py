"""Interface of the sinks of a run's records: files, TensorBoard, Weights & Biases, Prometheus, the HTML report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from parallelism.checkpoint import StateHash
from training.reports.facts import RunFacts
from training.reports.metrics import Record


class Sink:
    """Takes the records of a run, on rank 0; `target` is the file, folder or project that it writes to.

    A failure to write a file, as on a full disk, is shown once, and does not stop the run.
    """

    def __init__(self, target: str):
        self.target = target
        self.failed: set[str] = set()

    def open(self, facts: RunFacts, show: Callable[[str], None]) -> None:
        """Begin; `show` prints a line.

        Raises: ValueError for a sink that does not start.
        """
        self.facts, self.show = facts, show

    def write(self, record: Record) -> None:
        raise NotImplementedError

    def write_hash(self, step: int, state: StateHash) -> None:
        """Take the hash of a step, whose record follows."""

    def close(self) -> None:
        """End, also after an error or an interrupt."""

    @contextmanager
    def writing(self, path: str) -> Iterator[Path]:
        """Show a failure to write this file, the first time."""
        try:
            yield Path(path)
        except OSError as error:
            if path not in self.failed:
                self.show(f"{path} can't be written ({error.strerror}): the run continues without it")
            self.failed.add(path)


def numbers(record: Record) -> dict[str, float]:
    """Return the numbers of a record that are plotted over the iterations."""
    plotted = {name: value for name, value in record.items() if name not in ("iter", "max_iters")}
    return {name: value for name, value in plotted.items() if isinstance(value, int | float)}
