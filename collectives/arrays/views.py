"""Flat views of NumPy, CuPy and torch arrays: only this module tells the libraries apart."""

import sys
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from operator import index
from typing import Any

import numpy as np

from collectives.arrays.device import Device, host
from collectives.arrays.ops import BFLOAT16, COMPLEX, DTYPES, FLOATS, INTEGERS, Op, sum_dtype
from collectives.schedule.spec import OPS

DLPACK_CPU, DLPACK_CUDA = 1, 2  # kinds of devices; source: dmlc/dlpack, include/dlpack/dlpack.h


def cuda(index: int, library: str = "cupy") -> Device:
    from collectives.arrays.cuda import cuda

    return cuda(index, library)


def device(name: str) -> Device:
    """Return the device of that name: "cpu", "cuda" (the current one) or "cuda:1".

    Raises: ValueError for an unknown name or a device that does not exist.
    """
    kind, _, index = name.partition(":")
    if name == "cpu":
        return host()
    if kind != "cuda" or not (index or "0").isdigit():
        raise ValueError(f"device {name!r} is unknown: use 'cpu', 'cuda' or 'cuda:<index>'")
    cupy = import_cupy(f"device {name!r}")
    if not cupy.cuda.is_available():
        raise ValueError(f"device {name!r}: this machine has no CUDA device or driver; use 'cpu'")
    return cuda(int(index) if index else cupy.cuda.runtime.getDevice())


def import_cupy(what: str) -> Any:
    try:
        import cupy
    except ImportError:
        raise ValueError(f"{what} needs CuPy: pip install '.[cuda12]' or '.[cuda13]', or use 'cpu'") from None
    return cupy


def dtype_of(name: Any) -> np.dtype:
    """Return the dtype of that name, bfloat16 included.

    >>> dtype_of("bfloat16").itemsize, dtype_of("float32").itemsize
    (2, 4)
    """
    try:
        dtype = BFLOAT16 if str(name) == "bfloat16" else np.dtype(name)
    except TypeError:
        raise ValueError(f"dtype {name!r} is unknown; {usable_dtypes()}") from None
    check_dtype(dtype)
    return dtype


def check_dtype(dtype: np.dtype) -> None:
    if not dtype.isnative:
        native = f'x.astype("{dtype.newbyteorder("=")}")'
        raise ValueError(f"dtype {dtype} has another machine's byte order: pass {native}")
    if not (dtype in DTYPES or is_pair(dtype)):
        raise ValueError(f"dtype {dtype} cannot be sent; {usable_dtypes()}")


def is_pair(dtype: np.dtype) -> bool:
    """Return whether numbers are pairs of a value and an index, as MPI.FLOAT_INT has them.

    >>> is_pair(np.dtype("f4,i4")), is_pair(np.dtype("f4,f4")), is_pair(np.dtype("f4"))
    (True, False, False)
    """
    if len(names := dtype.names or ()) != 2:
        return False
    return dtype[names[0]] in FLOATS | INTEGERS and dtype[names[1]] in INTEGERS


def usable_dtypes() -> str:
    return f"use one of {', '.join(sorted(map(str, DTYPES)))}"


def check_op(op: str | Op, dtype: np.dtype) -> None:
    """Refuse an op that is unknown, or makes no sense for a dtype.

    Raises: ValueError with the remedy.
    """
    if isinstance(op, Op):
        op.check(sum_dtype(dtype, op))
        return
    if not isinstance(op, str) or op not in OPS:
        if callable(op):
            name = getattr(op, "__name__", type(op).__name__)
            raise ValueError(f"op {name} is a function: wrap it, as collectives.Op({name})")
        raise ValueError(f"op {op!r} is unknown: use one of {', '.join(OPS)}")
    if remedy := OPS[op].refused.get(kind_of(dtype)):
        raise ValueError(f"op {op!r} of {dtype}: {remedy}")


def kind_of(dtype: np.dtype) -> str:
    """Return bool, float, complex, integer or pair."""
    if dtype.names:
        return "pair"
    if dtype == np.dtype(bool):
        return "bool"
    return "float" if dtype in FLOATS else "complex" if dtype in COMPLEX else "integer"


def flat(x: Any) -> tuple[Device, Any]:
    """Return an array's device, which follows its library's current stream; and a flat view of the array.

    `x` is a NumPy array, a CuPy array, a torch tensor, or of another library with DLPack.

    Raises: ValueError for other objects, arrays that are not C-contiguous, and dtypes that cannot be sent.
    """
    if isinstance(x, np.ma.MaskedArray):
        raise ValueError(
            "masked arrays are not supported: pass x.filled(...), or x.data to include the masked elements"
        )
    if isinstance(x, np.ndarray):
        view_device, view = host(), np.asarray(x)  # of a subclass, its memory
    elif is_a(x, "cupy", "ndarray"):
        view_device, view = cuda(x.device.id), x
    elif is_a(x, "torch", "Tensor"):
        return flat_torch(x)
    elif hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return flat(from_dlpack(x))
    else:
        raise ValueError(f"{type(x).__name__} is not an array: pass a NumPy or CuPy array or a torch tensor")
    check_dtype(view.dtype)
    if not view.flags.c_contiguous:
        raise ValueError(f"array of shape {x.shape} and strides {x.strides} is not C-contiguous: pass a copy of it")
    return view_device, view.reshape(-1)


def from_dlpack(x: Any) -> Any:
    """Return a NumPy or CuPy array of the memory of another library's array, as JAX's, which are read-only.

    Raises: ValueError for memory of other devices, and arrays that the library does not export.
    """
    kind, number = x.__dlpack_device__()
    if kind == DLPACK_CPU:
        try:
            return np.from_dlpack(x)
        except (BufferError, RuntimeError) as error:
            raise ValueError(f"{type(x).__name__} cannot be read by DLPack ({error}): pass a NumPy array") from None
    if kind == DLPACK_CUDA:
        return import_cupy(f"{type(x).__name__} on cuda:{number}").from_dlpack(x)
    raise ValueError(f"{type(x).__name__} is on a device of DLPack's kind {int(kind)}: pass one on the CPU or on CUDA")


def is_a(x: Any, library: str, name: str) -> bool:
    """Return whether `x` is of a type of a library, without importing it."""
    module = sys.modules.get(library)
    return module is not None and isinstance(x, getattr(module, name))


def flat_torch(tensor: Any) -> tuple[Device, Any]:
    import torch

    if tensor.layout != torch.strided:
        raise ValueError(f"tensor of layout {tensor.layout}: pass tensor.to_dense()")
    if not tensor.is_contiguous():
        raise ValueError(
            f"tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not C-contiguous: "
            "pass tensor.contiguous()"
        )
    tensor = tensor.detach().view(-1)
    if tensor.is_cuda:
        view = import_cupy(f"tensor on device {tensor.device}").from_dlpack(tensor)
        return cuda(view.device.id, "torch"), flat(view)[1]
    if tensor.device.type != "cpu":
        raise ValueError(f"tensor on device {tensor.device}: use the CPU or CUDA")
    return flat(numpy_view(tensor))


def numpy_view(x: Any) -> np.ndarray:
    """Return a NumPy array or a torch tensor of the host, of any strides, as a NumPy array of the same memory."""
    if isinstance(x, np.ndarray):
        return np.asarray(x)
    x = x.detach()
    if str(x.dtype) == "torch.bfloat16":
        return x.view(sys.modules["torch"].uint16).numpy().view(BFLOAT16)
    return x.numpy()


def to_torch(x: Any) -> Any:
    """Return a torch tensor that shares the memory of a NumPy or CuPy array, through DLPack."""
    import torch

    if isinstance(x, np.ndarray) and x.dtype == BFLOAT16:
        return torch.from_dlpack(x.view(np.uint16)).view(torch.bfloat16)
    return torch.from_dlpack(x)


def writable(x: Any) -> bool:
    return getattr(x.flags, "writeable", True)


def shape_of(shape: int | Sequence[int]) -> tuple[int, ...]:
    """Return a shape as NumPy takes it: an integer, or one for each dimension.

    Raises: ValueError for anything else.
    """
    try:
        lengths = tuple(map(index, shape)) if isinstance(shape, Iterable) else (index(shape),)
    except TypeError:
        raise ValueError(
            f"shape {shape!r} must consist of integers: pass an integer, or one for each dimension"
        ) from None
    if min(lengths, default=0) < 0:
        raise ValueError(f"shape {shape!r} has a negative length: pass lengths of 0 or more")
    return lengths


def split(array: Any, counts: Sequence[int]) -> list[Any]:
    """Return an array's chunks of those lengths."""
    return [array[begin:end] for begin, end in pairwise(accumulate(counts, initial=0))]
