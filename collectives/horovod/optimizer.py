"""Optimizers whose steps use all ranks' gradients."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from collectives.horovod.functions import Adasum, Average, Compression, grouped_allreduce_, refusal_of
from collectives.horovod.matching import Description, MatchedCalls, TensorFacts
from collectives.horovod.process_sets import ProcessSet, global_process_set
from collectives.horovod.reducer import GradientBucket, GradientReducer, Groups, cut

Named = tuple[str, Tensor]
Base: Any = Optimizer  # to mypy, the base of the mixins below


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
                    "step() after synchronize() reduces again: call it under skip_synchronize()", stacklevel=2
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


class AdasumOptimizer(Base):
    """Mixin of an optimizer whose ranks make steps of their own; Adasum combines the changes."""

    compression: Any
    trained: list[Tensor]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        before = [param.detach().clone() for param in self.trained]
        loss = super().step() if closure is None else super().step(closure)
        with torch.no_grad():
            changes = [param - old for param, old in zip(self.trained, before, strict=True)]
            sent, contexts = zip(*map(self.compression.compress, changes), strict=True)
            combined = grouped_allreduce_(sent, op=Adasum)
            for param, old, change, context in zip(self.trained, before, combined, contexts, strict=True):
                param.copy_(old + self.compression.decompress(change, context))
        return loss

    def synchronize(self) -> None:
        """Do nothing: the changes are combined by `step`."""

    def skip_synchronize(self) -> None:
        raise AssertionError("skip_synchronize() with op=hvd.Adasum: it is the step that is reduced")

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Do nothing: a step uses the gradients accumulated by then."""


def DistributedOptimizer(  # noqa: N802  as Horovod calls it
    optimizer: Optimizer,
    named_parameters: Iterable[Named] | None = None,
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
    `sparse_as_dense`.  With op=Adasum the changes of parameters are reduced instead.

    Raises: InputError on every rank where one has wrong arguments, or other parameters.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    named = list(named_parameters or ((str(i), param) for i, param in enumerate(params)))
    failure = refusal(params, named, backward_passes_per_step, op, gradient_predivide_factor, groups, process_set)
    extra: dict[str, Any] = {"reducer": None}
    if process_set.included():
        names = {} if failure else {param: name for name, param in named}
        own = [(names[param], param) for param in params if names and param.requires_grad]
        calls, description = agree(process_set, own, failure, op, groups)
        trained = [param for _, param in own]
        if op == Adasum:
            extra = {"compression": compression, "trained": trained}
        else:
            comm = calls.comm.split(0)  # its calls run beside the others'
            assert comm is not None
            arguments = compression, op, gradient_predivide_factor
            buckets = [GradientBucket(comm, bucket, *arguments) for bucket in cut(trained, groups)]
            extra = {"reducer": GradientReducer(calls, comm, description, buckets, backward_passes_per_step)}
    base = AdasumOptimizer if op == Adasum else ReducingOptimizer
    result: Any = object.__new__(type(type(optimizer).__name__, (base, type(optimizer)), {}))
    state = {key: value for key, value in vars(optimizer).items() if key != "step"}  # a learning-rate scheduler's
    vars(result).update(state | extra)
    return result


def agree(
    process_set: ProcessSet, named: Sequence[Named], failure: str, op: str, groups: Groups
) -> tuple[MatchedCalls, Description]:
    """Return the calls and the description of an optimizer, which is the same on all ranks.  Collective.

    Raises: HorovodInternalError on every rank otherwise.
    """
    calls, kind = process_set.matched, "DistributedOptimizer"
    facts = tuple(TensorFacts.of(param, name=name) for name, param in named)
    number = groups if groups is None or isinstance(groups, int) else len(groups)
    description = Description(kind, calls.name(kind), facts, (("op", op), ("groups", number)), failure)
    calls.wait(calls.add(description))
    return calls, description


def refusal(
    params: Sequence[Tensor],
    named: Sequence[Any],
    passes: int,
    op: str,
    predivide: float,
    groups: Any,
    process_set: ProcessSet,
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
    if why := refusal_of(op, params, process_set.size() or 1):
        return why
    if op == Adasum and process_set is not global_process_set:
        return f"op=Adasum in {process_set}: use the global process set"
    if isinstance(groups, int):
        return f"groups={groups}: use 0 or more, or lists of parameters" if groups < 0 else ""
    grouped = [param for group in groups or () for param in group]
    if not all(isinstance(param, Tensor) for param in grouped) or len({*grouped}) < len(grouped):
        return "groups must be lists of parameters, each parameter in one of them"
    return ""
