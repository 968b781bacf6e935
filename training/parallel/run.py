"""What a rank of a training run holds: its part of the data, of the model and of the optimizer's states."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import collectives
from collectives import InputError
from collectives.bench.surroundings import surroundings
from collectives.job.errors import LoneInputError
from collectives.job.launch import is_rank_failure
from models.decoder import Decoder, flops_per_token
from models.mixture import routers
from parallelism.buffers.tensor_collectives import ExposedTime, TensorCollectives
from parallelism.buffers.transfer import to_device
from parallelism.checkpoint import fingerprint, model_parts
from parallelism.data.sampler import DistributedSampler
from parallelism.experts.exchange import ExpertExchange
from parallelism.mesh import Mesh, axes_of
from parallelism.numerics.clipping import GradientClip
from parallelism.numerics.dropout import BatchPosition
from parallelism.numerics.non_finite import FiniteCheck, GradientMonitor, StepGuard, first_not_finite
from parallelism.pipeline.stage import Batch
from parallelism.placement import fill, wholes
from parallelism.planner.presets import FAMILIES
from parallelism.sequence.sequence_parallel import SequenceParallel
from parallelism.step.local_parameters import tied_names
from training.data.samples import Samples
from training.health.corruption import CorruptionCheck
from training.health.monitor import Health
from training.lora.adapters import attach_adapters
from training.lora.targets import targets_of
from training.optim.make import make_optimizer
from training.parallel.device import own_device, set_matrix_precision
from training.parallel.remains import Remains
from training.parallel.saving import Saving, Shards, StateHashes, load_weights
from training.parallel.staged import divide, staged
from training.reports.facts import RunFacts, bit_conditions
from training.reports.out_dir import take_out_dir
from training.reports.peak_rate import peak_rate
from training.reports.pending import Meter
from training.reports.profile import ALL_RANKS, BUBBLE, StepProfiler
from training.settings.checks import make_schedule
from training.settings.config import Config, Inputs
from training.settings.derived import make_model
from training.settings.fields import LEAVE_OUT, REDO
from training.settings.paths import check_files, prepare_folders


class TrainingRun:
    """A training run on one rank, whose steps `training.loop` runs.

    Construction is collective, and raises InputError for incompatible settings.  The end of `with` closes it, or, where
    ranks have died, hands what this one holds to `leave`.
    """

    saving: Saving | None = None
    health: Health | None = None
    corruption: CorruptionCheck | None = None
    first = 1  # first step

    def __init__(self, config: Config, comm: collectives.Communicator, leave: Callable[[Remains], None] | None = None):
        settings, self.leave = config, leave
        with comm.agreed():
            config = replace(config, device=own_device(config.device, comm))
            inputs = config.checked(comm.topology, comm.rank)
        with comm.agreed():
            prepare_folders(config, comm.rank)
            check_files(config, comm.rank)
        self.matrix_precision = torch.get_float32_matmul_precision()  # restored on closing
        set_matrix_precision(config.dtype)
        self.config, self.model, self.source = config, inputs.model, config.init_from  # source of the weights
        self.tokens, self.windows = inputs.tokens, inputs.windows
        self.val_windows, self.val_parts = inputs.val_windows, inputs.val_parts
        self.num_params = self.model.num_params()  # of the undivided model
        self.mesh = Mesh(comm, **axes_of(config))
        self.sp = SequenceParallel(
            self.mesh.sp, config.sp_mode, config.sp_order, config.sp_heads, config.sequence_parts
        )
        dp, positions = self.mesh.dp, self.sp.positions(config.block_size)
        position = BatchPosition(config.seed)
        position.positions = to_device(positions, config.device)
        self.numbers = inputs.num_micro_batches  # of micro-batches, by dp rank
        lengths = [number * config.micro_batch_size for number in self.numbers]
        self.sampler = DistributedSampler(
            len(self.windows), inputs.batch_size, dp.rank, dp.size, seed=config.seed, lengths=lengths
        )
        count = config.micro_batch_size, inputs.num_micro_batches[dp.rank]
        self.num_micro_batches = sum(self.numbers)  # of a global batch
        self.samples = Samples(
            self.windows,
            self.sampler,
            *count,
            positions,
            config.document_end,
            config.device,
            by_sample=bool(config.tiles),
        )
        self.exchange = ExpertExchange(self.mesh.ep) if config.ep > 1 else None
        adapt = partial(attach_adapters, settings=config, values=inputs.factors) if config.lora_rank else None
        self.targets = targets_of(self.model, config.lora_targets) if adapt else []
        tp_collectives = divide(self.model, config, self.mesh, self.sp, position, self.exchange, adapt)
        self.routers = [router for _, router in routers(self.model)]
        tied, names = tied_names(self.model), [*self.model.state_dict()]
        self.pipeline = staged(
            self.model, config, self.mesh, inputs.schedule, inputs.precision, position, self.samples.first_batch
        )
        self.replica = self.pipeline.replica
        self.masters = self.replica.masters
        self.optimizer = make_optimizer(config, self.replica, self.mesh, self.model.config)
        self.scale = inputs.precision.loss_scale(config.device)
        limit = config.grad_clip or math.inf
        self.clip = GradientClip(limit, self.model, self.masters, self.mesh, tied, config.device)
        self.guard = self._make_guard()
        self.sums = torch.zeros(2, dtype=torch.float64, device=config.device)  # loss, samples
        self.add_up = self.mesh.along("dp", "pp").plan("all_reduce", self.sums)
        self.sum_time = ExposedTime()
        shards = Shards(self.model, self.replica, model_parts(self.model, self.mesh, tied))
        state = partial(shards.state, self.optimizer)
        self.hashes = StateHashes(comm, state, names) if config.hash_interval else None
        self.conditions = bit_conditions(config, comm)
        self._restore(inputs.batch_size, shards)
        self.profiler = self._make_profiler(tp_collectives)
        # A device's work is not timed by the host's clock.
        self.health = Health(self.mesh, self.profiler, self.numbers) if config.device == "cpu" else None
        self.pipeline.listeners[:0] = [self.health] if self.health else []
        if interval := config.check_interval:
            acts = {"redo": config.on_corruption == REDO, "leave_out": config.on_corruption == LEAVE_OUT}
            self.corruption = CorruptionCheck(interval, self.mesh, self.pipeline, state, **acts)
        flops, tokens_per_step = (
            flops_per_token(self.model.config, self.num_params, is_frozen=bool(self.targets)),
            inputs.batch_size * config.block_size,
        )
        self.peak = None if config.eval_only else peak_rate(comm, config.device, config.dtype, config.peak_tflops)
        peak_flops_per_s = self.peak and self.peak.flops_per_s
        self.meter = Meter(self.guard, config.max_iters, tokens_per_step, flops, peak_flops_per_s)
        with comm.agreed():
            before = self.saving.out_dir if self.saving else ""
            self.out_dir = take_out_dir(settings, before) if comm.rank == 0 else ""
        if self.saving:
            self.saving.out_dir = comm.broadcast_object(self.out_dir)
        self.facts = self._collect_facts(inputs)

    def _restore(self, batch_size: int, shards: Shards) -> None:
        """Load the weights that are to be validated, or the newest checkpoint, if the settings say so.  Collective."""
        config, comm = self.config, self.mesh.comm
        try:
            if config.eval_only and config.resume:
                self.source, step = load_weights(config, comm, shards)
                self.first = step + 1
            elif config.checkpoint_dir and not config.eval_only:
                data = {"data": fingerprint(self.tokens.ids), "batch_size": batch_size}
                rest = self.conditions, self.hashes, self.pipeline.exact
                self.saving = Saving(config, comm, shards, self.optimizer, self.scale, data, *rest)
                self.first, self.source = self.saving.first, self.saving.source
        except InputError:
            self.close()
            raise

    def _make_profiler(self, tp_collectives: TensorCollectives) -> StepProfiler:
        """Make the profiler, with the waits that each axis of the mesh counts."""
        exact, exchange = self.pipeline.exact, self.exchange
        waits: dict[str, list[ExposedTime]] = {
            "tp": [tp_collectives],
            "sp": self.sp.clocks,
            "ep": [exchange] if exchange else [],
            "dp": [self.replica],
            "pp": [self.replica.own.tied],
            BUBBLE: [self.pipeline.times] if self.mesh.pp.size > 1 else [],
            ALL_RANKS: [self.clip, self.guard, self.sum_time, *([exact] if exact else [])],
        }
        return StepProfiler(self.pipeline, self.mesh, self.config, self.first, waits, self.optimizer)

    def _collect_facts(self, inputs: Inputs) -> RunFacts:
        config = self.config
        return RunFacts(
            config,
            data=self.tokens.name,
            num_tokens=len(self.tokens.ids),
            vocab_size=self.tokens.vocab_size,
            family=FAMILIES[self.model.config.family].label,
            num_params=self.num_params,
            batch_size=inputs.batch_size,
            num_micro_batches=inputs.num_micro_batches[self.mesh.dp.rank],
            lengths=self.mesh.shape,
            attention=str(self.sp),
            schedule=self.pipeline.schedule.name,
            num_stages=self.pipeline.schedule.num_stages,
            source=self.source,
            first=self.first,
            out_dir=self.out_dir,
            conditions=self.conditions,
            conditions_before=self.saving.conditions_before if self.saving else {},
            surroundings=surroundings(self.mesh.comm, config.device.partition(":")[0]) if config.report else {},
            peak=self.peak,
            profiler=self.profiler,
        )

    def _make_guard(self) -> StepGuard:
        config = self.config
        monitor: FiniteCheck | None = None if config.non_finite == "ignore" else self.pipeline.exact or self.clip
        if monitor is self.clip and self.replica.sums_over_ranks:
            monitor = GradientMonitor(self.replica.own.names)
            self.pipeline.listeners.insert(0, monitor)
        return StepGuard(
            self.mesh.comm,
            config.non_finite,
            self.scale,
            monitor,
            device=config.device,
            max_skips=config.max_skips,
            weights=lambda: self.masters.pieces,
        )

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Close; where ranks have died, without them; not if only this rank fails, which ends the job."""
        if is_rank_failure(error):
            self.abandon()
        elif error is None or (isinstance(error, InputError) and not isinstance(error, LoneInputError)):
            self.close()

    def close(self) -> None:
        """Release all resources: the checkpoints' folder, signals, communicators and shared memory.

        The run cannot be used afterwards.  Collective.
        """
        if self.saving:
            self.saving.close()
        if self.health:
            self.health.close()
        torch.set_float32_matmul_precision(self.matrix_precision)
        groups = [self.sp, *([self.exchange] if self.exchange else []), self.mesh, *self.pipeline.groups]
        self.pipeline.remove_hooks()
        vars(self).clear()
        gc.collect()  # breaks reference cycles of modules, which hold memory of the communicators
        for group in groups:
            group.free()

    def abandon(self) -> None:
        """Release what this rank holds alone, and drop the rest, which only all ranks together could release."""
        if self.saving:
            with self.saving.taken:
                if self.leave:
                    self.leave(self.saving.remains())
        torch.set_float32_matmul_precision(self.matrix_precision)
        self.pipeline.remove_hooks()
        vars(self).clear()

    def inputs(self) -> Generator[list[Batch], None, None]:
        """Yield this rank's micro-batches of each step from the first one on.  The caller closes the generator."""
        return self.profiler.inputs(self._micro_batches())

    def _micro_batches(self) -> Generator[list[Batch], None, None]:
        step = self.first
        while True:
            numbers = self.numbers
            with closing(self.samples.micro_batches(step)) as coming:
                for batches in coming:
                    yield batches
                    step += 1
                    if self.numbers != numbers:
                        break

    def passes(self, step: int, batches: Sequence[Batch], weights: Sequence[float] | Sequence[torch.Tensor]) -> None:
        """Run a step's passes, with checks of the numbers if these are due.  Collective."""
        if self.corruption:
            self.corruption.step(step, batches, weights)
        else:
            self.pipeline.step(batches, weights)

    def loss_weights(self, num_targets: torch.Tensor, total: torch.Tensor) -> list[torch.Tensor]:
        """Return each micro-batch's weight in the loss: its part of the `total` targets of the global batch, scaled.

        Where gradients are averaged over the dp ranks instead of summed, it is multiplied by their number.
        """
        ranks = 1 if self.config.reproducible else self.mesh.dp.size
        return [*(self.scale.value * (num_targets * ranks / total))]

    def balance_load(self) -> str:
        """Move micro-batches between dp ranks if their measured speeds ask for it; return what to say of that.

        Collective.
        """
        if not (self.config.balance_load and self.health and (numbers := self.health.better_numbers())):
            return ""
        self.numbers, own = numbers, self.mesh.dp.rank
        self.sampler.cut([number * self.config.micro_batch_size for number in numbers])
        self.samples.num_micro_batches = numbers[own]
        self.pipeline.follow(make_schedule(self.config, numbers[own]), sum(numbers[:own]), max(numbers))
        return f"micro-batches by dp rank from now on: {', '.join(map(str, numbers))}"

    @contextmanager
    def observing(self, iteration: int) -> Iterator[None]:
        """Profile the step in this context if it is selected, and judge the ranks by their times.  Collective."""
        is_usual = not self.profiler.selects(iteration) and not (self.saving and self.saving.is_writing)
        is_usual &= not (self.corruption and self.corruption.is_due(iteration))
        judging = self.health.observing(iteration, is_usual) if self.health else nullcontext()
        with judging, self.profiler.observing(iteration):
            yield

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

    def whole(self) -> Decoder:
        """Gather the plain model with the trained weights, and its adapters, if it has any.  Collective.

        Raises: InputError for weights that are not finite.
        """
        model = make_model(self.config, self.tokens.vocab_size)
        if self.targets:
            attach_adapters(model, self.config)
        model.to(self.config.device)
        with self.replica.whole(), self.masters.exact(self.model, self.replica.shard):
            fill(model, wholes(self.model, self.mesh), self.mesh.pp)
        with self.mesh.comm.agreed("weights"):
            if name := first_not_finite(dict(model.named_parameters())):
                raise ValueError(f"{name} is not finite: no weights are written; lower the learning rate")
        return model
