"""Judge a file in a separate process, which the file's code may end or block."""

import signal
import sys
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from teaching.exercise.exercise import Exercise, Judgement
from teaching.exercise.student import FileError

JUDGE_S = 60.0  # for all calls of the student's code


def judge_apart(exercise: Exercise, path: Path) -> Judgement:
    """Return the judgement of a file.

    Raises: FileError for a file that can't be judged, ends the process, or takes too long.
    """
    context = get_context("fork")
    answers, sender = context.Pipe(duplex=False)
    child = context.Process(target=answer, args=(exercise, path, sender))
    child.start()
    sender.close()
    try:
        if not answers.poll(JUDGE_S):
            raise FileError(f"{path} takes too long: judging it was stopped after {JUDGE_S:g} s")
        result = answers.recv()
    except EOFError:
        child.join()
        raise FileError(f"{path} {ending(child.exitcode or 0)}") from None
    finally:
        child.kill()
        child.join()
    if isinstance(result, FileError):
        raise result
    return result


def answer(exercise: Exercise, path: Path, sender: Connection) -> None:
    """Send the judgement, or why there is none; the file's own folder is on the path for its imports."""
    sys.path.insert(0, str(path.absolute().parent))
    try:
        result: Judgement | FileError = exercise.judge(path)
    except FileError as error:
        result = error
    sender.send(result)


def ending(exit_code: int) -> str:
    """Describe how the process ended without an answer.

    >>> ending(0), ending(-11)
    ('ends the process that judges it, with status 0', 'ends the process that judges it, by SIGSEGV')
    """
    if exit_code in (-signal.SIGALRM, -signal.SIGVTALRM):
        return "is endless, and catches what would end it"
    how = f"by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"with status {exit_code}"
    return f"ends the process that judges it, {how}"
