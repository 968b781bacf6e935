"""A process group of torch.distributed, among ranks that MPI knows."""

import sys
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch._C._distributed_c10d import AllreduceOptions, ReduceOp, Work

from collectives.communicator import Communicator
from collectives.job.launch import start_mpi
from collectives.schedule.ops import OPS
from collectives.torch_backend import monitored, reductions
from collectives.torch_backend.call import Tensors, TorchCall, caller
from collectives.torch_backend.letters import Delivery
from collectives.torch_backend.runner import Runner
from collectives.torch_backend.untraced import untraced

RedOp: Any = ReduceOp.RedOpType
NAMES = {getattr(RedOp, op.torch): name for name, op in OPS.items()}
NAMES_OF_BOOL = NAMES | {RedOp.SUM: "max", RedOp.PRODUCT: "min"}  # as NCCL's


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
        store.set("world ranks", b",".join(ranks).decode())
    members = [int(r) for r in store.get("world ranks").split(b",")]
    if len(set(members)) < size:
        raise dist.DistBackendError(
            f"{size} ranks were asked for, but MPI has started {world.size}: start as many with mpirun or srun"
        )
    return part(world, members, name)


def part(of: Any, ranks: Sequence[int], name: str) -> Communicator:
    """Of some ranks of an MPI communicator, which all know them.  Collective among these."""
    largest: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    made = of.Create_group(of.group.Incl(ranks), crc32(name.encode()) % largest)
    comm = Communicator(made, check=True, timeout_s=0)
    made.Free()
    return comm


@untraced
class Group(Runner):
    """torch's calls, as it makes them: with lists of one tensor each; see `torch.distributed` for what they do.

    Of names that torch has changed, both are there.
    """

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        opts = AllreduceOptions() if opts is None else opts
        if len(tensors) == 1 and tensors[0].layout == torch.sparse_coo:
            place = caller(sys._getframe(1))
            return self.submit(partial(reductions.sum_sparse, self, tensors[0], opts, place), tensors, opts)
        return self.reduction("all_reduce", tensors, tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        taken = tensors if self.comm.rank == opts.rootRank else []
        return self.reduction("reduce", tensors, taken, opts, ("root", opts.rootRank))

    def reduction(self, name: str, given: Tensors, taken: Tensors, opts: Any, *same: tuple) -> Work:
        asked, dtype = opts.reduceOp.op, given[0].dtype
        count = given[0].numel() if len(given) == 1 else total(given)
        if asked == RedOp.PREMUL_SUM:
            call = TorchCall(
                name, given, taken, (("op", "sum"), *same), (), reductions.refuse(dtype), count, "PREMUL_SUM"
            )
            call.place = caller(sys._getframe(1))
            return self.submit(partial(reductions.sum_products, self, call, opts), taken or given, opts)
        op = (NAMES_OF_BOOL if dtype == torch.bool else NAMES)[asked]
        return self.run(TorchCall(name, given, taken, (("op", op), *same), (), "", count), opts)

    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        root = opts.rootRank
        given, taken = (tensors, []) if self.comm.rank == root else ([], tensors)
        return self.run(TorchCall("broadcast", given, taken, (("root", root),), count=total(tensors)), opts)

    def barrier(self, opts: Any = None) -> Work:
        return self.run(TorchCall("barrier"), opts)

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Work:
        return self.run(TorchCall("all_gather", [given], [output], count=given.numel()), opts)

    _allgather_base = all_gather_single

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Raises: DistBackendError on every rank where one has not come in time."""
        self.num_monitored += 1
        turn = f"monitored barrier {self.num_monitored}"
        limit_s = self.limit_s if timeout is None else timeout.total_seconds()
        monitored.meet(self.store, self.comm.rank, self.comm.size, turn, limit_s, wait_all_ranks)

    def allgather(self, outputs: Sequence[Tensors], given: Tensors, opts: Any = None) -> Work:
        counts = [t.numel() for t in outputs[0]]
        uneven = (("counts", tuple(counts)),) * (len(set(counts)) > 1)
        return self.run(TorchCall("all_gather", given, list(outputs[0]), uneven, count=total(outputs[0])), opts)

    def all_gather_single_coalesced(self, outputs: Tensors, given: Tensors, opts: Any = None) -> Work:
        return self.last([self.all_gather_single(o, g, opts) for o, g in zip(outputs, given, strict=True)])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, outputs: Sequence[Tensors], given: Tensors, opts: Any = None) -> Work:
        """Of each tensor; `outputs` has a list for each rank."""
        lists = [list(of_tensor) for of_tensor in zip(*outputs, strict=True)]
        return self.last([self.allgather([o], [g], opts) for o, g in zip(lists, given, strict=True)])

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Work:
        return self.reduction("reduce_scatter", [given], [output], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter(self, outputs: Tensors, given: Sequence[Tensors], opts: Any = None) -> Work:
        counts = [t.numel() for t in given[0]]
        uneven = (("counts", tuple(counts)),) * (len(set(counts)) > 1)
        return self.reduction("reduce_scatter", list(given[0]), outputs, opts, *uneven)

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
            return self.run(TorchCall("all_to_all", [given], [output], count=given.numel()), opts)
        sends, receives = (
            row_counts(t, s, self.comm.size) for t, s in ((given, input_splits), (output, output_splits))
        )
        own = (("send_counts", sends), ("recv_counts", receives))
        return self.run(TorchCall("all_to_all", [given], [output], (), own), opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Tensors, given: Tensors, opts: Any = None) -> Work:
        sends, receives = (tuple(t.numel() for t in tensors) for tensors in (given, outputs))
        own = (("send_counts", sends), ("recv_counts", receives))
        return self.run(TorchCall("all_to_all", given, outputs, (), own), opts)

    def gather(self, outputs: Sequence[Tensors], given: Tensors, opts: Any) -> Work:
        taken = list(outputs[0]) if self.comm.rank == opts.rootRank else []
        return self.run(TorchCall("gather", given, taken, (("root", opts.rootRank),), count=total(given)), opts)

    def scatter(self, outputs: Tensors, given: Sequence[Tensors], opts: Any) -> Work:
        tensors = list(given[0]) if self.comm.rank == opts.rootRank else []
        return self.run(TorchCall("scatter", tensors, outputs, (("root", opts.rootRank),), count=total(outputs)), opts)

    def last(self, works: list[Work]) -> Work:
        """Of calls that end in their order; nothing to wait for if there are none."""
        return works[-1] if works else self.finished

    def _start_coalescing(self, device: torch.device) -> None:
        self.coalesced = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self.coalesced = self.coalesced or [], None
        return self.last(works)

    # --- split_group, which torch offers where a device has been bound to the default group ---

    supports_splitting = True
    options = None

    def eager_connect_single_device(self, device: torch.device) -> None:
        """What torch does with the `device_id` of init_process_group."""
        self.bound_device_id = device

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Nothing: ranks that a new group leaves out need not come."""

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: calls are compared as they are."""

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
        """A group of some of this one's ranks, which alone need to call it; None on others."""
        if self.comm.rank not in ranks:
            return None
        comm = part(self.comm.mpi, ranks, group_name)
        store = dist.PrefixStore(f"{group_name}/{ranks[0]}/", self.store)  # others may have the same name
        group = Group(comm, store, timedelta(seconds=self.limit_s) if timeout is None else timeout, group_name)
        group._set_group_desc(group_desc or "")
        return group

    # --- point to point ---

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Work:
        return Delivery(self.comm, tensors[0], dst, tag, self.limit_s, sends=True)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> Work:
        return Delivery(self.comm, tensors[0], src, tag, self.limit_s, sends=False)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        return Delivery(self.comm, tensors[0], None, tag, self.limit_s, sends=False)


def total(tensors: Tensors) -> int:
    return sum(t.numel() for t in tensors)


def row_counts(tensor: torch.Tensor, splits: Sequence[int] | None, size: int) -> tuple[int, ...]:
    """How many elements the rows of each split have, of equal ones if there are none."""
    rows = len(tensor)
    row = tensor.numel() // rows if rows else 0
    return tuple(n * row for n in splits or [rows // size] * size)
