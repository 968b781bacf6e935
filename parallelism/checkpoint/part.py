"""Parts: what a rank holds of a parameter, or of an optimizer's state of it; and where parts of two layouts meet."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from parallelism.shard import Shard


class Extent(NamedTuple):
    """Which elements of a whole: `length` from `begin` on, of the flat shard that one of `size` ranks has of it.

    Without `shard`, of the flat whole.

    >>> Extent((2, 4), begin=1, length=3, shard=Shard(1, 4), rank=1, size=2).runs().tolist()  # of 2, 3, 6, 7
    [[0, 3, 1], [1, 6, 2]]
    """

    shape: tuple[int, ...]  # of the whole
    begin: int
    length: int
    shard: Shard | None = None
    rank: int = 0
    size: int = 1

    def runs(self) -> np.ndarray:
        """Elements side by side both here and in the flat whole, in rows: place here, place there, how many.

        Padding is not among them.

        Raises: ValueError for a whole that has no such shard, or a shard that has no such range.
        """
        runs = self._shard_runs(self.shard) if self.shard else np.array([[0, 0, math.prod(self.shape)]])
        if not 0 <= self.begin <= self.end <= (among := self.shard_length()):
            raise ValueError(f"elements {self.begin} to {self.end} are not all among a part's {among}")
        begins = np.maximum(runs[:, 0], self.begin)
        ends = np.minimum(runs[:, 0] + runs[:, 2], self.end)
        runs = np.stack([begins - self.begin, runs[:, 1] + begins - runs[:, 0], ends - begins], axis=1)
        return joined(runs[runs[:, 2] > 0])

    @property
    def end(self) -> int:
        return self.begin + self.length

    def shard_length(self) -> int:
        if self.shard is None:
            return math.prod(self.shape)
        return math.prod(self.shape) // self.shape[self.shard.dim] * self.shard.part_length(self.size)

    def _shard_runs(self, shard: Shard) -> np.ndarray:
        dim, length, part_length = shard.dim, shard.length, shard.part_length(self.size)
        pieces = np.array(shard.pieces(part_length * self.size))
        if self.shape[dim] != length or (pieces % self.size).any() or not (shard.padded or length % self.size == 0):
            raise ValueError(f"dim {dim} of {self.shape} can't be split as {shard} over {self.size} ranks")
        counts = pieces // self.size
        here, there = np.cumsum(counts) - counts, np.cumsum(pieces) - pieces + self.rank * counts
        counts = np.clip(length - there, 0, counts)
        rows = np.arange(math.prod(self.shape[:dim]))[:, None]
        columns = rows * part_length + here, rows * length + there, counts + 0 * rows
        return np.stack(columns, axis=-1).reshape(-1, 3) * math.prod(self.shape[dim + 1 :])


def joined(runs: np.ndarray) -> np.ndarray:
    """The same with runs made one that follow one another both here and there."""
    if len(runs) == 0:
        return runs
    ends = runs[:-1, :2] + runs[:-1, 2:]
    firsts = np.flatnonzero([True, *(runs[1:, :2] != ends).any(axis=1)])
    return np.column_stack([runs[firsts, :2], np.add.reduceat(runs[:, 2], firsts)])


def packed(runs: np.ndarray) -> np.ndarray:
    """The runs as they lie here without what is between them."""
    return np.column_stack([np.cumsum(runs[:, 2]) - runs[:, 2], runs[:, 1:]])


def meet(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """What two have in common of a whole, in rows: place in `a`, place in `b`, how many.

    >>> meet(np.array([[0, 2, 6]]), np.array([[0, 0, 3], [3, 5, 9]])).tolist()
    [[0, 2, 1], [3, 3, 3]]
    """
    edges = np.unique(np.concatenate([runs[:, 1:2] + runs[:, 2:] * [0, 1] for runs in (a, b)]))
    begins, counts = edges[:-1], np.diff(edges)
    (in_a, at_a), (in_b, at_b) = located(a, begins), located(b, begins)
    return joined(np.column_stack([at_a, at_b, counts])[in_a & in_b])


def located(runs: np.ndarray, there: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which places of the whole the runs reach, and where these are here."""
    if len(runs) == 0:
        return np.zeros(len(there), bool), there
    number = np.searchsorted(runs[:, 1], there, side="right") - 1
    here, start, count = runs[number].T
    return (number >= 0) & (there < start + count), here + there - start


class Part(NamedTuple):
    """A tensor that has some elements, `extent`, of a parameter or of a state of it.

    `name` is the parameter's in the whole model, of a tied one the first; `kind` says what of it: "parameter", or an
    optimizer's name for its state, such as "exp_avg".  Of a parameter that is tied over ranks, all but one have copies.
    Ranks that hold the same extent need no such mark.
    """

    name: str
    kind: str
    extent: Extent
    tensor: Tensor
    is_copy: bool = False

    def __str__(self) -> str:
        return f"{self.kind} of {self.name}"

    @property
    def flat(self) -> Tensor:
        return self.tensor.detach().view(-1)

    def check(self) -> None:
        """Raise ValueError where the tensor is not as long as its extent, which must be in the whole."""
        try:
            self.extent.runs()
        except ValueError as error:
            raise ValueError(f"{self}: {error}") from None
        if self.tensor.numel() != self.extent.length:
            raise ValueError(f"{self}: a tensor of {self.tensor.numel()} elements for {self.extent.length}")

    def within(self, span: slice, tensor: Tensor, kind: str = "parameter") -> Part:
        """Some elements of this part, flat, which `tensor` has."""
        extent = self.extent._replace(begin=self.extent.begin + span.start, length=span.stop - span.start)
        return self._replace(kind=kind, extent=extent, tensor=tensor)

    def compact(self) -> Tensor:
        """A copy, on the host, of the elements without the padding, flat."""
        runs = self.extent.runs()
        if runs[:, 2].sum() == self.extent.length:
            return self.flat.to("cpu", copy=True)
        return torch.cat([self.flat[:0], *(self.flat[here : here + count] for here, _, count in runs.tolist())]).cpu()


def model_parts(model: nn.Module, rank: int = 0, size: int = 1, tied: Iterable[Sequence[str]] = ()) -> dict[str, Part]:
    """The parameters of a model, by their names in it, of which `rank` of `size` tensor-parallel ranks has its parts.

    `tied` are the names in the whole model of each parameter that has several there, of which this may have another
    than the first; and those of other ranks are marked, as by `TiedGradients`.
    """
    first = {name: names[0] for names in tied for name in names}
    parts = {}
    for name, p in model.named_parameters():
        shard: Shard | None = getattr(p, "shard", None)
        shape = list(p.shape)
        if shard:
            shape[shard.dim] = shard.length
        place = (shard, rank, size) if shard else ()
        extent = Extent(tuple(shape), 0, p.numel(), *place)
        parts[name] = Part(first.get(name, name), "parameter", extent, p.detach(), getattr(p, "is_copy", False))
    return parts


def state_parts(part: Part, states: Mapping[str, Tensor]) -> Iterator[Part]:
    """An optimizer's states of a parameter by their kinds: each as large as the part, or one number."""
    for kind, tensor in states.items():
        extent = part.extent if tensor.dim() else Extent((), 0, 1)
        yield part._replace(kind=kind, extent=extent, tensor=tensor)


@torch.no_grad()
def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer make the states that its first step would, to be filled.  Parameters stay as they are.

    Gradients, where there are any, must be zero.
    """
    lacking = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p.grad is None]
    for p in lacking:
        p.grad = torch.zeros_like(p)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for p in lacking:
        p.grad = None


def arena_parts(
    parts: Mapping[str, Part], slices: Mapping[str, slice], kind: str, flat: Tensor, begin: int = 0
) -> Iterator[Part]:
    """What of each parameter lies in `flat`, the elements from `begin` on of an arena of these slices."""
    for name, place in slices.items():
        low, high = max(place.start, begin), min(place.stop, begin + flat.numel())
        if low < high:
            span = slice(low - place.start, high - place.start)
            yield parts[name].within(span, flat[low - begin : high - begin], kind)
