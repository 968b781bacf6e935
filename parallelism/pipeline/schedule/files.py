"""Schedule files: one line of actions per rank, as text (separated by blanks) or CSV (by commas).

Empty cells are idle time, and ignored; `#` begins a comment.  The CSV format is that of
torch.distributed.pipelining for a schedule's compute actions: F, B, I and W.
"""

from os import PathLike
from pathlib import Path
from typing import NamedTuple

from parallelism.pipeline.schedule.actions import Action, Schedule, count_peaks, parse
from parallelism.pipeline.schedule.failure import ProofError
from parallelism.pipeline.schedule.proof import prove

EXAMPLE = "0F0 0F1 0B0 0B1"


class FileCell(NamedTuple):
    """An action and its position in a file; cells are counted from 1, including idle ones."""

    line: int
    cell: int
    action: Action


def read(path: str | PathLike[str]) -> Schedule:
    """Read and prove a schedule; its live activations are counted.

    Raises: ValueError with the line, the cell and the error; OSError.
    """
    lines = cells_of(Path(path))
    orders = tuple(tuple(cell.action for cell in line) for line in lines)
    schedule = Schedule(Path(path).stem, orders, count_peaks(orders))
    try:
        prove(schedule)
    except ProofError as error:
        where = "".join(place_in(lines[rank], position) for rank, position in error.places[:1])
        raise ValueError(f"{path}{where}: {error}") from None
    return schedule


def place_in(line: list[FileCell], position: int) -> str:
    if position < len(line):
        return f", line {line[position].line}, cell {line[position].cell}"
    return f", line {line[-1].line}, behind the last cell"


def cells_of(path: Path) -> list[list[FileCell]]:
    """Return the actions of each line that is not empty."""
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text ({error}): write a line of actions for each rank, as {EXAMPLE}") from None
    lines = [actions_of(path, number, line) for number, line in enumerate(text.splitlines(), 1) if bare(line)]
    if not lines:
        raise ValueError(f"{path} has no actions: write a line of them for each rank, as {EXAMPLE}")
    return lines


def bare(line: str) -> str:
    return line.partition("#")[0].strip()


def actions_of(path: Path, number: int, line: str) -> list[FileCell]:
    words = [word for part in bare(line).split(",") for word in part.split() or [""]]
    cells = []
    for cell, word in enumerate(words, 1):
        try:
            cells += [FileCell(number, cell, parse(word))] if word else []
        except ValueError as error:
            raise ValueError(f"{path}, line {number}, cell {cell}: {error}; messages follow from these") from None
    if not cells:
        raise ValueError(f"{path}, line {number}: a rank without actions; write some, as {EXAMPLE}, or no line")
    return cells


def write(schedule: Schedule, path: str | PathLike[str]) -> None:
    """Write a schedule, as CSV if the suffix is .csv, else as text."""
    is_csv = Path(path).suffix == ".csv"
    lines = [("," if is_csv else " ").join(map(str, order)) for order in schedule.orders]
    Path(path).write_text("".join(f"{line}\n" for line in lines))
