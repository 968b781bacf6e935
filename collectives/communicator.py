"""The user's face: a communicator's collectives on NumPy, CuPy and torch arrays."""

import math
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import algorithms, arrays, environment, footing, links, memory, phases, select, system
from collectives.agreement import NUM_CLAIMS, Agreement
from collectives.algorithms import Reach
from collectives.arguments import OPERANDS, TAKES, Arguments, Operands, check_rank, check_writable
from collectives.baseline import NativePlan, check_native
from collectives.bind import BINDERS, Room
from collectives.cost import NETWORK, Network, on_device
from collectives.device import Device, SharingDevice, host
from collectives.device_memory import DeviceMemory
from collectives.errors import InputError, LoneInputError
from collectives.executor import LARGEST_MESSAGE_BYTES, SEGMENT_BYTES, TAGS, Binder, Vector
from collectives.footing import Footing
from collectives.fuse import Fused, Parts
from collectives.job import after_fork, library_name
from collectives.memory import SymmetricMemory, Windows
from collectives.plan import Plan, Progress
from collectives.point_to_point import Mailbox, PointToPoint, RecvMessage, SendMessage
from collectives.record import Call, Calls, Record
from collectives.schedule import Round, in_parts
from collectives.topology import Topology, refuse_levels
from collectives.tuning import Tuning, parse_tuning, read_tuning
from collectives.watchdog import Watchdog

LARGEST_ARRAY_BYTES = 1 << 46
# What ranks agree by before they know the topology.
BOOKKEEPING = {"all_reduce": "recursive_doubling", "all_gather": "ring", "all_to_all": "pairwise"}
REFUSALS = (ValueError, TypeError, RuntimeError, MemoryError)  # what NumPy, CuPy and torch raise for an argument


os.register_at_fork(after_in_child=after_fork)


class Family(NamedTuple):
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
        family: Family | None = None,
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
        self._family = family or Family(Progress(environment.crowded(shared.size)), Windows())
        self._progress = self._family.progress
        self._agreement = Agreement(self.rank, self.size, self._bind_messages)
        said = f"Communicator(segment_bytes={segment_bytes}{'' if levels is None else f', {levels=}'})"
        self._agreement.check(said, refuse_segment(segment_bytes) or refuse_levels(levels))
        self.check, self.timeout_s = self._settings(check, timeout_s)
        self._node = self._find_node(shared) if node is None else node
        shared.Free()
        self.topology = Topology.from_ids(self._agreement.gather_ints(self._node), levels)
        self._tuning = tuning or self._read_tuning()
        self._memory = SymmetricMemory(self.mpi, self._node, self._family.windows, self._agreement.highest)
        self._on_device: DeviceMemory | None = None
        self._watchdog: Watchdog | None = None
        if family is None and self.timeout_s:
            self._watchdog = Watchdog(self.mpi, self._num_tags, self._calls, self._progress.waits, self.timeout_s)

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
            view_device, lengths, known = arrays.device(device), arrays.shape_of(shape), arrays.dtype_of(dtype)
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

    def fuse(self, given: Sequence[Any]) -> Fused:
        """Several arrays of one dtype, of any shapes, as the one `x` of a collective.  Collective.

        `all_reduce`, `broadcast` and `reduce` take it, once or in a plan: they copy the arrays to a buffer from
        `empty`, run on that, copy the results back into the arrays, and return the list of them.

        >>> import numpy as np, collectives
        >>> comm = collectives.world()
        >>> comm.all_reduce(comm.fuse([np.ones(2), np.ones((1, 1))]))
        [array([1., 1.]), array([[1.]])]

        Raises: InputError on every rank where arrays do not go together, or ranks' lengths differ.
        """
        said = failure = ""
        with Call(self._calls, "fuse") as call:
            try:
                parts = Parts(given)
                said = str(parts)
            except REFUSALS as error:
                failure = f"fuse: {error}"
            self._agreement.check(said, failure, call=call if self.check else None)
        return Fused(parts, self._new(parts.device, sum(parts.lengths), parts.dtype))

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
        asked = {"wire_dtype": wire_dtype, "reproducible": reproducible}
        return self._run(blocking, "all_reduce", x, op=op, out=out, algorithm=algorithm, **asked)

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
        asked = {"wire_dtype": wire_dtype, "reproducible": reproducible}
        return self._run(blocking, "reduce_scatter", x, out=out, op=op, counts=counts, algorithm=algorithm, **asked)

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
        return self._run(blocking, "all_gather", x, out=out, counts=counts, algorithm=algorithm)

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
        counts = {"send_counts": send_counts, "recv_counts": recv_counts}
        return self._run(blocking, "all_to_all", x, out=out, algorithm=algorithm, **counts)

    def broadcast(self, x: Any, root: int = 0, algorithm: str = "auto", blocking: bool = True) -> Any:
        """Every rank's `x` becomes the root's; returns `x`."""
        return self._run(blocking, "broadcast", x, root=root, algorithm=algorithm)

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
        asked = {"wire_dtype": wire_dtype, "reproducible": reproducible}
        return self._run(blocking, "reduce", x, root=root, op=op, out=out, algorithm=algorithm, **asked)

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
        return self._run(blocking, "gather", x, root=root, out=out, counts=counts, algorithm=algorithm)

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
        return self._run(blocking, "scatter", x, root=root, out=out, counts=counts, algorithm=algorithm)

    def barrier(self, algorithm: str = "auto", blocking: bool = True) -> Any:
        """Return only when every rank has called it."""
        return self._run(blocking, "barrier", None, algorithm=algorithm)

    def plan(self, collective: str, x: Any = None, *, algorithm: str = "auto", **arguments: Any) -> Plan:
        """Bind a collective to its arrays once, to be run often: `plan()`, or `plan.start()` and `plan.wait()`.

        Binding is collective; the further arguments are those of the method of that name.

        Raises: InputError on every rank where one rank's arguments are wrong or ranks ask for different things.
        """
        with Call(self._calls, f"plan {collective}") as call:
            plan = self._plan(call, collective, x, algorithm, arguments, once=False)
        runs = call.of_plan(plan.name)
        runs.compare = self._agreement.compare if self.check == "every" else None
        return plan.recorded_as(runs)

    def _plan(self, call: Call, collective: str, x: Any, algorithm: str, arguments: dict[str, Any], once: bool) -> Plan:
        said = failure = ""
        claims = [0] * NUM_CLAIMS
        fused = x if isinstance(x, Fused) else None
        try:
            if collective not in OPERANDS:
                raise ValueError(f"collective {collective!r} is unknown: use one of {', '.join(OPERANDS)}")
            if strange := [name for name in arguments if name not in TAKES[collective]]:
                raise ValueError(f"takes no {strange[0]}: it takes {', '.join(TAKES[collective])}")
            a = Arguments(collective, self.rank, self.size, fused.buffer if fused else x, **arguments)
            if fused:
                fused.check(a)
            if algorithm == "mpi":
                check_native(a)
            elif algorithm != "auto":
                algorithms.find(collective, algorithm).check(self.size, equal=a.send_counts is None)
            a.check_algorithm(algorithm)
            layout = f" of {fused.layout}" if fused else ""
            said = call.describe(collective, a.describe(algorithm) + layout, a.flat)
            operands = OPERANDS[collective](a) if a.send_counts is None else None
            claims = footing.claims(a, operands, self._family.windows, once)
        except REFUSALS as error:
            failure = f"{collective}: {error}"
        if self.check:
            claims = self._agreement.check(said, failure, claims, call)
        elif failure:
            raise LoneInputError(failure)
        operands = operands or self._exchange_counts(a)
        if algorithm == "mpi":
            plan: Plan = NativePlan(a, operands, self.mpi, self._progress)
        else:
            plan = self._bind(a, operands, algorithm, footing.footing(collective, claims))
        if fused:
            fused.enclose(plan, a)
        return plan

    def explain(self, collective: str, nbytes: int = 0) -> str:
        """Which algorithm a plan takes by `auto`, for a vector of `nbytes` from `empty`, why, and what the model says.

        The vector is what the collective is about, as in an algorithm's cost line: an all-gather's `out`.
        """
        if collective not in OPERANDS:
            raise ValueError(f"collective {collective!r} is unknown: use one of {', '.join(OPERANDS)}")
        far = Reach.NODES if self.topology.has_groups_in_nodes else Reach.MESSAGES
        reach = far if len(self.topology.nodes) > 1 else Reach.ARRAYS
        memory = "ordinary" if collective == "barrier" else "symmetric"
        return select.explain(*self._case(collective, nbytes, reach, memory))

    def _case(
        self,
        collective: str,
        nbytes: int,
        reach: Reach,
        memory: str,
        equal: bool = True,
        once: bool = False,
        suits: Callable[[algorithms.Algorithm], bool] = lambda row: True,
        tuning: Tuning | None = None,
    ) -> tuple:
        """What `select` decides by."""
        rows = [row for row in algorithms.rows(collective, self.size, equal) if suits(row)]
        if self.topology.is_flat:  # with nothing to compose
            rows = [row for row in rows if row.reach != Reach.NODES]
        candidates = select.usable(rows, reach, nbytes, once)
        nodes, groups = self.topology.nodes, self.topology.groups
        return collective, nbytes, candidates, self.size, nodes, tuning or self._tuning, memory, groups

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
        device, view = arrays.flat(x)
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

    # --- binding ---

    def _run(self, blocking: bool, collective: str, x: Any, **arguments: Any) -> Any:
        with Call(self._calls, collective) as call:
            plan = self._plan(call, collective, x, arguments.pop("algorithm"), arguments, once=blocking)
        call.name, call.under_way = plan.name, True  # until the plan has ended: its run is not counted again
        plan.call = call
        if not blocking:
            return plan.start()
        plan.begin()
        result = plan.wait()
        plan.free()
        return result

    def _exchange_counts(self, a: Arguments) -> Operands:
        """Of an all-to-all of uneven chunks: ask the other ranks how much will come."""
        sends = np.array(a.send_counts, np.int64)
        incoming = self._bind_messages(Arguments("all_to_all", self.rank, self.size, sends))().tolist()
        with self.agreed("counts of all_to_all"):
            if a.recv_counts not in (None, incoming):
                raise ValueError(
                    f"all_to_all: recv_counts={a.recv_counts}, but {incoming} is sent: pass that, or leave it out"
                )
            a.recv_counts = incoming
            return OPERANDS["all_to_all"](a)

    def _bind(self, a: Arguments, operands: Operands, algorithm: str, footing: Footing) -> Plan:
        shared = None if footing.on_host else self._device_memory(a.device)
        reach = self._reach(footing, shared)
        equal = a.send_counts is None
        if algorithm == "auto":
            memory = "symmetric" if footing.symmetric else "ordinary"
            tuning = self._tuning if footing.on_host else self._tuning_on_device
            case = self._case(a.collective, footing.nbytes, reach, memory, equal, footing.once, a.suits, tuning)
            algorithm = select.choose(*case)
        row = algorithms.find(a.collective, algorithm)
        if row.reach > reach:
            raise InputError(f"{a.collective}: {self._out_of_reach(row, a, footing, shared)}")
        if row.reach >= Reach.STAGES:
            return self._bind_direct(row, a, operands, footing, shared)
        return self._bind_messages(a, operands, algorithm, footing, shared)

    def _reach(self, footing: Footing, shared: DeviceMemory | None) -> Reach:
        """How far the ranks reach into each other's memory."""
        if not footing.on_host and shared is None:
            return Reach.MESSAGES
        if len(self.topology.nodes) > 1:
            return Reach.NODES if self.topology.has_groups_in_nodes else Reach.MESSAGES
        if footing.symmetric or not footing.nbytes or (footing.on_host and self._reads_processes):
            return Reach.ARRAYS
        return Reach.STAGES

    @cached_property
    def _tuning_on_device(self) -> Tuning:
        return Tuning(on_device(self.network))

    @cached_property
    def _reads_processes(self) -> bool:
        """Whether every rank may read and write the others' memory through the system.  Collective."""
        rows = self._agreement.gather_rows(system.invitation())
        return not any(self._agreement.highest([not system.accept(rows.tolist())]))

    def _out_of_reach(
        self, row: algorithms.Algorithm, a: Arguments, footing: Footing, shared: DeviceMemory | None
    ) -> str:
        if not footing.on_host and shared is None:
            why = "arrays in host memory, or devices whose memory the ranks may share"
        elif row.reach == Reach.NODES:
            why = "innermost groups of several ranks, each in one node"
        elif len(self.topology.nodes) > 1:
            why = f"ranks of one node, but there are {len(self.topology.nodes)} nodes"
        else:
            why = "arrays from comm.empty, as the system lets no process read another's memory"
        return f"algorithm {row.name!r} needs {why}: use {', '.join(a.able(self._reach(footing, shared)))}"

    def _bind_direct(
        self, row: algorithms.Algorithm, a: Arguments, o: Operands, footing: Footing, shared: DeviceMemory | None
    ) -> Plan:
        dtype = np.dtype(np.uint8) if a.flat is None else a.flat.dtype
        fold = phases.Fold(a.op, dtype, self.size if a.op == "avg" else 1)
        views = o.inputs if a.collective == "broadcast" else o.inputs + o.outputs
        cut = phases.cut(row, footing.chunk_bytes, self.size, footing.on_host)
        rounds = row.rounds(self.rank, self.size, a.root, ())
        bound = self._program_binder(shared).bind([rounds], views, fold, self.rank, cut)
        only = None if shared else bound
        return Plan(f"{a.collective} {row.name}", o.result, self._progress, a.device, [bound], only=only)

    def _bind_parts(
        self, schedule: Sequence[Round], vector: Vector, num_shared: int, op: str, shared: DeviceMemory | None
    ) -> Any:
        """The direct parts of a schedule as one program, which pauses after each.  Collective."""
        parts = [[moves for _, moves in part] for direct, part in in_parts(schedule) if direct]
        views = [vector.view(range(chunk, chunk + 1)) for chunk in range(len(vector.places))]
        chunk_bytes = max(view.nbytes for view in views)
        probe = partial(self.mpi.Iprobe, MPI.ANY_SOURCE, MPI.ANY_TAG)  # moves on what is still to leave
        return self._program_binder(shared, meanwhile=probe).bind(
            parts,
            views[:num_shared],
            phases.Fold(op, views[0].dtype, divisor=1),
            self.rank,
            phases.whole(chunk_bytes * self.size),
            scratch=views[num_shared:],
        )

    @cached_property
    def _world_ranks(self) -> list[int]:
        ranks = range(self.size)
        return list(MPI.Group.Translate_ranks(self.mpi.Get_group(), ranks, MPI.COMM_WORLD.Get_group()))

    def _program_binder(self, shared: DeviceMemory | None, meanwhile: Callable[[], Any] | None = None) -> Any:
        from collectives.device_program import DeviceProgramBinder  # which bring the compiler
        from collectives.program import ProgramBinder

        crowded, gather_rows = self._progress.crowded, self._agreement.gather_rows
        known = self._world_ranks, self._memory, gather_rows, crowded, meanwhile
        return DeviceProgramBinder(shared, *known) if shared else ProgramBinder(*known)

    def _bind_messages(
        self,
        a: Arguments,
        operands: Operands | None = None,
        algorithm: str = "",
        footing: Footing | None = None,
        shared: DeviceMemory | None = None,
    ) -> Plan:
        algorithm = algorithm or BOOKKEEPING[a.collective]
        row = algorithms.find(a.collective, algorithm)
        in_nodes = footing if row.reach else None
        room = Room(True, a.device.empty, together=False)
        if in_nodes:
            room = Room(in_nodes.shared, partial(self._new, a.device), together=True)
        binding = BINDERS[a.collective](a, operands or OPERANDS[a.collective](a), room)
        self._num_plans += 1  # the same on every rank, since binding is collective
        first_tag = self._num_plans % (self._num_tags // TAGS) * TAGS
        binder = Binder(self.mpi, first_tag, a.device, a.op, self.segment_bytes, a.wire_dtype)
        schedule = row.rounds(self.rank, self.size, a.root, self.topology.groups if row.over_nodes else ())
        num_shared = len(binding.vector.places)
        binding.vector.add_scratch(schedule, a.device)
        program = self._bind_parts(schedule, binding.vector, num_shared, a.op, shared) if in_nodes else None
        rounds: list[Any] = []
        for direct, part in in_parts(schedule):
            rounds += [program] if direct else [binder.bind(i, moves, binding.vector) for i, moves in part if moves]
        if a.wire_dtype is not None and binding.reduced is not None:
            rounds.append(binder.rounding(len(schedule), binding.reduced))
        plan = Plan(f"{a.collective} {algorithm}", binding.result, self._progress, a.device, rounds)
        plan.before, plan.after = binding.before, binding.after
        if a.op == "avg" and binding.reduced is not None:
            plan.divide = binding.reduced, self.size
        return plan


def refuse_segment(segment_bytes: int) -> str:
    if 1 <= segment_bytes <= LARGEST_MESSAGE_BYTES:
        return ""
    return f"segment_bytes={segment_bytes} must be from 1 to {LARGEST_MESSAGE_BYTES}"
