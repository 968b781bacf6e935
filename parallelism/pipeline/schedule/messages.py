"""Rank programs: a rank's actions, with its posted receives, waits and sends in between.

Both the proof and the driver follow these programs.  A send is started right after the action whose result it carries,
and waited for at the end only; a receive is posted some actions before the one that needs it, so that messages overlap
with computation.
"""

from collections.abc import Iterator
from typing import NamedTuple

from parallelism.pipeline.schedule.actions import FORWARD, WEIGHTS, Action, Schedule

AHEAD = 2  # receives posted ahead of the next one that is needed


class StageMessage(NamedTuple):
    """Input of stage `stage` from its neighbour for a micro-batch: activations, or the gradients of its output."""

    is_gradient: bool
    stage: int
    micro_batch: int
    source: int  # rank
    dest: int

    def __str__(self) -> str:
        what = "gradient" if self.is_gradient else "activation"
        return f"{what} of micro-batch {self.micro_batch} for stage {self.stage}, rank {self.source} to {self.dest}"


class PostRecv(NamedTuple):
    """Post a receive for a message, which may arrive from now on."""

    message: StageMessage


class WaitRecv(NamedTuple):
    """Wait until a message has arrived."""

    message: StageMessage


class Compute(NamedTuple):
    action: Action


class StartSend(NamedTuple):
    """Start sending a message; the send is complete only when it is received."""

    message: StageMessage


Op = PostRecv | WaitRecv | Compute | StartSend


def incoming(schedule: Schedule, action: Action) -> StageMessage | None:
    """Return the message that an action waits for, or None if its input is local."""
    before = action.stage - 1 if action.kind == FORWARD else action.stage + 1
    return between(schedule, action, before, action.stage)


def outgoing(schedule: Schedule, action: Action) -> StageMessage | None:
    """Return the message that carries an action's result, or None if no other rank needs it."""
    after = action.stage + 1 if action.kind == FORWARD else action.stage - 1
    return between(schedule, action, action.stage, after)


def between(schedule: Schedule, action: Action, stage: int, dest: int) -> StageMessage | None:
    """Return an action's message from a stage to its neighbour `dest`; None if there is none, or they share a rank."""
    ranks = schedule.home.get(stage), schedule.home.get(dest)
    if action.kind == WEIGHTS or None in ranks or ranks[0] == ranks[1]:
        return None
    return StageMessage(dest < stage, dest, action.micro_batch, *ranks)  # type: ignore[arg-type]


def program(schedule: Schedule, rank: int, ahead: int = AHEAD) -> Iterator[Op]:
    """Yield a rank's actions, with its messages between them."""
    order = schedule.orders[rank]
    awaited = [message for action in order if (message := incoming(schedule, action))]
    num_posted = num_taken = 0
    for action in order:
        if incoming(schedule, action):
            num_taken += 1
            while num_posted < min(len(awaited), num_taken + ahead):
                yield PostRecv(awaited[num_posted])
                num_posted += 1
            yield WaitRecv(awaited[num_taken - 1])
        yield Compute(action)
        if message := outgoing(schedule, action):
            yield StartSend(message)
