"""Expert dispatch and combine: send token rows to their experts and back, by shared memory and once between hosts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import collectives
from collectives.arrays.views import to_torch
from parallelism.buffers.autograd import Conjugate
from parallelism.buffers.tensor_collectives import ExposedTime, TensorCollectives
from parallelism.experts.route import Route, Transfer, make_route

GROWTH = 1.25  # when a buffer is too short, as routing varies from step to step


class HostBuffer:
    """A buffer of each rank of a host, readable by all of them; all grow together."""

    def __init__(self, host: collectives.Communicator):
        self.host, self.nbytes = host, 0

    def rows(self, count: int, width: int, like: Tensor) -> list[Tensor]:
        """Return each rank's buffer of `count` rows.  Collective on the host; all arguments must agree."""
        nbytes = count * width * like.element_size()
        if nbytes > self.nbytes:
            self.nbytes = int(nbytes * GROWTH)
            self.array = self.host.empty(self.nbytes, "uint8", str(like.device))
            self.parts = [to_torch(part) for part in self.host.peers(self.array)]
        return [part[:nbytes].view(like.dtype).view(count, width) for part in self.parts]


class ExpertExchange(ExposedTime):
    """Ranks of `comm` that divide the experts evenly, in rank order.  Construction is collective.

    All calls are collective: routes, and each of their dispatches and combines, forward and backward, in the same order
    on all ranks.  Two buffers alternate, so that one barrier on the host per call suffices, after writing: a rank that
    reaches the next barrier has read this buffer.
    """

    def __init__(self, comm: collectives.Communicator):
        self.comm, self.ranks = comm, TensorCollectives(comm)
        node = comm.topology.node_of[comm.rank]
        host = comm.split(node)
        assert host is not None
        self.own, self.has_others = comm.topology.nodes[node], len(comm.topology.nodes) > 1
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
            every = self.ranks.all_gather(padded).cpu().view(self.comm.size, *padded.shape)
        route = make_route(self.comm.rank, every.numpy(), lengths, num_experts, self.comm.topology.nodes)
        return ExchangeRouting(self, route, len(experts), experts.device)

    def written(self, count: int, longest: int, like: Tensor) -> list[Tensor]:
        """Return the host ranks' buffers; this rank writes `count` rows to its own."""
        self.buffers.reverse()
        return self.buffers[0].rows(max(longest, count), like.shape[1], like)

    def in_turn(self, transfers: Sequence[Transfer]) -> list[Transfer]:
        """Return the transfers that are not empty, beginning on each rank with another peer."""
        ordered = sorted(transfers, key=lambda transfer: (transfer.peer - self.comm.rank) % self.comm.size)
        return [transfer for transfer in ordered if len(transfer.rows)]

    def synchronize(self, x: Tensor) -> None:
        """Wait until all ranks of the host have written their rows."""
        if x.is_cuda:
            torch.cuda.current_stream(x.device).synchronize()
        with self.waiting():
            self.host.barrier()

    def wait_for(self, messages: Iterable[Any]) -> None:
        with self.waiting():
            for message in messages:
                message.wait()

    def free(self) -> None:
        """Free the host's communicator.  Collective."""
        self.buffers.clear()
        self.ranks.forget()
        self.host.free()


class ExchangeRouting:
    """A `models.mixture.Routing` over the ranks of an exchange: dispatch and combine are each other's gradients."""

    def __init__(self, exchange: ExpertExchange, route: Route, num_tokens: int, device: torch.device):
        self.exchange, self.num_tokens, self.counts = exchange, num_tokens, route.counts
        self.me, index = exchange.host.rank, partial(on_device, device)
        self.choices, self.num_slots = index(route.choices), len(route.choices)
        self.route = route
        self.sends = [(peer, index(rows)) for peer, rows in exchange.in_turn(route.sends)]
        self.receives = [(peer, slice(rows[0], rows[-1] + 1)) for peer, rows in exchange.in_turn(route.receives)]
        self.reads: dict[bool, list[Any]] = {True: [], False: []}  # by whether the tokens are of this host
        for block in route.reads:
            self.reads[block.source in exchange.own].append((block.table, index(block.rows), block.slots))
        self.gives: dict[int, list[Any]] = {block.source: [] for block in route.gives}
        for block in route.gives:
            self.gives[block.source].append((block.owner, index(block.rows), block.slots))

    def dispatch(self, x: Tensor) -> Tensor:
        return Conjugate.apply(x, self.spread, self.gather)

    def combine(self, rows: Tensor) -> Tensor:
        return Conjugate.apply(rows, self.gather, self.spread)

    def spread(self, x: Tensor) -> Tensor:
        """Send tokens to the hosts of their experts; read this rank's experts' rows from the tables of its host.

        Rows of tokens of this host are read while those of other hosts are on their way.
        """
        exchange, x = self.exchange, x.contiguous()
        tables = exchange.written(self.route.table_length, self.route.longest_table, x)
        own = tables[self.me]
        messages = [exchange.comm.recv(own[rows], peer, blocking=False) for peer, rows in self.receives]
        messages += [exchange.comm.send(x.index_select(0, rows), peer, blocking=False) for peer, rows in self.sends]
        own[: self.num_tokens] = x
        result = x.new_empty((self.num_slots, x.shape[1]))
        for is_near in (True, False) if exchange.has_others else (True,):
            if not is_near:
                exchange.wait_for(messages)
            exchange.synchronize(x)
            for table, rows, slots in self.reads[is_near]:
                torch.index_select(tables[table], 0, rows, out=result[slots])
        return result

    def gather(self, y: Tensor) -> Tensor:
        """Sum each token's rows on each host, and send the sums back to the token's rank, one rank after the other."""
        exchange = self.exchange
        experts = exchange.written(self.num_slots, self.route.most_slots, y)
        experts[self.me][: self.num_slots] = y
        arriving = [(peer, rows, y.new_empty((len(rows), y.shape[1]))) for peer, rows in self.sends]
        messages = [exchange.comm.recv(part, peer, blocking=False) for peer, _, part in arriving]
        exchange.synchronize(y)
        wide = torch.promote_types(y.dtype, torch.float32)
        sums = y.new_zeros((self.route.table_length, y.shape[1]), dtype=wide)
        total = sums[: self.num_tokens]
        for peer, part in [*((peer, sums[rows]) for peer, rows in self.receives), (exchange.comm.rank, None)]:
            for owner, rows, slots in self.gives.get(peer, ()):
                sums.index_add_(0, rows, experts[owner][slots].to(wide))
            if part is not None:
                messages.append(exchange.comm.send(part.to(y.dtype), peer, blocking=False))
        exchange.wait_for(messages)
        for _, rows, part in arriving:
            total.index_add_(0, rows, part.to(wide))
        return total.to(y.dtype)


def on_device(device: torch.device, indices: np.ndarray) -> Any:
    return torch.from_numpy(np.ascontiguousarray(indices)).to(device)
