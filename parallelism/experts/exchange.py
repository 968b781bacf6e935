"""Expert dispatch and combine: send token rows to their experts and back, by shared memory and once between hosts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import collectives
from collectives.arrays.views import to_torch
from parallelism.buffers.autograd import Conjugate
from parallelism.buffers.tensor_collectives import ExposedTime, TensorCollectives
from parallelism.experts.route import Route, make_route

GROWTH = 1.25  # when a buffer is too short, as routing varies from step to step


class HostBuffer:
    """A buffer of each rank of a host, readable by all of them; all grow together."""

    def __init__(self, host: collectives.Communicator):
        self.host, self.nbytes = host, 0

    def rows(self, count: int, like: Tensor) -> list[Tensor]:
        """Return each rank's buffer of `count` rows, as long as those of `like`.  Collective on the host."""
        width = like.shape[1]
        nbytes = count * width * like.element_size()
        if nbytes > self.nbytes:
            self.nbytes = int(nbytes * GROWTH)
            self.array = self.host.empty(self.nbytes, "uint8", str(like.device))
            self.parts = [to_torch(part) for part in self.host.peers(self.array)]
        # (rows, width) of each rank of the host
        return [part[:nbytes].view(like.dtype).view(count, width) for part in self.parts]


class ExpertExchange(ExposedTime):
    """Ranks of `comm` that divide the experts evenly, in rank order.  Construction is collective.

    All calls are collective: routes, and each of their dispatches and combines, forward and backward, in the same order
    on all ranks.  Two buffers alternate, so that one barrier on the host per call suffices, after writing: a rank that
    reaches the next barrier has read this buffer.
    """

    def __init__(self, comm: collectives.Communicator):
        self.comm, self.ranks = comm, TensorCollectives(comm)
        host = comm.split(comm.topology.node_of[comm.rank])
        assert host is not None
        self.host, self.buffers = host, [HostBuffer(host), HostBuffer(host)]

    def route(self, experts: Tensor, num_experts: int) -> ExchangeRouting:
        """Build a route from all ranks' choices; the number of tokens may differ between ranks.

        Shapes: experts (tokens, choices).
        """
        with self.waiting():
            lengths = self.ranks.all_gather(torch.tensor([len(experts)])).tolist()
        padded = experts.new_full((max(lengths), experts.shape[1]), -1, dtype=torch.int16)
        padded[: len(experts)] = experts
        with self.waiting():
            every = self.ranks.all_gather(padded).cpu().view(self.comm.size, *padded.shape)  # (ranks, tokens, choices)
        route = make_route(self.comm.rank, every.numpy(), lengths, num_experts, self.comm.topology.nodes)
        return ExchangeRouting(self, route, len(experts), experts.device)

    def next_buffers(self, count: int, like: Tensor) -> list[Tensor]:
        """Return the host ranks' buffers of `count` rows, as many as the rank with the most writes to its own."""
        self.buffers.reverse()
        with self.waiting():
            return self.buffers[0].rows(count, like)

    def synchronize(self, x: Tensor) -> None:
        """Wait until all ranks of the host have written their rows."""
        if x.is_cuda:
            torch.cuda.current_stream(x.device).synchronize()
        with self.waiting():
            self.host.barrier()

    def free(self) -> None:
        """Free the host's communicator.  Collective."""
        self.buffers.clear()
        self.ranks.forget()
        self.host.free()


class ExchangeRouting:
    """Routes of rows to the experts of all ranks of an exchange, and back; `combine` is the gradient of `dispatch`.

    `counts` has the number of rows of each of this rank's experts, and `choices` each row's index among its token's
    choices, (rows).
    """

    def __init__(self, exchange: ExpertExchange, route: Route, num_tokens: int, device: torch.device):
        self.exchange, self.num_tokens, self.counts = exchange, num_tokens, route.counts
        self.me = exchange.host.rank
        index: Callable[..., Any] = partial(torch.as_tensor, device=device)
        self.choices, self.num_slots = index(route.choices), len(route.choices)
        self.route = route
        self.sends = [(peer, index(rows)) for peer, rows in route.sends if len(rows)]
        self.receives = [(peer, slice(rows[0], rows[-1] + 1)) for peer, rows in route.receives if len(rows)]
        self.reads = [(block.table, index(block.rows), block.slots) for block in route.reads]
        self.combines = [(block.owner, index(block.rows), block.slots) for block in route.combines]

    def dispatch(self, x: Tensor) -> Tensor:
        """Return the rows of all ranks' tokens for this rank's experts, grouped by expert.  Collective.

        Shapes: x (tokens, width), result (rows, width).
        """
        return Conjugate.apply(x, self.scatter_rows, self.gather_rows)

    def combine(self, rows: Tensor) -> Tensor:
        """Return the sum of each token's rows, computed in at least float32.  Collective."""
        return Conjugate.apply(rows, self.gather_rows, self.scatter_rows)

    def scatter_rows(self, x: Tensor) -> Tensor:
        """Send tokens to the hosts of their experts; read this rank's experts' rows from the tables of its host."""
        exchange, x = self.exchange, x.contiguous()
        tables = exchange.next_buffers(self.route.longest_table, x)
        own = tables[self.me]
        with exchange.waiting(), exchange.comm.group():
            for peer, rows in self.sends:
                exchange.comm.send(x.index_select(0, rows), peer)
            for peer, rows in self.receives:
                exchange.comm.recv(own[rows], peer)
            own[: self.num_tokens] = x
        exchange.synchronize(x)
        result = x.new_empty((self.num_slots, x.shape[1]))  # (rows, width)
        for table, rows, slots in self.reads:
            torch.index_select(tables[table], 0, rows, out=result[slots])
        return result

    def gather_rows(self, y: Tensor) -> Tensor:
        """Sum each token's rows on each host, and send the sums back to the token's rank."""
        exchange = self.exchange
        experts = exchange.next_buffers(self.route.most_slots, y)
        experts[self.me][: self.num_slots] = y
        exchange.synchronize(y)
        wide = torch.promote_types(y.dtype, torch.float32)
        sums = y.new_zeros((self.route.table_length, y.shape[1]), dtype=wide)  # (rows of the table, width)
        for owner, rows, slots in self.combines:
            sums.index_add_(0, rows, experts[owner][slots].to(wide))
        total = sums[: self.num_tokens]  # (tokens, width)
        arriving = [(rows, y.new_empty((len(rows), y.shape[1]))) for _, rows in self.sends]
        with exchange.waiting(), exchange.comm.group():
            for peer, rows in self.receives:
                exchange.comm.send(sums[rows].to(y.dtype), peer)
            for (peer, _), (_, part) in zip(self.sends, arriving, strict=True):
                exchange.comm.recv(part, peer)
        for rows, part in arriving:
            total.index_add_(0, rows, part.to(wide))
        return total.to(y.dtype)
