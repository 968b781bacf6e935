"""A rank's work in a round, in chunks: what prices and simulations read of the moves."""

from typing import NamedTuple

from collectives.schedule.moves import Barrier, Copy, Get, GetReduce, Put, Recv, RecvReduce, Round, Send

Nodes = tuple[tuple[int, ...], ...]  # the ranks of each


class PeerTraffic(NamedTuple):
    """All that a rank sends another in a round, or receives from it."""

    is_send: bool
    peer: int
    chunks: int
    folded: int  # of the chunks


class RoundSummary(NamedTuple):
    """A rank's work in a round; `copied` and `folded` are chunks in its node's memory, `pulled` those of others."""

    messages: tuple[PeerTraffic, ...] = ()
    copied: int = 0
    folded: int = 0
    pulled: int = 0
    barrier: tuple[int, ...] = ()  # its ranks


IDLE = RoundSummary()


def summary(moves: Round, rank: int) -> RoundSummary:
    """Return what a rank does in a round."""
    chunks: dict[tuple[bool, int], list[int]] = {}
    copied = folded = pulled = 0
    barrier: tuple[int, ...] = ()
    for move in moves:
        match move:
            case Send(peer, run) | Recv(peer, run) | RecvReduce(peer, run):
                sums = chunks.setdefault((isinstance(move, Send), peer), [0, 0])
                sums[0] += len(run)
                sums[1] += len(run) * isinstance(move, RecvReduce)
            case Copy(_, run) | Get(_, _, run) | Put(_, run, _):
                copied += len(run)
                pulled += len(run) * (not isinstance(move, Copy))
            case GetReduce(sources, _, run):
                folded += len(sources) * len(run)
                pulled += (len(sources) - (rank in sources)) * len(run)
            case Barrier(ranks):
                barrier = ranks
    messages = tuple(PeerTraffic(*way, *sums) for way, sums in chunks.items())
    return RoundSummary(messages, copied, folded, pulled, barrier)
