"""What an exercise is: a task, a file to begin with, and a judge of what a student makes of it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

from collectives.exercise.student import Student

COMMAND = "python -m collectives.exercise"
WIDTH = 100


class MistakeError(Exception):
    """A schedule that is wrong: the rank, the number of the step that shows it, why, and a picture of the schedule."""

    def __init__(self, rank: int, step: int, why: str, picture: str = ""):
        super().__init__(why)
        self.rank, self.step, self.why, self.picture = rank, step, why, picture


class Instance(NamedTuple):
    """What a schedule is tried on: the arguments that follow a rank's number."""

    num_ranks: int
    arguments: tuple[Any, ...]
    words: str


class Measure(NamedTuple):
    """A cost of the student's schedule and of the textbook's, which its verb and noun make a sentence of."""

    verb: str
    noun: str
    student: float
    textbook: float


class Judgement(NamedTuple):
    """The verdict, and what explains it."""

    is_right: bool
    text: str


class Exercise(ABC):
    """An exercise: the student writes a function that yields one rank's steps."""

    name: str
    title: str
    idea: str  # what the student should know of the algorithm
    function: str
    parameters: str
    steps: str  # what the function yields, for the stub
    imports: str  # the stub's
    textbook: str  # the name of the schedule to compare with
    instances: Sequence[Instance]
    tried: str  # in words
    priced: Instance

    @abstractmethod
    def contract(self) -> str:
        """Return what holds before and after, with an example."""

    @abstractmethod
    def step(self, value: Any) -> Any:
        """Return what the function yields as a step.

        Raises: ValueError for what is none.
        """

    @abstractmethod
    def check(self, instance: Instance, schedules: list[list[Any]]) -> None:
        """Prove all ranks' steps.

        Raises: MistakeError.
        """

    @abstractmethod
    def measures(self, schedules: list[list[Any]]) -> list[Measure]:
        """Price the steps of the instance `priced`, and the textbook's."""

    def task(self) -> str:
        file = f"my_{self.name}.py"
        return (
            f"{self.name}: {self.title}\n\n{fill(self.idea, WIDTH)}\n\n{self.contract()}\n\n"
            f"Write {self.function}({self.parameters}).\n{fill(self.steps, WIDTH)}\n\n"
            f"It is proved on {self.tried}, and its cost compared with that of {self.textbook}.\n\n"
            f"{COMMAND} {self.name} {file} --stub    # writes a file to begin with\n"
            f"{COMMAND} {self.name} {file}           # judges it"
        )

    def stub(self) -> str:
        steps = fill(self.steps, WIDTH, subsequent_indent="    ")
        return (
            f'"""The exercise {self.name}, {self.title}: {COMMAND}"""\n\n'
            f"{self.imports}\n\n\n"
            f'def {self.function}({self.parameters}):\n    """{steps}\n    """\n    yield from ()\n'
        )

    def judge(self, path: Path) -> Judgement:
        """Judge a student's file.

        Raises: FileError for what can't be judged.
        """
        student = Student(path, self.function, self.parameters)
        for instance in self.instances:
            lines, schedules = self._schedules(student, instance)
            try:
                self.check(instance, schedules)
            except MistakeError as mistake:
                line = (lines[mistake.rank][mistake.step :] or [student.line])[0]
                first = f"{path}:{line}: wrong on {instance.words}: {mistake.why}"
                return Judgement(False, "\n".join(filter(None, (first, mistake.picture))))
        return Judgement(True, self._price(self.measures(self._schedules(student, self.priced)[1])))

    def _schedules(self, student: Student, instance: Instance) -> tuple[list[list[int]], list[list[Any]]]:
        """Return the lines, and the steps, of every rank."""
        lines: list[list[int]] = []
        schedules: list[list[Any]] = []
        for rank in range(instance.num_ranks):
            yielded = student.yields(rank, *instance.arguments)
            lines.append([line for _, line in yielded])
            schedules.append([])
            for value, line in yielded:
                try:
                    schedules[-1].append(self.step(value))
                except ValueError as error:
                    raise student.error(str(error), line) from error
        return lines, schedules

    def _price(self, measures: list[Measure]) -> str:
        """Return the verdict on a schedule that is right: what it costs."""
        above = [
            f"{verb} {student:g} {noun} where {self.textbook} {verb} {textbook:g}"
            for verb, noun, student, textbook in measures
            if student > textbook
        ]
        verdict = f"right on {self.tried}" + (f", but {'; '.join(above)}" if above else "")
        width = max(len(self.priced.words), *(len(measure.noun) for measure in measures))
        columns = ["yours", self.textbook]
        rows = [f"{self.priced.words:{width}}  {'  '.join(columns)}"]
        for _, noun, student, textbook in measures:
            rows.append(f"{noun:{width}}  {student:>{len(columns[0])}g}  {textbook:>{len(columns[1])}g}")
        return "\n".join([verdict, *rows])
