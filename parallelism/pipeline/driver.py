"""Pipeline driver: each rank runs a schedule's actions on its stages of a model; also for one stage on one rank.

Sources: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019, section 2;
Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021, section 2.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import mul
from typing import Any

import torch
from torch import Tensor

import collectives
from parallelism.pipeline.schedule.actions import Schedule
from parallelism.pipeline.schedule.messages import PostRecv, StartSend, WaitRecv, program
from parallelism.pipeline.stage import Stage
from parallelism.step.actions import BACKWARD, FORWARD, WEIGHTS, Action, StageMessage
from parallelism.step.events import Listener

Form = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of the activations between two stages


class Pipeline:
    """Stages of a model on the ranks of `comm`, run by a schedule.

    `stages` are this rank's, by their numbers in `schedule`.  Messages between stages are sent directly from the memory
    of the activations, received into new tensors, and overlap with computation.  `listeners` are notified of the events
    of each step.  Hooks on layers emit `parameters_needed` before a layer computes.  Hooks on parameters call
    `gradient_ready`, or `gradient_accumulated` if backward passes are split.  Micro-batches are numbered within the
    global batch; this rank's begin with `first_micro_batch`.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        schedule: Schedule,
        comm: collectives.Communicator,
        device: str = "cpu",
        listeners: Sequence[Listener] = (),
        first_micro_batch: int = 0,
    ):
        with comm.agreed("Pipeline"):
            if schedule.num_ranks != comm.size:
                raise ValueError(
                    f"schedule {schedule.name} is for {schedule.num_ranks} ranks, but there are {comm.size}: make one "
                    "for those"
                )
            if tuple(sorted(stages)) != schedule.stages(comm.rank):
                raise ValueError(
                    f"rank {comm.rank} has stages {sorted(stages)}, but by schedule {schedule.name} "
                    f"{list(schedule.stages(comm.rank))}: cut the model by Schedule.stages"
                )
        self.stages, self.schedule, self.comm, self.device = stages, schedule, comm, device
        self.listeners, self.first_micro_batch = list(listeners), first_micro_batch
        self.now: Action | None = None  # the action in progress
        self.step_losses = torch.zeros(0, dtype=torch.float64, device=device)  # of the latest step, by micro-batch
        self._forms: dict[Any, dict[int, Form]] = {}  # of each stage's input, by the shapes of a batch

    def emit(self, event: str, *arguments: Any) -> None:
        """Call the listeners' methods with the event's name, in order, or those of `after` events in reverse order.

        Listeners that ignore the event are skipped.
        """
        ignored = getattr(Listener, event)
        for listener in reversed(self.listeners) if event.startswith("after") else self.listeners:
            handle = getattr(listener, event)
            if getattr(handle, "__func__", None) is not ignored:
                handle(*arguments)

    @contextmanager
    def notifying(self, listener: Listener, index: int = 0) -> Iterator[None]:
        """Notify another listener in this context, by default ahead of the others."""
        self.listeners.insert(index, listener)
        yield
        self.listeners.remove(listener)

    def step(self, batches: Sequence[Any], weights: Sequence[float] | Sequence[Tensor] | None = None) -> Tensor:
        """Run a step's passes; each batch is a micro-batch, the same on all ranks.  Collective.

        The loss is the sum of the micro-batches' losses times `weights`, by default their mean.  Return it on the rank
        of the last stage, 0 on others, in float64 on the device; gradients accumulate in each stage.

        `step_losses` are the losses without weights, likewise.

        Raises: ValueError if the number of batches is not the schedule's.
        """
        if len(batches) != self.schedule.num_micro_batches:
            raise ValueError(
                f"{len(batches)} micro-batches, but schedule {self.schedule.name} is for "
                f"{self.schedule.num_micro_batches}: pass as many, or make one for {len(batches)}"
            )
        run = Pass(self, self.schedule, batches, weights or [1 / len(batches)] * len(batches))
        loss = run.run()
        self.step_losses = torch.stack(run.losses)
        self.emit("step_done")
        return loss

    def gradient_accumulated(self, parameter: Tensor) -> None:
        """Handle autograd's accumulation of a gradient, which is ready unless part of it is deferred."""
        assert self.now
        stage, _, micro_batch = self.now
        if not self.stages[stage].is_deferred(micro_batch, parameter):
            self.gradient_ready(parameter)

    def gradient_ready(self, parameter: Tensor) -> None:
        assert self.now
        self.emit("gradient_ready", parameter, self.first_micro_batch + self.now.micro_batch)

    @torch.no_grad()
    def losses(self, batches: Sequence[Any]) -> list[float]:
        """Return each batch's loss on the rank of the last stage, zeros on others; forward passes only.  Collective."""
        orders = [
            tuple(Action(stage, FORWARD, m) for m in range(len(batches)) for stage in self.schedule.stages(rank))
            for rank in range(self.comm.size)
        ]
        run = Pass(self, replace(self.schedule, orders=tuple(orders)), batches, [0.0] * len(batches))
        run.run()
        return [float(loss) for loss in run.losses]

    @torch.no_grad()
    def form(self, batch: Any) -> dict[int, Form]:
        """Return the form of each stage's input.  Collective.

        For each new shape of batch, zeros are run through the stages.  A single rank sends nothing, and needs no forms.
        """
        key = tuple(part.shape for part in batch if part is not None)
        if self.comm.size == 1 or key in self._forms:
            return self._forms.get(key, {})
        forms: dict[int, Form] = {}
        for stage in range(self.schedule.num_stages - 1):
            form, home = None, self.schedule.home[stage]
            if home == self.comm.rank:
                x = self.empty(forms[stage]).zero_() if stage else None
                y = self.stages[stage].forward(0, x, batch)
                form = tuple(y.shape), y.dtype
            forms[stage + 1] = self.comm.broadcast_object(form, home)
        self._forms[key] = forms
        return forms

    def empty(self, form: Form) -> Tensor:
        return torch.empty(form[0], dtype=form[1], device=self.device)


class Pass:
    """One execution of a schedule, with its received tensors and its messages in progress."""

    def __init__(self, pipeline: Pipeline, schedule: Schedule, batches: Sequence[Any], weights: Sequence[Any]):
        self.pipeline, self.schedule, self.batches, self.weights = pipeline, schedule, batches, weights
        self.forms = [pipeline.form(batch) for batch in batches]
        self.losses = [torch.zeros((), dtype=torch.float64, device=pipeline.device)] * len(batches)
        self.coming: dict[StageMessage, Any] = {}
        self.leaving: list[Any] = []
        self.held: dict[tuple[bool, int, int], Tensor] = {}  # activations or gradients, by stage and micro-batch

    def run(self) -> Tensor:
        comm, emit = self.pipeline.comm, self.pipeline.emit
        emit("before_passes")
        following = iter(self.schedule.orders[comm.rank][1:])
        for op in program(self.schedule, comm.rank):
            match op:
                case PostRecv(message):
                    x = self.pipeline.empty(self.forms[message.micro_batch][message.stage + message.is_gradient])
                    self.coming[message] = comm.recv(x, message.source, self.tag(message), blocking=False)
                case WaitRecv(message):
                    emit("before_wait", message)
                    self.coming[message].wait()
                    emit("after_wait", message)
                    self.held[message[:3]] = self.coming.pop(message).result
                case StartSend(message):
                    self.leaving = [work for work in self.leaving if not work.done()]  # frees their memory
                    x = self.held.pop(message[:3]).contiguous()
                    self.leaving.append(comm.send(x, message.dest, self.tag(message), blocking=False))
                case Action():
                    self.pipeline.now = op
                    emit("before", op, next(following, None))
                    self.compute(op)
                    emit("after", op)
        for work in self.leaving:
            work.wait()
        emit("after_passes")
        return sum(map(mul, self.losses, self.weights), torch.zeros_like(self.losses[0]))

    def tag(self, message: StageMessage) -> int:
        """Return the message's tag, unique within a step."""
        return (2 * message.stage + message.is_gradient) * len(self.batches) + message.micro_batch

    def compute(self, action: Action) -> None:
        stage, kind, micro_batch = action
        passes = self.pipeline.stages[stage]
        if kind == FORWARD:
            x = self.held.pop((False, stage, micro_batch)) if stage else None
            y = passes.forward(micro_batch, x, self.batches[micro_batch])
            if stage < self.schedule.num_stages - 1:
                self.held[False, stage + 1, micro_batch] = y
            else:
                self.losses[micro_batch] = y.double()
                self.held[True, stage, micro_batch] = (torch.ones_like(y) * self.weights[micro_batch]).to(y.dtype)
        elif kind == WEIGHTS:
            passes.backward_weights(micro_batch)
        else:
            backward = passes.backward if kind == BACKWARD else passes.backward_inputs
            gradient = backward(micro_batch, self.held.pop((True, stage, micro_batch)))
            if gradient is not None:
                self.held[True, stage - 1, micro_batch] = gradient
