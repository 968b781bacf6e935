"""Learn the algorithms by writing them: exercises, from the ring to ZeRO 3, and a judge.  No MPI is needed.

python -m teaching.exercise                           # lists the exercises
python -m teaching.exercise ring                      # says what to do
python -m teaching.exercise ring my_ring.py --stub    # writes a file to begin with
python -m teaching.exercise ring my_ring.py           # judges it

Exit status: 0 if the file is right, 1 if it is wrong, 2 if it can't be judged.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from collectives.job.settings import Parser
from teaching.exercise.apart import judge_apart
from teaching.exercise.catalogue import EXERCISES
from teaching.exercise.exercise import COMMAND, Exercise
from teaching.exercise.student import FileError


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        flags = parser().parse_intermixed_args(arguments)
        rows = {exercise.name: exercise for exercise in EXERCISES}
        if flags.exercise is None:
            print(listing())
            return 0
        if flags.exercise not in rows:
            raise ValueError(f"no exercise is called {flags.exercise!r}: use {', '.join(rows)}")
        return work_on(rows[flags.exercise], flags.file, flags.stub)
    except (ValueError, FileError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def parser() -> Parser:
    parser = Parser(COMMAND, __doc__)
    parser.add_argument("exercise", nargs="?", metavar="NAME", help="the exercise; without it, all are listed")
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="file to judge, or stub to write")
    parser.add_argument("--stub", action="store_true", help="write a file to begin with (my_NAME.py)")
    return parser


def listing() -> str:
    width = max(len(exercise.name) for exercise in EXERCISES)
    lines = [f"{exercise.name:{width}}  {exercise.title}" for exercise in EXERCISES]
    return "\n".join([*lines, "", f"{COMMAND} NAME says what to do."])


def work_on(exercise: Exercise, file: Path | None, stub: bool) -> int:
    if stub:
        path = file or Path(f"my_{exercise.name}.py")
        if path.exists():
            raise ValueError(f"{path} exists: name another file, which --stub writes")
        try:
            path.write_text(exercise.stub(), encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from error
        print(f"{path} is written; edit it, then run {COMMAND} {exercise.name} {path}")
        return 0
    if file is None:
        print(exercise.task())
        return 0
    judgement = judge_apart(exercise, file)
    print(judgement.text)
    return 0 if judgement.is_right else 1


if __name__ == "__main__":
    sys.exit(main())
