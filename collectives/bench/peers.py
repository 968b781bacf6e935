"""Peers to compare with: the MPI library's own collectives, and those of gloo and NCCL, through torch."""

import atexit
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

from mpi4py import MPI

from collectives.arrays import addresses, views
from collectives.bench.trial import PEERS, MessageTrial, Trial
from collectives.communicator import Communicator
from collectives.job.errors import InputError
from collectives.runtime.backends.native_mpi import check_native, mpi_view, native_call
from collectives.runtime.call.operands import call_on
from collectives.schedule.spec import OPS, Chunks, spec_of

TIMEOUT = timedelta(seconds=60)


def peer_call(comm: Communicator, trial: Trial, name: str) -> Callable[[], Any]:
    """Bind a peer's call to a trial's arrays.  Collective.

    Raises: InputError on every rank for calls that the peer does not support.
    """
    arguments = trial.collective, trial.x, trial.out, trial.workload.op, trial.root
    counts = {name: trial.arguments[name] for name in ("send_counts", "recv_counts") if name in trial.arguments}
    with comm.agreed(name):
        if name == "mpi":
            return mpi_call(comm.mpi, *arguments, **counts)
        call = torch_call(*arguments, **counts)
        trial.fill()
        try:
            call()  # fails for dtypes that it can't move
        except (RuntimeError, TypeError) as error:
            raise ValueError(str(error).splitlines()[0]) from None
    return call


def mpi_call(
    mpi: MPI.Comm, collective: str, x: Any, out: Any, op: str = "sum", root: int = 0, **counts: Any
) -> Callable[[], Any]:
    """Bind the MPI library's call, as directly as mpi4py can: in place where `x` and `out` are one array."""
    spec = spec_of(collective)
    arguments = counts | {"out": None if x is out else out, "op": op, "root": root}
    call = call_on(collective, mpi.rank, mpi.size, x, **{name: arguments.get(name) for name in spec.takes})
    check_native(call)
    if spec.reduces and op == "avg":
        raise ValueError("MPI has no op 'avg'")
    if call.operands.in_place and spec.reduces and spec.gets is Chunks.OWN:
        raise ValueError("MPI's reduce_scatter in place leaves the result elsewhere")
    return native_call(call, mpi)


def start_of(comm: Communicator, trial: Trial, call: Callable[..., Any]) -> Callable[[], Callable[[], Any]]:
    """Return a function that starts a peer's call without waiting, and returns the wait.  Collective.

    Raises: InputError on every rank where the peer has no such call.
    """
    module = getattr(getattr(call, "func", call), "__module__", None) or ""
    if module.startswith("torch"):
        start = partial(call, async_op=True)
        return lambda: start().wait
    with comm.agreed("mpi"):
        if not isinstance(call, partial):
            raise ValueError(f"there is no non-blocking {trial.collective} of these arrays")
    function = getattr(comm.mpi, f"I{call.func.__name__.lower()}")
    return lambda: function(*call.args).Wait


class Library(NamedTuple):
    """A library's messages, of its own views of arrays: calls that wait, and calls that return what to wait for."""

    view: Callable[[Any], Any]
    send: Callable[[Any, int], Any]
    recv: Callable[[Any, int], Any]
    start_send: Callable[[Any, int], Any]
    start_recv: Callable[[Any, int], Any]
    wait: Callable[[list[Any]], Any]


def library(comm: Communicator, name: str) -> Library:
    """Return the messages of a peer, or our own."""
    if name == "mpi":
        mpi = comm.mpi
        return Library(mpi_view, mpi.Send, mpi.Recv, mpi.Isend, mpi.Irecv, MPI.Request.Waitall)
    if name in PEERS:
        from torch import distributed as torch

        return Library(views.to_torch, torch.send, torch.recv, torch.isend, torch.irecv, wait_for_each)
    start_send, start_recv = (partial(call, blocking=False) for call in (comm.send, comm.recv))
    return Library(lambda x: x, comm.send, comm.recv, start_send, start_recv, wait_for_each)


def wait_for_each(requests: list[Any]) -> None:
    for request in requests:
        request.wait()


def message_call(comm: Communicator, trial: MessageTrial, name: str, window: int) -> Callable[[], Any]:
    """Bind the messages of a run by a library, ours or a peer's.  Collective.

    Raises: InputError on every rank for arrays that the library cannot send.
    """
    calls = library(comm, name)
    with comm.agreed(name):
        if name == "mpi" and not trial.device.mpi_reads:
            raise ValueError(f"it needs an MPI that reads {trial.device.name} memory")
        if trial.partners is None:
            return lambda: None
        dest, source = trial.partners
        x, element = calls.view(trial.x), calls.view(trial.element)
        out = None if trial.out is None else calls.view(trial.out)
        number, both_ways = window if trial.messages.is_windowed else 1, trial.messages.both_ways
        sends = [(x, dest)] * number if both_ways or trial.is_first else []
        recvs = [(out, source)] * number if both_ways or not trial.is_first else []
        replies = {"": [], "vector": [(x, out)], "element": [(x[:1], element)]}[trial.messages.reply]
        answers = [(to_send, dest) for to_send, _ in replies if not trial.is_first]
        awaited = [(to_recv, source) for _, to_recv in replies if trial.is_first]
    exchange, reply = at_once(calls, sends, recvs), at_once(calls, answers, awaited)

    def run() -> None:
        exchange()
        reply()

    return run if replies else exchange


def at_once(calls: Library, sends: list[Any], recvs: list[Any]) -> Callable[[], Any]:
    """Return a function that sends and receives at the same time, to and from ranks, and waits for all."""
    if len(sends) + len(recvs) == 1:
        ((array, peer),) = [*sends, *recvs]
        return partial(calls.send if sends else calls.recv, array, peer)

    def run() -> None:
        requests = [calls.start_recv(out, source) for out, source in recvs]
        requests += [calls.start_send(x, dest) for x, dest in sends]
        calls.wait(requests)

    return run


def inside(part: Any, whole: Any) -> bool:
    """Return whether an array is a part of another, longer one."""
    if part is None or whole is None or part.nbytes >= whole.nbytes:
        return False
    return 0 <= addresses.pointer(part) - addresses.pointer(whole) < whole.nbytes


def torch_call(
    collective: str,
    x: Any,
    out: Any,
    op: str = "sum",
    root: int = 0,
    send_counts: list[int] | None = None,
    recv_counts: list[int] | None = None,
) -> Callable[[], Any]:
    """Bind torch.distributed's call, by whichever backend was started: in place where `x` and `out` are one array."""
    from torch import distributed

    here: Any
    there: Any
    here, there = (None if array is None else views.to_torch(array) for array in (x, out))
    size, is_root = distributed.get_world_size(), distributed.get_rank() == root
    if not OPS[op].torch or (op == "avg" and distributed.get_backend() == "gloo"):
        raise ValueError(f"{distributed.get_backend()} has no op {op!r}")
    reduction = getattr(distributed.ReduceOp, OPS[op].torch)
    match collective:
        case "all_reduce" if x is out:
            return partial(distributed.all_reduce, there, reduction)
        case "reduce_scatter" if not inside(out, x):
            return partial(renamed("reduce_scatter"), there, here, reduction)
        case "all_gather" if not inside(x, out):
            return partial(renamed("all_gather"), there, here)
        case "all_to_all":
            return partial(distributed.all_to_all_single, there, here, recv_counts, send_counts)
        case "broadcast":
            return partial(distributed.broadcast, here, root)
        case "gather":
            return partial(distributed.gather, here, list(there.chunk(size)) if is_root else None, root)
        case "scatter":
            return partial(distributed.scatter, there, list(here.chunk(size)) if is_root else None, root)
        case "barrier":
            return distributed.barrier
    raise ValueError(f"torch.distributed has no such {collective}")


def renamed(collective: str) -> Callable[..., Any]:
    """Find torch's function, whose older name newer releases warn of."""
    from torch import distributed

    older = {"reduce_scatter": "reduce_scatter_tensor", "all_gather": "all_gather_into_tensor"}
    return getattr(distributed, f"{collective}_single", None) or getattr(distributed, older[collective])


def take_device(comm: Communicator, device: str) -> None:
    """Choose this rank's GPU: the ranks of a node take its GPUs in turn."""
    if device == "cuda":
        runtime = views.device(device).xp.cuda.runtime
        local = comm.topology.nodes[comm.topology.node_of[comm.rank]].index(comm.rank)
        runtime.setDevice(local % runtime.getDeviceCount())


def start(comm: Communicator, flags: Namespace) -> dict[str, str]:
    """Start the peers that are available, and say why others are not.  Collective."""
    missing = {}
    for name in [peer for peer in flags.peers if peer != "mpi"]:
        try:
            with comm.agreed(name):
                if (name == "gloo") != (flags.device == "cpu"):
                    raise ValueError(f"it is not for --device {flags.device}")
                from torch import cuda, distributed

                if not getattr(distributed, f"is_{name}_available")():
                    raise ValueError(f"this torch has no {name}")
                if name == "nccl":  # torch's barrier works there, too
                    cuda.set_device(views.device(flags.device).xp.cuda.runtime.getDevice())
            start_torch(comm.mpi, name, alone=len(comm.topology.nodes) == 1)
        except InputError as error:
            missing[name] = f"--peers {name}: left out: {error}"
    return missing


def start_torch(mpi: MPI.Comm, backend: str, alone: bool) -> None:
    """Start torch.distributed among the ranks, which are on one machine if `alone`.  Collective."""
    from torch import distributed

    from collectives.torch_backend import create_store

    if alone:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    end_job, store = sys.excepthook, create_store(mpi, TIMEOUT)
    distributed.init_process_group(backend, store=store, rank=mpi.rank, world_size=mpi.size, timeout=TIMEOUT)
    atexit.register(distributed.destroy_process_group)
    sys.excepthook = end_job  # torch's delays this one's output until after the end of the job
