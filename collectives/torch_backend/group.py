"""A process group of torch.distributed, among ranks that MPI knows, and the execution of its calls."""

import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial, wraps
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import AllreduceOptions, ProcessGroup, ReduceOp, Work

from collectives.communicator import Communicator
from collectives.job.backoff import Backoff
from collectives.job.errors import InputError
from collectives.job.launch import dead_ranks, refuse_after_fork
from collectives.runtime.plan import Plan
from collectives.schedule.spec import OPS, options_of
from collectives.torch_backend.calls import Execute, Tensors, TorchCall, caller, sum_products, sum_sparse
from collectives.torch_backend.rendezvous import handle_of, part, ranks_of, wait_for_all
from collectives.torch_backend.work import (
    FAILURES,
    HELD,
    CallQueue,
    Finished,
    MessageWork,
    Pending,
    PlanWork,
    Runs,
    seconds,
)

LONGEST_SLEEP_S = 0.05  # while the other ranks end the group, too
LONGEST_WAIT_S = 1e6  # that a store accepts
SHORT_BYTES = 1 << 16
UUIDS: set[int] = set()  # of groups that this rank has reconfigured
CPP_HOLDS_WORKS = torch.__version__ >= "2.7"  # before, a work that Python drops loses its methods, which C++ calls
RedOp: Any = ReduceOp.RedOpType
PREMUL_SUM = int(RedOp.PREMUL_SUM)
OP_NAMES = {int(getattr(RedOp, op.torch)): name for name, op in OPS.items() if op.torch} | {PREMUL_SUM: "sum"}
OP_NAMES_OF_BOOL = OP_NAMES | {int(RedOp.SUM): "max", int(RedOp.PRODUCT): "min"}  # as NCCL's
Base: Any = ProcessGroup  # its declared overloads are for callers; a backend implements one of each


class Runner(Base):
    """Base of a process group: its calls run in the order in which they are made, each once ranks have agreed."""

    def __init__(self, comm: Communicator, store: dist.Store, timeout: timedelta, name: str):
        super().__init__(comm.rank, comm.size)
        self.first_store, self.limit_s, self.group_name = store, seconds(timeout), name
        self.queue = CallQueue()
        self.finished = Finished()
        self._run_on(comm, store)

    def _run_on(self, comm: Communicator, store: dist.Store) -> None:
        self.comm, self.store = comm, store
        self.rank_and_size = comm.rank, comm.size  # also once it has been freed
        self.coalesced: list[Work] | None = None
        self.failure, self.kind_of_failure = "", "SUCCESS"
        self.num_monitored = 0

    def rank(self) -> int:
        return self.rank_and_size[0]

    def size(self) -> int:
        return self.rank_and_size[1]

    getRank, getSize = rank, size  # noqa: N815  as C++ calls them

    def name(self) -> str:
        return "collectives"

    getBackendName = _get_backend_name = name  # noqa: N815  as C++ calls it

    group_name = group_desc = ""  # in place of C++'s properties

    def _set_group_name(self, name: str) -> None:
        self.group_name = name

    def _set_group_desc(self, description: str) -> None:
        self.group_desc = description

    def getGroupName(self) -> str:  # noqa: N802  as C++ calls it
        return self.group_name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")] + [torch.device("cuda")] * torch.cuda.is_available()

    def _get_backend(self, device: torch.device) -> "Runner":
        return self

    supports_coalescing = supports_time_estimate = supports_shrinking = False
    supports_reconfigure = True

    def set_timeout(self, timeout: timedelta) -> None:
        self.limit_s = seconds(timeout)

    def shutdown(self) -> None:
        """End the group, and free its resources, unless a call has failed on any rank: it may not come here."""
        self._end_calls()
        if not self.failure and self.all_are_done():
            self.comm.free()
        self.failure = self.failure or "the group has been destroyed"

    def _end_calls(self) -> None:
        """Wait for all calls that this rank has made, by their time limits."""
        self.queue.end()
        try:
            self.comm.dispatcher.order.drain(partial(self.run_plan, None, time.monotonic()))
        except FAILURES:
            self.fail("a call had not finished when the group ended")

    def abort(self) -> None:
        """End the group without waiting for other ranks."""
        self.fail("the group has been aborted")

    def get_reconfigure_handle(self) -> str:
        """Return this rank's name for `reconfigure`, the same in every group."""
        return handle_of(MPI.COMM_WORLD.rank)

    def reconfigure(self, opts: Any) -> Work:
        """Continue as the group of the ranks with some handles, numbered in their order; those of a set, in MPI's.

        All of these ranks call it, with the same `uuid`, which none of them has used before.  Others need not, and may
        have died in a job that goes on without them.  Calls in flight end first.  What the ranks have shared so far is
        freed when they end.

        Raises: DistBackendError for handles that are not of this job's ranks or lack this one; where a rank does not
        come in time, has died, or comes for other ranks.  The group is then as it was.
        """
        ranks = ranks_of(opts.handles)
        if opts.uuid in UUIDS:
            raise dist.DistBackendError(f"uuid {opts.uuid} was already used by this rank: pass a new one")
        UUIDS.add(opts.uuid)
        self._end_calls()
        wait_for_all(ranks, opts.uuid, self.limit_of(opts))
        name = f"reconfigured {opts.uuid} of {ranks}"
        try:
            comm = part(MPI.COMM_WORLD, ranks, name)
        except FAILURES as error:
            raise dist.DistBackendError(str(error)) from error
        self.fail("ranks have left the group")  # those that do not come learn it from the store
        self.comm.context.abandon()
        self._run_on(comm, dist.PrefixStore(name, self.first_store))
        return self.finished

    def get_error(self) -> Any:
        """Return torch's kind of what has failed, if anything has: an abort is none."""
        return getattr(_distributed_c10d.ErrorType, self.kind_of_failure)

    def all_are_done(self) -> bool:
        """Return whether every rank ends the group, and none of them after a failed call."""
        backoff, deadline_s = Backoff(LONGEST_SLEEP_S), time.monotonic() + self.limit_s
        with suppress(MPI.Exception):  # of a rank that dies
            came = self.comm.mpi.Ibarrier()
            while not came.Test():
                if time.monotonic() > deadline_s or (backoff.is_longest and self.has_failed()):
                    return False
                backoff.sleep()
            return True
        return False

    def has_failed(self) -> bool:
        """Return whether a call has failed on any rank."""
        try:
            return self.store.check(["failed"])
        except dist.DistError:  # rank 0, which serves the store, has ended; if it died, the others may go on
            return not dead_ranks()

    def fail(self, words: str) -> None:
        """Refuse all further calls in this group."""
        self.failure = words
        with suppress(dist.DistError):  # rank 0, which serves the store, may have ended
            self.store.set("failed", words)

    def run(
        self, collective: str, inputs: Tensors, outputs: Tensors, opts: Any, factor: Any = None, **values: Any
    ) -> Work:
        """Run a call, begin it, or have it run; `values` are of options, and a `factor` multiplies the input."""
        call = TorchCall(collective, inputs, outputs, options_of(collective, **values), caller(sys._getframe(1)))
        if factor is not None:
            call.note = ", PREMUL_SUM"
            return self.submit(partial(sum_products, call, factor), outputs or inputs, opts)
        if getattr(opts, "asyncOp", True) and (work := self.begin(call, opts)):
            return work
        return self.submit(lambda execute: execute(call), outputs or inputs, opts, inputs)

    def begin(self, call: TorchCall, opts: Any) -> Work | None:
        """Begin an asynchronous call in this thread, if it has been bound and takes less time than handing it over."""
        nbytes = sum(t.nbytes for t in call.inputs + call.outputs)
        if self.failure or not CPP_HOLDS_WORKS or not self.queue.is_empty or nbytes > SHORT_BYTES:
            return None
        with self.queue.running:
            plan = call.begin(self.comm)
        if plan is None:
            return None
        results, error_of = call.outputs or call.inputs, partial(self.error_of, self.comm, call)
        return self.keep(PlanWork(plan, results, self.limit_of(opts), error_of, self.queue))

    def keep(self, work: Work) -> Work:
        """Add asynchronous work to coalesced calls, if any; hold a reference where torch does not."""
        if not CPP_HOLDS_WORKS:
            HELD.add(work)
        if self.coalesced is not None:
            self.coalesced.append(work)
        return work

    def reduction(self, collective: str, inputs: Tensors, outputs: Tensors, opts: Any, **values: Any) -> Work:
        op, dtype = int(opts.reduceOp.op), inputs[0].dtype
        name = (OP_NAMES_OF_BOOL if dtype is torch.bool else OP_NAMES)[op]
        factor = opts.reduceOp.__getstate__()[1] if op == PREMUL_SUM else None  # older torch has no attribute for it
        return self.run(collective, inputs, outputs, opts, factor, op=name, **values)

    def last(self, works: list[Work]) -> Work:
        """Return the last of calls that end in their order; nothing to wait for if there are none."""
        HELD.difference_update(works[:-1])
        return works[-1] if works else self.finished

    def submit(
        self, make_calls: Callable[[Execute], None], results: Tensors, opts: Any, inputs: Sequence[torch.Tensor] = ()
    ) -> Work:
        """Make calls now, or have a thread make them in their turn; nothing else of the group runs between them."""
        if not getattr(opts, "asyncOp", True) and self.queue.is_empty:
            with self.queue.running:
                make_calls(partial(self.execute, opts, None))
            return self.finished
        work = Pending(lambda run: make_calls(partial(self.execute, opts, run)), results, self.limit_of(opts), inputs)
        self.queue.add(work)
        return self.keep(work)

    def run_plan(self, opts: Any, begin_s: float, plan: Plan) -> None:
        """Run a plan of a call that was made at `begin_s`."""
        if not plan.run_only():
            plan.begin()
            plan.wait(max(0, begin_s + self.limit_of(opts) - time.monotonic()))

    def limit_of(self, opts: Any) -> float:
        limit_s = seconds(getattr(opts, "timeout", None))
        return self.limit_s if limit_s == math.inf else limit_s

    def execute(self, opts: Any, run: Runs | None, call: TorchCall) -> None:
        """Run a call to its end, its plans by `run` or in this thread; errors become torch's kind."""
        if self.failure:
            raise dist.DistBackendError(f"{call}: {self.failure}")
        try:
            call.run(self.comm, run or partial(self.run_plan, opts, time.monotonic()), at_once=run is None)
        except FAILURES as error:
            raise self.error_of(self.comm, call, error, self.limit_of(opts)) from error

    def error_of(self, comm: Communicator, call: TorchCall, error: Exception, limit_s: float) -> dist.DistBackendError:
        """Make torch's kind of error.  After any but a refusal, further calls on the communicator are refused."""
        is_late, words = isinstance(error, TimeoutError), str(error)
        if is_late:
            words = f"{call} did not finish within its timeout of {limit_s:g} s: not all {comm.size} ranks have arrived"
        if comm is self.comm and not isinstance(error, InputError):
            self.kind_of_failure = "TIMEOUT" if is_late else "COMM_ERROR"
            self.fail(words)
        return dist.DistBackendError(words)


refuse_after_fork(Runner, "run", "begin", "submit", "shutdown", "fail", "reconfigure")


def untraced(group: type) -> type:
    """Run a class's methods, and what they call, as they are: compiled code ends before and begins again after them.

    torch calls them from C++, where its compiler would trace them as if they were the program's own.
    """
    for name, method in list(vars(group).items()):
        if isinstance(method, FunctionType):
            setattr(group, name, not_compiled(method))
    return group


def not_compiled(method: Callable) -> Callable:
    """Disable the compiler, without the seconds for importing it where it is not used."""
    disabled: list[Callable] = []

    @wraps(method)
    def run(*arguments: Any, **named: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return method(*arguments, **named)
        if not disabled:
            disabled.append(torch.compiler.disable(method))
        return disabled[0](*arguments, **named)

    return run


@untraced
class Group(Runner):
    """torch's calls, as it makes them, with lists of one tensor each; see `torch.distributed` for their meaning.

    Both names of renamed calls are present.
    """

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        opts = AllreduceOptions() if opts is None else opts
        if len(tensors) == 1 and tensors[0].layout is torch.sparse_coo:
            add = partial(sum_sparse, tensors[0], opts.reduceOp.op, self.comm.size, caller(sys._getframe(1)))
            return self.submit(add, tensors, opts)
        return self.reduction("all_reduce", tensors, tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        outputs = tensors if self.comm.rank == opts.rootRank else []
        return self.reduction("reduce", tensors, outputs, opts, root=opts.rootRank)

    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        inputs, outputs = (tensors, []) if self.comm.rank == opts.rootRank else ([], tensors)
        return self.run("broadcast", inputs, outputs, opts, root=opts.rootRank)

    def barrier(self, opts: Any = None) -> Work:
        return self.run("barrier", [], [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks through the store; rank 0 names missing ones.

        Raises: DistBackendError on rank 0 with the first missing rank, or all, if requested; and on the others.
        """
        self.num_monitored += 1
        limit_s = self.limit_s if timeout is None else timeout.total_seconds()
        prefix, comm = f"monitored barrier {self.num_monitored}", self.comm
        if comm.rank == 0:
            failure = wait_for_others(self.store, comm.size, prefix, limit_s, wait_all_ranks)
        else:
            failure = report_to_first(self.store, comm.rank, prefix, limit_s)
        if failure:
            raise dist.DistBackendError(failure)

    def all_gather_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> Work:
        return self.run("all_gather", [x], [output], opts)

    _allgather_base = all_gather_single

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        return self.run("all_gather", inputs, list(outputs[0]), opts, counts=uneven(outputs[0]))

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        return self.last([self.all_gather_single(out, x, opts) for out, x in zip(outputs, inputs, strict=True)])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """Gather each tensor; `outputs` has a list for each rank."""
        lists = [list(of_tensor) for of_tensor in zip(*outputs, strict=True)]
        return self.last([self.allgather([out], [x], opts) for out, x in zip(lists, inputs, strict=True)])

    def reduce_scatter_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> Work:
        return self.reduction("reduce_scatter", [x], [output], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Work:
        return self.reduction("reduce_scatter", list(inputs[0]), outputs, opts, counts=uneven(inputs[0]))

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        return self.last([self.reduce_scatter_single(out, x, opts) for out, x in zip(outputs, inputs, strict=True)])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        opts: Any = None,
    ) -> Work:
        """Exchange even parts, or uneven ones by splits of rows."""
        if not (output_splits or input_splits):
            return self.run("all_to_all", [x], [output], opts)
        sends, receives = self.row_counts(x, input_splits), self.row_counts(output, output_splits)
        return self.run("all_to_all", [x], [output], opts, send_counts=sends, recv_counts=receives)

    alltoall_base = all_to_all_single

    def row_counts(self, tensor: torch.Tensor, splits: Sequence[int] | None) -> tuple[int, ...]:
        """Return the number of elements in the rows of each split, or of equal splits if there are none."""
        rows, size = len(tensor), self.comm.size
        return tuple(n * tensor[:1].numel() for n in splits or [rows // size] * size)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        sends, receives = (tuple(t.numel() for t in tensors) for tensors in (inputs, outputs))
        return self.run("all_to_all", inputs, outputs, opts, send_counts=sends, recv_counts=receives)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Work:
        targets = list(outputs[0]) if self.comm.rank == opts.rootRank else []
        return self.run("gather", inputs, targets, opts, root=opts.rootRank)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        sources = list(inputs[0]) if self.comm.rank == opts.rootRank else []
        return self.run("scatter", sources, outputs, opts, root=opts.rootRank)

    def _start_coalescing(self, device: torch.device) -> None:
        self.coalesced = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self.coalesced = self.coalesced or [], None
        return self.last(works)

    # `split_group`, which torch offers where a device has been bound to the default group.
    supports_splitting = True
    options = None

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Take the `device_id` of init_process_group."""
        self.bound_device_id = device

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing: ranks outside a new group need not take part."""

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: ranks compare calls without such numbers."""

    def get_group_store(self) -> dist.Store:
        return self.store

    def split_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str = "",
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> "Group | None":
        """Create a group of some of this one's ranks, which alone need to call it; None on others."""
        if self.comm.rank not in ranks:
            return None
        comm = part(self.comm.mpi, ranks, group_name)
        store = dist.PrefixStore(f"{group_name}/{ranks[0]}/", self.store)  # others may have the same name
        limit = timedelta(seconds=min(self.limit_s, LONGEST_WAIT_S)) if timeout is None else timeout
        group = Group(comm, store, limit, group_name)
        group._set_group_desc(group_desc or "")
        return group

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Work:
        return MessageWork(self.comm.send, tensors[0], dst, tag, self.limit_s)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> Work:
        return MessageWork(self.comm.recv, tensors[0], src, tag, self.limit_s)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        return MessageWork(self.comm.recv, tensors[0], None, tag, self.limit_s)


def uneven(tensors: Tensors) -> tuple[int, ...] | None:
    """Return the lengths of tensors, None if all are equal."""
    counts = tuple(t.numel() for t in tensors)
    return counts if len(set(counts)) > 1 else None


def wait_for_others(store: dist.Store, size: int, prefix: str, limit_s: float, name_all: bool) -> str:
    """Do rank 0's part of a monitored barrier; returns the error, in gloo's words, which programs may look for."""
    deadline_s = time.monotonic() + limit_s
    late = [r for r in range(1, size) if awaited(store, f"{prefix}: {r}", deadline_s - time.monotonic()) is None]
    missing = ", ".join(map(str, late if name_all else late[:1]))
    who = f"[Rank 0]: Rank{'s' * name_all} {missing} failed to pass"
    failure = f"{who} monitoredBarrier in {1e3 * limit_s:g} ms" if missing else ""
    if failure and limit_s <= 0:
        failure = f"[Rank 0]: Rank 0 timed out in monitoredBarrier after {1e3 * limit_s:g} ms"
    store.set(f"{prefix}: over", failure)
    return failure


def report_to_first(store: dist.Store, rank: int, prefix: str, limit_s: float) -> str:
    """Do another rank's part; returns the error."""
    store.set(f"{prefix}: {rank}", "")
    over = awaited(store, f"{prefix}: over", 2 * limit_s)
    why = f"nothing came from it within {2 * limit_s:g} s" if over is None else over.decode()
    came = f"Rank {rank} successfully reached monitoredBarrier"
    return f"{came}, but received errors while waiting for send/recv from rank 0: {why}" if why else ""


def awaited(store: dist.Store, key: str, limit_s: float) -> bytes | None:
    """Return the store's value of a key, once there is one; None if there is none in time."""
    try:
        store.wait([key], timedelta(seconds=min(max(limit_s, 1e-3), LONGEST_WAIT_S)))
    except dist.DistStoreError:
        return None
    return store.get(key)
