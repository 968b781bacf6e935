"""Expert routes: compute each rank's sends, receives and reads from all ranks' choices, without communication.

A token is sent once to each host that has one of its experts: to its proxy, the rank there with the same local rank as
the token's rank.  Each rank has a *table*: its own tokens, followed by those received from other hosts.  The experts of
a host read their rows from its tables in blocks; a block belongs to one table and one expert.

Source: Zhao et al., "DeepEP: an efficient expert-parallel communication library", 2025,
github.com/deepseek-ai/DeepEP (a token is sent once to each host, and distributed there).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Nodes = Sequence[Sequence[int]]  # the ranks of each host, in order
Transfer = tuple[int, np.ndarray]  # a rank of another host, and the rows of a table that are sent to it, or received


class ExpertBlock(NamedTuple):
    """Rows of a table for one expert; `slots` are their indices among all rows of its owner's experts."""

    table: int  # local rank
    owner: int  # local rank
    rows: np.ndarray
    slots: slice


class Route(NamedTuple):
    """A rank's part in an exchange.

    Rows are grouped by expert, `counts` of each; `choices` has each row's index among its token's choices.
    `longest_table` and `most_slots` are the host's maxima of a table's length and of the rows for a rank's experts.
    """

    sends: list[Transfer]  # its own tokens
    receives: list[Transfer]  # rows after its own
    reads: list[ExpertBlock]  # rows for its experts
    combines: list[ExpertBlock]  # rows of its table
    table_length: int
    counts: list[int]
    choices: np.ndarray
    longest_table: int
    most_slots: int


def make_route(rank: int, experts: np.ndarray, lengths: Sequence[int], num_experts: int, nodes: Nodes) -> Route:
    """Compute a rank's route from the choices of all ranks, given their numbers of tokens.

    Shapes: experts (ranks, tokens, choices), below 0 for none.

    >>> experts = np.array([[[0, 2], [2, 1]], [[1, 0], [2, 1]], [[0, 1], [-1, 2]]])  # 2 tokens on each of 3 ranks
    >>> route = make_route(2, experts, [2, 2, 2], num_experts=3, nodes=[(0, 1), (2,)])
    >>> route.sends, route.receives
    ([(0, array([0]))], [(0, array([2, 3])), (1, array([4]))])
    >>> route.reads  # for expert 2
    [ExpertBlock(table=0, owner=0, rows=array([2, 3, 4, 1]), slots=slice(0, 4, None))]
    """
    num_ranks, num_local = len(experts), num_experts // len(experts)
    local_rank = {r: number for ranks in nodes for number, r in enumerate(ranks)}
    mine = next(number for number, ranks in enumerate(nodes) if rank in ranks)
    own, me = nodes[mine], local_rank[rank]
    host_of_rank = {r: number for number, ranks in enumerate(nodes) for r in ranks}
    host = np.array([*(host_of_rank[expert // num_local] for expert in range(num_experts)), -1])
    hosts = host[experts]  # of each choice's expert
    sends = [
        (ranks[me % len(ranks)], np.flatnonzero((hosts[rank] == number).any(-1)))
        for number, ranks in enumerate(nodes)
        if number != mine
    ]
    table = np.array([local_rank[r] % len(own) for r in range(num_ranks)])  # of the table with each rank's tokens
    enters = (hosts == mine).any(-1)
    for r in own:
        enters[r] = np.arange(enters.shape[1]) < lengths[r]
    row = rows_in_tables(enters, table, own)
    receives = [(r, row[r][enters[r]]) for r in np.flatnonzero(table == me).tolist() if r not in own]
    tables = [int(enters[table == number].sum()) for number in range(len(own))]

    source, token, choice = np.nonzero(hosts == mine)
    expert = np.searchsorted(np.flatnonzero(host[:-1] == mine), experts[source, token, choice])  # number on the host
    key = expert * len(own) + table[source]
    order = key.argsort(kind="stable")
    sizes = np.bincount(key, minlength=len(own) * num_local * len(own)).reshape(len(own), -1)  # by owner
    blocks = cut_blocks(row[source, token][order], sizes)
    begin, end = sizes[:me].sum(), sizes[: me + 1].sum()
    return Route(
        sends,
        receives,
        [block for block in blocks if block.owner == me],
        [block for block in blocks if block.table == me],
        tables[me],
        sizes[me].reshape(num_local, -1).sum(1).tolist(),  # (local experts), summed over tables
        choice[order][begin:end],
        max(tables),
        int(sizes.sum(1).max()),
    )


def rows_in_tables(enters: np.ndarray, table: np.ndarray, own: Sequence[int]) -> np.ndarray:
    """Return each token's row in its table, which begins with its own rank's tokens.  Shapes: (ranks, tokens)."""
    row = np.empty(enters.shape, np.int64)
    for number, rank in enumerate(own):
        others = np.flatnonzero(table == number)
        order = [rank, *others[others != rank]]
        row[order] = (enters[order].cumsum() - 1).reshape(len(order), -1)  # (ranks of the table, tokens)
    return row


def cut_blocks(rows: np.ndarray, sizes: np.ndarray) -> list[ExpertBlock]:
    """Cut rows, sorted by owner, expert and table, into blocks of the given sizes; empty blocks are omitted."""
    blocks, num_tables, begin = [], len(sizes), 0
    for owner, counts in enumerate(sizes.tolist()):
        slot = 0
        for number, count in enumerate(counts):
            if count:
                slots = slice(slot, slot + count)
                blocks.append(ExpertBlock(number % num_tables, owner, rows[begin : begin + count], slots))
            slot, begin = slot + count, begin + count
    return blocks
