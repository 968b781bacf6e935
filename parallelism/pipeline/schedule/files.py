"""Schedule files: one line of actions per rank, as text (separated by blanks) or CSV (by commas).

Empty cells are idle time, and ignored; `#` begins a comment.  The CSV format is that of
torch.distributed.pipelining for a schedule's compute actions: F, B, I and W.
"""

from os import PathLike
from pathlib import Path

from parallelism.pipeline.schedule.actions import Schedule, count_peaks
from parallelism.pipeline.schedule.proof import ProofError, prove
from parallelism.step.actions import Action, parse

EXAMPLE = "0F0 0F1 0B0 0B1"


def read(path: str | PathLike[str]) -> Schedule:
    """Read and prove a schedule; its live activations are counted.

    Raises: ValueError with the line, the cell and the error; OSError.
    """
    lines = lines_of(Path(path))
    orders = tuple(tuple(line.values()) for line in lines.values())
    schedule = Schedule(Path(path).stem, orders, count_peaks(orders))
    try:
        prove(schedule)
    except ProofError as error:
        (rank, position), *_ = error.positions
        line, cells = [*lines.items()][rank]
        where = f"cell {[*cells][position]}" if position < len(cells) else "behind the last cell"
        raise ValueError(f"{path}, line {line}, {where}: {error}") from None
    return schedule


def lines_of(path: Path) -> dict[int, dict[int, Action]]:
    """Return the actions of each line that is not empty, by line and cell, counted from 1 and including idle cells."""
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text ({error}): write a line of actions for each rank, as {EXAMPLE}") from None
    texts = [line.partition("#")[0].strip() for line in text.splitlines()]
    lines = {number: actions_of(f"{path}, line {number}", line) for number, line in enumerate(texts, 1) if line}
    if not lines:
        raise ValueError(f"{path} has no actions: write a line of them for each rank, as {EXAMPLE}")
    return lines


def actions_of(where: str, line: str) -> dict[int, Action]:
    actions: dict[int, Action] = {}
    for cell, word in enumerate((word for part in line.split(",") for word in part.split() or [""]), 1):
        try:
            actions |= {cell: parse(word)} if word else {}
        except ValueError as error:
            raise ValueError(f"{where}, cell {cell}: {error}; messages follow from these") from None
    if not actions:
        raise ValueError(f"{where}: a rank without actions; write some, as {EXAMPLE}, or no line")
    return actions


def write(schedule: Schedule, path: str | PathLike[str]) -> None:
    """Write a schedule, as CSV if the suffix is .csv, else as text."""
    is_csv = Path(path).suffix == ".csv"
    lines = [("," if is_csv else " ").join(map(str, order)) for order in schedule.orders]
    Path(path).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
