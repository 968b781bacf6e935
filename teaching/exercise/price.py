"""The cost of rounds of messages in counts, which do not depend on a machine's speed."""

from collections.abc import Sequence

from collectives.schedule.cost import summary
from collectives.schedule.moves import Round
from collectives.schedule.network import Nodes
from teaching.exercise.exercise import Measure

Programs = Sequence[Sequence[Round]]

MEASURES = (
    Measure("takes", "rounds", "round"),
    Measure("sends", "messages one after another", "message"),
    Measure("sends", "MiB one after another"),
    Measure("connects a rank with", "others", "other"),
)
BETWEEN = Measure("sends", "MiB out of a node")


def prices(programs: Programs, nodes: Nodes) -> list[float]:
    """Count rounds, messages and MiB of chunks of 1 MiB, in each round those of the busiest rank, and its peers.

    With nodes, count the data that leave the busiest one, too.
    """
    size, num_messages, num_chunks = len(programs), 0, 0
    peers: list[set[int]] = [set() for _ in range(size)]
    leaving = [0] * len(nodes)
    for rounds in zip(*programs, strict=True):
        traffic = [summary(moves, rank).messages for rank, moves in enumerate(rounds)]
        ways = [[m for m in messages if m.is_send == is_send] for messages in traffic for is_send in (True, False)]
        num_messages += max(map(len, ways))
        num_chunks += max(sum(message.chunks for message in way) for way in ways)
        for rank, messages in enumerate(traffic):
            peers[rank] |= {message.peer for message in messages}
        for number, node in enumerate(nodes):
            sent = [m for rank in node for m in traffic[rank] if m.is_send and m.peer not in node]
            leaving[number] += sum(message.chunks for message in sent)
    return [len(programs[0]), num_messages, num_chunks, max(map(len, peers)), *([max(leaving)] if nodes else [])]
