"""Zero-bubble schedules: the weights' part of backward passes fills a rank's idle time.

Only the inputs' part is waited for by the stage before.  Bubbles are stated for parts that take as long as a forward
pass; an activation is alive until its weights' part ends.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, arXiv 2401.10241: section 2.1 (ZB-H1), section 6 (ZB-V).
"""

from collections import defaultdict
from collections.abc import Iterable
from itertools import count

from parallelism.pipeline.schedule.actions import Schedule
from parallelism.step.actions import FORWARD, INPUTS, WEIGHTS, Action, Order

Step = tuple[int, str]  # stage and kind, for the step's next micro-batch


def zb_h1(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Run 1F1B with the weights' parts delayed until every rank has as many live activations as the first.

    Bubble p-1 forward passes, a third of 1F1B's, if m >= p; at most p live activations.
    """
    orders = []
    for rank in range(num_ranks):  # its weights' parts are `rank` micro-batches behind its inputs' parts
        forward, inputs, weights = ((rank, kind) for kind in (FORWARD, INPUTS, WEIGHTS))
        steps = [forward] * (num_ranks - rank)
        for micro_batch in range(num_micro_batches):
            steps += [inputs, weights, forward] if micro_batch >= rank else [inputs, forward]
        orders.append(in_turn([*steps, *[weights] * rank], num_micro_batches))
    return Schedule("zb_h1", tuple(orders), (min(num_ranks, num_micro_batches),) * num_ranks)


def zb_v(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Place stages r and 2p-1-r on rank r, a V, so that the last rank has consecutive stages, without a message.

    If m >= 2p-1, the only bubble is the p-1 passes of filling and draining the pipeline; 2p live activations on every
    rank, of stages half the size of 1F1B's.  Fewer micro-batches keep the order of 2p-1.
    """
    num_steady = max(num_micro_batches, 2 * num_ranks - 1) - num_ranks
    orders, peaks = [], []
    for rank in range(
        num_ranks
    ):  # first 2p-1-r forward passes of its first stage, the last r alternating with its second
        to_last = num_ranks - rank
        down, up = ({kind: (stage, kind) for kind in "FIW"} for stage in (rank, 2 * num_ranks - 1 - rank))
        steps = [down["F"]] * (2 * to_last - 1)
        steps += [up["F"], down["F"]] * rank
        steps += [up["F"], up["I"], up["W"]] * to_last
        steps += [down["F"], down["I"], down["W"], up["F"], up["I"], up["W"]] * num_steady
        steps += [down["I"], up["I"]] * rank
        steps += [down["I"], down["W"]] * to_last
        steps += [up["W"]] * rank + [down["W"]] * rank
        orders.append(in_turn(steps, num_micro_batches))
        peaks.append(min(2 * num_ranks - rank - 1, num_micro_batches) + min(rank + 1, num_micro_batches))
    return Schedule("zb_v", tuple(orders), tuple(peaks))


def in_turn(steps: Iterable[Step], num_micro_batches: int) -> Order:
    """Give each step its next micro-batch, and drop those beyond the number of micro-batches."""
    turns: dict[Step, count[int]] = defaultdict(count)
    actions = [Action(*step, next(turns[step])) for step in steps]
    return tuple(action for action in actions if action.micro_batch < num_micro_batches)
