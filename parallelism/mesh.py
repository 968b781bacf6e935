"""A mesh: the ranks of a job along named axes, and a communicator for each axis."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collectives import Communicator

AXES = ("dp", "pp", "sp", "tp")  # tp innermost, so that it stays within a node


class Mesh:
    """Data (dp), pipeline (pp), sequence (sp) and tensor parallelism (tp) over the ranks of `comm`.

    `mesh.dp` is the communicator of the ranks that differ from this one in dp only, and so on; `mesh.coords` says
    where this rank is.  Without `dp`, it is what the other axes leave.  Collective.

    Raises: InputError where the axes do not multiply to the number of ranks.
    """

    dp: Communicator
    pp: Communicator
    sp: Communicator
    tp: Communicator

    def __init__(self, comm: Communicator, dp: int | None = None, pp: int = 1, sp: int = 1, tp: int = 1):
        with comm.agreed():
            self.shape = mesh_shape(comm.size, dp, pp, sp, tp)
        lengths = tuple(self.shape.values())
        position = [int(i) for i in np.unravel_index(comm.rank, lengths)]
        self.comm, self.coords = comm, dict(zip(AXES, position, strict=True))
        self._parts: list[Communicator] = []
        for name in AXES:
            setattr(self, name, self.along(name))

    def along(self, *axes: str) -> Communicator:
        """The ranks that differ from this one in some axes only, such as "dp" and "sp".  Collective."""
        first, *_ = next(ranks for ranks in groups_along(self.shape, *axes) if self.comm.rank in ranks)
        part = self.comm.split(first)
        assert part is not None
        self._parts.append(part)
        return part

    def free(self) -> None:
        """Give its communicators back to MPI, but not the one it was made of.  Collective."""
        for part in self._parts:
            part.free()


def mesh_shape(world_size: int, dp: int | None, pp: int, sp: int, tp: int) -> dict[str, int]:
    """The length of each axis.

    >>> mesh_shape(8, None, 1, 2, 2)
    {'dp': 2, 'pp': 1, 'sp': 2, 'tp': 2}
    """
    for name, length in {"dp": dp, "pp": pp, "sp": sp, "tp": tp}.items():
        if length is not None and length < 1:
            raise ValueError(f"mesh axis {name}={length} must be at least 1")
    inner = pp * sp * tp
    if dp is None and world_size % inner:
        raise ValueError(f"pp={pp} x sp={sp} x tp={tp} = {inner} does not divide the {world_size} ranks of this job")
    lengths = (world_size // inner if dp is None else dp, pp, sp, tp)
    if math.prod(lengths) != world_size:
        product = " x ".join(f"{name}={length}" for name, length in zip(AXES, lengths, strict=True))
        raise ValueError(
            f"mesh {product} makes {math.prod(lengths)} ranks, but mpirun started {world_size}: "
            f"change the axes, or start with -np {math.prod(lengths)}"
        )
    return dict(zip(AXES, lengths, strict=True))


def groups_along(shape: Mapping[str, int], *axes: str) -> list[list[int]]:
    """The ranks of each group that differ in some axes only, such as "dp" and "sp".

    >>> groups_along({"dp": 2, "pp": 1, "sp": 1, "tp": 2}, "dp")
    [[0, 2], [1, 3]]
    """
    lengths = tuple(shape.values())
    ranks = np.arange(math.prod(lengths)).reshape(lengths)
    last = [number for number, name in enumerate(shape) if name in axes]
    size = math.prod(shape[name] for name in axes)
    return np.moveaxis(ranks, last, range(-len(last), 0)).reshape(-1, size).tolist()
