"""An exercise: a task, a file to begin with, and a judge of the student's file."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

from teaching.exercise.student import Student

COMMAND = "python -m teaching.exercise"
WIDTH = 100


class MistakeError(Exception):
    """A wrong schedule: the rank, the number of the step that shows it, the reason, and a picture of the schedule."""

    def __init__(self, rank: int, step: int, why: str, picture: str = ""):
        super().__init__(why)
        self.rank, self.step, self.why, self.picture = rank, step, why, picture


class Instance(NamedTuple):
    """An instance that a schedule is tried on: the arguments after the rank."""

    num_ranks: int
    arguments: tuple[Any, ...]
    words: str


class Measure(NamedTuple):
    """A cost in words: its verb and noun make a sentence around the number.

    >>> rounds = Measure("takes", "rounds", "round")
    >>> rounds.sentence(1), rounds.sentence(2)
    ('takes 1 round', 'takes 2 rounds')
    """

    verb: str
    noun: str
    one: str = ""  # the noun after a 1, where it is another

    def sentence(self, cost: float) -> str:
        return f"{self.verb} {cost:g} {self.one if self.one and cost == 1 else self.noun}"


class Judgement(NamedTuple):
    """The verdict and its explanation."""

    is_right: bool
    text: str


class Exercise(ABC):
    """An exercise: the student writes a function that yields one rank's steps."""

    name: str
    title: str
    idea: str  # background on the algorithm for the student
    function: str
    parameters: str
    steps: str  # type that the function yields, for the stub
    imports: str  # the stub's
    textbook: str  # the name of the schedule to compare with
    instances: Sequence[Instance]
    tried: str  # description in words
    priced: Instance
    measures: Sequence[Measure]

    @abstractmethod
    def contract(self) -> str:
        """Return the contract, the state before and after, with an example."""

    @abstractmethod
    def step(self, value: Any) -> Any:
        """Convert a value that the function yields to a step.

        Raises: ValueError for a value that is not one.
        """

    @abstractmethod
    def check(self, instance: Instance, schedules: list[list[Any]]) -> None:
        """Prove all ranks' steps.

        Raises: MistakeError.
        """

    @abstractmethod
    def book(self) -> list[list[Any]]:
        """Return the textbook's steps on the instance `priced`."""

    @abstractmethod
    def costs(self, schedules: list[list[Any]]) -> list[float]:
        """Price all ranks' steps on the instance `priced`: a number for each of `measures`."""

    def task(self) -> str:
        file = f"my_{self.name}.py"
        costs = [m.sentence(cost) for m, cost in zip(self.measures, self.costs(self.book()), strict=True)]
        rule = f"It is proved on {self.tried}, and priced beside {self.textbook}, which on {self.priced.words}"
        paragraphs = (
            f"{self.name}: {self.title}",
            fill(self.idea, WIDTH),
            self.contract(),
            f"Write {self.function}({self.parameters}).\n{fill(self.steps, WIDTH)}",
            fill(f"{rule} {', '.join(costs)}.", WIDTH),
            f"{COMMAND} {self.name} {file} --stub    # writes a file to begin with\n"
            f"{COMMAND} {self.name} {file}           # judges it",
        )
        return "\n\n".join(paragraphs)

    def stub(self) -> str:
        steps = fill(self.steps, WIDTH, subsequent_indent="    ")
        parts = (
            f'"""The exercise {self.name}: {self.title}."""',
            self.imports,
            f'\ndef {self.function}({self.parameters}):\n    """{steps}\n    """\n    yield from ()\n',
        )
        return "\n\n".join(filter(None, parts))

    def judge(self, path: Path) -> Judgement:
        """Judge a student's file.

        Raises: FileError for a file that can't be judged.
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
        return Judgement(True, self._price(self._schedules(student, self.priced)[1]))

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

    def _price(self, schedules: list[list[Any]]) -> str:
        """Return the verdict on a correct schedule: its cost beside the textbook's."""
        rows = list(zip(self.measures, self.costs(schedules), self.costs(self.book()), strict=True))
        above = [f"{m.sentence(own)} where {self.textbook} {m.verb} {book:g}" for m, own, book in rows if own > book]
        verdict = f"right on {self.tried}" + (f", but {'; '.join(above)}" if above else "")
        width = max(len(self.priced.words), *(len(m.noun) for m in self.measures))
        table = [f"{self.priced.words:{width}}  yours  {self.textbook}"]
        table += [f"{m.noun:{width}}  {own:>5g}  {book:>{len(self.textbook)}g}" for m, own, book in rows]
        return "\n".join([verdict, *table])


def counted(number: int, noun: str) -> str:
    """Return a number of things in words.

    >>> counted(1, "rank"), counted(2, "rank")
    ('1 rank', '2 ranks')
    """
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def shortened(value: Any) -> str:
    """Return a value as it is written in code, in a line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
