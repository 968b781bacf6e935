"""A process group of torch.distributed, among ranks that MPI knows."""

import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, Work

from collectives.job.launch import start_mpi
from collectives.torch_backend.calls import Tensors, caller, sum_sparse
from collectives.torch_backend.rendezvous import communicator, part
from collectives.torch_backend.runner import Runner, untraced
from collectives.torch_backend.work import MessageWork

LONGEST_WAIT_S = 1e6  # that a store accepts


def create_group(backend_options: Any, _: Any) -> "Group":
    """Create a group on its ranks, and only there, for torch."""
    mpi, o = start_mpi(), backend_options
    comm = communicator(mpi, o.store, o.group_rank, o.group_size, o.group_id)
    return Group(comm, o.store, o.timeout, o.group_id)


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
        group = Group(comm, store, timedelta(seconds=self.limit_s) if timeout is None else timeout, group_name)
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
