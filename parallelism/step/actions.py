"""Actions of a step: passes of a stage on a micro-batch, and the messages between stages.

A model is cut into consecutive *stages*; one that is not cut has one stage.  An action is a stage's pass of a
micro-batch: `2F0` is stage 2's forward pass of micro-batch 0, `2B0` its backward pass, and `2I0` and `2W0` the two
parts of that, for the gradients of inputs and of weights.
"""

import re
from typing import NamedTuple

FORWARD, BACKWARD, INPUTS, WEIGHTS = KINDS = "FBIW"


class Action(NamedTuple):
    """A pass, or a part of one, of a stage on a micro-batch."""

    stage: int
    kind: str  # one of KINDS
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


def parse(word: str) -> Action:
    """Parse an action.

    Raises: ValueError.

    >>> parse("2F0")
    Action(stage=2, kind='F', micro_batch=0)
    """
    match = re.fullmatch(f"([0-9]+)([{KINDS}])([0-9]+)", word)
    if not match:
        raise ValueError(
            f"{word!r} is not an action: write stage, kind ({', '.join(KINDS)}) and micro-batch, as in 2F0"
        )
    stage, kind, micro_batch = match.groups()
    return Action(int(stage), kind, int(micro_batch))


Order = tuple[Action, ...]  # one rank's actions


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
