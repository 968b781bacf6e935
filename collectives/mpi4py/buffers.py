"""The buffers of mpi4py's calls, as `[data, count, type]`, as flat arrays, for any datatype."""

import ctypes
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from operator import index
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.arrays.device import Device
from collectives.arrays.ops import DTYPES
from collectives.arrays.packing import Packing
from collectives.arrays.views import is_a
from collectives.arrays.views import writable as is_writable

BYTES = np.dtype(np.uint8)
DLPACK_KINDS = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}
DLPACK_DTYPE_OFFSET = 20  # in DLTensor: after data, device and ndim
LISTS = list | tuple
typedict: dict[str, MPI.Datatype] = MPI._typedict  # by the formats of Python's buffers


class NotOurs(Exception):  # noqa: N818  not an error: the library gets the call, and raises what there is to raise
    """A buffer that the library refuses, or that our collectives do not take."""


class BufferSpec:
    """A buffer as a caller names it: data, counts and displacements in elements of a datatype, None where not given.

    With `vector` there are counts and displacements for each rank.
    """

    def __init__(self, spec: Any, vector: bool = False):
        self.data, self.count, self.displ, datatype = unpacked(spec, vector)
        self.view: Any
        if isinstance(datatype, str):
            datatype = typedict[datatype]
        if self.data is None or self.data is MPI.BOTTOM:
            self.view, self.datatype = None, datatype
        else:
            self.view, own = flat_bytes(self.data)
            self.datatype = own if datatype is None else datatype
        if self.datatype is None:
            raise NotOurs
        self.size, self.extent = self.datatype.Get_size(), self.datatype.Get_extent()[1]
        self.is_plain = self.view is not None and self.size == self.extent and self.datatype.is_predefined

    def num_elements(self, blocks: int = 1) -> int:
        """Return the number of elements of a block, if the data are so many blocks."""
        if self.count is not None:
            return self.count
        length = 0 if self.view is None else len(self.view) - (self.displ or 0) * self.extent
        if not length:
            return 0
        count, rest = divmod(length, self.extent * blocks)
        if rest or count < 0:
            raise NotOurs
        return count

    def window(self, first: int, count: int) -> Any:
        """Return so many elements from the `first` on, as bytes.  Only for plain data."""
        begin, end = first * self.extent, (first + count) * self.extent
        if not 0 <= begin <= end <= len(self.view):
            raise NotOurs
        return self.view[begin:end]

    def elements(self, writable: bool) -> Any:
        """Return the data as numbers to reduce."""
        dtype = numbers().get(self.datatype.handle)
        if dtype is None or not self.is_plain:
            raise NotOurs
        window = self.window(self.displ or 0, self.num_elements())
        if not len(window) or (writable and not is_writable(window)):
            raise NotOurs
        return window.view(dtype)


def unpacked(spec: Any, vector: bool) -> tuple[Any, Any, Any, Any]:
    """Return data, counts, displacements and datatype of a message as mpi4py takes it."""
    if not isinstance(spec, LISTS):
        return spec, None, None, None
    if len(spec) == 4:
        return tuple(spec)  # type: ignore[return-value]
    if len(spec) not in (2, 3):
        raise NotOurs
    data, count, datatype = spec if len(spec) == 3 else (*spec, None)
    if datatype is None and isinstance(count, MPI.Datatype | str):
        return data, None, None, count
    if isinstance(count, tuple if vector else LISTS):
        return data, *count, datatype
    return data, count, None, datatype


def flat_bytes(data: Any) -> tuple[Any, MPI.Datatype | None]:
    """Return the memory of a contiguous array as bytes, and the datatype of its elements, None if MPI has none."""
    if not isinstance(data, np.ndarray):
        data = as_array(data)
    flags = data.flags
    if not flags.c_contiguous:
        if not flags.f_contiguous:
            raise NotOurs
        data = data.T
    return data.reshape(-1).view(BYTES), datatype_of(data.dtype)


def as_array(data: Any) -> Any:
    """Return a NumPy or CuPy array of the same memory."""
    if is_a(data, "cupy", "ndarray"):
        return data
    try:
        return np.asarray(memoryview(data))
    except (TypeError, ValueError):
        pass
    if hasattr(data, "__cuda_array_interface__"):
        import cupy

        return cupy.asarray(data)
    memory: Any = MPI.buffer.frombuffer(data)
    return np.frombuffer(memory, dlpack_dtype(data))


def dlpack_dtype(data: Any) -> np.dtype:
    """Return the dtype of an array that only has DLPack, from its header."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    capsule = data.__dlpack__()
    code, bits = (ctypes.c_uint8 * 2).from_address(pointer(capsule, b"dltensor") + DLPACK_DTYPE_OFFSET)
    return np.dtype(f"{DLPACK_KINDS[code]}{bits // 8}")


@cache
def datatype_of(dtype: np.dtype) -> MPI.Datatype | None:
    try:
        buffer_format = np.empty(1, dtype).data.format
    except ValueError:
        return None
    return typedict.get(buffer_format.lstrip("@=<" if dtype.isnative else "@"))


@cache
def numbers() -> dict[int, np.dtype]:
    """Return the dtypes of those of MPI's datatypes, by handle, whose numbers both MPI and we reduce."""
    dtypes = {each.handle: np.dtype(each.typestr) for each in typedict.values() if each != MPI.DATATYPE_NULL}
    ours = DTYPES - {np.dtype(bool), np.dtype(np.float16)}  # for which MPI libraries have fewer ops, or none
    return {handle: dtype for handle, dtype in dtypes.items() if dtype in ours}


@cache
def reducible() -> frozenset[np.dtype]:
    return frozenset(numbers().values())


class DatatypeMemory(Device):
    """Memory that MPI itself copies, between elements of any datatype and bytes, in messages of this rank to itself.

    A message of any datatype may be received as MPI.PACKED, and sent as that.
    """

    def copy(self, target: Any, source: Any) -> None:
        to_itself().Sendrecv(source, 0, 0, target, 0, 0)


@cache
def to_itself() -> MPI.Comm:
    """Duplicate the communicator of this process alone, for our own messages."""
    return MPI.Comm(MPI.COMM_SELF).Dup()


def pack(spec: BufferSpec, counts: Sequence[int], displs: Sequence[int], writable: bool) -> Packing:
    """Return blocks as contiguous bytes: those of the data themselves, if they are plain and the blocks contiguous."""
    if writable and spec.view is not None and not is_writable(spec.view):
        raise NotOurs
    ends = list(accumulate(counts, initial=0))
    if spec.is_plain and list(displs) == [displs[0] + end for end in ends[:-1]]:
        return Packing(spec.window(displs[0], ends[-1]))
    memory = np.empty(ends[-1] * spec.size, BYTES)
    pairs = []
    for count, displ, end in zip(counts, displs, ends[:-1], strict=True):
        part = memory[end * spec.size : (end + count) * spec.size]
        pairs.append(([spec.data, count, displ, spec.datatype], [part, MPI.PACKED]))
    return Packing(memory, pairs, DatatypeMemory())


def is_simple(array: Any, writable: bool) -> bool:
    """Return whether `array` is a plain NumPy array, the usual case, by a quick check."""
    if type(array) is not np.ndarray or datatype_of(array.dtype) is None:
        return False
    return bool(array.flags.c_contiguous and (not writable or array.flags.writeable))


def numbers_in(data: Any, writable: bool) -> Any:
    """Return data as numbers to reduce."""
    if is_simple(data, writable) and data.dtype in reducible() and data.size:
        return data if data.ndim == 1 else data.reshape(-1)
    return BufferSpec(data).elements(writable)


def blocks_of(data: Any, num_blocks: int, writable: bool = False) -> Packing:
    """Return so many equal blocks as contiguous bytes."""
    if is_simple(data, writable) and data.size % num_blocks == 0:
        return Packing(data.reshape(-1).view(BYTES))
    spec = BufferSpec(data)
    return pack(spec, [num_blocks * spec.num_elements(num_blocks)], [spec.displ or 0], writable)


def vector_of(data: Any, num_blocks: int) -> tuple[Packing, tuple[int, ...]]:
    """Return blocks of own counts and displacements as contiguous bytes, and the number of bytes of each."""
    spec = BufferSpec(data, vector=True)
    counts, displs = spec.count, spec.displ
    if counts is None:
        length, longer = divmod(spec.num_elements(), num_blocks)
        counts = [length + (rank < longer) for rank in range(num_blocks)]
    counts = integers(counts, num_blocks, [1] * num_blocks)
    if displs is None:
        displs = list(accumulate(counts, initial=0))[:-1]
    displs = integers(displs, num_blocks, range(num_blocks))
    return pack(spec, counts, displs, writable=True), tuple(count * spec.size for count in counts)


def integers(values: Any, length: int, times: Sequence[int]) -> list[int]:
    """Return one integer for each rank; a single one stands for its products with `times`."""
    numbers = [values * each for each in times] if np.ndim(values) == 0 else [index(value) for value in values]
    if len(numbers) != length or min(numbers) < 0:
        raise NotOurs
    return numbers
