"""Device mesh: arrange the ranks of a job along named axes, with one communicator per axis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

import collectives

AXES = ("dp", "pp", "sp", "tp")  # axes of train.py and the planner: tp innermost, so that it stays within a node


def divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def listed_divisors(number: int) -> str:
    """Return the numbers of ranks that divide a number evenly, for messages."""
    return ", ".join(map(str, divisors(number)))


class Within(NamedTuple):
    """An axis nested in another one: groups of `length` neighbouring ranks along `axis`."""

    axis: str
    length: int


Pattern = tuple[tuple[int, bool], ...]


class MeshShape(NamedTuple):
    """Lengths of the axes, and the disjoint axes that each consists of: `disjoint` lists these, innermost last."""

    lengths: dict[str, int]
    disjoint: dict[str, int]
    components: dict[str, tuple[str, ...]]

    def along(self, *axes: str) -> tuple[str, ...]:
        """Return the disjoint axes that make up `axes`, except those of length 1; a missing axis has length 1."""
        parts = {part for axis in axes for part in self.components.get(axis, ())}
        return tuple(axis for axis, length in self.disjoint.items() if axis in parts and length > 1)

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the groups of ranks that differ only in some axes, such as "dp" and "sp".

        >>> mesh_shape(4, dp=2, tp=2).groups("dp")
        [[0, 2], [1, 3]]
        """
        return groups_of_ranks(self.pattern(*axes)).tolist()

    def pattern(self, *axes: str) -> Pattern:
        """Return the lengths of which the ranks are a product, and whether a group of some axes is along each.

        >>> mesh_shape(24, dp=2, pp=3, sp=1, tp=4).pattern("dp")
        ((2, True), (12, False))
        """
        parts = self.along(*axes)
        longer = [(axis, length) for axis, length in self.disjoint.items() if length > 1]
        runs = groupby(longer, key=lambda axis: axis[0] in parts)
        return tuple((math.prod(length for _, length in run), is_along) for is_along, run in runs)

    def coords(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinate along each axis."""
        return {
            axis: next(ranks.index(rank) for ranks in self.groups(axis) if rank in ranks) for axis in self.components
        }


class Mesh:
    """Ranks of `comm` arranged along axes of any names, in the order of the arguments, innermost last.

    `mesh.tp`, or `mesh["tp"]`, is the communicator of the ranks whose coordinates differ from this one's in tp only;
    `mesh.coords` are this rank's coordinates, `mesh.shape` the axis lengths.  An axis that is None takes
    the remaining ranks; by default dp, the outermost, does.  An axis that the mesh lacks has one rank.

    An axis may be nested in another: with `ep=Within("dp", 2)`, ep groups 2 neighbours along dp, and "dp/ep" is the
    axis of the ranks with the same position in each group.  Collective.

    Raises: InputError where the axes do not multiply to the number of ranks.
    """

    def __init__(self, comm: collectives.Communicator, **axes: int | Within | None):
        with comm.agreed():
            self.layout = mesh_shape(comm.size, **axes)
        self.comm, self.shape, self.coords = comm, self.layout.lengths, self.layout.coords(comm.rank)
        self._parts: dict[tuple[str, ...], collectives.Communicator] = {}
        for names in ((), *((axis,) for axis in self.layout.components)):
            self.along(*names)

    def along(self, *axes: str) -> collectives.Communicator:
        """Return the communicator of ranks that differ from this one only in some axes.  Collective."""
        key = self.layout.along(*axes)
        if key not in self._parts:
            first, *_ = next(ranks for ranks in self.layout.groups(*key) if self.comm.rank in ranks)
            part = self.comm.split(first)
            assert part is not None
            self._parts[key] = part
        return self._parts[key]

    def __getitem__(self, axis: str) -> collectives.Communicator:
        return self._parts[self.layout.along(axis)]

    def __getattr__(self, axis: str) -> collectives.Communicator:
        if axis.startswith("_") or axis == "layout":  # looked up on a mesh that is still being built or copied
            raise AttributeError(axis)
        return self[axis]

    def free(self) -> None:
        """Free the communicators of the mesh, but not the one it was built from.  Collective."""
        for part in self._parts.values():
            part.free()


def groups_of_ranks(pattern: Pattern) -> np.ndarray:
    """Return the ranks of each group of a mesh's pattern.  Shapes: (groups, ranks).

    >>> groups_of_ranks(((2, True), (2, False))).tolist()
    [[0, 2], [1, 3]]
    """
    lengths = tuple(length for length, _ in pattern)
    last = [number for number, (_, is_along) in enumerate(pattern) if is_along]
    size = math.prod(lengths[number] for number in last)
    return np.moveaxis(np.arange(math.prod(lengths)).reshape(lengths), last, range(-len(last), 0)).reshape(-1, size)


def axes_of(layout: Any) -> dict[str, int | Within | None]:
    """Return the axes of train.py's settings, or of a planner's layout, as keyword arguments of `Mesh`."""
    outer = {axis: getattr(layout, axis) for axis in AXES}
    return outer if layout.ep == 1 else {**outer, "ep": Within("dp", layout.ep)}


def replica_axes(axes: Iterable[str]) -> tuple[str, ...]:
    """Return the axes along which ranks hold the same shards of every parameter: dp and sp, except ep inside dp."""
    return "dp/ep" if "ep" in axes else "dp", "sp"


def mesh_shape(world_size: int, **axes: int | Within | None) -> MeshShape:
    """Return the shape of a mesh of `world_size` ranks; the axes are those of `Mesh`.

    >>> mesh_shape(8, sp=2, tp=2).lengths
    {'dp': 2, 'sp': 2, 'tp': 2}
    >>> mesh_shape(8, dp=4, tp=2, ep=Within("dp", 2)).disjoint
    {'dp/ep': 2, 'ep': 2, 'tp': 2}

    Raises: ValueError if the lengths do not multiply to the number of ranks, or one does not divide the axis around it.
    """
    if "dp" not in axes and None not in axes.values():
        axes = {"dp": None, **axes}
    lengths = outer_lengths(world_size, {name: axis for name, axis in axes.items() if not isinstance(axis, Within)})
    disjoint = dict(lengths)
    components: dict[str, tuple[str, ...]] = {name: (name,) for name in lengths}
    for name, inner in axes.items():
        if isinstance(inner, Within):
            around, rest = lengths.get(inner.axis, 1), f"{inner.axis}/{name}"
            if inner.length < 1 or around % inner.length or components.get(inner.axis) != (inner.axis,):
                raise ValueError(
                    f"mesh axis {name}={inner.length} must divide {inner.axis}={around}, within which it lies"
                )
            lengths[name], parts = inner.length, {rest: around // inner.length, name: inner.length}
            replaced = [parts if axis == inner.axis else {axis: length} for axis, length in disjoint.items()]
            disjoint = {axis: length for several in replaced for axis, length in several.items()}
            components |= {inner.axis: (rest, name), rest: (rest,), name: (name,)}
    return MeshShape(lengths, disjoint, components)


def outer_lengths(world_size: int, axes: Mapping[str, int | None]) -> dict[str, int]:
    """Return the axis lengths, with the one that is None computed from the others."""
    lengths = {name: length for name, length in axes.items() if length is not None}
    for name, length in lengths.items():
        if length < 1:
            raise ValueError(f"mesh axis {name}={length} must be at least 1")
    missing = [name for name in axes if name not in lengths]
    if len(missing) > 1:
        raise ValueError(f"mesh axes {', '.join(missing)} are all None: give all but one")
    count, product = math.prod(lengths.values()), " x ".join(f"{name}={length}" for name, length in lengths.items())
    if missing and world_size % count:
        raise ValueError(
            f"{product} = {count} does not divide the {world_size} ranks of this job: use lengths whose product is one "
            f"of {listed_divisors(world_size)}"
        )
    if not missing and count != world_size:
        raise ValueError(
            f"mesh {product} makes {count} ranks, but mpirun started {world_size}: "
            f"change the axes, or start with -np {count}"
        )
    return {name: world_size // count if length is None else length for name, length in axes.items()}
