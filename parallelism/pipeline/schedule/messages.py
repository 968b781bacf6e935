"""Rank programs: a rank's actions, with its posted receives, waits and sends in between.

Both the proof and the driver follow these programs.  A send is started right after the action whose result it carries,
and waited for at the end only; a receive is posted some actions before the one that needs it, so that messages overlap
with computation.
"""

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from parallelism.pipeline.schedule.actions import Schedule
from parallelism.step.actions import FORWARD, WEIGHTS, Action, StageMessage

AHEAD = 2  # receives posted ahead of the next one that is needed


class PostRecv(NamedTuple):
    """Post a receive for a message, which may arrive from now on."""

    message: StageMessage


class WaitRecv(NamedTuple):
    """Wait until a message has arrived."""

    message: StageMessage


class StartSend(NamedTuple):
    """Start sending a message; the send is complete only when it is received."""

    message: StageMessage


Op = PostRecv | WaitRecv | Action | StartSend


def message(schedule: Schedule, action: Action, is_output: bool) -> StageMessage | None:
    """Return the message with an action's input, or its output, or None if no other rank has it, or needs it."""
    step = 1 if action.kind == FORWARD else -1
    dest = action.stage + step * is_output
    ranks = schedule.home.get(dest - step), schedule.home.get(dest)
    if action.kind == WEIGHTS or None in ranks or ranks[0] == ranks[1]:
        return None
    return StageMessage(step < 0, dest, action.micro_batch, *ranks)  # type: ignore[arg-type]


def program(schedule: Schedule, rank: int) -> Iterator[Op]:
    """Yield a rank's actions, with its messages between them."""
    order = schedule.orders[rank]
    inputs = [message(schedule, action, is_output=False) for action in order]
    awaited = filter(None, inputs)
    num_new = AHEAD + 1
    for action, needed in zip(order, inputs, strict=True):
        if needed:
            yield from map(PostRecv, islice(awaited, num_new))
            num_new = 1
            yield WaitRecv(needed)
        yield action
        if sent := message(schedule, action, is_output=True):
            yield StartSend(sent)
