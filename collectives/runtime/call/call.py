"""A call of a collective on one rank, from its caller's arguments to its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any, NamedTuple

from collectives import algorithms
from collectives.algorithms import Access, Algorithm, rows
from collectives.algorithms.own import is_own
from collectives.arrays.device import Device, host
from collectives.arrays.ops import Op, has_kernel
from collectives.arrays.views import check_op, flat
from collectives.runtime.call.checks import check_rank, checked_wire_dtype
from collectives.runtime.call.fused import Fused
from collectives.runtime.call.signature import Signed
from collectives.runtime.plan import CopyPair, Runs, run_now
from collectives.runtime.reports.call_log import CallSite, LogEntry
from collectives.schedule.spec import COLLECTIVES, DEFAULTS, SOURCES, Chunks, spec_of


@dataclass
class Operands:
    """Flat arrays of a call on one rank: `source`, and `out` for the result; and the position of each chunk in them.

    `counts` are the chunks' lengths.  On a rank that gives or gets only one chunk, the others are None.
    """

    result: Any  # as the caller sees it
    source: Any
    out: Any
    counts: list[int]
    inputs: list[Any]
    outputs: list[Any]
    in_place: bool = False  # `out` is all of `x`, or one of them is this rank's chunk of the other
    new: Callable[[Any], Any] | None = None  # makes the result for an `x`, where it may be a new array


class CallFacts(NamedTuple):
    """Facts of a call on which all ranks agree before they choose an algorithm."""

    nbytes: int  # its vector, or, where chunks are uneven, the most that any rank gives
    chunk_bytes: int  # its longest chunk
    symmetric: bool  # whether the arrays that ranks would read of each other are in symmetric memory
    on_host: bool
    shared: bool  # whether the working array of messages is in symmetric memory


@dataclass(eq=False)
class Call:
    """A call of a collective on one rank.

    Its caller gives arrays and arguments.  A signature is added, by which bindings are cached.  On a miss the arguments
    are checked and the `operands` are found, all ranks agree on the call, its `facts` and the number of its `binding`,
    an algorithm is chosen, and a back end binds it.

    `run` runs a plan to its end; ranks must also agree in `note`; `call_site` is the line that makes the call, by
    default that which calls the library.  Where `x` and `out` are copies of the caller's arrays, `after` are the copies
    back, and `owners` pairs each with the array that it replaces.
    """

    collective: str
    x: Any = None
    arguments: Mapping[str, Any] = field(default_factory=dict)  # by name, `out` and `algorithm` among them
    run: Runs = run_now
    note: str = ""
    call_site: CallSite | None = None
    after: Sequence[CopyPair] = ()
    owners: Sequence[tuple[Any, Any]] = ()
    signed: Signed | None = None

    def __post_init__(self) -> None:
        self.out = self.arguments.get("out")
        self.fused = self.x if isinstance(self.x, Fused) else None
        self.entry: LogEntry  # in the call log
        self.operands: Operands
        self.facts: CallFacts
        self.binding = 0  # its number, the same on all ranks
        self.all_move = False  # whether all ranks' arrays are copied to buffers

    @classmethod
    def of(
        cls,
        collective: str,
        x: Any,
        out: Any,
        options: Sequence[Any],
        run: Runs = run_now,
        note: str = "",
        call_site: CallSite | None = None,
        signed: Signed | None = None,
    ) -> Call:
        """Return a call with the values of all `options`, in the order of the collective's row."""
        spec = COLLECTIVES[collective]
        arguments = dict(zip(spec.options, options, strict=True)) | ({"out": out} if "out" in spec.takes else {})
        return cls(collective, x, arguments, run, note, call_site, signed=signed)

    @property
    def moves(self) -> bool:
        """Whether it has arrays on a device, outside of symmetric memory: the next call's may have other addresses."""
        return self.signed is not None and self.signed[-1]

    def argument(self, name: str) -> Any:
        return self.arguments.get(name, DEFAULTS.get(name))

    @property
    def options(self) -> tuple:
        """The values of its arguments besides `out`, in the order of the collective's row."""
        return tuple(map(self.argument, COLLECTIVES[self.collective].options))

    def on(self, x: Any, out: Any, **changes: Any) -> Call:
        """Return the same call on other arrays."""
        arguments = self.arguments if out is self.out else {**self.arguments, "out": out}
        return replace(self, x=x, arguments=arguments, **changes)

    def result(self, array: Any) -> Any:
        """Return the caller's array that the call's result replaces, if it does."""
        return next((owner for copied, owner in self.owners if copied is array), array)

    def check(self, rank: int, size: int) -> None:
        """Check the arguments, as far as one rank can.

        Raises: one of `REFUSALS`.
        """
        self.rank, self.size, self.spec = rank, size, spec_of(self.collective)
        takes = self.spec.takes
        if strange := [name for name in self.arguments if name not in (*takes, "algorithm")]:
            raise ValueError(f"takes no {strange[0]}: it takes {', '.join(takes)}")
        self.op: str | Op = self.argument("op")
        self.root: int = self.argument("root")
        self.reproducible, self.algorithm = self.argument("reproducible"), self.argument("algorithm")
        if self.spec.rooted:
            check_rank("root", self.root, size)
        self.device: Device
        self.flat: Any
        self.device, self.flat = (host(), None) if self.spec.gives is Chunks.NONE else flat(self.exemplar)
        if self.spec.reduces:
            self.check_op()
        self.wire_dtype = checked_wire_dtype(self.argument("wire_dtype"), self.flat)
        self.counts, self.send_counts, self.recv_counts = map(
            self.checked_counts, ("counts", "send_counts", "recv_counts")
        )
        if self.recv_counts is not None and self.send_counts is None:
            raise ValueError(f"recv_counts={self.recv_counts} need send_counts: pass them too")

    def check_op(self) -> None:
        check_op(self.op, self.flat.dtype)
        if self.is_reduced_by_numpy and self.device is not host():
            raise ValueError(f"op {self.op} reduces only host arrays: copy x to the host, or use another op")
        if self.op == "avg" and self.spec.sources is not SOURCES["everyone"]:
            raise ValueError("op 'avg' needs all ranks, but a scan reduces only some: use 'sum', and divide")

    @property
    def holds_x(self) -> bool:
        """Whether this rank passes an `x`, even if only for the result; a scatter's receivers do not."""
        return self.spec.in_place or self.spec.reads(self.rank, self.root)

    @property
    def exemplar(self) -> Any:
        """The array that determines dtype and device: `x`, or the one that a scatter's receiver passes."""
        return self.out if self.x is None and not self.holds_x else self.x

    @property
    def total(self) -> int:
        """The number of elements of the call, the same on every rank."""
        if self.x is not None:
            return len(self.flat)
        return sum(self.counts) if self.counts is not None else self.size * len(self.flat)

    @property
    def lengths(self) -> Sequence[int]:
        """The lengths in elements of the call, or of its chunks, as ranks compare them."""
        if self.flat is None:
            return []
        return self.counts or [self.total]

    def checked_counts(self, name: str) -> list[int] | None:
        values = self.argument(name)
        if values is None:
            return None
        try:
            counts = [index(n) for n in values]
        except TypeError:
            counts = []
        if len(counts) != self.size or min(counts) < 0:
            raise ValueError(f"{name}={values} must be {self.size} integers, one for each rank, none below 0")
        return counts

    @property
    def demands(self) -> list[str]:
        """The caller's other requirements of the algorithm, as written in the call."""
        wire = [] if self.wire_dtype is None else [f"wire_dtype={self.wire_dtype}"]
        op = [f"op={self.op}"] * self.is_reduced_by_numpy
        return op + wire + ["reproducible=True"] * bool(self.reproducible)

    @property
    def is_reduced_by_numpy(self) -> bool:
        return self.spec.reduces and not has_kernel(self.op)

    @property
    def kernel_op(self) -> str:
        """The op with which programs reduce."""
        assert isinstance(self.op, str), f"{self.op} has no kernel"
        return self.op

    def suits(self, row: Algorithm) -> bool:
        """Return whether an algorithm meets the call's demands: reduction in rank order, by messages only."""
        in_order = self.reproducible or (isinstance(self.op, Op) and not self.op.commutative)
        by_messages = self.is_reduced_by_numpy or self.wire_dtype is not None
        return (row.in_order or not in_order) and not (row.access and by_messages)

    def able(self, access: Access = Access.DIRECT) -> list[str]:
        """Return the names of the algorithms that meet the call's demands."""
        usable = [r for r in rows(self.collective, self.size, self.send_counts is None) if r.access <= access]
        return ["auto", *(row.name for row in usable if self.suits(row)), *([] if self.demands else ["mpi"])]

    def check_algorithm(self) -> None:
        """Refuse an algorithm that does not exist, or does not meet the call's demands.

        Raises: ValueError with the names of those that can.
        """
        name = self.algorithm
        if isinstance(name, str) and name in ("auto", "mpi"):
            is_able = name in self.able()
        else:
            row = algorithms.find(self.collective, name)
            algorithms.check(row, self.size, equal=self.send_counts is None)
            is_able = self.suits(row)
        if not is_able:
            shown = algorithms.name_of(name)
            raise ValueError(f"algorithm {shown!r} cannot do {', '.join(self.demands)}: use {', '.join(self.able())}")

    def describe(self) -> str:
        """Return the call as every rank must make it, for comparison between ranks."""
        words = []
        note = f" of {self.fused}" if self.fused is not None else self.note
        if self.flat is not None:
            uneven = "uneven counts" if self.send_counts is not None else f"{self.total} elements"
            words += [uneven if self.counts is None else f"counts {self.counts}", str(self.flat.dtype)]
        words += [f"op={self.op}"] * self.spec.reduces + [f"root={self.root}"] * self.spec.rooted
        words += [demand for demand in self.demands if demand not in words]
        algorithm = algorithms.name_of(self.algorithm)
        if algorithm == "auto" and (registered := [row.name for row in rows(self.collective) if is_own(row)]):
            algorithm = f"auto or {', '.join(registered)}"
        return f"{self.collective}({', '.join([*words, f'algorithm={algorithm}'])}){note}"
