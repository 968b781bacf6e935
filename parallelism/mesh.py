"""A mesh: the ranks of a job along named axes, and a communicator for each axis."""

from __future__ import annotations

import math
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
        for axis, name in enumerate(AXES):
            others = [*position]
            others[axis] = 0
            setattr(self, name, self._part(int(np.ravel_multi_index(others, lengths)), key=position[axis]))

    def along(self, *axes: str) -> Communicator:
        """The ranks that differ from this one in some axes only, such as "dp" and "sp".  Collective."""
        position = [0 if name in axes else at for name, at in self.coords.items()]
        return self._part(int(np.ravel_multi_index(position, tuple(self.shape.values()))))

    def _part(self, color: int, key: int = 0) -> Communicator:
        part = self.comm.split(color, key)
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
