"""Pipeline scene: the actions of every registered schedule, which the page times by the rule of `price`."""

from __future__ import annotations

from parallelism.pipeline.schedule import registry
from parallelism.pipeline.schedule.proof import prove
from parallelism.step.actions import Order
from teaching.page.assemble import Scene

RANKS = range(1, 9)
MICRO_BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)


def scene() -> Scene:
    data = {name: orders(name) for name in registry.names()}
    words = {name: first_line(row.schedule.__doc__) for name, row in registry.REGISTRY.items()}
    return Scene("pipelines", {"catalog": words, **data})


def orders(name: str) -> dict[str, list[str]]:
    """Return each rank's actions, such as 0F0 0F1, by ranks and micro-batches; every schedule is proved first."""
    table = {}
    for num_ranks in RANKS:
        for num_micro_batches in MICRO_BATCHES:
            schedule = registry.make_schedule(name, num_ranks, num_micro_batches)
            prove(schedule)
            table[f"{num_ranks}x{num_micro_batches}"] = list(map(in_words, schedule.orders))
    return table


def in_words(order: Order) -> str:
    return " ".join(map(str, order))


def first_line(text: str | None) -> str:
    return (text or "").strip().split("\n")[0]
