"""Proof of a schedule: each micro-batch passes each stage once, and there is no deadlock.

All ranks' programs are run symbolically.  A rank holds results, not numbers; a send is started, and completes only when
it is received; a receive is posted without waiting.  A rank waits for messages only, each with one sender and one
receiver, so that all interleavings of the ranks have the same outcome.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from parallelism.pipeline.schedule import actions
from parallelism.pipeline.schedule.actions import Schedule
from parallelism.pipeline.schedule.messages import AHEAD, Op, PostRecv, StartSend, program
from parallelism.step.actions import BACKWARD, FORWARD, INPUTS, KINDS, WEIGHTS, Action, StageMessage

Programs = Callable[[Schedule, int], Iterable[Op]]
COMPLEMENT = {"F": BACKWARD, "FI": WEIGHTS, "FW": INPUTS}  # the missing kind, by the kinds that are present
BEFORE, AFTER = 9, 4  # columns shown around the first marked cell


class ActionPosition(NamedTuple):
    """Position of an action in its rank's order; after the last one, if an action is missing."""

    rank: int
    position: int


class ProofError(ValueError):
    """Invalid schedule; gives the reason, `why`, and the `positions` marked in a drawing of ranks by step."""

    def __init__(self, schedule: Schedule, why: str, *positions: ActionPosition) -> None:
        super().__init__(f"schedule {schedule.name!r}: {why}\n{drawn(schedule, positions)}".rstrip())
        self.why, self.positions = why, positions


def prove(schedule: Schedule, programs: Programs = program) -> None:
    """Check that a schedule is correct, and within its stated live activations.

    Raises: ProofError.
    """
    check_actions(schedule)
    check_peaks(schedule)
    SymbolicRun(schedule, programs).run()


def check_actions(schedule: Schedule) -> None:
    """Check that each stage is on one rank, and each micro-batch passes it forward once and backward once or in parts.

    A stage belongs to the rank with most of its actions.
    """
    if not schedule.orders:
        raise ProofError(schedule, "it has no ranks")
    counts = Counter((action.stage, rank) for rank, order in enumerate(schedule.orders) for action in order)
    home = {stage: rank for (stage, rank), _ in reversed(counts.most_common())}  # the last, most common one wins
    positions: dict[Action, ActionPosition] = {}
    for rank, order in enumerate(schedule.orders):
        if not order:
            raise ProofError(schedule, f"rank {rank} has no action", ActionPosition(rank, 0))
        for index, action in enumerate(order):
            why, own = "", home[action.stage]
            if action.kind not in KINDS or min(action.stage, action.micro_batch) < 0:
                why = f"{action} is not an action"
            elif own != rank:
                why = f"{action} is on rank {rank}, but stage {action.stage} belongs to rank {own}"
            elif action in positions:
                why = f"{action} appears twice"
            if why:
                raise ProofError(schedule, why, ActionPosition(rank, index))
            positions[action] = ActionPosition(rank, index)
    for stage in range(schedule.num_stages):
        for micro_batch in range(schedule.num_micro_batches):
            there = "".join(kind for kind in KINDS if Action(stage, kind, micro_batch) in positions)
            if there not in ("FB", "FIW"):
                raise incomplete(schedule, stage, micro_batch, there, positions)


def incomplete(
    schedule: Schedule, stage: int, micro_batch: int, there: str, positions: dict[Action, ActionPosition]
) -> ProofError:
    """Return the error that names the missing or duplicate action of a micro-batch in a stage."""
    whole, part = Action(stage, BACKWARD, micro_batch), Action(stage, there[-1:], micro_batch)
    if whole in positions and part.kind in (INPUTS, WEIGHTS):
        return ProofError(schedule, f"{part} is a part of {whole}, which appears, too", positions[part])
    missing = Action(stage, COMPLEMENT.get(there, FORWARD), micro_batch)
    last_stage, last_micro_batch = schedule.num_stages - 1, schedule.num_micro_batches - 1
    why = f"{missing} is missing, of stages 0 to {last_stage} and micro-batches 0 to {last_micro_batch}"
    if stage not in schedule.home:
        return ProofError(schedule, why, next(p for action, p in positions.items() if action.stage == last_stage))
    rank = schedule.home[stage]
    return ProofError(schedule, why, ActionPosition(rank, len(schedule.orders[rank])))


def check_peaks(schedule: Schedule) -> None:
    """Check that no rank ever has more live activations than the schedule states."""
    if len(schedule.peaks) != schedule.num_ranks:
        raise ProofError(schedule, f"it states peaks of {len(schedule.peaks)} ranks, and has {schedule.num_ranks}")
    for rank, (order, peak) in enumerate(zip(schedule.orders, schedule.peaks, strict=True)):
        for index, alive in enumerate(actions.num_alive(order)):
            if alive > peak:
                why = f"{order[index]} makes {alive} live activations on rank {rank}, which states {peak}"
                raise ProofError(schedule, why, ActionPosition(rank, index))


class SymbolicRun:
    """Symbolic run of all ranks' programs, each until it waits for a message whose send has not started."""

    def __init__(self, schedule: Schedule, programs: Programs) -> None:
        self.schedule = schedule
        self.programs = [iter(programs(schedule, rank)) for rank in range(schedule.num_ranks)]
        self.num_done = [0] * schedule.num_ranks  # actions, by rank
        self.results: list[set[Action]] = [set() for _ in self.programs]  # held, by rank
        self.open: list[set[StageMessage]] = [set() for _ in self.programs]  # receives posted but not taken, by rank
        self.sent: set[StageMessage] = set()
        self.taken: set[StageMessage] = set()
        self.waiting: dict[int, StageMessage] = {}
        self.ready = deque(range(schedule.num_ranks))

    def run(self) -> None:
        while self.ready:
            self.advance(self.ready.popleft())
        if self.waiting:
            raise self.deadlock()
        for rank, order in enumerate(self.schedule.orders):
            if self.num_done[rank] < len(order):
                raise self.failure(rank, "the program ends here")
        for message in (self.sent - self.taken).union(*self.open):
            raise self.failure(message.dest, f"the {message} is never taken")

    def advance(self, rank: int) -> None:
        for op in self.programs[rank]:
            if isinstance(op, Action):
                self.compute(rank, op)
            elif isinstance(op, PostRecv):
                self.post(rank, op.message)
            elif isinstance(op, StartSend):
                self.put(rank, op.message)
            elif op.message in self.sent:
                self.take(rank, op.message)
            else:
                self.waiting[rank] = op.message
                return

    def compute(self, rank: int, action: Action) -> None:
        order, at = self.schedule.orders[rank], self.num_done[rank]
        if order[at : at + 1] != (action,):
            raise self.failure(rank, f"the program has {action} here")
        for need in actions.needs(action, self.schedule.num_stages):
            if need not in self.results[rank]:
                whole = need._replace(kind=BACKWARD)
                is_whole = need.kind == INPUTS and any(whole in own for own in self.schedule.orders)
                raise self.failure(rank, f"{action} needs {whole if is_whole else need}, which has not been done")
        self.num_done[rank] += 1
        self.results[rank].add(actions.result(action))

    def post(self, rank: int, message: StageMessage) -> None:
        if message.dest != rank or message in self.open[rank] or message in self.taken:
            raise self.failure(rank, f"the {message} is posted out of turn")
        self.open[rank].add(message)
        if len(self.open[rank]) > AHEAD + 1:
            raise self.failure(rank, f"{len(self.open[rank])} receives are posted together")

    def put(self, rank: int, message: StageMessage) -> None:
        if message.source != rank or message in self.sent or content(message) not in self.results[rank]:
            raise self.failure(rank, f"the {message} is sent out of turn")
        self.sent.add(message)
        if self.waiting.get(message.dest) == message:
            del self.waiting[message.dest]
            self.take(message.dest, message)
            self.ready.append(message.dest)

    def take(self, rank: int, message: StageMessage) -> None:
        if message not in self.open[rank]:
            raise self.failure(rank, f"the {message} is taken out of turn")
        self.open[rank].remove(message)
        self.taken.add(message)
        self.results[rank].add(content(message))

    def failure(self, rank: int, why: str) -> ProofError:
        return ProofError(self.schedule, f"{why} on rank {rank}", ActionPosition(rank, self.num_done[rank]))

    def deadlock(self) -> ProofError:
        """Return the error for ranks that wait for each other in a cycle, or for one that has ended."""
        rank, circle = next(iter(self.waiting)), []
        while rank in self.waiting and rank not in circle:
            circle.append(rank)
            rank = self.waiting[rank].source
        circle = circle[circle.index(rank) :] if rank in circle else circle[-1:]
        positions = [ActionPosition(r, self.num_done[r]) for r in circle]
        waits = [f"{self.schedule.orders[r][i]} of rank {r} waits for the {self.waiting[r]}" for r, i in positions]
        return ProofError(self.schedule, "; ".join(waits), *positions)


def content(message: StageMessage) -> Action:
    """Return the result that a message carries."""
    if message.is_gradient:
        return Action(message.stage + 1, INPUTS, message.micro_batch)
    return Action(message.stage - 1, FORWARD, message.micro_batch)


def drawn(schedule: Schedule, positions: Sequence[ActionPosition]) -> str:
    """Draw the steps around the positions, up to where ranks stop; actions that cannot begin follow without a gap.

    >>> from parallelism.pipeline.schedule.basic import one_f_one_b
    >>> print(drawn(one_f_one_b(3, 2), [ActionPosition(1, 2)]))
    step     0     1     2     3     4     5     6     7
    rank 0  0F0   0F1    .     .     .    0B0    .    0B1
    rank 1   .    1F0   1F1    .   >1B0<   .    1B1    .
    rank 2   .     .    2F0   2B0   2F1   2B1    .     .
    """
    steps = in_steps(schedule)
    lanes = [dict(zip(row, map(str, order), strict=False)) for row, order in zip(steps, schedule.orders, strict=True)]
    marked = [(rank, steps[rank][position]) for rank, position in positions]
    for rank, step in marked:
        lanes[rank][step] = f">{lanes[rank].get(step, '?')}<"
    first = min((step for _, step in marked), default=0)
    end = max((1 + step for lane in lanes for step in lane), default=0)
    columns = range(max(0, first - BEFORE), min(end, first + AFTER + 1))
    rows = {"step": list(map(str, columns))}
    rows |= {f"rank {rank}": [lane.get(step, ".") for step in columns] for rank, lane in enumerate(lanes)}
    width = max((len(cell) for row in rows.values() for cell in row), default=0)
    margin = max(map(len, rows)) + 1
    return "\n".join(
        f"{name:{margin}}{' '.join(f'{cell:^{width}}' for cell in row)}".rstrip() for name, row in rows.items()
    )


def in_steps(schedule: Schedule) -> list[list[int]]:
    """Return each action's step, in which every rank that can proceed does one action, and the step after the last."""
    steps: list[list[int]] = [[] for _ in schedule.orders]
    results: set[Action] = set()
    step = 0
    while active := [rank for rank, order in enumerate(schedule.orders) if len(steps[rank]) < len(order)]:
        following = {rank: schedule.orders[rank][len(steps[rank])] for rank in active}
        able = [rank for rank in active if results.issuperset(actions.needs(following[rank], schedule.num_stages))]
        for rank in able or active:
            steps[rank].append(step)
            results.add(actions.result(following[rank]))
        step += 1
    for row in steps:
        row.append(row[-1] + 1 if row else 0)
    return steps
