"""Bytes that a rank holds and sends with ZeRO, measured and by formula.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
arXiv 1910.02054, sections 3.1 and 5 (memory), and 7 (communication).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from collectives import algorithms
from collectives.schedule.moves import Get, GetReduce, Recv, RecvReduce, Round
from parallelism.data.units import ShardGroups
from parallelism.numerics.master_weights import MasterWeights

if TYPE_CHECKING:
    from collectives import Communicator, Plan
    from parallelism.step.optimizer import Optimizer


class HeldBytes(NamedTuple):
    """Bytes that a rank holds between steps, without activations and working memory."""

    parameters: float
    gradients: float
    states: float

    @property
    def total(self) -> float:
        return sum(self)


def held_by_formula(
    zero_stage: int,
    num_params: int,
    num_ranks: int,
    parameter_bytes: int = 4,
    gradient_bytes: int = 4,
    state_bytes: int = 8,
) -> HeldBytes:
    """Return the bytes of `num_params` parameters; K, `state_bytes`, is 8 for Adam's two float32 moments.

    In mixed precision the states include the float32 parameters, and K is 12; as in the source's figure 1, in GB:

    >>> mixed = dict(num_params=7.5e9, num_ranks=64, parameter_bytes=2, gradient_bytes=2, state_bytes=12)
    >>> [round(held_by_formula(stage, **mixed).total / 1e9, 1) for stage in range(4)]
    [120.0, 31.4, 16.6, 1.9]
    """
    parameters, gradients, states = parameter_bytes * num_params, gradient_bytes * num_params, state_bytes * num_params
    return HeldBytes(
        parameters / (num_ranks if zero_stage >= 3 else 1),
        gradients / (num_ranks if zero_stage >= 2 else 1),
        states / (num_ranks if zero_stage >= 1 else 1),
    )


def held(parameters: Any, gradients: Any, optimizer: Optimizer, masters: MasterWeights | None = None) -> HeldBytes:
    """Return the bytes of arrays and of optimizer states, including float32 master weights."""
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    weights = [] if masters is None or masters.weights is None else [masters.weights]
    return HeldBytes(parameters.nbytes, gradients.nbytes, sum(tensor.nbytes for tensor in (*tensors, *weights)))


def sent_by_formula(zero_stage: int, num_bytes: float, num_ranks: int, kept_bytes: float = 0.0) -> float:
    """Return the bytes that a rank sends in a step of one micro-batch; parameters and gradients have `num_bytes`.

    That is 2 Psi, with stage 3 it is 3 Psi, if the chunk that a rank need not send to itself is counted.  Stage 3 does
    not gather `kept_bytes` again: those of the last two layers, which the backward pass begins with.

    >>> [sent_by_formula(stage, 100, num_ranks=4, kept_bytes=20) for stage in range(4)]
    [150.0, 150.0, 150.0, 210.0]
    """
    return (3 * num_bytes - kept_bytes if zero_stage == 3 else 2 * num_bytes) * (num_ranks - 1) / num_ranks


class CountingCommunicator:
    """A communicator whose plans count the bytes received from other ranks, in `nbytes`.

    Summed over all ranks, received and sent bytes are equal.
    """

    def __init__(self, comm: Communicator):
        self.comm, self.nbytes = comm, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)

    def plan(self, collective: str, x: Any, **arguments: Any) -> Plan:
        plan = self.comm.plan(collective, x, **arguments)
        whole = arguments["out"] if collective == "all_gather" else x
        counts = arguments.get("counts") or [len(whole) / self.comm.size] * self.comm.size
        row = algorithms.find(collective, plan.name.rpartition(" ")[2])
        rounds = row.rounds(self.comm.rank, self.comm.size, 0, self.comm.topology.nodes)
        count, begin = received(rounds, self.comm.rank, counts) * whole.itemsize, plan.begin

        def count_and_begin() -> None:
            self.nbytes += count
            begin()

        plan.begin = count_and_begin  # type: ignore[method-assign]
        return plan


def counting(ranks: ShardGroups) -> tuple[ShardGroups, list[CountingCommunicator]]:
    """Return the same groups of ranks with communicators that count their traffic."""
    counters = [CountingCommunicator(comm) for comm in (ranks.shard, ranks.replicate) if comm]
    return ShardGroups(ranks.every, *counters), counters  # type: ignore[arg-type]


def received(rounds: Sequence[Round], rank: int, counts: Sequence[float]) -> float:
    """Count the elements that a rank receives or reads from others; chunk sizes repeat `counts`.

    >>> from collectives.algorithms import direct, ring
    >>> [received(list(all_reduce(0, 4)), 0, counts=[5, 5, 5, 5]) for all_reduce in (ring.all_reduce, direct.two_shot)]
    [30, 30]
    """
    moves = [move for moves in rounds for move in moves]
    runs = [m.run for m in moves if isinstance(m, Recv | RecvReduce | Get) and m.source != rank]
    runs += [m.run for m in moves if isinstance(m, GetReduce) for source in m.sources if source != rank]
    return sum(counts[chunk % len(counts)] for run in runs for chunk in run)
