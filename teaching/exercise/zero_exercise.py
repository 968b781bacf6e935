"""Exercise: schedule ZeRO 3's gathers and releases of parameters, and its reduce-scatters of gradients."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any, NamedTuple

from teaching.exercise.exercise import Exercise, Instance, Measure, MistakeError, counted, shortened

VERBS = ("gather", "forward", "backward", "reduce_scatter", "release")
COLLECTIVES = ("gather", "reduce_scatter")
MOST_BLOCKS = 6


class BlockStep(NamedTuple):
    """An operation, one of VERBS, of a rank on a block."""

    verb: str
    block: int

    def __str__(self) -> str:
        return f"{self.verb} {self.block}"


def passes(num_blocks: int) -> list[BlockStep]:
    blocks = range(num_blocks)
    return [BlockStep("forward", b) for b in blocks] + [BlockStep("backward", b) for b in reversed(blocks)]


def textbook_steps(num_blocks: int) -> Iterator[BlockStep]:
    """Gather the next pass's block before each pass, and release its own block after it."""
    yield BlockStep("gather", 0)
    for now, following in pairwise([*passes(num_blocks), None]):
        assert now
        is_last = following is None or following.block != now.block
        if following and is_last:
            yield BlockStep("gather", following.block)
        yield now
        if now.verb == "backward":
            yield BlockStep("reduce_scatter", now.block)
        if is_last:
            yield BlockStep("release", now.block)


class BlockRun:
    """Symbolic run of one rank's steps: gathered blocks, completed passes, pending gradients, and counts."""

    def __init__(self, rank: int, num_blocks: int):
        self.rank, self.passes, self.num_done, self.num_steps = rank, passes(num_blocks), 0, 0
        self.gathered: dict[int, int] = {}  # by block, the number of passes done before its gather
        self.gradients: set[int] = set()
        self.num_gathers = self.num_waits = self.most_gathered = self.most_gradients = 0

    def run(self, steps: list[BlockStep]) -> None:
        for step in steps:
            self.take(step)
            self.num_steps += 1
            self.most_gathered = max(self.most_gathered, len(self.gathered))
            self.most_gradients = max(self.most_gradients, len(self.gradients))
        if self.num_done < len(self.passes):
            raise self.mistake(f"rank {self.rank} ends without {self.passes[self.num_done]}")
        for block in sorted(self.gradients):
            raise self.mistake(f"rank {self.rank} ends without reduce_scatter {block}: gradients stay each rank's own")
        for block in sorted(self.gathered):
            raise self.mistake(f"rank {self.rank} ends without release {block}: it keeps that block's parameters")

    def take(self, step: BlockStep) -> None:
        """Take a step, if it is allowed."""
        why = self.refusal(step)
        if why:
            raise self.mistake(f"in step {self.num_steps}, rank {self.rank} would {step}, but {why}")
        match step.verb:
            case "gather":
                self.gathered[step.block] = self.num_done
                self.num_gathers += 1
            case "release":
                del self.gathered[step.block]
            case "reduce_scatter":
                self.gradients.remove(step.block)
            case _:
                self.num_waits += self.gathered[step.block] == self.num_done
                self.num_done += 1
                self.gradients |= {step.block} if step.verb == "backward" else set()

    def refusal(self, step: BlockStep) -> str:
        """Return why a step is not allowed now, or ""."""
        verb, block = step
        if block >= len(self.passes) // 2:
            return f"there are blocks 0 to {len(self.passes) // 2 - 1}"
        if verb == "reduce_scatter":
            return "" if block in self.gradients else "it holds no gradients of that block"
        if verb == "gather":
            return "that block is gathered already" if block in self.gathered else ""
        if block not in self.gathered:
            return "that block is not gathered"
        following = self.passes[self.num_done : self.num_done + 1]
        if verb == "release" or following == [step]:
            return ""
        return f"the next pass is {following[0]}" if following else "all passes are done"

    def mistake(self, why: str) -> MistakeError:
        return MistakeError(self.rank, self.num_steps, why)


def zero_instance(size: int, num_blocks: int) -> Instance:
    return Instance(size, (size, num_blocks), f"{size} ranks and {counted(num_blocks, 'block')}")


class ZeroExercise(Exercise):
    """A training step of a model with sharded parameters."""

    name = "zero3"
    title = "ZeRO 3: gather a block's parameters when they are needed"
    idea = (
        "Each rank keeps its shard of every block's parameters.  Gather a block while the one before computes, so "
        "that no pass but the first waits; release it after its pass.  The last block can stay for its backward pass, "
        "which comes next."
    )
    function = "zero3"
    parameters = "rank, size, num_blocks"
    steps = (
        'Yield the steps of a rank as text, with the number of a block: "gather 0", an all-gather of its parameters, '
        '"forward 0", "backward 0", "reduce_scatter 0", of the gradients of its backward pass, and "release 0", which '
        "lets the gathered parameters go."
    )
    imports = ""
    textbook = "ZeRO 3"
    instances = tuple(zero_instance(*sizes) for sizes in product((2, 3), range(1, MOST_BLOCKS + 1)))
    tried = f"2 and 3 ranks and 1 to {MOST_BLOCKS} blocks"
    priced = zero_instance(2, 4)
    measures = (
        Measure("gathers", "blocks", "block"),
        Measure("waits for", "gathers", "gather"),
        Measure("holds", "blocks at a time", "block at a time"),
        Measure("holds", "blocks' gradients at a time", "block's gradients at a time"),
    )

    def contract(self) -> str:
        return (
            "Before and after, each rank holds its shards alone.  Forward passes go from the first block to the\n"
            "last, backward passes from the last to the first, each of a block that is gathered.  Gathers and\n"
            "reduce-scatters come in the same order on all ranks."
        )

    def step(self, value: Any) -> BlockStep:
        words = re.fullmatch(f"({'|'.join(VERBS)}) ([0-9]+)", str(value))
        if not words:
            raise ValueError(
                f"yields {shortened(value)}: write a verb ({', '.join(VERBS)}) and a block, as in gather 0"
            )
        return BlockStep(words[1], int(words[2]))

    def check(self, instance: Instance, schedules: list[list[BlockStep]]) -> None:
        check_same_collectives(schedules)
        for rank, steps in enumerate(schedules):
            BlockRun(rank, instance.arguments[1]).run(steps)

    def book(self) -> list[list[BlockStep]]:
        return [list(textbook_steps(self.priced.arguments[1]))] * self.priced.num_ranks

    def costs(self, schedules: list[list[BlockStep]]) -> list[float]:
        runs = [BlockRun(rank, self.priced.arguments[1]) for rank in range(len(schedules))]
        for run, steps in zip(runs, schedules, strict=True):
            run.run(steps)
        counts = [(run.num_gathers, run.num_waits, run.most_gathered, run.most_gradients) for run in runs]
        return [max(column) for column in zip(*counts, strict=True)]


def check_same_collectives(schedules: list[list[BlockStep]]) -> None:
    """Compare every rank's gathers and reduce-scatters with rank 0's: a different order is a deadlock.

    Raises: MistakeError.
    """
    numbered = [[(i, step) for i, step in enumerate(steps) if step.verb in COLLECTIVES] for steps in schedules]
    for rank, own in enumerate(numbered):
        for (_, first), (index, step) in zip(numbered[0], own, strict=False):
            if step != first:
                why = f"in step {index}, rank {rank} would {step}, where rank 0 would {first}: deadlock"
                raise MistakeError(rank, index, why)
        if len(own) != len(numbered[0]):
            others = f"rank 0 in {len(numbered[0])}: deadlock"
            why = f"rank {rank} takes part in {counted(len(own), 'collective')}, {others}"
            raise MistakeError(rank, len(schedules[rank]), why)
