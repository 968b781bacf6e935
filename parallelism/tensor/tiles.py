"""Sums over a dim that tensor parallelism splits, with the same bits on any number of ranks.

The dim is cut into a fixed number of tiles, of which each rank has as many.  Tiles are summed along a balanced binary
tree, whose lower levels are within a rank, and whose upper levels are between ranks: both numbers are powers of two.

Source: Zhang et al., "Deterministic Inference across Tensor Parallel Sizes That Eliminates Training-Inference
Mismatch", 2025, arXiv 2511.17826 (tree-based invariant kernels).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from parallelism.buffers.tensor_collectives import TensorCollectives

LEAST_COLUMNS = 32  # of a rank's matrices: for fewer, matrix products use other kernels


def tree_sum(parts: Iterable[Tensor]) -> Tensor:
    """Return the sum of a power of two of tensors, overwriting some: of that of the first half and of the second.

    >>> tree_sum([torch.tensor(x) for x in (1e8, 1.0, -1e8, 1.0)]).item()
    0.0
    """
    sums: list[Tensor] = []  # of 2**k tensors each, k falling
    for number, part in enumerate(parts):
        while number & 1:
            part, number = sums.pop().add_(part), number >> 1
        sums.append(part)
    return sums.pop()


def tiles_of(length: int, count: int, pieces: Sequence[int] = (1,)) -> list[list[slice]]:
    """Cut a dim into tiles: each has a slice of each of its pieces, of relative lengths `pieces`.

    >>> tiles_of(12, 2, pieces=(2, 1))
    [[slice(0, 4, None), slice(8, 10, None)], [slice(4, 8, None), slice(10, 12, None)]]
    """
    tiles: list[list[slice]] = [[] for _ in range(count)]
    start = 0
    for piece in pieces:
        each = length * piece // sum(pieces) // count
        for number, tile in enumerate(tiles):
            tile.append(slice(start + number * each, start + (number + 1) * each))
        start += count * each
    return tiles


def tiled(multiply: Callable[[slice], Tensor], length: int, count: int, pieces: Sequence[int] = (1,)) -> Tensor:
    """Return the sum of products over a dim, at least in float32, given the product over a slice of it."""
    return tree_sum(in_order(map(multiply, slices)) for slices in tiles_of(length, count, pieces))


def in_order(products: Iterable[Tensor]) -> Tensor:
    """Return the sum of products, at least in float32, one after the other."""
    first, *rest = products
    total = first.to(torch.promote_types(first.dtype, torch.float32))
    for product in rest:
        total += product
    return total


def sum_over_ranks(x: Tensor, ranks: TensorCollectives) -> Tensor:
    """Return the sum of all ranks' tensors.  Collective."""
    if ranks.size == 1:
        return x
    if ranks.size == 2:
        return ranks.all_reduce(x)  # the only order
    padded = F.pad(x.reshape(-1), (0, -x.numel() % ranks.size))
    return ranks.all_gather(shard_of_sum(padded, ranks))[: x.numel()].view(x.shape)


def shard_of_sum(x: Tensor, ranks: TensorCollectives) -> Tensor:
    """Return this rank's shard, along the first dim, of the sum of all ranks' tensors.  Collective."""
    if ranks.size == 1:
        return x
    return tree_sum(ranks.all_to_all(x).unflatten(0, (ranks.size, -1)).unbind())


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
