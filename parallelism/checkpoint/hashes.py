"""Hash of a model's weights and optimizer states that does not depend on how ranks divide them.

For each tensor of the whole model, every element's position and bits are mixed to two 64-bit numbers, which are added
up modulo 2^64: a sum of integers does not depend on who holds which elements, nor on the order.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import collectives
from parallelism.checkpoint.checkpoints import identity, refuse_different
from parallelism.checkpoint.part import TensorShard
from parallelism.numerics.dropout import kernels, mix

BLOCK = 1 << 17  # elements that are mixed at a time
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers of as many bytes as an element
Whole = tuple[str, str, tuple[int, ...], str]  # a tensor's name, kind, shape and dtype
Sums = tuple[int, int]  # of a part's or a whole tensor's elements


class StateHash(NamedTuple):
    """SHA-256 of a model's tensors in hexadecimal, and the first 64 bits of that of each, by parameter and kind."""

    hash: str
    tensors: dict[str, dict[str, str]]


def hash_state(parts: Iterable[TensorShard], comm: collectives.Communicator) -> StateHash:
    """Hash tensors of which each rank passes its own shards: the hash is the same in any layout.  Collective.

    It covers each tensor's name, kind, shape, dtype and bits.  A shard that several ranks hold counts once.

    Raises: InputError with the first tensor that differs between the ranks that hold it.
    """
    own = {identity(part): part for part in parts}
    every = comm.all_gather_object({key: part_sums(part) for key, part in own.items()})
    refuse_different(comm, own, every, "the sum of its mixed bits", "resume from an earlier checkpoint")
    return combined(every)


def combined(of_ranks: Iterable[Mapping[int, tuple[*Whole, *Sums]]]) -> StateHash:
    """Return the hash of a whole model from each rank's `part_sums`, by the parts' identities."""
    sums: dict[Whole, list[Sums]] = defaultdict(list)
    for part in {key: part for parts in of_ranks for key, part in parts.items()}.values():
        sums[part[:4]].append(part[4:])
    tensors: dict[str, dict[str, str]] = defaultdict(dict)
    whole = sha256()
    for tensor in sorted(sums, key=lambda tensor: (tensor[0], tensor[1] != "parameter", tensor)):
        name, kind, *_ = tensor
        total = [sum(numbers) % (1 << 64) for numbers in zip(*sums[tensor], strict=True)]
        digest = sha256(json.dumps([*tensor, *total]).encode())
        whole.update(digest.digest())
        tensors[name][kind] = digest.hexdigest()[:16]
    return StateHash(whole.hexdigest(), dict(tensors))


def part_sums(part: TensorShard) -> tuple[*Whole, *Sums]:
    return part.name, part.kind, part.extent.shape, str(part.tensor.dtype), *element_sums(part)


def bits_of(part: TensorShard) -> Tensor:
    """Return the elements of a shard, with its padding, as integers of as many bits."""
    return part.flat.view(BITS[part.tensor.element_size()])


def element_sums(part: TensorShard) -> Sums:
    """Return the two sums of a shard's elements, without its padding, modulo 2^64, computed on its device."""
    bits, runs = bits_of(part), part.extent.runs()
    sums = torch.zeros(2, dtype=torch.int64, device=bits.device)
    if bits.device.type == "cpu" and kernels():
        kernels().add_mixed(bits.numpy(), runs, sums.numpy())
    else:
        for here, there in blocks(runs, bits.device):
            first = mix(there, bits[here].to(torch.int64))
            sums += torch.stack([first.sum(), mix(first, torch.ones_like(first)).sum()])
    first, second = (number % (1 << 64) for number in sums.tolist())
    return first, second


def blocks(runs: np.ndarray, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the local and the global indices of all elements of an extent's runs, in blocks."""
    here, there, counts = torch.from_numpy(runs).to(device).unbind(1)
    ends = counts.cumsum(0)
    begins, total = ends - counts, int(runs[:, 2].sum())
    for begin in range(0, total, BLOCK):
        index = torch.arange(begin, min(begin + BLOCK, total), device=device)
        run = torch.searchsorted(ends, index, right=True)
        yield index + (here - begins)[run], index + (there - begins)[run]
