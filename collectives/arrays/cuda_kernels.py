"""Reductions and casts of arrays in a GPU's memory, by kernels of our own (cuda_kernels.cu), launched through CuPy.

One kernel computes out = sources[0] op sources[1] op ..., divides at the end, and rounds to the dtype of `out`.  Each
source is read once and `out` written once.  Sources may lie in peers' memory, mapped by CUDA IPC.

They run on the current device and, unless a stream is passed, on the current one.  CuPy compiles an instance for a
dtype, op and number of sources on first use, once per node, and keeps it on disk.
"""

import fcntl
import platform
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from collectives.arrays import addresses
from collectives.arrays.ops import COMPLEX
from collectives.job import environment

SOURCE = Path(__file__).with_suffix(".cu")
OPTIONS = ("--std=c++17", "--fmad=false")
MAX_SOURCES = 64  # of one launch
MAX_AT_ONCE = 8  # sources that a thread loads before it reduces
VECTOR_BYTES = 16  # of one load, from an aligned address
BLOCK_THREADS = 256
BLOCKS_PER_MULTIPROCESSOR = 4  # half of the maximum: 128 KiB in flight, and room for concurrent kernels

TASK = np.dtype(
    [
        ("sources", "u8", MAX_SOURCES),
        ("outs", "u8", MAX_SOURCES),
        *((name, "u8") for name in ("num_sources", "num_outs", "head", "blocks", "tail")),
        ("divisor", "f8"),
    ]
)
FLOATS = {"float16": "Float16", "bfloat16": "Bfloat16", "float32": "float", "float64": "double"}
UNSIGNED = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}
SIGNED = {1: "signed char", 2: "short", 4: "int", 8: "long long"}


class KernelChoice(NamedTuple):
    """A kernel's template arguments, its number of elements, and `sizes`: the bytes of one of out, and of each source.

    It loads from `at_once` sources at a time.
    """

    op: str
    source: str
    into: str
    at_once: int
    num_elements: int
    sizes: list[int]

    @property
    def name(self) -> str:
        return f"reduce<{self.op}, {self.source}, {self.into}, {self.at_once}>"


class Launch(NamedTuple):
    """A kernel bound to its arguments, to be launched often."""

    kernel: Any
    num_blocks: int
    task: np.ndarray

    def __call__(self, stream: Any = None) -> None:
        if self.num_blocks:
            self.kernel((self.num_blocks,), (BLOCK_THREADS,), (self.task,), stream=stream)


def cast(out: Any, source: Any, stream: Any = None) -> None:
    """Cast floats to another dtype, rounding to nearest, or copy an array of the same dtype."""
    bind_reduction("max" if out.dtype == bool else "sum", out, [source])(stream)


def divide(x: Any, divisor: int, stream: Any = None) -> None:
    """Divide x in place: 16-bit floats in float32, integers toward zero."""
    bind_reduction("avg", x, [x], divisor)(stream)


def bind_reduction(op: str, out: Any, sources: Sequence[Any], divisor: int = 1) -> Launch:
    """Bind the launch of out = (sources[0] op sources[1] op ...) / divisor, elementwise and in that order.

    `out` and the sources are flat arrays of one length; a source may be `out` itself, but overlaps it in no other way.
    Sources of floats may be of another float dtype than `out`, one for all.  Only "avg" has a divisor.  16-bit floats
    are reduced and divided in float32, and rounded once.  Integers wrap, and are divided toward zero.  "min" and "max"
    of a NaN and a number are NaN.

    Raises: ValueError for more sources than one launch takes.
    """
    import cupy

    if not 1 <= len(sources) <= MAX_SOURCES:
        raise ValueError(f"{len(sources)} sources: reduce 1 to {MAX_SOURCES} at a time")
    assert divisor >= 1, f"a divisor of {divisor}"
    choice = plan(op, out.dtype, sources[0].dtype, out.size, len(sources), divisor)
    task, work = task_of(choice, [addresses.pointer(out)], [*map(addresses.pointer, sources)], divisor)
    device = cupy.cuda.runtime.getDevice()
    return Launch(kernel(choice.name, device), num_blocks(work, device), task)


def task_of(choice: KernelChoice, outs: Sequence[int], sources: Sequence[int], divisor: int) -> tuple[np.ndarray, int]:
    """Return a kernel's task in memory at these addresses, and the number of threads that have work."""
    sizes = choice.sizes[:1] * len(outs) + choice.sizes[1:]
    head, blocks, tail = split(choice.num_elements, sizes, [*outs, *sources])
    task = np.zeros((), TASK)
    task["sources"][: len(sources)], task["outs"][: len(outs)] = sources, outs
    rest = (len(sources), len(outs), head, blocks, tail, divisor)
    for field, value in zip(TASK.names[2:], rest, strict=True):  # type: ignore[index]
        task[field] = value
    return task, max(blocks, head + tail)


def plan(op: str, into: np.dtype, source: np.dtype, count: int, num_sources: int, divisor: int) -> KernelChoice:
    """Choose the kernel that reduces.  It loads from as many sources at a time as divide all of them, up to 8.

    >>> plan("sum", np.dtype("complex64"), np.dtype("complex64"), 5, 3, 1)
    KernelChoice(op='Sum', source='float', into='float', at_once=3, num_elements=10, sizes=[4, 4, 4, 4])
    """
    parts = 2 if into in COMPLEX and op != "prod" else 1  # complex numbers are reduced as twice as many real ones
    at_once = max(n for n in range(1, MAX_AT_ONCE + 1) if num_sources % n == 0)
    if op == "avg" and divisor == 1:
        op = "sum"
    sizes = [into.itemsize // parts, *[source.itemsize // parts] * num_sources]
    return KernelChoice(op.capitalize(), number(source, op), number(into, op), at_once, count * parts, sizes)


def number(dtype: np.dtype, op: str) -> str:
    """Name a dtype in C++.  Signed integers become unsigned where only wrapping differs."""
    if str(dtype) in FLOATS:
        return FLOATS[str(dtype)]
    if dtype in COMPLEX:
        part = "float" if dtype.itemsize == 8 else "double"
        return f"Complex<{part}>" if op == "prod" else part
    return (SIGNED if dtype.kind == "i" and op in ("min", "max", "avg") else UNSIGNED)[dtype.itemsize]


def split(count: int, sizes: Sequence[int], pointers: Sequence[int]) -> tuple[int, int, int]:
    """Count the elements before the first that is aligned in all arrays, vector blocks from there on, and the rest.

    Where no element is aligned in all, all come before.

    >>> split(100, [2, 2], [64, 32]), split(100, [2, 2], [62, 46]), split(100, [2, 2], [62, 32])
    ((0, 12, 4), (1, 12, 3), (100, 0, 0))
    """
    block = VECTOR_BYTES // min(sizes)
    ranges = list(zip(pointers, sizes, strict=True))
    well = (at for at in range(block) if all((pointer + at * size) % VECTOR_BYTES == 0 for pointer, size in ranges))
    head = min(next(well, count), count)
    return head, *divmod(count - head, block)


def num_blocks(work: int, device: int) -> int:
    """Return the number of blocks for `work` threads, up to a limit from which each thread takes several pieces."""
    most = environment.device_blocks() or num_multiprocessors(device) * BLOCKS_PER_MULTIPROCESSOR
    return min(-(-work // BLOCK_THREADS), most)


@cache
def num_multiprocessors(device: int) -> int:
    import cupy

    return cupy.cuda.Device(device).attributes["MultiProcessorCount"]


@cache
def kernel(name: str, device: int, *more: Path) -> Any:
    """Return an instance of the template `reduce`, or of one in another source, for the device, which is current."""
    import cupy

    code = "".join(source.read_text(encoding="utf-8") for source in (SOURCE, *more))
    module = cupy.RawModule(code=code, options=OPTIONS, name_expressions=(name,))
    with once_per_node(name):
        return module.get_function(name)


@contextmanager
def once_per_node(name: str) -> Iterator[None]:
    """Let one process of the user compile an instance: the others then find it in CuPy's cache.

    All instances share one file, of which each locks a byte of its own: a lock file that is removed while another
    process waits for it would exclude nobody.  Where the user's cache cannot be written or locked, each compiles.
    """
    path = environment.cache_folder() / f"{platform.node()}.lock"
    with ExitStack() as opened:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = opened.enter_context(path.open("a"))
            fcntl.lockf(file, fcntl.LOCK_EX, 1, crc32(name.encode()))
        yield
