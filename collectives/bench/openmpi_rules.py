"""Turn a tuning file into rules for Open MPI's own collectives, where it has the algorithm that was the fastest.

python -m collectives.bench --tune-openmpi rules.txt --from tuning.json
mpirun --mca coll_tuned_use_dynamic_rules 1 --mca coll_tuned_dynamic_rules_filename rules.txt ...

In Open MPI's file, a rule holds from its number of ranks, or of bytes, up to the next one's; the first must begin
with 0, and algorithm 0 leaves the decision to Open MPI.  So what was not measured, and what has no counterpart, stays
as it was.  In a gather or scatter only some ranks know the size, and others would follow the rule for 0 bytes: these
get a rule where one algorithm is the fastest at every size.  Rules know no nodes.  Arrays in shared memory are none of
Open MPI's: rows of "ordinary" memory count.

Source: Open MPI 5.0, documentation, "Tuning Collectives" (the file, numbers of collectives and algorithms, sizes of
messages); ompi/mca/coll/tuned/coll_tuned_dynamic_file.c (what is read), coll_tuned_decision_dynamic.c (when it counts).
"""

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from collectives.tuning import Case, Limits, Tuning, parse_tuning


class Target(NamedTuple):
    """A collective of Open MPI's, and its numbers of our algorithms."""

    number: int
    name: str
    algorithms: Mapping[str, int]
    sized: bool = True  # whether all ranks know how many bytes there are


PIPELINE = 3  # the chain of Open MPI's `broadcast` and `reduce`, which flows in segments of a length that rules give
TARGETS = {
    "all_gather": [Target(0, "Allgather", {"bruck": 2, "recursive_doubling": 3, "ring": 4, "neighbor": 5})],
    "all_reduce": [Target(2, "Allreduce", {"recursive_doubling": 3, "ring": 4, "rabenseifner": 6})],
    "all_to_all": [Target(3, "Alltoall", {"pairwise": 2, "bruck": 3})],
    "barrier": [Target(6, "Barrier", {"dissemination": 4}, sized=False)],  # its name there: bruck
    "broadcast": [Target(7, "Bcast", {"chain": PIPELINE, "binomial": 6, "scatter_all_gather": 9})],
    "gather": [Target(9, "Gather", {"binomial": 2}, sized=False)],
    "reduce": [Target(11, "Reduce", {"chain": PIPELINE, "binomial": 5})],
    "reduce_scatter": [
        Target(12, "Reduce_scatter", {"recursive_halving": 2, "ring": 3}),
        Target(13, "Reduce_scatter_block", {"recursive_halving": 3}),
    ],
    "scatter": [Target(15, "Scatter", {"binomial": 2}, sized=False)],
}


class Rules(NamedTuple):
    text: str
    left_out: Sequence[str]  # what has no counterpart, a line each


def export(tuning: Tuning) -> Rules:
    """The rules that follow from a tuning file."""
    rows, left_out = chosen(tuning.fastest)
    sections = []
    for collective, by_ranks in sorted(rows.items()):
        for target in TARGETS[collective]:
            left_out += missing(target, by_ranks)
            if any(number for limits in by_ranks.values() for number in numbers(target, limits)):
                sections.append("\n".join(section(target, by_ranks)))
    head = f"{len(sections)}  # collectives; made from {tuning.source}"
    return Rules("\n".join([head, *sections]) + "\n", left_out)


def chosen(fastest: Mapping[Case, Limits]) -> tuple[dict[str, dict[int, Limits]], list[str]]:
    """Limits by collective and ascending ranks, of the most nodes there are; and which cases were not taken."""
    rows: dict[str, dict[int, Limits]] = defaultdict(dict)
    left_out = []
    taken: dict[tuple[str, int], int] = {}
    for case in sorted(fastest, key=lambda case: (case.collective, case.ranks, -case.nodes)):
        if case.memory != "ordinary":
            continue
        nodes = taken.setdefault((case.collective, case.ranks), case.nodes)
        if nodes == case.nodes:
            rows[case.collective][case.ranks] = fastest[case]
        else:
            where = f"{case.collective} on {case.ranks} ranks of {case.nodes} nodes"
            left_out.append(f"{where}: rules know no nodes, and those for {nodes} nodes are taken")
    return rows, left_out


def numbers(target: Target, limits: Limits) -> list[int]:
    """Open MPI's algorithm for each entry, 0 for none."""
    if not target.sized and len({name for _, name in limits}) > 1:
        return [0] * len(limits)
    return [target.algorithms.get(name, 0) for _, name in limits]


def missing(target: Target, by_ranks: Mapping[int, Limits]) -> Iterator[str]:
    """What has no counterpart, in words."""
    for ranks, limits in by_ranks.items():
        where = f"{target.name} on {ranks} ranks"
        names = list(dict.fromkeys(name for _, name in limits))
        if not target.sized and len(names) > 1:
            yield f"{where}: {' and '.join(names)} by size, which only some ranks know"
            continue
        for begin, end, name in spans(limits):
            if name not in target.algorithms:
                sizes = f", {begin} to {end} bytes" if target.sized else ""
                yield f"{where}{sizes}: Open MPI has no {name}"


def spans(limits: Limits) -> Iterator[tuple[int, int, str]]:
    """The first and last size of each entry.

    >>> list(spans(((64, "bruck"), (256, "ring"))))
    [(0, 64, 'bruck'), (65, 256, 'ring')]
    """
    begin = 0
    for end, name in limits:
        yield begin, end, name
        begin = end + 1


def section(target: Target, by_ranks: Mapping[int, Limits]) -> Iterator[str]:
    """A collective's lines: for other numbers of ranks than those measured, Open MPI decides."""
    sizes: dict[int, Limits] = {0: ()}
    for ranks, limits in by_ranks.items():
        sizes |= {ranks: limits, ranks + 1: by_ranks.get(ranks + 1, ())}
    yield f"{target.number}  # {target.name}"
    yield f"{len(sizes)}  # numbers of ranks"
    for ranks, limits in sorted(sizes.items()):
        lines = list(messages(target, ranks, limits))
        yield f"{ranks}  # ranks or more"
        yield f"{len(lines)}  # sizes: bytes or more, algorithm, fan-out, bytes of a segment"
        yield from lines


def messages(target: Target, ranks: int, limits: Limits) -> Iterator[str]:
    if not limits or not target.sized:
        yield f"0 {max(numbers(target, limits), default=0)} 0 0"
        return
    for (begin, end, name), number in zip(spans(limits), numbers(target, limits), strict=True):
        segment = -(-end // ranks) if name == "chain" and number else 0  # ours are chunks: of the largest vector
        yield f"{begin} {number} 0 {segment}"
    yield f"{limits[-1][0] + 1} 0 0 0"


def convert(source: str | Path, dest: str | Path) -> list[str]:
    """Write the rules that a tuning file gives, in one go; return what has no counterpart.

    Raises: ValueError with the remedy.
    """
    try:
        text = Path(source).read_text(errors="replace")
    except OSError as error:
        raise ValueError(f"{source}: can't be read ({error.strerror}): check the path") from None
    rules = export(parse_tuning(text, str(source)))
    try:
        Path(f"{dest}.part").write_text(rules.text)
        os.replace(f"{dest}.part", dest)
    except OSError as error:
        raise ValueError(f"{dest} can't be written ({error.strerror}): pass another path") from None
    return list(rules.left_out)


def report(source: str | Path, dest: str | Path) -> None:
    """Convert, and say what is left to Open MPI and how to use the file."""
    for line in convert(source, dest):
        print(f"left to Open MPI: {line}")
    flags = f"--mca coll_tuned_use_dynamic_rules 1 --mca coll_tuned_dynamic_rules_filename {dest}"
    print(f"Open MPI follows these rules under mpirun {flags}")
