"""Gather each matrix that tensor parallelism or ZeRO shards on one rank, its owner, and send the result back.

For optimizers that need whole matrices, such as Muon.  Ownership balances work.  With n elements and p ranks, a rank
sends 2 n/p elements with ZeRO; without, when every rank holds all of them, n/p to each of the p ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import collectives
from parallelism.buffers.arena import allocate
from parallelism.buffers.tensor_collectives import ExposedTime
from parallelism.data.replica import Replica
from parallelism.data.units import offsets
from parallelism.mesh import Mesh, replica_axes
from parallelism.numerics.master_weights import MasterWeights
from parallelism.placement import Shard, shard_of


class HeldPart(NamedTuple):
    """Part of a matrix that a rank holds: elements `start` to `stop` of the flat shard of tp rank `number`."""

    number: int
    start: int
    stop: int


class SplitMatrix(NamedTuple):
    """A matrix that is sharded over tp ranks by `shard`, or replicated, and gathered on the rank `owner`.

    `holders` are all ranks that hold a part; `sources` the ones that send theirs, in the order of the parts.
    """

    shape: torch.Size  # of a tp rank's shard
    shard: Shard | None
    num_shards: int
    owner: int
    holders: Mapping[int, HeldPart]
    sources: Mapping[int, HeldPart]

    def whole(self, parts: Mapping[int, Tensor]) -> Tensor:
        """Assemble the matrix from the parts of its sources."""
        shards = torch.cat([parts[rank] for rank in self.sources]).view(-1, *self.shape).unbind()
        return self.shard.whole(shards) if self.shard else shards[0]

    def parts(self, whole: Tensor) -> dict[int, Tensor]:
        """Return each holder's flat part of the matrix."""
        numbers = range(self.num_shards)
        shards = [self.shard.local(whole, number, self.num_shards) for number in numbers] if self.shard else [whole]
        flat = [shard.reshape(-1) for shard in shards]
        return {rank: flat[part.number][part.start : part.stop] for rank, part in self.holders.items()}


class ElementRoute(NamedTuple):
    """Elements of a matrix that one rank sends to another."""

    name: str
    source: int
    dest: int
    length: int


class Exchange:
    """Sends along all routes by one all-to-all, on preallocated memory.  Construction and calls are collective.

    `clock` counts the waits.
    """

    def __init__(
        self,
        comm: collectives.Communicator,
        routes: Sequence[ElementRoute],
        dtype: torch.dtype,
        device: str,
        clock: ExposedTime,
    ):
        outgoing = sorted((route for route in routes if route.source == comm.rank), key=lambda route: route.dest)
        incoming = sorted((route for route in routes if route.dest == comm.rank), key=lambda route: route.source)
        self.sent = allocate(comm, sum(route.length for route in outgoing), dtype, device)
        self.received = allocate(comm, sum(route.length for route in incoming), dtype, device)
        self.outgoing = dict(zip(outgoing, offsets(route.length for route in outgoing), strict=True))
        self.incoming = dict(zip(incoming, offsets(route.length for route in incoming), strict=True))
        send = tuple(sum(route.length for route in outgoing if route.dest == rank) for rank in range(comm.size))
        recv = tuple(sum(route.length for route in incoming if route.source == rank) for rank in range(comm.size))
        self.clock = clock
        self.plan = comm.plan("all_to_all", self.sent, out=self.received, send_counts=send, recv_counts=recv)

    def __call__(self, tensors: Mapping[ElementRoute, Tensor]) -> dict[ElementRoute, Tensor]:
        """Send flat tensors; the received ones are valid until the next call."""
        for route, span in self.outgoing.items():
            self.sent[span].copy_(tensors[route])
        with self.clock.waiting():
            self.plan()
        return {route: self.received[span] for route, span in self.incoming.items()}


class MatrixOwners:
    """Applies a function to whole matrices, the parameters of some `names`, each on the rank that owns it.

    They are parameters of a replica, on the ranks of a mesh with the same stage.  Construction is collective.
    """

    def __init__(self, replica: Replica, names: Sequence[str], mesh: Mesh, device: str = "cpu"):
        comm = mesh.along(*replica_axes(mesh.shape), "tp")
        params = {name: replica.params[name] for name in names}
        self.matrices = split_matrices(params, replica.masters, mesh, comm)
        dtype = torch.promote_types(next(iter(params.values())).dtype, torch.float32)
        self.collecting = Exchange(comm, [*self._routes(to_owners=True)], dtype, device, replica)
        self.returning = Exchange(comm, [*self._routes(to_owners=False)], dtype, device, replica)

    def _routes(self, to_owners: bool) -> Iterable[ElementRoute]:
        for name, matrix in self.matrices.items():
            for rank, part in (matrix.sources if to_owners else matrix.holders).items():
                ends = (rank, matrix.owner) if to_owners else (matrix.owner, rank)
                yield ElementRoute(name, *ends, part.stop - part.start)

    def __call__(self, function: Callable[[str, Tensor], Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Apply the function to whole matrices; return this rank's parts, given each rank's parts `tensors`.

        The result is valid until the next call.  Collective.
        """
        collected: dict[str, dict[int, Tensor]] = defaultdict(dict)
        sent = {route: tensors[route.name].reshape(-1) for route in self.collecting.outgoing}
        for route, tensor in self.collecting(sent).items():
            collected[route.name][route.source] = tensor
        results = {}
        for name, parts in collected.items():
            matrix = self.matrices[name]
            results[name] = matrix.parts(function(name, matrix.whole(parts)))
        returned = self.returning({route: results[route.name][route.dest] for route in self.returning.outgoing})
        return {route.name: tensor.view_as(tensors[route.name]) for route, tensor in returned.items()}


def split_matrices(
    params: Mapping[str, Tensor], masters: MasterWeights, mesh: Mesh, comm: collectives.Communicator
) -> dict[str, SplitMatrix]:
    """Return how the ranks of `comm` hold parameters, given this rank's parts.  Collective."""
    shards = {name: shard_of(param, "tp") for name, param in params.items()}
    spans = {name: masters.spans[name] if name in masters.pieces else slice(0, 0) for name in params}  # updated here
    own = [HeldPart(mesh.tp.rank if shards[name] else 0, span.start, span.stop) for name, span in spans.items()]
    owners, of_ranks = owners_of([param.shape for param in params.values()], comm.size), comm.all_gather_object(own)
    matrices = {}
    for (name, param), owner, *parts in zip(params.items(), owners, *of_ranks, strict=True):
        holders = {rank: part for rank, part in enumerate(parts) if part.start < part.stop}
        shard, sources = shards[name], nearest(holders, owner)
        matrices[name] = SplitMatrix(param.shape, shard, mesh.tp.size if shard else 1, owner, holders, sources)
    return matrices


def nearest(holders: Mapping[int, HeldPart], owner: int) -> dict[int, HeldPart]:
    """Return the holder of each part that is nearest to the owner, possibly the owner itself.

    >>> nearest({rank: HeldPart(rank % 2, 0, 8) for rank in range(4)}, owner=2)
    {2: HeldPart(number=0, start=0, stop=8), 1: HeldPart(number=1, start=0, stop=8)}
    """
    ranks: dict[HeldPart, int] = {}
    for rank in sorted(holders, key=lambda rank: abs(rank - owner)):
        ranks.setdefault(holders[rank], rank)
    return {ranks[part]: part for part in sorted(ranks)}


def owners_of(shapes: Sequence[Sequence[int]], size: int) -> list[int]:
    """Assign each matrix to a rank, balancing the cost of products with the matrix's shorter side.

    >>> owners_of([(4, 4), (16, 4), (4, 4), (4, 4)], 2)
    [1, 0, 1, 1]
    """
    work = [np.prod(shape, dtype=float) * min(shape[-2:]) for shape in shapes]
    load, owners = [0.0] * size, [0] * len(shapes)
    for index in sorted(range(len(shapes)), key=lambda index: -work[index]):
        owners[index] = load.index(min(load))
        load[owners[index]] += work[index]
    return owners
