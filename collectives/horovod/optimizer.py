"""Optimizers whose steps use all ranks' gradients, which are reduced in buckets during the backward pass.

Buckets start in the same order on all ranks, each once all its gradients are ready, in whichever order these appear.
Before the first one of a step the ranks match calls, so that joined ranks take part.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from collectives.arrays.views import to_torch
from collectives.horovod.functions import Average, Compression, broadcast_object, refusal_of
from collectives.horovod.matching import Description, MatchedCalls, TensorFacts
from collectives.horovod.process_sets import ProcessSet, global_process_set, rank

if TYPE_CHECKING:
    from collectives.communicator import Communicator

BUCKET_BYTES = 4 << 20
Groups = int | Sequence[Sequence[Tensor]] | None
Base: Any = Optimizer  # to mypy, the base of the mixins below


class GradientBucket:
    """Parameters whose gradients are sent together, in a buffer that every rank of the node reaches."""

    def __init__(self, comm: Communicator, params: Sequence[Tensor], compression: Any, op: str, predivide: float):
        self.params, self.compression, self.predivide = params, compression, predivide
        likes = [compression.compress(torch.zeros_like(param))[0] for param in params]
        lengths, dtype = [x.numel() for x in likes], str(likes[0].dtype).removeprefix("torch.")
        self.buffer = to_torch(comm.empty(sum(lengths), dtype, str(likes[0].device)))
        self.views = [view.view_as(x) for view, x in zip(self.buffer.split(lengths), likes, strict=True)]
        self.contexts: list[Any] = [None] * len(params)
        self.plan = comm.plan("all_reduce", self.buffer, op=op)

    @torch.no_grad()
    def start(self) -> None:
        """Begin to reduce the gradients, 0 if there is none."""
        for i, (param, view) in enumerate(zip(self.params, self.views, strict=True)):
            gradient = torch.zeros_like(param) if param.grad is None else param.grad
            sent, self.contexts[i] = self.compression.compress(gradient.to_dense() if gradient.is_sparse else gradient)
            view.copy_(sent)
        if self.predivide != 1:
            self.buffer.div_(self.predivide)
        self.plan.start()

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the reduced gradients; sparse ones become sparse again."""
        self.plan.wait()
        if self.predivide != 1:
            self.buffer.mul_(self.predivide)
        for param, view, context in zip(self.params, self.views, self.contexts, strict=True):
            reduced = self.compression.decompress(view, context)
            if param.grad is None:
                param.grad = reduced.clone()
            elif param.grad.is_sparse:
                param.grad = reduced.to_sparse(param.grad.sparse_dim())
            else:
                param.grad.copy_(reduced)


class GradientReducer:
    """Reduces gradients in buckets, each parameter's once it has had `passes` backward passes.

    `description` is the optimizer's, on which the ranks have agreed; `comm` is that of the buckets.
    """

    def __init__(
        self,
        calls: MatchedCalls,
        comm: Communicator,
        description: Description,
        buckets: Sequence[GradientBucket],
        passes: int,
    ):
        self.calls, self.comm, self.buckets, self.passes = calls, comm, buckets, passes
        self.step = description._replace(kind="step")
        calls.reducers[self.step.name] = self
        self.bucket_of = {param: bucket for bucket in buckets for param in bucket.params}
        self.hooks = [param.register_post_accumulate_grad_hook(self.ready) for param in self.bucket_of]
        self.begin()

    def begin(self) -> None:
        self.left = dict.fromkeys(self.bucket_of, self.passes)
        self.missing = {bucket: {*bucket.params} for bucket in self.buckets}
        self.num_started = 0

    @property
    def is_under_way(self) -> bool:
        return any(passes_left < self.passes for passes_left in self.left.values())

    def ready(self, param: Tensor) -> None:
        """Count a backward pass that has reached a parameter, and start the buckets that are full."""
        if self.left[param] == 0:
            raise AssertionError(
                f"a gradient has had more than backward_passes_per_step={self.passes} backward passes before step(): "
                "call step() after each so many, or raise it"
            )
        self.left[param] -= 1
        if self.left[param] == 0:
            self.missing[self.bucket_of[param]].discard(param)
            while self.num_started < len(self.buckets) and not self.missing[self.buckets[self.num_started]]:
                self.start_next()

    def start_next(self) -> None:
        if self.num_started == 0:
            self.calls.wait(self.calls.add(self.step))
        self.buckets[self.num_started].start()
        self.num_started += 1

    def finish(self) -> None:
        """Start the remaining buckets, and wait for all."""
        while self.num_started < len(self.buckets):
            self.start_next()
        for bucket in self.buckets:
            bucket.finish()
        self.begin()

    def free(self) -> None:
        """Remove the hooks of gradients, and free the communicator.  Collective."""
        for hook in self.hooks:
            hook.remove()
        for bucket in self.buckets:
            bucket.plan.free()
        self.comm.free()

    def join_in(self) -> None:
        """Contribute gradients of 0, for a rank that has joined."""
        for bucket in self.buckets:
            bucket.buffer.zero_()
            bucket.plan.start()
        for bucket in self.buckets:
            bucket.plan.wait()


def cut(params: Sequence[Tensor], groups: Groups) -> list[list[Tensor]]:
    """Return the parameters of each bucket, in the order in which the last of their gradients appears.

    Buckets have one dtype, and about `BUCKET_BYTES`, unless `groups` gives their number, or the buckets themselves.
    """
    order = {param: i for i, param in enumerate(reversed(params))}
    if isinstance(groups, int):
        each = -(-len(order) // groups) if groups else 1
        groups = [[*order][i : i + each] for i in range(0, len(order) if groups else 0, each)]
    parts = [[param for param in group if param in order] for group in groups or ()]
    grouped = {param for part in parts for param in part}
    parts += by_size(param for param in order if param not in grouped)
    buckets = [[*same] for part in parts for _, same in groupby(sorted(part, key=kind), key=kind)]
    return sorted(buckets, key=lambda bucket: max(order[param] for param in bucket))


def kind(param: Tensor) -> str:
    return f"{param.dtype} {param.device}"


def by_size(params: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for param in params:
        bucket.append(param)
        if sum(x.nbytes for x in bucket) >= BUCKET_BYTES:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


class ReducingOptimizer(Base):
    """Mixin of an optimizer that updates parameters by gradients reduced over the ranks."""

    reducer: GradientReducer | None  # None on ranks that are not in the process set
    is_synchronized, synchronizes = False, True

    def synchronize(self) -> None:
        """Wait for the reduced gradients, to change them before `step`, under `skip_synchronize`."""
        if self.reducer is not None:
            self.reducer.finish()
        self.is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make `step` use gradients as they are."""
        self.synchronizes = False
        try:
            yield
        finally:
            self.synchronizes = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, once all gradients are reduced; those of a closure after each time it is called."""
        if closure is not None:

            def with_gradients() -> Any:
                loss = closure()
                self.synchronize()
                return loss

            return super().step(with_gradients)
        if self.synchronizes:
            if self.is_synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): "
                    "gradients are reduced again; call it under skip_synchronize()",
                    stacklevel=2,
                )
            self.synchronize()
        self.is_synchronized = False
        return super().step()

    def zero_grad(self, *arguments: Any, **named: Any) -> None:
        if self.reducer is not None and self.reducer.is_under_way:
            raise AssertionError(
                "zero_grad() between backward() and step() or synchronize(): gradients are being reduced"
            )
        super().zero_grad(*arguments, **named)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes before `step`.  Raises: ValueError after the first of them."""
        if self.reducer is not None:
            if self.reducer.is_under_way:
                raise ValueError(f"set_backward_passes_per_step({passes}) amid a step: call it after step()")
            self.reducer.passes = passes
            self.reducer.begin()


def DistributedOptimizer(  # noqa: N802  as Horovod calls it
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer of the same class and state, whose steps reduce gradients over the ranks.  Collective.

    Gradients are reduced during backward passes, in buckets or `groups`; sparse ones as dense ones, with or without
    `sparse_as_dense`.

    Raises: InputError on every rank where one has wrong arguments, or other parameters.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    named = list(named_parameters or ((str(i), param) for i, param in enumerate(params)))
    failure = refusal(params, named, backward_passes_per_step, op, gradient_predivide_factor, groups)
    names = {} if failure else {param: name for name, param in named}
    reducer = None
    if process_set.included():
        trained = [param for param in params if param in names and param.requires_grad]
        calls, kind = process_set.matched, "DistributedOptimizer"
        facts = tuple(TensorFacts.of(param, name=names[param]) for param in trained)
        number = groups if groups is None or isinstance(groups, int) else len(groups)
        description = Description(kind, calls.name(kind), facts, (("op", op), ("groups", number)), failure)
        calls.wait(calls.add(description))
        comm = calls.comm.split(0)  # its calls run beside the others'
        assert comm is not None
        arguments = compression, op, gradient_predivide_factor
        buckets = [GradientBucket(comm, bucket, *arguments) for bucket in cut(trained, groups)]
        reducer = GradientReducer(calls, comm, description, buckets, backward_passes_per_step)
    result: Any = object.__new__(type(type(optimizer).__name__, (ReducingOptimizer, type(optimizer)), {}))
    state = {key: value for key, value in vars(optimizer).items() if key != "step"}  # a learning-rate scheduler's
    vars(result).update(state | {"reducer": reducer, "_parameter_names": names})  # the latter as in Horovod
    return result


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int, model: Any = None) -> None:
    """Copy the state and options of the root's optimizer to every rank's; `model` is not read.

    A new optimizer's state is filled first, as by a step on gradients of zero; parameters stay as they are.
    """
    if not optimizer.state and not isinstance(optimizer, torch.optim.LBFGS):  # which needs a closure
        fill_state(optimizer)
    is_root = rank() == root_rank
    state = tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, optimizer.state_dict()) if is_root else None
    state = broadcast_object(state, root_rank, "optimizer")
    if not is_root:
        optimizer.load_state_dict(state)


@torch.no_grad()
def fill_state(optimizer: Any) -> None:
    trained = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    before = [(param, param.clone(), param.grad) for param in trained]
    for param in trained:
        zeros = torch.zeros_like(param)
        param.grad = zeros.to_sparse() if isinstance(optimizer, torch.optim.SparseAdam) else zeros
    is_ours = isinstance(optimizer, ReducingOptimizer)
    step = super(ReducingOptimizer, optimizer).step if is_ours else optimizer.step  # of this rank alone
    step()
    for param, value, gradient in before:
        param.copy_(value)
        if gradient is not None:
            param.grad = gradient


def refusal(
    params: Sequence[Tensor],
    named: Sequence[Any],
    passes: int,
    op: str,
    predivide: float,
    groups: Any,
) -> str:
    if not all(isinstance(each, tuple) and len(each) == 2 for each in named):
        return "named_parameters must contain pairs of a name and a parameter: pass model.named_parameters()"
    names = [name for name, _ in named]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        return f"named_parameters has {repeated[0]!r} more than once: give each parameter a name of its own"
    if nameless := len({*params} - {param for _, param in named}):
        return f"named_parameters lacks {nameless} of {len(params)} parameters: pass model.named_parameters()"
    if passes < 1:
        return f"backward_passes_per_step={passes}: use 1 or more"
    if predivide != 1 and op != Average:
        return f"gradient_predivide_factor={predivide} with op={op}: it requires op=hvd.Average"
    if why := refusal_of(op):
        return why
    if isinstance(groups, int):
        return f"groups={groups}: use 0 or more, or lists of parameters" if groups < 0 else ""
    grouped = [param for group in groups or () for param in group]
    if not all(isinstance(param, Tensor) for param in grouped) or len({*grouped}) < len(grouped):
        return "groups must be lists of parameters, each parameter in one of them"
    return ""
