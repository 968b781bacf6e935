"""A training run on one rank."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

import collectives
from collectives import InputError
from collectives.job import environment
from collectives.job.errors import LoneInputError
from models.data import TokenWindows
from models.mixture import balance, routers, scale_losses
from models.model import Model
from parallelism.buffers.tensor_collectives import ExposedTime
from parallelism.buffers.transfer import Readback, to_device
from parallelism.checkpoint import model_parts
from parallelism.data.sampler import DistributedSampler
from parallelism.experts.exchange import ExpertExchange
from parallelism.mesh import Mesh, axes_of
from parallelism.numerics.clipping import GradientClip
from parallelism.numerics.dropout import BatchPosition
from parallelism.numerics.non_finite import FiniteCheck, GradientMonitor, StepGuard, Verdict
from parallelism.pipeline.stage import Batch
from parallelism.placement import fill, wholes
from parallelism.sequence.sequence_parallel import SequenceParallel
from parallelism.step.local_parameters import tied_names
from training.checks import check
from training.config import TRACED, Config, learning_rate_of, make_model
from training.device import memory_mib, own_device, set_matrix_precision
from training.logs import check_files
from training.optimizing import make_optimizer
from training.out_dir import prepare_folders, take_out_dir
from training.pending import PendingStep
from training.profile import INPUT, OPTIMIZER, StepProfiler
from training.samples import Samples
from training.saving import Saving, load_weights
from training.staged import divide, staged
from training.tracing import traced
from training.validation import spread, validate


class TrainingRun:
    """A training run on one rank: its part of the data and of the model, and the training step.

    Construction is collective, and raises InputError for incompatible settings.  The end of `with` closes it.
    """

    saving: Saving | None = None
    first = 1  # first step

    def __init__(self, config: Config, comm: collectives.Communicator):
        settings = config
        with comm.agreed():
            config = replace(config, device=own_device(config.device, comm))
            inputs = check(config, comm.topology, comm.rank)
        with comm.agreed():
            prepare_folders(config, comm.rank)
            check_files(config, comm.rank)
        self.matrix_precision = torch.get_float32_matmul_precision()  # restored on closing
        set_matrix_precision(config.dtype)
        self.config, self.gpt, self.source = config, inputs.gpt, config.init_from  # source of the weights
        self.tokens, self.windows, self.val_ids = inputs.tokens, inputs.windows, inputs.val_ids
        self.num_params = self.gpt.num_params()  # of the undivided model
        self.mesh = Mesh(comm, **axes_of(config))
        self.sp = SequenceParallel(self.mesh.sp, config.sp_mode, config.sp_order, head_ranks=config.sp_heads)
        dp, positions = self.mesh.dp, self.sp.positions(config.block_size)
        position = BatchPosition(config.seed)
        position.positions = to_device(positions, config.device)
        self.sampler = DistributedSampler(len(self.windows), inputs.batch_size, dp.rank, dp.size, seed=config.seed)
        count = config.micro_batch_size, inputs.num_micro_batches
        self.samples = Samples(self.windows, self.sampler, *count, positions, config.document_end, config.device)
        self.exchange = ExpertExchange(self.mesh.ep) if config.ep > 1 else None
        self.tp_collectives = divide(self.gpt, config, self.mesh, self.sp, position, self.exchange)
        self.routers = [router for _, router in routers(self.gpt)]
        tied = tied_names(self.gpt)
        self.model = staged(
            self.gpt, config, self.mesh, inputs.schedule, inputs.precision, position, self.samples.first_batch
        )
        self.replica = self.model.replica
        self.masters = self.replica.masters
        self.optimizer = make_optimizer(config, self.replica, self.mesh, self.gpt.config)
        self.scale = inputs.precision.loss_scale(config.device)
        limit = config.grad_clip or math.inf
        self.clip = GradientClip(limit, self.gpt, self.masters, self.mesh, tied, self.replica.shard, config.device)
        monitor: FiniteCheck | None = None
        if config.non_finite != "ignore":
            monitor = GradientMonitor(self.replica.own.names) if self.replica.sums_over_ranks else self.clip
        if isinstance(monitor, GradientMonitor):
            self.model.listeners.insert(0, monitor)
        self.guard = StepGuard(
            comm,
            config.non_finite,
            self.scale,
            monitor,
            device=config.device,
            max_skips=config.max_skips,
            weights=lambda: self.masters.pieces,
        )
        self.sums = torch.zeros(2, dtype=torch.float64, device=config.device)  # loss, samples
        self.ended_s = 0.0  # end of the last reported step
        self.add_up = self.mesh.along("dp", "pp").plan("all_reduce", self.sums)
        self.sum_time, self.profiler = ExposedTime(), StepProfiler(self)
        try:
            parts = model_parts(self.gpt, self.mesh, tied)
            if config.eval_only and config.resume:
                self.source, step = load_weights(self, parts)
                self.first = step + 1
            elif config.checkpoint_dir and not config.eval_only:
                self.saving = Saving(self, parts)
                self.first, self.source = self.saving.first, self.saving.source
        except InputError:
            self.close()
            raise
        with comm.agreed():
            before = self.saving.out_dir if self.saving else ""
            self.out_dir = take_out_dir(settings, before) if comm.rank == 0 else None
        self.progress_bar = comm.rank == 0 and environment.on_terminal()

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Close, unless only this rank fails, which ends the job."""
        if error is None or (isinstance(error, InputError) and not isinstance(error, LoneInputError)):
            self.close()

    def close(self) -> None:
        """Release all resources: the checkpoints' folder, signals, communicators and shared memory.

        The run cannot be used afterwards.  Collective.
        """
        if self.saving:
            self.saving.close()
        torch.set_float32_matmul_precision(self.matrix_precision)
        groups = [self.sp, *([self.exchange] if self.exchange else []), self.mesh, *self.model.groups]
        self.model.remove_hooks()
        vars(self).clear()
        gc.collect()  # breaks reference cycles of modules, which hold memory of the communicators
        for group in groups:
            group.free()

    def inputs(self) -> Generator[list[Batch], None, None]:
        """Yield this rank's micro-batches of each step from the first one on.  The caller closes the generator."""
        return self.profiler.inputs(self.samples.micro_batches(self.first))

    def step(self, iteration: int, inputs: list[Batch]) -> PendingStep:
        """Run one training step.  The host does not wait for its device.  Collective."""
        is_shown = self.config.trace or (self.config.report and self.mesh.pp.size > 1)
        tracing: AbstractContextManager[None] = nullcontext()
        if is_shown and iteration == min(self.first + TRACED - 1, self.config.max_iters):
            tracing = traced(self.model, self.mesh, self.config.trace, self.profiler.keep)
        with tracing, self.profiler.profiling(iteration):
            return self.begun(iteration, inputs)

    def begun(self, iteration: int, inputs: list[Batch]) -> PendingStep:
        config, timing = self.config, self.profiler.timing
        begin_s, waited_s = time.perf_counter(), self.profiler.waited_s
        lr = learning_rate_of(config, iteration)
        with timing(INPUT):
            batches = [batch.to(config.device) for batch in inputs]
        weight = self.scale.value / len(batches)
        scale_losses(self.routers, weight)
        loss = self.model.step(batches, [weight] * len(batches)) / self.scale.value
        with timing(OPTIMIZER):
            norm, verdict = self.update(lr, loss)
        mean_loss = self.add(loss / self.mesh.dp.size)[0]
        numbers = torch.cat([torch.stack([mean_loss, loss, norm]), verdict.numbers])
        with self.sum_time.waiting():
            bubble = self.model.times.bubble(self.mesh.pp)
        metrics = {"iter": iteration, "lr": lr, "bubble": bubble, "memory_mib": memory_mib(config.device)}
        comm_s = self.profiler.waited_s - waited_s
        return PendingStep(self, verdict.names, Readback(numbers), begin_s, comm_s, metrics)

    def add(self, *numbers: Any) -> torch.Tensor:
        """Return the sums of these numbers over the ranks of dp and pp.  Collective."""
        for index, number in enumerate(numbers):
            self.sums[index] = number
        with self.sum_time.waiting():
            self.add_up()
        return self.sums

    def sum_loads(self, loads: torch.Tensor) -> None:
        """Sum the loads of experts over all ranks in place.  Collective."""
        with self.sum_time.waiting():
            self.mesh.along("dp", "sp").all_reduce(loads)

    def update(self, lr: float, loss: torch.Tensor) -> tuple[torch.Tensor, Verdict]:
        """Clip the gradients, update the weights unless the step is to be skipped, and clear the gradients.

        Return the norm before clipping, and the ranks' verdict on the step.  Collective.
        """
        self.masters.take_gradients(self.scale.inverse)
        norm = self.clip()
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_factor", 1)
        verdict = self.guard.judge(loss, norm)
        self.optimizer.step(verdict.skipped)
        balance(self.routers, self.sum_loads)
        self.replica.gather()
        self.model.zero_grad()
        return norm, verdict

    def validate(self) -> float:
        """Return the mean loss in nats per token over the validation data, or over some batches of it.  Collective."""
        windows = TokenWindows(self.val_ids, self.config.block_size, seed=None)
        selection = spread(len(windows), self.config.eval_iters * self.sampler.batch_size)
        self.gpt.eval()
        total, count = self.add(*validate(self.model, self.samples, windows, selection, self.mesh.dp)).tolist()
        self.gpt.train()
        return total / (count / self.mesh.pp.size)

    def whole(self) -> Model:
        """Gather the plain model with the trained weights.  Collective."""
        gpt = make_model(self.config, self.tokens.vocab_size).to(self.config.device)
        with self.replica.whole(), self.masters.exact(self.gpt, self.replica.shard):
            fill(gpt, wholes(self.gpt, self.mesh), self.mesh.pp)
        return gpt
