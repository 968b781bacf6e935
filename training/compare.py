"""Compare two runs by the hashes of their weights and optimizer states, and name what differs first.

python -m training.compare out out-2

Both must have been trained with --hash_interval.  It names the first step that differs, then the first parameter, in
the model's order.  Where both runs have a checkpoint of that step, or of a later one, in their --checkpoint_dir, it
also names the first element that differs there.  The exit status is 0 for equal runs, 1 for different ones, and 2 if
they can't be compared.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from collectives.job.settings import Parser
from parallelism.checkpoint import Checkpoint, Extent, StateHash, TensorShard
from parallelism.checkpoint.folders import complete_checkpoints
from parallelism.checkpoint.hashes import BITS
from training.reports.jsonl import HASHES, SETTINGS

EXAMPLES = 3  # of steps, in a message


class HashedRun:
    """A run's folder, with its hashes by step.

    Raises: ValueError with the file and the remedy.
    """

    def __init__(self, folder: Path):
        self.folder, self.hashes = folder, dict(hashes_in(folder / HASHES))

    def checkpoints(self) -> dict[int, Checkpoint]:
        """Return the run's checkpoints by step, those that hold what it hashed in that step; others are not its own."""
        own = {}
        with suppress(OSError, tomllib.TOMLDecodeError):
            directory = tomllib.loads((self.folder / SETTINGS).read_text(encoding="utf-8")).get("checkpoint_dir")
            for path in complete_checkpoints(Path(directory)) if directory else []:
                with suppress(ValueError):  # a damaged one
                    checkpoint = Checkpoint(path)
                    step, whole = checkpoint.index.step, checkpoint.index.whole
                    if step in self.hashes and self.hashes[step].hash == whole.get("hash"):
                        own[step] = checkpoint
        return own


def main() -> int:
    parser = Parser("python -m training.compare", __doc__)
    parser.add_argument("runs", nargs=2, type=Path, metavar="RUN", help=f"folder of a run, with {HASHES}")
    try:
        first, second = parser.parse_args().runs
        if first.resolve() == second.resolve():
            raise ValueError(f"{first} is given twice: pass two runs")
        lines = compare(HashedRun(first), HashedRun(second))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(*lines, sep="\n")
    return int(len(lines) > 1)


def hashes_in(path: Path) -> Iterator[tuple[int, StateHash]]:
    """Yield the hashes in a file by step; a step that a resumed run has repeated comes again.

    A line that a killed run has not finished is skipped.

    Raises: ValueError for another file, or a missing one.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}: pass the folder of a run with --hash_interval") from None
    for line in lines:
        with suppress(json.JSONDecodeError):
            match json.loads(line):
                case {"step": int(step), "hash": str(state_hash), "tensors": dict(tensors)}:
                    yield step, StateHash(state_hash, tensors)
                case _:
                    raise ValueError(f"{path}: has a line that is not a hash of a run: pass another folder")


def compare(first: HashedRun, second: HashedRun) -> list[str]:
    """Describe the first difference between two runs, or their equality in one line.

    Raises: ValueError if they have hashed no step in common.
    """
    common = sorted(first.hashes.keys() & second.hashes.keys())
    if not common:
        steps = " and ".join(f"{steps_of(run)} of {run.folder}" for run in (first, second))
        raise ValueError(f"{steps} are hashed, none in common: train both with the same --hash_interval")
    different = [step for step in common if first.hashes[step].hash != second.hashes[step].hash]
    if not different:
        return [f"equal in {len(common)} hashed steps, up to step {common[-1]}"]
    step = different[0]
    before = [f"step {each} is equal" for each in common if each < step][-1:] or ["it is the first that both hashed"]
    a, b = first.hashes[step].tensors, second.hashes[step].tensors
    names = [name for name in {**a, **b} if a.get(name) != b.get(name)]
    if not names:
        raise ValueError(f"step {step} has two hashes, but the same tensors: a {HASHES} is damaged; train again")
    name = names[0]
    ours, theirs = a.get(name, {}), b.get(name, {})
    kinds = [kind for kind in {**ours, **theirs} if ours.get(kind) != theirs.get(kind)]
    return [
        f"step {step} differs; {before[0]}",
        f"{name} is the first parameter that differs, in {', '.join(kinds)}; {len(names)} of {len({**a, **b})} differ",
        element(first, second, step, name, kinds),
    ]


def steps_of(run: HashedRun) -> str:
    steps = sorted(run.hashes)
    return f"steps {', '.join(map(str, steps[:EXAMPLES]))}{', ...' if len(steps) > EXAMPLES else ''}"


def element(first: HashedRun, second: HashedRun, step: int, name: str, kinds: list[str]) -> str:
    """Describe the first element of a tensor that differs, in the runs' first checkpoints from `step` on."""
    every = first.checkpoints(), second.checkpoints()
    at = min((each for each in every[0].keys() & every[1].keys() if each >= step), default=None)
    if at is None:
        return (
            f"no checkpoint of step {step} or a later one is there of both runs, to name an element: train with "
            "--checkpoint_dir and --checkpoint_interval"
        )
    for kind in kinds:
        try:
            tensors = [tensor_in(checkpoints[at], kind, name) for checkpoints in every]
        except (ValueError, OSError) as error:
            return f"no element can be named: {error}"
        if difference := describe(*tensors):
            return f"{kind} of {name} in the checkpoints of step {at}: {difference}"
    return f"{name} does not differ in the checkpoints of step {at}"


def tensor_in(checkpoint: Checkpoint, kind: str, name: str) -> Tensor | None:
    """Read a whole tensor, if the checkpoint has it; raise ValueError or OSError if a shard is damaged."""
    if (kind, name) not in checkpoint.pieces:
        return None
    _, piece = checkpoint.pieces[kind, name][0]
    whole = torch.empty(piece.extent.shape, dtype=piece.torch_dtype)
    checkpoint.fill([TensorShard(name, kind, Extent(piece.extent.shape, 0, prod(piece.extent.shape)), whole)])
    return whole


def describe(a: Tensor | None, b: Tensor | None) -> str:
    """Describe the first element that differs, with its values and bits, or why there is none to compare."""
    if a is None or b is None:
        return f"only the {'second' if a is None else 'first'} run has it"
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return " and ".join(f"{[*each.shape]} of {each.dtype}" for each in (a, b))
    bits = [each.reshape(-1).view(BITS[each.element_size()]) for each in (a, b)]
    differs = (bits[0] != bits[1]).nonzero()
    if not len(differs):
        return ""
    index, size = int(differs[0]), a.element_size()
    digits = 9 if size <= 4 else 17  # which identify a float
    numbers = [f"{each.reshape(-1)[index].item():.{digits}g}" for each in (a, b)]
    words = [f"{int(its[index]) % (1 << 8 * size):#0{2 + 2 * size}x}" for its in bits]
    values = " and ".join(f"{number} ({word})" for number, word in zip(numbers, words, strict=True))
    indices = [int(i) for i in np.unravel_index(index, a.shape)]
    return f"element {indices} is {values}; {len(differs):,} of {a.numel():,} differ"


if __name__ == "__main__":
    sys.exit(main())
