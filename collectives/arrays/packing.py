"""Regions of memory as one contiguous array of a call, with the copies before the call and after it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from collectives.arrays.device import Device


class LibraryMemory(Device):
    """Memory of any array library, on its current stream, of any strides and any dtype that the library has."""

    def copy(self, target: Any, source: Any) -> None:
        target[...] = source


BY_LIBRARY = LibraryMemory()


class Packing(NamedTuple):
    """Regions of memory as one contiguous array: gathered into it before a call, and written back from it after.

    `pairs` are each region and its part of the array, and `device` copies them.  There are none where the array is the
    caller's memory itself.
    """

    array: Any
    pairs: Sequence[tuple[Any, Any]] = ()
    device: Device = BY_LIBRARY

    @property
    def loads(self) -> list[tuple[Any, Any]]:
        return [(part, region) for region, part in self.pairs]

    def load(self) -> None:
        self.device.copy_pairs(self.loads)

    def store(self) -> None:
        self.device.copy_pairs(self.pairs)


def pack_tensors(tensors: Sequence[Any]) -> Packing:
    """Return torch tensors of one dtype on one device as a contiguous one: the only one itself, or a new one."""
    first, lengths = tensors[0], [tensor.numel() for tensor in tensors]
    if len(tensors) == 1 and first.is_contiguous():
        return Packing(first)
    array = first.new_empty(first.shape if len(tensors) == 1 else sum(lengths))
    parts = zip(tensors, array.view(-1).split(lengths), strict=True)
    return Packing(array, [(tensor.detach(), part.view(tensor.shape)) for tensor, part in parts])
