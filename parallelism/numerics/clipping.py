"""Gradient clipping by the global norm, which is bitwise identical with ZeRO and with pipelines.

Squares are summed in float64 in a fixed order: the blocks of a parameter first, then the parameters.  Gradients that
follow each other in memory are read in one pass, which takes one launch on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn

import collectives
from parallelism.buffers.tensor_collectives import ExposedTime
from parallelism.mesh import Mesh
from parallelism.numerics.master_weights import MasterWeights, scale_all
from parallelism.placement import shards_of

BLOCK = 128  # elements of a parameter whose squares are summed together; ZeRO's shard boundaries do not cut a block


class GradientClip(ExposedTime):
    """Scales the gradients of `masters` so that their global norm is at most `limit`, without a host synchronization.

    They are the gradients of `model`, which is distributed over `mesh` by its parameters' placements and by stages; a
    parameter that several ranks hold is counted once.  `tied` lists the names of each tied parameter in the whole
    model.  The ranks of `shard` hold pieces of the parameters.  Construction is collective.
    """

    def __init__(
        self,
        limit: float,
        model: nn.Module,
        masters: MasterWeights,
        mesh: Mesh,
        tied: Iterable[Sequence[str]] = (),
        shard: collectives.Communicator | None = None,
        device: str = "cpu",
    ):
        self.limit, self.masters = limit, masters
        params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.names = list(params)
        lengths = [-(-p.numel() // BLOCK) for p in params.values()]

        numbers = partial(torch.tensor, dtype=torch.int64, device=device)
        self.lengths = numbers(lengths)
        first = dict(zip(params, np.cumsum([0, *lengths]).tolist(), strict=False))
        own = [blocks_of(masters.spans[name], first[name]) for name in masters.pieces]
        self.own_blocks = numbers([*chain(*own)])
        self.blocks = torch.zeros(sum(lengths), dtype=torch.float64, device=device)
        self.join = shard.plan("all_reduce", self.blocks) if shard else None
        indices, slots, count = counted_once(mesh.comm, keys(params, mesh, tied))
        self.counted, self.slots = numbers(indices), numbers(slots)
        self.sums = torch.zeros(max(1, count), dtype=torch.float64, device=device)
        self.add_up = mesh.comm.plan("all_reduce", self.sums)

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """Scale the gradients; return the norm before scaling, on their device.  Collective."""
        gradients = [piece.grad for piece in self.masters.pieces.values() if piece.grad is not None]
        self.of_each = self.squares(gradients)
        self.sums.zero_().index_copy_(0, self.slots, self.of_each[self.counted])
        with self.waiting():
            self.add_up()
        norm = square_root(self.sums.cumsum(0)[-1])
        if gradients and self.limit < math.inf:
            scale = torch.full_like(norm, self.limit) / (norm + 1e-6)  # epsilon of torch.nn.utils.clip_grad_norm_
            scale_all(gradients, torch.where(scale < 1, scale, 1.0))  # with a NaN, 1
        return norm

    def take(self, device: torch.device) -> tuple[list[str], Tensor]:
        """Return the parameters' names in the order of the backward pass, and whether each gradient is finite.

        As a `GradientMonitor`, but without a pass of its own, and after the latest call: where ranks sum gradients, all
        of them have one rank's infinity.
        """
        return self.names[::-1], self.of_each.isfinite().flip(0)

    def squares(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the sum of squares of each parameter that this rank, or its `shard`, holds."""
        norms = [norm for run in runs(gradients) for norm in block_norms(run)]
        self.blocks.zero_()
        if norms:
            self.blocks.index_copy_(0, self.own_blocks, torch.cat(norms).double().square_())
        if self.join:
            with self.waiting():
                self.join()
        return torch.segment_reduce(self.blocks, "sum", lengths=self.lengths, unsafe=True)  # in order


def runs(gradients: Iterable[Tensor]) -> Iterator[Tensor]:
    """Join gradients that follow each other in memory, up to one that ends within a block; yield flat tensors."""
    run: Tensor | None = None
    for gradient in gradients:
        flat = gradient.reshape(-1)
        if run is not None and len(run) % BLOCK == 0 and follows(flat, run):
            run = run.as_strided((len(run) + len(flat),), (1,))
            continue
        if run is not None:
            yield run
        run = flat
    if run is not None:
        yield run


def follows(flat: Tensor, run: Tensor) -> bool:
    """Return whether a flat tensor begins at the element after another one."""
    is_next = flat.storage_offset() == run.storage_offset() + len(run) and flat.dtype == run.dtype
    return is_next and flat.untyped_storage().data_ptr() == run.untyped_storage().data_ptr()


def blocks_of(span: slice, first: int) -> range:
    """Return the block numbers that a span of a parameter covers; the parameter's first block is number `first`."""
    assert span.start % BLOCK == 0
    return range(first + span.start // BLOCK, first - (-span.stop // BLOCK))


def block_norms(flat: Tensor) -> list[Tensor]:
    length = flat.numel()
    end = length - length % BLOCK
    whole = [torch.linalg.vector_norm(flat[:end].view(-1, BLOCK), dim=1)] if end else []
    return whole + ([torch.linalg.vector_norm(flat[end:], dim=0, keepdim=True)] if end < length else [])


def keys(params: Mapping[str, nn.Parameter], mesh: Mesh, tied: Iterable[Sequence[str]]) -> np.ndarray:
    """Return a 64-bit hash of each parameter's name and of this rank's shard of it."""
    first = {name: names[0] for names in tied for name in names}
    texts = [[first.get(name, name), *(mesh.coords[axis] for axis in shards_of(p))] for name, p in params.items()]
    digests = [blake2b(repr(text).encode(), digest_size=8).digest() for text in texts]
    return np.array([int.from_bytes(digest, "big", signed=True) for digest in digests], np.int64)


def counted_once(comm: collectives.Communicator, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the indices of the keys that no earlier rank or parameter has, their slots, and the number of all slots.

    Parameters with equal keys are the same.  Collective.
    """
    counts = comm.all_gather(np.array([len(keys)])).tolist()
    every = comm.all_gather(keys, counts=counts)
    unique, firsts = np.unique(every, return_index=True)
    indices = firsts - sum(counts[: comm.rank])
    slots = np.flatnonzero((indices >= 0) & (indices < len(keys)))
    return indices[slots], slots, len(unique)


def square_root(x: Tensor) -> Tensor:
    """Compute the square root in place, rounded to nearest.

    Torch's square root on the CPU, from MKL, may be off by one unit in the last place, depending on the CPU.
    """
    if x.is_cuda:
        return x.sqrt_()
    np.sqrt(x.numpy(), out=x.numpy())
    return x
