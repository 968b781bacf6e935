"""Exercise: write 1F1B as the order of one rank's actions."""

from __future__ import annotations

from itertools import product
from typing import Any

from parallelism.pipeline.schedule.actions import Schedule, count_peaks
from parallelism.pipeline.schedule.basic import one_f_one_b
from parallelism.pipeline.schedule.price import price
from parallelism.pipeline.schedule.proof import ProofError, prove
from parallelism.step.actions import Action, parse
from teaching.exercise.exercise import Exercise, Instance, Measure, MistakeError, counted

MOST_STAGES, MOST_MICRO_BATCHES = 6, 8


def of_size(num_stages: int, num_micro_batches: int) -> Instance:
    words = f"{counted(num_stages, 'stage')} and {counted(num_micro_batches, 'micro-batch')}"
    return Instance(num_stages, (num_stages, num_micro_batches), words)


class PipelineExercise(Exercise):
    """Every micro-batch runs forward through all stages, then backward; rank s has stage s."""

    name = "1f1b"
    title = "a pipeline schedule: one forward, one backward"
    idea = (
        "Begin with as many forward passes as it takes until the first backward pass can come, then do a backward and "
        "a forward pass by turns.  It is as fast as all forward passes before all backward passes (GPipe), but stage s "
        "keeps the activations of p-s micro-batches at most."
    )
    function = "one_f_one_b"
    parameters = "stage, num_stages, num_micro_batches"
    steps = (
        'Yield the actions of a stage in order, as text: "2F0" is stage 2\'s forward pass of micro-batch 0, "2B0" its '
        'backward pass, as in yield f"{stage}F{micro_batch}".'
    )
    imports = ""
    textbook = "1F1B"
    instances = tuple(of_size(*sizes) for sizes in product(range(1, MOST_STAGES + 1), range(1, MOST_MICRO_BATCHES + 1)))
    tried = f"1 to {MOST_STAGES} stages and 1 to {MOST_MICRO_BATCHES} micro-batches"
    priced = of_size(4, 8)
    measures = (
        Measure("takes", "forward passes' time"),
        Measure("keeps", "activations on a rank", "activation on a rank"),
        Measure("keeps", "activations on all ranks", "activation on all ranks"),
    )

    def contract(self) -> str:
        return (
            "sFm begins after (s-1)Fm, and sBm after sFm and (s+1)Bm.  A stage does one action at a time, in order,\n"
            "and keeps activations from sFm to the end of sBm.  A backward pass takes as long as two forward passes."
        )

    def step(self, value: Any) -> Action:
        return parse(str(value))

    def check(self, instance: Instance, schedules: list[list[Action]]) -> None:
        _, num_micro_batches = instance.arguments
        for rank, order in enumerate(schedules):
            for index, action in enumerate(order):
                if action.stage != rank:
                    raise MistakeError(rank, index, f"action {index} of stage {rank} is {action}, of another stage")
                if action.micro_batch >= num_micro_batches:
                    there = f"there are micro-batches 0 to {num_micro_batches - 1}"
                    raise MistakeError(rank, index, f"action {index} of stage {rank} is {action}: {there}")
        schedule = with_peaks(schedules)
        try:
            prove(schedule)
        except ProofError as error:
            at, picture = error.positions[0], str(error).partition("\n")[2]
            is_there = at.position < len(schedules[at.rank])
            where = f"action {at.position} of stage {at.rank}: " if is_there else ""
            raise MistakeError(at.rank, at.position, where + error.why, picture) from error
        if schedule.num_micro_batches < num_micro_batches:
            missing = Action(0, "F", schedule.num_micro_batches)
            raise MistakeError(0, len(schedules[0]), f"{missing} is missing, and so is all of that micro-batch")

    def book(self) -> list[list[Action]]:
        return [list(order) for order in one_f_one_b(*self.priced.arguments).orders]

    def costs(self, schedules: list[list[Action]]) -> list[float]:
        schedule = with_peaks(schedules)
        return [price(schedule).span_s, max(schedule.peaks), sum(schedule.peaks)]


def with_peaks(orders: list[list[Action]]) -> Schedule:
    return Schedule("yours", tuple(map(tuple, orders)), count_peaks(orders))
