"""A process group of torch.distributed, among ranks that MPI knows."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch._C._distributed_c10d import AllreduceOptions, ProcessGroup, ReduceOp, Work

from collectives.communicator import Communicator
from collectives.errors import CommunicationError, InputError
from collectives.job import start_mpi
from collectives.plan import Plan
from collectives.torch_backend import bound
from collectives.torch_backend.call import Call, Tensors
from collectives.torch_backend.letters import Delivery
from collectives.torch_backend.work import Finished, Line, Pending, Run, at_once, seconds

SHORTEST_SLEEP_S, LONGEST_SLEEP_S = 1e-4, 0.05
LONGEST_WAIT_S = 1e6
MOST_BOUND = 256  # calls kept bound
RedOp = ReduceOp.RedOpType
OPS = {RedOp.SUM: "sum", RedOp.PRODUCT: "prod", RedOp.MIN: "min", RedOp.MAX: "max", RedOp.AVG: "avg"}
OPS_OF_BOOL = {RedOp.SUM: "max", RedOp.PRODUCT: "min", RedOp.MIN: "min", RedOp.MAX: "max"}  # as NCCL's


def create_group(options: Any, _: Any) -> "Group":
    """What torch calls on the ranks of a new group, and only there."""
    mpi = start_mpi()
    comm = communicator(mpi, options.store, options.group_rank, options.group_size, options.group_id)
    return Group(comm, options.store, options.timeout, options.group_id)


def communicator(mpi: Any, store: dist.Store, rank: int, size: int, name: str) -> Communicator:
    """Of the ranks that have come together in a store, in whatever order, of MPI's world."""
    world = mpi.COMM_WORLD
    store.set(f"world rank of {rank}", str(world.rank))
    if rank == 0:
        ranks = store.multi_get([f"world rank of {r}" for r in range(size)])
        store.set("world ranks", b",".join(ranks))
    ranks = [int(r) for r in store.get("world ranks").split(b",")]
    if len(set(ranks)) < size:
        raise dist.DistBackendError(
            f"{size} ranks were asked for, but MPI has started {world.size}: start as many with mpirun or srun"
        )
    part = world.Create_group(world.group.Incl(ranks), crc32(name.encode()) % world.Get_attr(MPI.TAG_UB))
    made = Communicator(part, check=True, timeout_s=0)
    part.Free()
    return made


class Group(ProcessGroup):
    """Calls run in the order in which they are made, each compared with the other ranks' before it runs.

    torch's methods take lists of one tensor each; see `torch.distributed` for what they do.
    """

    def __init__(self, comm: Communicator, store: dist.Store, timeout: timedelta, name: str):
        super().__init__(comm.rank, comm.size)
        self.comm, self.store, self.limit_s, self._name = comm, store, seconds(timeout), name
        self.line = Line()
        self.word = comm.empty(3, "int64")  # digest, negated digest, whether the call is to be bound
        self.compare = comm.plan("all_reduce", self.word, op="max")
        self.bound: OrderedDict[tuple, bound.Bound] = OrderedDict()
        self.coalesced: list[Work] | None = None
        self.failure = ""
        self.num_monitored = 0
        self.finished = Finished()

    # --- what torch asks of a group itself ---

    def rank(self) -> int:
        return self.comm.rank

    def size(self) -> int:
        return self.comm.size

    def name(self) -> str:
        return "collectives"

    getBackendName = _get_backend_name = name  # noqa: N815  as C++ calls it

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def getGroupName(self) -> str:  # noqa: N802  as C++ calls it
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")] + [torch.device("cuda")] * torch.cuda.is_available()

    def _get_backend(self, device: torch.device) -> "Group":
        return self

    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False

    def set_timeout(self, timeout: timedelta) -> None:
        self.limit_s = seconds(timeout)

    def shutdown(self) -> None:
        """End the group, and give back what it holds, unless a call has failed on any rank: it may not come here."""
        self.line.end()
        if not self.failure and self.all_are_done():
            self.bound.clear()
            self.comm.free()
        self.failure = self.failure or "the group has been destroyed"

    abort = shutdown

    def all_are_done(self) -> bool:
        """Whether every rank ends the group, and none of them because a call has failed."""
        came = self.comm.mpi.Ibarrier()
        deadline_s = time.monotonic() + self.limit_s
        sleep_s = SHORTEST_SLEEP_S
        while not came.Test():
            if time.monotonic() > deadline_s or (sleep_s == LONGEST_SLEEP_S and self.store.check(["failed"])):
                return False
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, LONGEST_SLEEP_S)
        return True

    def fail(self, words: str) -> None:
        """No call in this group can be made any more."""
        self.failure = words
        self.store.set("failed", words)

    # --- running calls ---

    def run(self, call: Call, options: Any = None) -> Work:
        """Run a call, or have it run."""
        if not getattr(options, "asyncOp", True) and self.line.free:
            self.execute(call, options, at_once)
            return self.finished
        work = Pending(partial(self.execute, call, options), call.taken or call.given)
        self.line.add(work)
        if self.coalesced is not None:
            self.coalesced.append(work)
        return work

    def execute(self, call: Call, options: Any, run: Run) -> None:
        """Run a call to its end; what goes wrong is torch's kind of error."""

        def limit_s() -> float:
            return min(self.limit_s, seconds(getattr(options, "timeout", None)))

        if self.failure:
            raise dist.DistBackendError(f"{call.said}: {self.failure}")
        try:
            self.agreed(call, lambda plan: run(plan, limit_s))
        except TimeoutError:
            self.fail(f"{call.said} was not over after {limit_s():g} s: not all {self.comm.size} ranks have come")
            raise dist.DistBackendError(self.failure) from None
        except InputError as error:
            raise dist.DistBackendError(str(error)) from None
        except (CommunicationError, MPI.Exception) as error:
            self.fail(str(error))
            raise dist.DistBackendError(self.failure) from error

    def agreed(self, call: Call, run: Callable[[Plan], None]) -> None:
        """Run a call that all ranks make alike, once all have bound it.

        Which calls a rank still has bound depends on where its tensors lie: where one has to bind, all do.
        """
        key = bound.key(call) if not call.failure else None
        known = self.bound.get(key) if key else None
        digest = known.digest if known else call.digest
        self.word[:] = digest, -digest, known is None
        run(self.compare)
        highest, negated, unbound = self.word.tolist()
        if highest != -negated or unbound:
            known = self.bind(call, key)
        assert known is not None
        known.run(call, run)

    def bind(self, call: Call, key: tuple | None) -> bound.Bound:
        """Collective.  Raises: InputError on every rank where one cannot make the call, or ranks make others."""
        self.comm.compare(call.said, call.refuse())
        made = self.bound[key] = bound.bind(self.comm, call)
        if len(self.bound) > MOST_BOUND:
            self.bound.popitem(last=False)
        return made

    # --- collectives ---

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        opts = AllreduceOptions() if opts is None else opts
        return self.run(self.reduction("all_reduce", tensors, tensors, opts), opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        taken = tensors if self.comm.rank == opts.rootRank else []
        return self.run(self.reduction("reduce", tensors, taken, opts, ("root", opts.rootRank)), opts)

    def reduction(self, name: str, given: Tensors, taken: Tensors, opts: Any, *same: tuple) -> Call:
        asked = opts.reduceOp.op
        of_bool = given[0].dtype == torch.bool
        op = (OPS_OF_BOOL if of_bool else OPS).get(asked, "")
        failure = "" if op else f"{name}: no op {asked.name} of {given[0].dtype}: use {', '.join(map(str, OPS))}"
        count = given[0].numel() if len(given) == 1 else total(given)
        return Call(name, given, taken, (("op", op), *same), (), failure, count)

    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        root = opts.rootRank
        given, taken = (tensors, []) if self.comm.rank == root else ([], tensors)
        return self.run(Call("broadcast", given, taken, (("root", root),), count=total(tensors)), opts)

    def barrier(self, opts: Any = None) -> Work:
        return self.run(Call("barrier"), opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier by way of the store, where rank 0 says who has not come.

        Raises: DistBackendError on rank 0 with the first rank that is missing, or, asked for, all; and on the others.
        """
        limit_s = min(self.limit_s, seconds(timeout))
        self.num_monitored += 1
        turn = f"monitored barrier {self.num_monitored}"
        if self.comm.rank > 0:
            self.store.set(f"{turn}: {self.comm.rank}", "")
            over = self.awaited(f"{turn}: over", 2 * limit_s)
            missing = "0" if over is None else over.decode()
        else:
            deadline_s = time.monotonic() + limit_s
            others = range(1, self.comm.size)
            late = [r for r in others if self.awaited(f"{turn}: {r}", deadline_s - time.monotonic()) is None]
            missing = ", ".join(map(str, late if wait_all_ranks else late[:1]))
            self.store.set(f"{turn}: over", missing)
        if missing:
            raise dist.DistBackendError(f"monitored_barrier: ranks {missing} have not come within {limit_s:g} s")

    def awaited(self, key: str, limit_s: float) -> bytes | None:
        """What the store has under a key, once it has; None where it has nothing in time."""
        try:
            self.store.wait([key], timedelta(seconds=min(max(limit_s, 1e-3), LONGEST_WAIT_S)))
        except dist.DistStoreError:
            return None
        return self.store.get(key)

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Work:
        return self.run(Call("all_gather", [given], [output], count=given.numel()), opts)

    _allgather_base = all_gather_single

    def allgather(self, outputs: Sequence[Tensors], given: Tensors, opts: Any = None) -> Work:
        counts = [t.numel() * t.itemsize for t in outputs[0]]
        uneven = (("counts", tuple(counts)),) * (len(set(counts)) > 1)
        return self.run(Call("all_gather", given, list(outputs[0]), uneven, count=total(outputs[0])), opts)

    def all_gather_single_coalesced(self, outputs: Tensors, given: Tensors, opts: Any = None) -> Work:
        return self.last([self.all_gather_single(o, g, opts) for o, g in zip(outputs, given, strict=True)])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, outputs: Sequence[Tensors], given: Tensors, opts: Any = None) -> Work:
        """Of each tensor; `outputs` has a list for each rank."""
        lists = [list(of_tensor) for of_tensor in zip(*outputs, strict=True)]
        return self.last([self.allgather([o], [g], opts) for o, g in zip(lists, given, strict=True)])

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Work:
        return self.run(self.reduction("reduce_scatter", [given], [output], opts), opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter(self, outputs: Tensors, given: Sequence[Tensors], opts: Any = None) -> Work:
        counts = [t.numel() for t in given[0]]
        uneven = (("counts", tuple(counts)),) * (len(set(counts)) > 1)
        return self.run(self.reduction("reduce_scatter", list(given[0]), outputs, opts, *uneven), opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, given: Tensors, opts: Any = None) -> Work:
        return self.last([self.reduce_scatter_single(o, g, opts) for o, g in zip(outputs, given, strict=True)])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        opts: Any = None,
    ) -> Work:
        """Uneven, by splits of rows."""
        if not output_splits and not input_splits:
            return self.run(Call("all_to_all", [given], [output], count=given.numel()), opts)
        sends, receives = (row_bytes(t, s, self.comm.size) for t, s in ((given, input_splits), (output, output_splits)))
        own = (("send_counts", sends), ("recv_counts", receives))
        return self.run(Call("all_to_all", [given], [output], (), own), opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Tensors, given: Tensors, opts: Any = None) -> Work:
        sends, receives = (tuple(t.numel() * t.itemsize for t in tensors) for tensors in (given, outputs))
        own = (("send_counts", sends), ("recv_counts", receives))
        return self.run(Call("all_to_all", given, outputs, (), own), opts)

    def gather(self, outputs: Sequence[Tensors], given: Tensors, opts: Any) -> Work:
        taken = list(outputs[0]) if self.comm.rank == opts.rootRank else []
        return self.run(Call("gather", given, taken, (("root", opts.rootRank),), count=total(given)), opts)

    def scatter(self, outputs: Tensors, given: Sequence[Tensors], opts: Any) -> Work:
        tensors = list(given[0]) if self.comm.rank == opts.rootRank else []
        return self.run(Call("scatter", tensors, outputs, (("root", opts.rootRank),), count=total(outputs)), opts)

    def last(self, works: list[Work]) -> Work:
        """Of calls that end in their order; nothing to wait for if there are none."""
        return works[-1] if works else self.finished

    def _start_coalescing(self, device: torch.device) -> None:
        self.coalesced = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self.coalesced = self.coalesced or [], None
        return self.last(works)

    # --- point to point ---

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Work:
        return Delivery(self.comm, tensors[0], dst, tag, self.limit_s, sends=True)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> Work:
        return Delivery(self.comm, tensors[0], src, tag, self.limit_s, sends=False)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        return Delivery(self.comm, tensors[0], None, tag, self.limit_s, sends=False)


def total(tensors: Tensors) -> int:
    return sum(t.numel() for t in tensors)


def row_bytes(tensor: torch.Tensor, splits: Sequence[int] | None, size: int) -> tuple[int, ...]:
    """How many bytes the rows of each split have, of equal ones if there are none."""
    rows = len(tensor)
    row = tensor.nbytes // rows if rows else 0
    return tuple(n * row for n in splits or [rows // size] * size)
