"""The public API: a communicator's collectives on NumPy, CuPy and torch arrays."""

import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.algorithms.groups import Topology
from collectives.arrays import views
from collectives.arrays.ops import Op
from collectives.job import environment
from collectives.job.errors import CommunicationError, InputError, LoneInputError
from collectives.job.launch import library_name, refuse_after_fork
from collectives.runtime.backends.messages import SEGMENT_BYTES
from collectives.runtime.backends.point_to_point import RecvMessage, SendMessage, probe, run_message
from collectives.runtime.call.checks import check_integer, check_rank, op_name
from collectives.runtime.call.fused import Fused
from collectives.runtime.context import Context
from collectives.runtime.dispatch import Dispatcher
from collectives.runtime.plan import FREED, Plan
from collectives.runtime.reports.call_log import LogEntry
from collectives.runtime.reports.waits import RankWaits, by_rank
from collectives.runtime.setup import set_up, set_up_part, survivors
from collectives.runtime.started import Starter
from collectives.schedule.network import Network
from collectives.schedule.spec import spec_of

LARGEST_ARRAY_BYTES = 1 << 46
LARGEST_INT = (1 << 31) - 1  # C's
SURVIVING = "mpirun --with-ft ulfm, of Open MPI 5"


class Freed:
    """Placeholder for the parts of a freed communicator, which refuses any use."""

    def __call__(self, *_: Any) -> Any:
        raise RuntimeError(FREED)

    __getattr__ = __call__


class Collectives:
    """The collectives among the ranks of a communicator: in each, the ranks pass the same arguments but arrays.

    Each returns the result's array, or with blocking=False a request whose `wait()` returns it.

    Raises: InputError on every rank where one rank's arguments are wrong or the ranks' calls differ.
    """

    dispatcher: Dispatcher
    _run: Callable[..., Any]
    _start: Callable[..., Any]

    def all_reduce(
        self,
        x: Any,
        op: "str | Op | MPI.Op" = "sum",
        out: Any = None,
        algorithm: str = "auto",
        blocking: bool = True,
        *,
        wire_dtype: Any = None,
        reproducible: bool = False,
    ) -> Any:
        """Reduce every rank's `x` elementwise; every rank gets the result, bit for bit the same.

        In place: `x` holds the result and is returned.  With `out`, `x` is left alone and `out` returned.

        `op` is "sum", "prod", "min", "max", "avg", "band", "bor", "bxor", "land", "lor", "lxor", "minloc" or "maxloc",
        an MPI op as MPI.SUM, or a user-defined op: a `collectives.Op`, or the result of MPI.Op.Create.  "avg" divides
        the sum by the number of ranks: integer sums wrap, and are divided toward zero, as in NCCL.  Logical ops give 0
        and 1 in the dtype of `x`; on a single rank `x` is unchanged, as in MPI.  "minloc" and "maxloc" take arrays of
        pairs of a value and an index, as [("value", "f4"), ("index", "i4")] for MPI.FLOAT_INT: among equal values the
        least index wins.  These two and user-defined ops are reduced in NumPy, over messages.

        16-bit floats are summed up in float32 and rounded once; messages carry the float32 sums, twice the bytes.

        wire_dtype="bfloat16" sends float32 in half the bytes: each rank sums in float32, but rounds every message and
        the result.  Each rounding of an addend adds an error of at most 2^-8 of the sum of magnitudes: about log2 p
        roundings, or p in a ring or a chain.  Data travels by messages, even within a node.

        With `reproducible`, each element is ((x0 + x1) + x2) + ... in the order of the ranks: the same bits for every
        length and `segment_bytes`.  Over messages, sums travel along a chain: 3(p-1) rounds, not a ring's 2(p-1).

        >>> import numpy as np, collectives
        >>> collectives.world().all_reduce(np.ones(3))
        array([1., 1., 1.])
        """
        return (self._run if blocking else self._start)(
            "all_reduce", x, out, (op_name(op), wire_dtype, reproducible, algorithm)
        )

    def reduce_scatter(
        self,
        x: Any,
        out: Any = None,
        op: "str | Op | MPI.Op" = "sum",
        counts: Sequence[int] | None = None,
        algorithm: str = "auto",
        blocking: bool = True,
        *,
        wire_dtype: Any = None,
        reproducible: bool = False,
    ) -> Any:
        """Reduce every rank's `x` elementwise; rank r gets the r-th chunk of the result in `out`.

        Without `out`, the result is a new array: of rows like those of `x` if chunks are whole rows, otherwise flat.
        Chunks have `counts` elements, by default as equal as possible, the first ones one longer.  `x` is unchanged,
        unless `out` is this rank's chunk of `x` itself: then the rest of `x` is used as working space.

        `wire_dtype` and `reproducible` are as in `all_reduce`.
        """
        return (self._run if blocking else self._start)(
            "reduce_scatter", x, out, (op_name(op), counts, wire_dtype, reproducible, algorithm)
        )

    def all_gather(
        self,
        x: Any,
        out: Any = None,
        counts: Sequence[int] | None = None,
        algorithm: str = "auto",
        blocking: bool = True,
        *,
        axis: int | None = None,
    ) -> Any:
        """Gather all ranks' `x` on every rank, one after the other, in `out`.

        Without `out`, the result is a new array: on p ranks, `x` of shape (n,) gives (p n,), and of shape (2, 3) the
        stack (p, 2, 3), or with axis=0 or `counts` its rows, (2p, 3).

        Rank r's `x` has `counts[r]` elements, by default the same number on all ranks.  `x` may be this rank's
        chunk of `out` itself.
        """
        if axis is not None or getattr(x, "ndim", 1) > 1:
            x = self._stacked("all_gather", x, out, counts, axis)
        return (self._run if blocking else self._start)("all_gather", x, out, (counts, algorithm))

    def all_to_all(
        self,
        x: Any,
        out: Any = None,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        algorithm: str = "auto",
        blocking: bool = True,
    ) -> Any:
        """Exchange chunks: chunk d of rank s's `x` becomes chunk s of rank d's `out`.

        Without `out`, the result is a new array: of rows like those of `x` if chunks are whole rows, otherwise flat.
        Chunks are equal, or have `send_counts`; then all ranks pass them, and `recv_counts` may be left out.
        """
        return (self._run if blocking else self._start)("all_to_all", x, out, (send_counts, recv_counts, algorithm))

    def broadcast(self, x: Any, root: int = 0, algorithm: str = "auto", blocking: bool = True) -> Any:
        """Copy the root's `x` into every rank's; returns `x`."""
        return (self._run if blocking else self._start)("broadcast", x, None, (root, algorithm))

    def reduce(
        self,
        x: Any,
        root: int = 0,
        op: "str | Op | MPI.Op" = "sum",
        out: Any = None,
        algorithm: str = "auto",
        blocking: bool = True,
        *,
        wire_dtype: Any = None,
        reproducible: bool = False,
    ) -> Any:
        """Reduce every rank's `x` elementwise to the root, into its `out`, or its `x`; other ranks' `x` stays.

        `wire_dtype` and `reproducible` are as in `all_reduce`.
        """
        return (self._run if blocking else self._start)(
            "reduce", x, out, (root, op_name(op), wire_dtype, reproducible, algorithm)
        )

    def scan(
        self,
        x: Any,
        op: "str | Op | MPI.Op" = "sum",
        out: Any = None,
        algorithm: str = "auto",
        blocking: bool = True,
        *,
        wire_dtype: Any = None,
        reproducible: bool = False,
    ) -> Any:
        """Reduce the `x` of ranks 0 to r elementwise, on rank r, into its `out`, or its `x`.

        `wire_dtype` and `reproducible` are as in `all_reduce`; there is no "avg".
        """
        return (self._run if blocking else self._start)(
            "scan", x, out, (op_name(op), wire_dtype, reproducible, algorithm)
        )

    def exscan(
        self,
        x: Any,
        op: "str | Op | MPI.Op" = "sum",
        out: Any = None,
        algorithm: str = "auto",
        blocking: bool = True,
        *,
        wire_dtype: Any = None,
        reproducible: bool = False,
    ) -> Any:
        """Reduce the `x` of the ranks below r elementwise, on rank r, into its `out`, or its `x`; rank 0's stay.

        `wire_dtype` and `reproducible` are as in `all_reduce`; there is no "avg".
        """
        return (self._run if blocking else self._start)(
            "exscan", x, out, (op_name(op), wire_dtype, reproducible, algorithm)
        )

    def gather(
        self,
        x: Any,
        root: int = 0,
        out: Any = None,
        counts: Sequence[int] | None = None,
        algorithm: str = "auto",
        blocking: bool = True,
        *,
        axis: int | None = None,
    ) -> Any:
        """Gather all ranks' `x` on the root, one after the other, in `out`; the other ranks get None.

        Without `out`, the result is a new array, as in `all_gather`.  Rank r's `x` has `counts[r]` elements, by default
        the same number on all ranks.
        """
        if axis is not None or getattr(x, "ndim", 1) > 1:
            x = self._stacked("gather", x, out, counts, axis)
        return (self._run if blocking else self._start)("gather", x, out, (root, counts, algorithm))

    def scatter(
        self,
        x: Any,
        root: int = 0,
        out: Any = None,
        counts: Sequence[int] | None = None,
        algorithm: str = "auto",
        blocking: bool = True,
    ) -> Any:
        """Give rank r the r-th chunk of the root's `x`, in `out`.

        Without `out`, the result is a new array, as in `reduce_scatter`.  Chunks have `counts` elements, by default as
        equal as possible, the first ones one longer.  Other ranks' `x` is not read; with an `out` it may be None, and
        then chunks without `counts` must be equal.
        """
        return (self._run if blocking else self._start)("scatter", x, out, (root, counts, algorithm))

    def barrier(self, algorithm: str = "auto", blocking: bool = True) -> Any:
        """Return only when every rank has called it."""
        return (self._run if blocking else self._start)("barrier", None, None, (algorithm,))

    def _stacked(self, collective: str, x: Any, out: Any, counts: Any, axis: int | None) -> Any:
        """Return `x` as the one entry of a stack, where the gathered array is to be the stack of all ranks'.

        Raises: InputError on every rank for an axis that is not 0.
        """
        if axis not in (None, 0):
            remedy = "for another axis, use numpy.concatenate(result, axis) on a stack"
            self.dispatcher.refuse(collective, f"{collective}: axis {axis!r} must be 0 or None: {remedy}")
        if axis == 0 or out is not None or counts is not None or getattr(x, "ndim", 1) < 2:
            return x
        return (np.asarray(x) if isinstance(x, np.ndarray) else x)[None]  # a matrix cannot have a third dimension

    def plan(self, collective: str, x: Any = None, **arguments: Any) -> Plan:
        """Bind a collective to its arrays once, to be run often: `plan()`, or `plan.start()` and `plan.wait()`.

        Binding is collective; the further arguments are those of the method of that name.

        Raises: InputError on every rank where one rank's arguments are wrong or the ranks' calls differ.
        """
        if "op" in arguments:
            arguments["op"] = op_name(arguments["op"])
        if collective in ("all_gather", "gather"):
            out, counts = arguments.get("out"), arguments.get("counts")
            x = self._stacked(collective, x, out, counts, arguments.pop("axis", None))
        return self.dispatcher.plan(collective, x, arguments)

    def explain(self, collective: str, nbytes: int = 0) -> str:
        """Report which algorithm `auto` takes for a plan, why, and the model's predictions for all algorithms.

        `nbytes` is the size of the whole vector, from `empty`, as in an algorithm's cost line: an all-gather's `out`.

        Raises: ValueError for an unknown collective, or a size that is no integer of 0 or more.
        """
        spec_of(collective)
        check_integer("nbytes", nbytes, 0, LARGEST_ARRAY_BYTES)
        return self.dispatcher.chooser.explain(collective, nbytes)


class Communicator(Collectives):
    """A group of ranks and the collectives among them, over a duplicate of an mpi4py communicator.

    Construction is collective.  With `check`, every collective first verifies, by one tiny all-reduce, that all ranks
    make the same call and have made equally many, runs of plans included; else it raises InputError on all of them.  A
    plan is verified once, when it is bound.  A rank that has waited `timeout_s` seconds for others, if not 0, aborts
    the job, after every rank has reported where it is.  These arguments default to the environment variables
    COLLECTIVES_CHECK and COLLECTIVES_TIMEOUT_S.

    Arrays may have any shape.  A host array that is not C-contiguous, as x[:, ::2], is copied, and results are written
    back to it; plans refuse such arrays, and on a device all calls do.

    `segment_bytes` is the length of the segments in which long messages travel.  Communicators made from one by `split`
    advance each other's started plans.
    """

    def __init__(
        self,
        mpi_comm: MPI.Comm,
        *,
        check: bool | None = None,
        timeout_s: float | None = None,
        segment_bytes: int = SEGMENT_BYTES,
    ):
        if not isinstance(mpi_comm, MPI.Comm) or mpi_comm == MPI.COMM_NULL or mpi_comm.Is_inter():
            raise TypeError(f"mpi_comm {mpi_comm!r} is not an intracommunicator of mpi4py: pass one, or use world()")
        self._base = mpi_comm  # whose survivors `shrink` returns
        self._use(set_up(mpi_comm, segment_bytes, check, timeout_s))

    def _use(self, context: Context) -> None:
        self.context, self.dispatcher = context, Dispatcher(context)
        self.starter = Starter(self.dispatcher)
        self._mpi, self._rank, self._size, self._topology = context.mpi, context.rank, context.size, context.topology
        self.segment_bytes, self.check, self.timeout_s = context.segment_bytes, context.check, context.timeout_s
        self._run, self._start = self.dispatcher.run, self.starter.start
        self._requests: list[Any] | None = None  # of the open group

    def __repr__(self) -> str:
        num_nodes = len(self.topology.nodes)
        nodes = "1 node" if num_nodes == 1 else f"{num_nodes} nodes"
        state = "freed" if isinstance(self.context, Freed) else nodes
        return f"Communicator(rank {self.rank} of {self.size}, {state})"

    @property
    def rank(self) -> int:
        """This process's number among the ranks, from 0 on."""
        return self._rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._size

    @property
    def topology(self) -> Topology:
        """The ranks of each node, and each rank's node."""
        return self._topology

    @property
    def mpi(self) -> MPI.Comm:
        """The underlying mpi4py communicator, a duplicate of the caller's."""
        return self._mpi

    @property
    def network(self) -> Network:
        """The speeds that algorithm="auto" predicts with."""
        return self.context.tuning.network

    def host_names(self) -> list[str]:
        """Return the name of each rank's host.  Collective."""
        self.dispatcher.order.drain()
        return self.context.host_names()

    def split(self, color: int | None, key: int = 0) -> "Communicator | None":
        """Return a communicator of the ranks of one `color`, ordered by `key`, then rank; None for color=None.

        Raises: InputError on every rank where one's `color` is not an integer of 0 or more, or its `key` no integer.
        """
        with self.agreed("split"):
            if color is not None:
                check_integer("color", color, 0, LARGEST_INT, ", or None for no part")
            check_integer("key", key, -LARGEST_INT - 1, LARGEST_INT)
        mpi_part = self.mpi.Split(MPI.UNDEFINED if color is None else color, key)
        if mpi_part == MPI.COMM_NULL:
            return None
        part = Communicator.__new__(Communicator)
        part._use(set_up_part(self.context, mpi_part, color or 0))
        part._base = part.mpi
        mpi_part.Free()
        return part

    def __enter__(self) -> "Communicator":
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        """Free the communicator, unless this rank may fail alone."""
        if error is None or (isinstance(error, InputError) and not isinstance(error, LoneInputError)):
            self.free()

    def free(self) -> None:
        """Give the communicator back to MPI, and refuse any use of it and of its plans.  Collective.

        Started calls and plans are waited for.  An array from `empty` stays valid until it is dropped, and is an
        ordinary one for other communicators' calls; their plans on it can still be run.  Other ranks lose access to
        device memory, also in plans of communicators that `split` made from this one; the watchdog no longer watches
        those.
        """
        with LogEntry(self.context.calls, "free"):
            self.dispatcher.free()
            self.context.memory.free()
        self.context.free()
        self._refuse()

    def shrink(self) -> "Communicator":
        """Return a communicator of the ranks that have not died, in their order.  Collective among these.

        A rank calls it once a call has raised RankFailure, or another error while ranks died.  This communicator
        refuses any use afterwards, and its parts, plans and arrays are to be dropped.  Where no rank has died, the new
        communicator has the same ranks.  A program that has shrunk must not call MPI.Finalize, which may wait for the
        dead: its processes leave without it at their end.

        Raises: RuntimeError unless the job goes on without ranks that die: `mpirun --with-ft ulfm` of Open MPI.
        """
        if not environment.survives_ranks():
            raise RuntimeError(f"{library_name(MPI)} ends with a rank that dies here: start it by {SURVIVING}")
        self.context.abandon()
        self._refuse()
        left, check, timeout_s, length = survivors(self._base), self.check, self.timeout_s, self.segment_bytes
        while True:
            try:
                shrunk = Communicator(left, check=check, timeout_s=timeout_s, segment_bytes=length)
            except (MPI.Exception, CommunicationError):
                before, left = left, survivors(self._base)
                if left.size == before.size:  # then no other rank has died
                    raise
            else:
                shrunk._base = self._base  # all shrink the same one, also those whose new one has failed
                return shrunk

    def _refuse(self) -> None:
        freed: Any = Freed()
        self.context = self.dispatcher = self.starter = self._run = self._start = freed

    def empty(self, shape: int | tuple[int, ...], dtype: Any = "float32", device: str = "cpu") -> Any:
        """Return a new, uninitialised array in memory that every rank of the node can access.  Collective.

        Ranks may ask for different lengths; each node's shared memory must hold the longest for every rank.
        device="cuda" gives a CuPy array: an ordinary one, as rank 0 says, if ranks cannot share device memory.

        Raises: InputError on every rank where there is no such device, or not so much memory.
        """
        with self.agreed("empty"):
            view_device, lengths, dtype = views.device(device), views.shape_of(shape), views.dtype_of(dtype)
            if (count := math.prod(lengths)) * dtype.itemsize > LARGEST_ARRAY_BYTES:
                raise ValueError(f"shape {shape!r} of {dtype} exceeds the memory that a process can address")
        return self.context.memory.empty(view_device, count, dtype).reshape(lengths)

    def peers(self, x: Any) -> list[Any]:
        """Return the flat arrays that `empty` gave the ranks of this node together with `x`, which must be kept.

        They are as long as `x`; what lies beyond an array for which a rank asked for less is undefined.

        Raises: ValueError for an `x` that is not from this communicator's `empty`.
        """
        return self.context.memory.peers(*views.flat(x))

    def fuse(self, arrays: Sequence[Any]) -> Fused:
        """Present several arrays of one dtype, of any shapes, as the one `x` of a collective.

        `all_reduce`, `broadcast`, `reduce` and scans take it, once or in a plan: they copy the arrays to a buffer, run
        on that, copy the results back into the arrays, and return the list of them.  They refuse incompatible arrays,
        and lengths that differ between ranks.

        >>> import numpy as np, collectives
        >>> comm = collectives.world()
        >>> comm.all_reduce(comm.fuse([np.ones(2), np.ones((1, 1))]))
        [array([1., 1.]), array([[1.]])]
        """
        return Fused(arrays)

    @contextmanager
    def group(self) -> Iterator[None]:
        """Start the calls of a block together, and wait for all of them at its end.

        Inside it collectives, `send`, `recv` and `sendrecv` return requests, as with blocking=False, whose `wait()`
        returns the result, a new array included.  So ranks may send and receive in any order, but must call
        collectives in the same one.  Nested groups wait at the end of the outermost; a block that raises does not wait.

        >>> import numpy as np, collectives
        >>> comm, x, y = collectives.world(), np.ones(2), np.zeros(2)
        >>> with comm.group():
        ...     request = comm.recv(y, source=comm.rank)
        ...     request = comm.send(x, dest=comm.rank)
        >>> y
        array([1., 1.])
        """
        if self._requests is not None:
            yield
            return
        run, start = self.dispatcher.run, self.starter.start  # those of a freed communicator refuse
        requests = self._requests = []
        self._run = self._start = self._begin
        try:
            yield
        finally:
            self._requests, self._run, self._start = None, run, start
        with ExitStack() as waits:
            for request in requests:
                waits.callback(request.wait)

    def _begin(self, collective: str, x: Any, out: Any, options: tuple) -> Plan:
        return self._grouped(self.starter.start(collective, x, out, options))

    def _grouped(self, request: Any) -> Any:
        if self._requests is not None:
            self._requests.append(request)
        return request

    def _refuse_in_group(self, name: str) -> None:
        if self._requests is not None:
            raise RuntimeError(f"{name} waits for the other ranks: call it outside of the group")

    # --- point to point ---

    def send(self, x: Any, dest: int, tag: int = 0, blocking: bool = True) -> Any:
        """Send an array to rank `dest`, which receives it with the same tag.

        With blocking=False, returns a request; `x` must not change before its `wait()` returns.

        Raises: ValueError for a rank or a tag that is out of range, or an array that cannot be sent.
        """
        is_in_group = self._requests is not None
        return self._grouped(run_message(self.context.mailbox, SendMessage, x, dest, tag, blocking, is_in_group))

    def recv(self, x: Any = None, source: int | None = None, tag: int = 0, blocking: bool = True) -> Any:
        """Receive rank `source`'s array of that tag into `x`; returns `x`, or a request.

        With source=None, receives the first message of that tag from any rank.  With x=None, receives into a new flat
        NumPy array of the sender's length and dtype.

        Raises: CommunicationError where the message is of another length or dtype; it is lost then, and `x` is
        unchanged.  ValueError for a rank or a tag that is out of range, or an array that cannot be written.
        """
        is_in_group = self._requests is not None
        return self._grouped(run_message(self.context.mailbox, RecvMessage, x, source, tag, blocking, is_in_group))

    def sendrecv(self, x: Any, dest: int, out: Any = None, source: int | None = None, tag: int = 0) -> Any:
        """Send `x` to rank `dest` while receiving from rank `source` into `out`, which is returned as by `recv`."""
        sent = self.send(x, dest, tag, blocking=False)
        received = self.recv(out, source, tag)
        if self._requests is None:
            sent.wait()
        return received

    def probe(self, source: int | None = None, tag: int = 0, blocking: bool = True) -> int | None:
        """Return the rank whose message of that tag can be received next, by `recv` from that rank.

        With blocking=False, None if no message has arrived.
        """
        return probe(self.context.mailbox, source, tag, blocking)

    # --- Python objects, as pickles: reading one can run code, and ranks read only those of their own job ---

    def broadcast_object(self, value: Any = None, root: int = 0) -> Any:
        """Return the root's `value` on every rank; other ranks' is not read.

        Raises: InputError on every rank where it cannot be pickled.
        """
        self._refuse_in_group("broadcast_object")
        with self.agreed("broadcast_object"):
            check_rank("root", root, self.size)
            data = pickled(value if self.rank == root else None)
        (length,) = self.broadcast(np.array([len(data)]), root).tolist()
        if self.rank != root:
            data = np.empty(length, np.uint8)
        self.broadcast(data, root)
        return value if self.rank == root else pickle.loads(data.data)

    def gather_object(self, value: Any, root: int = 0) -> list[Any] | None:
        """Return the list of all ranks' values, in their order, on the root, and None on the others.

        Raises: InputError on every rank where one cannot be pickled.
        """
        return self._gather_object("gather_object", value, root)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the list of all ranks' values, in their order, on every rank.

        Raises: InputError on every rank where one cannot be pickled.
        """
        return self._gather_object("all_gather_object", value, None)

    def _gather_object(self, name: str, value: Any, root: int | None) -> Any:
        self._refuse_in_group(name)
        with self.agreed(name):
            if root is not None:
                check_rank("root", root, self.size)
            data = pickled(value)
        counts = self.all_gather(np.array([len(data)])).tolist()
        gathered = self.all_gather(data, counts=counts) if root is None else self.gather(data, root, counts=counts)
        if gathered is None:
            return None
        return [pickle.loads(part.data) for part in np.split(gathered, np.cumsum(counts)[:-1])]

    # --- reports ---

    def health(self) -> list[RankWaits]:
        """Return each rank's waits at barriers of its node since the last call: who waits, and for whom.  Collective.

        The rank with the largest `awaited_s` holds the others up.  Counted are barriers in shared memory of calls and
        plans of this communicator for which a rank waited longer than it polls; all are 0 where nothing is compiled.
        """
        counted = self.context.memory.of_host.waits
        own = counted.copy()
        counted[:] = 0
        return by_rank(self.all_gather(own))

    # --- agreement ---

    def compare(self, description: str, failure: str = "", call_site: tuple[str, int] | None = None) -> None:
        """Raise InputError on every rank where one has a failure, or descriptions differ.  Collective.

        The error names the line that calls, or the file and line of `call_site`.
        """
        self.dispatcher.compare(description, failure, call_site)

    def agreed(self, name: str = "agreed") -> AbstractContextManager[None]:
        """Run a block whose ValueError or OSError on any rank becomes an InputError on every rank.  Collective."""
        return self.dispatcher.agreed(name)


refuse_after_fork(Communicator)


def pickled(value: Any) -> np.ndarray:
    """Return the bytes of a pickle, and zeros behind them, so that values of about the same size need one plan.

    The length is a multiple of 64 bytes, and of an eighth to a quarter of a longer pickle's.

    Raises: ValueError for objects that cannot be pickled.
    """
    try:
        data = np.frombuffer(pickle.dumps(value, protocol=5), np.uint8)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"{type(value).__name__} cannot be pickled ({error}): pass what pickle takes") from None
    unit = 1 << max(6, len(data).bit_length() - 3)
    return np.pad(data, (0, -len(data) % unit))
