"""The ranks of a process group, and the execution of their calls."""

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
from torch._C._distributed_c10d import ProcessGroup, ReduceOp, Work

from collectives.communicator import Communicator
from collectives.job.errors import InputError
from collectives.runtime.plan import Plan
from collectives.runtime.resolve import Runs
from collectives.schedule.spec import OPS
from collectives.torch_backend.calls import Execute, Tensors, TorchCall, caller, options_of, sum_products
from collectives.torch_backend.work import FAILURES, HELD, CallQueue, Finished, Pending, PlanWork, seconds

SHORTEST_SLEEP_S, LONGEST_SLEEP_S = 1e-4, 0.05
SHORT_BYTES = 1 << 16
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
        self.comm, self.store, self.limit_s, self._name = comm, store, seconds(timeout), name
        self.queue = CallQueue()
        comm.barrier()  # all ranks are here for it
        self.coalesced: list[Work] | None = None
        self.failure = ""
        self.num_monitored = 0
        self.finished = Finished()

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

    def _get_backend(self, device: torch.device) -> "Runner":
        return self

    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False

    def set_timeout(self, timeout: timedelta) -> None:
        self.limit_s = seconds(timeout)

    def shutdown(self) -> None:
        """End the group, and free its resources, unless a call has failed on any rank: it may not come here."""
        self.queue.end()
        with suppress(TimeoutError):
            self.comm._resolver.drain(partial(self.run_plan, None, time.monotonic()))
        if not self.failure and self.all_are_done():
            self.comm.free()
        self.failure = self.failure or "the group has been destroyed"

    def abort(self) -> None:
        """End the group without waiting for other ranks."""
        self.fail("the group has been aborted")

    def all_are_done(self) -> bool:
        """Return whether every rank ends the group, and none of them after a failed call."""
        came, sleep_s = self.comm.mpi.Ibarrier(), SHORTEST_SLEEP_S
        deadline_s = time.monotonic() + self.limit_s
        while not came.Test():
            if time.monotonic() > deadline_s or (sleep_s == LONGEST_SLEEP_S and self.has_failed()):
                return False
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, LONGEST_SLEEP_S)
        return True

    def has_failed(self) -> bool:
        """Return whether a call has failed on any rank."""
        try:
            return self.store.check(["failed"])
        except dist.DistError:  # rank 0, which serves the store, has ended
            return True

    def fail(self, words: str) -> None:
        """Refuse all further calls in this group."""
        self.failure = words
        with suppress(dist.DistError):  # rank 0, which serves the store, may have ended
            self.store.set("failed", words)

    def run(self, collective: str, inputs: Tensors, outputs: Tensors, opts: Any, **values: Any) -> Work:
        """Run a call, begin it, or have it run; `values` are of options."""
        call = TorchCall(collective, inputs, outputs, options_of(collective, **values))
        call.place = caller(sys._getframe(1))
        if getattr(opts, "asyncOp", True) and (work := self.begin(call, opts)):
            return work
        return self.submit(lambda execute: execute(call), call.outputs or call.inputs, opts, call.inputs)

    def begin(self, call: TorchCall, opts: Any) -> Work | None:
        """Begin an asynchronous call in this thread, if it has been bound and takes less time than handing it over."""
        results = call.outputs or call.inputs
        if self.failure or not self.queue.is_empty or sum(t.nbytes for t in call.inputs + call.outputs) > SHORT_BYTES:
            return None
        with self.queue.running:
            if not CPP_HOLDS_WORKS or (plan := call.begin(self.comm)) is None:
                return None
        return self.keep(PlanWork(plan, results, self.limit_of(opts), partial(self.error_of, call), self.queue))

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
        if op != PREMUL_SUM:
            return self.run(collective, inputs, outputs, opts, op=name, **values)
        call = TorchCall(collective, inputs, outputs, options_of(collective, op=name, **values), "PREMUL_SUM")
        call.place = caller(sys._getframe(1))
        factor = opts.reduceOp.__getstate__()[1]  # older torch has no attribute for it
        return self.submit(partial(sum_products, call, factor), outputs or inputs, opts)

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
            raise self.error_of(call, error, self.limit_of(opts)) from error

    def error_of(self, call: TorchCall, error: Exception, limit_s: float) -> dist.DistBackendError:
        """Make torch's kind of error.  After any but a refusal, further calls are refused."""
        if isinstance(error, InputError):
            return dist.DistBackendError(str(error))
        late = f"{call} did not finish within its timeout of {limit_s:g} s: not all {self.comm.size} ranks have arrived"
        self.fail(late if isinstance(error, TimeoutError) else str(error))
        return dist.DistBackendError(self.failure)


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
