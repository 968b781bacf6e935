"""The user's face: a communicator's collectives on NumPy, CuPy and torch arrays."""

import math
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.arrays import memory, views
from collectives.arrays.device import Device, SharingDevice, host
from collectives.arrays.device_memory import DeviceMemory
from collectives.arrays.memory import SymmetricMemory, Windows
from collectives.job import environment
from collectives.job.launch import after_fork, library_name
from collectives.runtime.arguments import OPERANDS, check_rank, check_writable
from collectives.runtime.binding import bookkeeping
from collectives.runtime.checks.agreement import Agreement
from collectives.runtime.checks.call_log import Call, Calls, Record
from collectives.runtime.checks.watchdog import Watchdog
from collectives.runtime.choose import links
from collectives.runtime.choose.tuning import Tuning, parse_tuning, read_tuning
from collectives.runtime.fuse import Fused
from collectives.runtime.messages import LARGEST_MESSAGE_BYTES, SEGMENT_BYTES, TAGS
from collectives.runtime.plan import Plan, Progress
from collectives.runtime.point_to_point import Mailbox, PointToPoint, RecvMessage, SendMessage
from collectives.runtime.resolve import Resolver
from collectives.schedule.cost import NETWORK, Network
from collectives.schedule.topology import Topology, refuse_levels

LARGEST_ARRAY_BYTES = 1 << 46


os.register_at_fork(after_in_child=after_fork)


class SharedState(NamedTuple):
    """What communicators that come from one by `split` have in common."""

    progress: Progress
    windows: Windows


class Communicator:
    """A group of ranks and the collectives among them, over a duplicate of an mpi4py communicator.

    Making one is collective.  With `check`, every collective first compares what the ranks ask for, and how many they
    have called, runs of plans included (one tiny all-reduce), and raises InputError on all of them where that differs;
    a plan does so once, when it is bound, or with check="every" each time that it runs.  A rank that waits for others
    for `timeout_s` seconds, if not 0, ends the job, once every rank has said where it is.  Without these arguments the
    environment variables COLLECTIVES_CHECK and COLLECTIVES_TIMEOUT_S decide.

    `segment_bytes` is the piece in which long messages travel.  Communicators that come from one by `split` move
    each other's started plans on.

    Hierarchical algorithms work inside and across the nodes.  With `levels`, as in [8, 4], they work in groups of 8
    consecutive ranks instead, and in groups of 4 inside those; parts from `split` work in their nodes again.
    """

    def __init__(
        self,
        mpi_comm: MPI.Comm,
        *,
        check: bool | str | None = None,
        timeout_s: float | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        levels: Sequence[int] | None = None,
        node: int | None = None,
        family: SharedState | None = None,
        tuning: Tuning | None = None,
        calls: Calls | None = None,
    ):
        self.mpi = mpi_comm.Dup()
        self.rank, self.size = self.mpi.rank, self.mpi.size
        self.segment_bytes = segment_bytes
        self._calls = calls or Calls(Record(), "", range(self.size))
        self._num_tags = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767)
        self._num_plans = 0
        self._mailbox = Mailbox(mpi_comm.Dup(), self._num_tags)
        shared = self.mpi.Split_type(MPI.COMM_TYPE_SHARED)
        self._family = family or SharedState(Progress(environment.crowded(shared.size)), Windows())
        self._progress = self._family.progress
        self._agreement = Agreement(self.rank, self.size, partial(bookkeeping, self))
        said = f"Communicator(segment_bytes={segment_bytes}{'' if levels is None else f', {levels=}'})"
        self._agreement.check(said, refuse_segment(segment_bytes) or refuse_levels(levels))
        self.check, self.timeout_s = self._settings(check, timeout_s)
        self._node = self._find_node(shared) if node is None else node
        shared.Free()
        self.topology = Topology.from_ids(self._agreement.gather_ints(self._node), levels)
        self._tuning = tuning or self._read_tuning()
        self._memory = SymmetricMemory(self.mpi, self._node, self._family.windows, self._agreement.highest)
        self._on_device: DeviceMemory | None = None
        self._resolver = Resolver(self)
        self._agreement.gate = self._resolver.gate
        self._watchdog: Watchdog | None = None
        if family is None and self.timeout_s:
            self._watchdog = Watchdog(self.mpi, self._num_tags, self._calls, self._progress.waits, self.timeout_s)

    def _next_tags(self) -> int:
        """The first of the tags of a new plan: the same on every rank, since binding is collective."""
        self._num_plans += 1
        return self._num_plans % (self._num_tags // TAGS) * TAGS

    def _settings(self, check: bool | str | None, timeout_s: float | None) -> tuple[bool | str, float]:
        """What was passed, else what the environment says; refused on all ranks where it will not do."""
        failure = ""
        try:
            check = environment.check() if check is None else check
            timeout_s = environment.timeout_s() if timeout_s is None else timeout_s
            if check not in (True, False, "every"):
                raise ValueError(f"check={check!r} must be True, False or 'every'")
            if not timeout_s >= 0:
                raise ValueError(f"timeout_s={timeout_s} must be seconds, or 0 for no limit")
        except ValueError as error:
            failure = str(error)
        self._agreement.check(f"Communicator(check={check!r})", failure)
        assert check is not None
        assert timeout_s is not None
        return check, timeout_s

    def _find_node(self, shared: MPI.Comm) -> int:
        """A number that the ranks of a node have in common: their first rank."""
        with self.agreed("Communicator"):
            fake = environment.fake_nodes()
            if fake and fake[0] * fake[1] != self.size:
                raise ValueError(
                    f"COLLECTIVES_FAKE_NODES={fake[0]}x{fake[1]} does not make the {self.size} ranks of this job: "
                    "change it, or unset it"
                )
        if fake:
            return self.rank // fake[1]
        return MPI.Group.Translate_ranks(shared.Get_group(), [0], self.mpi.Get_group())[0]

    def _read_tuning(self) -> Tuning:
        """What the file says that rank 0's COLLECTIVES_TUNING names; other ranks need not have it."""
        path = self._agreement.gather_texts(str(environment.tuning_file() or "") * (self.rank == 0))[0]
        if not path:
            return self._read_links()
        with self.agreed():
            text = read_tuning(Path(path)) if self.rank == 0 else ""
        text = self._agreement.gather_texts(text)[0]
        with self.agreed():
            return parse_tuning(text, path)

    def _read_links(self) -> Tuning:
        """The speeds that rank 0 finds kept of these hosts; other ranks need not have them."""
        cores = min(self._agreement.gather_ints(environment.cores()))
        if not max(self._agreement.gather_ints(self.rank == 0 and links.any_kept())):
            return Tuning(NETWORK._replace(cores=cores))
        place = links.place(self.host_names(), self.topology.nodes, library_name(MPI))
        kept = links.parse(self._agreement.gather_texts(links.read(place.file) * (self.rank == 0))[0])
        if kept is None or kept.place != place:
            return Tuning(NETWORK._replace(cores=cores))
        return Tuning(kept.network._replace(cores=cores), measured=True)

    @property
    def network(self) -> Network:
        """The speeds that algorithm="auto" predicts with."""
        return self._tuning.network

    def host_names(self) -> list[str]:
        """The name of each rank's host.  Collective."""
        return self._agreement.gather_texts(platform.node())

    def split(self, color: int | None, key: int = 0) -> "Communicator | None":
        """The ranks that gave the same `color`, in the order of `key`, then rank; None for color=None."""
        with self.agreed("split"):
            if color is not None and color < 0:
                raise ValueError(f"color {color} is below 0: use 0 or more, or None for no part")
        part = self.mpi.Split(MPI.UNDEFINED if color is None else color, key)
        if part == MPI.COMM_NULL:
            return None
        assert color is not None
        members = MPI.Group.Translate_ranks(part.Get_group(), range(part.size), self.mpi.Get_group())
        made = Communicator(
            part,
            check=self.check,
            timeout_s=self.timeout_s,
            segment_bytes=self.segment_bytes,
            node=self._node,
            family=self._family,
            tuning=self._tuning,
            calls=self._calls.part(color, list(members)),
        )
        part.Free()
        return made

    def free(self) -> None:
        """Give the communicator back to MPI.  Collective; its plans cannot be run after.

        Memory from `empty` goes when no array uses it any more; that of devices is not reached by other ranks after,
        not even in plans of parts that came from this one by `split`.  Those are no longer watched, either.
        """
        with Call(self._calls, "free"):
            self._resolver.free()
            self._memory.free()
            if self._on_device:
                self._on_device.free()
        if self._watchdog:
            self._watchdog.stop()
        self._calls.close()
        self._agreement.free()
        self.mpi.Free()
        self._mailbox.mpi.Free()

    def empty(self, shape: int | tuple[int, ...], dtype: Any = "float32", device: str = "cpu") -> Any:
        """A new array, uninitialised, in memory that every rank of the node reaches.  Collective.

        Ranks may ask for different lengths; each node's shared memory must hold the longest for every rank.
        device="cuda" gives a CuPy array, in device memory; where the devices or the system let no rank have another's,
        rank 0 says so, and it is an ordinary one.

        Raises: InputError on every rank where there is no such device, or not so much memory.
        """
        with self.agreed("empty"):
            view_device, lengths, known = views.device(device), views.shape_of(shape), views.dtype_of(dtype)
            if (count := math.prod(lengths)) * known.itemsize > LARGEST_ARRAY_BYTES:
                raise ValueError(f"shape {shape!r} of {known} is of more memory than a process can address")
        return self._new(view_device, count, known).reshape(lengths)

    def _new(self, device: Device, count: int, dtype: np.dtype) -> Any:
        if device is host():
            return memory.array(self._memory.allocate(count * dtype.itemsize), count, dtype)
        shared = self._device_memory(device)
        if shared is None:
            return device.empty(count, dtype)
        return shared.array(shared.allocate(count * dtype.itemsize), count, dtype)

    def _device_memory(self, device: Device) -> DeviceMemory | None:
        """What lets a node's ranks reach each other's device memory, if all have arrays on devices.  Collective.

        Each rank's is on the device that it used first.
        """
        mine = self._on_device and self._on_device.device.place
        (another,) = self._agreement.highest(
            [not isinstance(device, SharingDevice) or mine not in (None, device.place)]
        )
        if another:
            return None
        if self._on_device is None:
            assert isinstance(device, SharingDevice)
            ways = self._agreement.highest, self._agreement.gather_rows
            self._on_device = DeviceMemory(self.mpi, self._node, self._family.windows, *ways, device)
            failures = self._agreement.gather_texts(self._on_device.failure if not self._on_device.usable else "")
            if self.rank == 0 and any(failures):
                rank, failure = next((rank, text) for rank, text in enumerate(failures) if text)
                words = "arrays go through host memory, as ranks cannot share the devices'"
                print(f"{words}: rank {rank}: {failure}", file=sys.stderr)
        return self._on_device if self._on_device.usable else None

    def fuse(self, arrays: Sequence[Any]) -> Fused:
        """Several arrays of one dtype, of any shapes, as the one `x` of a collective.

        `all_reduce`, `broadcast` and `reduce` take it, once or in a plan: they copy the arrays to a buffer, run on
        that, copy the results back into the arrays, and return the list of them.  They refuse arrays that do not go
        together, and lengths that differ between ranks.

        >>> import numpy as np, collectives
        >>> comm = collectives.world()
        >>> comm.all_reduce(comm.fuse([np.ones(2), np.ones((1, 1))]))
        [array([1., 1.]), array([[1.]])]
        """
        return Fused(arrays)

    # --- collectives: the arguments, what each rank holds, and which failures there are, as in `plan` ---

    def all_reduce(
        self,
        x: Any,
        op: str = "sum",
        out: Any = None,
        algorithm: str = "auto",
        blocking: bool = True,
        *,
        wire_dtype: Any = None,
        reproducible: bool = False,
    ) -> Any:
        """Reduce every rank's `x` elementwise; every rank gets the result, bit for bit the same.

        In place: `x` holds the result and is returned.  With `out`, `x` is left alone and `out` returned.

        `op` is "sum", "prod", "min", "max", "avg", "band", "bor" or "bxor".  "avg" divides the sum by the number of
        ranks: of integers toward zero, and the sum wraps before, as NCCL does it.

        16-bit floats are summed up in float32 and rounded once; messages carry the float32 sums, twice the bytes.

        wire_dtype="bfloat16" sends float32 in half the bytes: each rank sums up in float32, but rounds to bfloat16
        what it sends, and the result.  The error of a sum is at most 2^-8 of the sum of magnitudes for each rounding
        that an addend goes through, which are about log2 p, or p of a ring or a chain.  It goes by messages, even
        within a node, where shared memory is faster and exact.

        With `reproducible`, each element is ((x0 + x1) + x2) + ... in the order of the ranks: the same bits from
        every algorithm that can, for every length of `x` and every `segment_bytes`.  In shared memory this costs
        nothing.  Over messages the sums climb a chain of all ranks, in 3(p-1) rounds to a ring's 2(p-1).

        >>> import numpy as np, collectives
        >>> collectives.world().all_reduce(np.ones(3))
        array([1., 1., 1.])
        """
        return self._run(blocking)("all_reduce", x, out, (op, wire_dtype, reproducible, algorithm))

    def reduce_scatter(
        self,
        x: Any,
        out: Any = None,
        op: str = "sum",
        counts: Sequence[int] | None = None,
        algorithm: str = "auto",
        blocking: bool = True,
        *,
        wire_dtype: Any = None,
        reproducible: bool = False,
    ) -> Any:
        """Reduce every rank's `x` elementwise; rank r gets the r-th chunk of the result, flat, in `out`.

        Chunks have `counts` elements, by default as equal as can be, the first ones one longer.  `x` is left
        alone, unless `out` is this rank's chunk of `x` itself: then the rest of `x` is used as working space.

        `wire_dtype` and `reproducible` are as in `all_reduce`.
        """
        return self._run(blocking)("reduce_scatter", x, out, (op, counts, wire_dtype, reproducible, algorithm))

    def all_gather(
        self,
        x: Any,
        out: Any = None,
        counts: Sequence[int] | None = None,
        algorithm: str = "auto",
        blocking: bool = True,
    ) -> Any:
        """Every rank gets all ranks' `x`, one after the other, flat, in `out`.

        Rank r's `x` has `counts[r]` elements, by default the same number on all ranks.  `x` may be this rank's
        chunk of `out` itself.
        """
        return self._run(blocking)("all_gather", x, out, (counts, algorithm))

    def all_to_all(
        self,
        x: Any,
        out: Any = None,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        algorithm: str = "auto",
        blocking: bool = True,
    ) -> Any:
        """Chunk d of rank s's `x` becomes chunk s of rank d's `out`, which is flat.

        Chunks are equal, or have `send_counts`; then all ranks pass them, and `recv_counts` may be left out.
        """
        return self._run(blocking)("all_to_all", x, out, (send_counts, recv_counts, algorithm))

    def broadcast(self, x: Any, root: int = 0, algorithm: str = "auto", blocking: bool = True) -> Any:
        """Every rank's `x` becomes the root's; returns `x`."""
        return self._run(blocking)("broadcast", x, None, (root, algorithm))

    def reduce(
        self,
        x: Any,
        root: int = 0,
        op: str = "sum",
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
        return self._run(blocking)("reduce", x, out, (root, op, wire_dtype, reproducible, algorithm))

    def gather(
        self,
        x: Any,
        root: int = 0,
        out: Any = None,
        counts: Sequence[int] | None = None,
        algorithm: str = "auto",
        blocking: bool = True,
    ) -> Any:
        """The root gets all ranks' `x`, one after the other, flat, in `out`; the other ranks get None.

        Rank r's `x` has `counts[r]` elements, by default the same number on all ranks.
        """
        return self._run(blocking)("gather", x, out, (root, counts, algorithm))

    def scatter(
        self,
        x: Any,
        root: int = 0,
        out: Any = None,
        counts: Sequence[int] | None = None,
        algorithm: str = "auto",
        blocking: bool = True,
    ) -> Any:
        """Rank r gets the r-th chunk of the root's `x`, flat, in `out`.

        Chunks have `counts` elements, by default as equal as can be, the first ones one longer.  Other ranks' `x`
        is not read; with an `out` it may be None, and then chunks without `counts` must be equal.
        """
        return self._run(blocking)("scatter", x, out, (root, counts, algorithm))

    def barrier(self, algorithm: str = "auto", blocking: bool = True) -> Any:
        """Return only when every rank has called it."""
        return self._run(blocking)("barrier", None, None, (algorithm,))

    def _run(self, blocking: bool) -> Callable[..., Any]:
        return self._resolver.run if blocking else self._resolver.start

    def plan(self, collective: str, x: Any = None, **arguments: Any) -> Plan:
        """Bind a collective to its arrays once, to be run often: `plan()`, or `plan.start()` and `plan.wait()`.

        Binding is collective; the further arguments are those of the method of that name.

        Raises: InputError on every rank where one rank's arguments are wrong or ranks ask for different things.
        """
        return self._resolver.plan(collective, x, arguments)

    def explain(self, collective: str, nbytes: int = 0) -> str:
        """Which algorithm a plan takes by `auto`, for a vector of `nbytes` from `empty`, why, and what the model says.

        The vector is what the collective is about, as in an algorithm's cost line: an all-gather's `out`.
        """
        if collective not in OPERANDS:
            raise ValueError(f"collective {collective!r} is unknown: use one of {', '.join(OPERANDS)}")
        return self._resolver.binder.explain(collective, nbytes)

    # --- point to point ---

    def send(self, x: Any, dest: int, tag: int = 0, blocking: bool = True) -> Any:
        """Send an array to rank `dest`, which receives it with the same tag.

        With blocking=False: work to wait for, until which `x` must stay as it is.

        Raises: ValueError for a rank or a tag that is out of range, or an array that cannot be sent.
        """
        check_rank("dest", dest, self.size)
        return self._message(SendMessage, x, dest, tag, f"send to rank {dest} with tag {tag}", blocking)

    def recv(self, x: Any, source: int | None, tag: int = 0, blocking: bool = True) -> Any:
        """Receive rank `source`'s array of that tag into `x`; returns `x`, or work to wait for.

        With source=None it is the first of that tag that comes, from any rank.

        Raises: CommunicationError where what was sent is of another length or dtype; the message is gone then, and `x`
        is as it was.  ValueError for a rank or a tag that is out of range, or an array that cannot be written.
        """
        if source is None:
            return self._message(RecvMessage, x, MPI.ANY_SOURCE, tag, f"recv from any rank with tag {tag}", blocking)
        check_rank("source", source, self.size)
        return self._message(RecvMessage, x, source, tag, f"recv from rank {source} with tag {tag}", blocking)

    def _message(self, kind: type[PointToPoint], x: Any, peer: int, tag: int, words: str, blocking: bool) -> Any:
        device, view = views.flat(x)
        if kind is RecvMessage:
            check_writable(view, "x")
        plan = Plan(words, x, self._progress, device, [kind(self._mailbox, device, view, peer, tag)])
        plan.words = words
        if not blocking and peer >= 0 and peer not in self.topology.nodes[self.topology.node_of[self.rank]]:
            return plan.start()
        plan.begin()  # in a node no thread need move it on: it is copied once, when it is waited for
        return plan.wait() if blocking else plan

    # --- agreement ---

    def compare(self, said: str, failure: str = "", place: tuple[str, int] | None = None) -> None:
        """Raise InputError on every rank where one has a failure, or not all have said the same.  Collective.

        The error names the line that calls, or the file and line of `place`.
        """
        with Call(self._calls, "compare") as call:
            call.place = place or call.place
            self._agreement.check(said, failure, call=call)

    @contextmanager
    def agreed(self, name: str = "agreed") -> Iterator[None]:
        """Run a block whose ValueError or OSError on any rank becomes an InputError on every rank.  Collective."""
        failure = ""
        with Call(self._calls, name) as call:
            try:
                yield
            except (ValueError, OSError, MemoryError) as error:
                failure = str(error) or type(error).__name__
            self._agreement.check(name, failure, call=call if self.check else None)


def refuse_segment(segment_bytes: int) -> str:
    if 1 <= segment_bytes <= LARGEST_MESSAGE_BYTES:
        return ""
    return f"segment_bytes={segment_bytes} must be from 1 to {LARGEST_MESSAGE_BYTES}"
