"""A training run on one rank."""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch

import collectives
from collectives import InputError
from collectives.job import environment
from collectives.job.errors import LoneInputError
from models.data import TokenWindows, documents
from models.gpt import GPT
from models.optimizer import adamw, learning_rate
from models.report import peak_memory_mib
from parallelism.buffers.arena import Arena
from parallelism.buffers.transfer import read_back, to_device
from parallelism.buffers.whole_parameters import fill, wholes
from parallelism.checkpoint import model_parts
from parallelism.data.data_parallel import DataParallel
from parallelism.data.sampler import DistributedSampler
from parallelism.mesh import Mesh, axes_of
from parallelism.numerics.clipping import GradientClip
from parallelism.numerics.dropout import BatchPosition
from parallelism.numerics.master_weights import MasterWeights
from parallelism.numerics.non_finite import GradientMonitor, StepGuard, Verdict
from parallelism.pipeline.balance import balance
from parallelism.pipeline.gradients import tied_names
from parallelism.pipeline.layer_times import agreed, measure, message_s, stage_costs
from parallelism.pipeline.pipeline_parallel import PipelineParallel, within
from parallelism.pipeline.schedule.price import Span, price
from parallelism.pipeline.schedule.search import search
from parallelism.pipeline.stage import Batch, Layer, gpt2_layers
from parallelism.pipeline.trace import gather, measured, save_picture, save_trace
from parallelism.sequence.sequence_parallel import SequenceParallel
from parallelism.tensor.sharding_plan import parallelize
from parallelism.zero.gradients import ShardedGradients
from parallelism.zero.parameters import ShardedParameters
from parallelism.zero.pipeline import ShardedLayers
from parallelism.zero.states import OptimizerShard, ShardedStates, Zero
from parallelism.zero.units import ShardGroups
from training.checks import check
from training.config import SEARCH, TRACED, Config, make_model, picture_of, plan_of, zero_group
from training.device import own_device, set_matrix_precision
from training.gpt import recompute_model
from training.out_dir import own_out_dir, prepare_out_dir
from training.pending import PendingStep
from training.saving import Saving


class TrainingRun:
    """A training run on one rank: the data and its share of it, the model, and how a step is done.

    Making one is collective, and raises InputError for settings that don't fit.  At the end of `with`, it is closed.
    """

    saving: Saving | None = None

    def __init__(self, config: Config, comm: collectives.Communicator):
        with comm.agreed():
            config = replace(config, device=own_device(config.device, comm))
            inputs = check(config, comm.topology, comm.rank)
        with comm.agreed():
            prepare_out_dir(config, comm.rank)
        self.matrix_precision = torch.get_float32_matmul_precision()  # of before
        set_matrix_precision(config.dtype)
        self.config = config
        self.tokens, self.windows, self.val_ids = inputs.tokens, inputs.windows, inputs.val_ids
        self.num_micro_batches, self.schedule = inputs.num_micro_batches, inputs.schedule
        self.precision, self.gpt = inputs.precision, inputs.gpt
        self.num_params = self.gpt.num_params()  # before ranks have parts of them
        self.mesh = Mesh(comm, **axes_of(config))
        self.dp, self.replicas = self.mesh.dp, self.mesh.along("dp", "sp")
        self.sp = SequenceParallel(self.mesh.sp, config.sp_mode, config.sp_order, head_ranks=config.sp_heads)
        self.place = BatchPosition(config.seed)
        self.sampler = DistributedSampler(
            len(self.windows), inputs.batch_size, self.dp.rank, self.dp.size, seed=config.seed
        )
        self.positions = self.sp.positions(config.block_size)
        self.place.positions = to_device(self.positions, config.device)
        self.parallelize()
        self.computing = partial(self.precision.computing, config.device)
        monitor = GradientMonitor(self.gpt) if config.non_finite != "ignore" else None
        tied = tied_names(self.gpt)
        parts = model_parts(self.gpt, self.mesh, tied)  # before ZeRO takes them away
        self.make_optimizer = partial(adamw, lr=config.lr, weight_decay=config.weight_decay)
        self.model = self.pipelined() if config.pp > 1 else self.replicated()
        self.zero = self.shared_update()
        self.masters = self.zero.masters if self.zero else self.own_update()
        self.optimizer = self.zero.optimizer if self.zero else self.make_optimizer(self.own_weights)
        self.scale = self.precision.loss_scale(config.device)
        self.guard = StepGuard(comm, config.non_finite, self.scale, monitor, device=config.device)
        limit = config.grad_clip if config.grad_clip > 0 else math.inf
        self.clip = GradientClip(limit, self.gpt, self.masters, self.mesh, tied, self.shard, config.device)
        if config.pp > 1:
            parts = model_parts(self.gpt, self.mesh, tied)
        self.sums = torch.zeros(2, dtype=torch.float64, device=config.device)  # loss, samples
        self.ended_s = 0.0  # when the last step that was reported had ended
        self.add_up = self.mesh.along("dp", "pp").plan("all_reduce", self.sums)
        try:
            self.saving = Saving(self, parts) if config.checkpoint_dir else None
        except InputError:
            self.close()
            raise
        with comm.agreed():
            before = self.saving.out_dir if self.saving else ""
            self.out_dir = own_out_dir(config.out_dir, before) if config.out_dir and comm.rank == 0 else None
        self.progress_bar = comm.rank == 0 and environment.on_terminal()

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Close, unless this rank fails alone, which ends the job."""
        if error is None or (isinstance(error, InputError) and not isinstance(error, LoneInputError)):
            self.close()

    def close(self) -> None:
        """Give back what was taken: the checkpoints' folder, signals, communicators and the memory that ranks share.

        The run is of no use after.  Collective.
        """
        if self.saving:
            self.saving.close()
        torch.set_float32_matmul_precision(self.matrix_precision)
        groups: list[Any] = [self.sp, self.mesh]
        if isinstance(self.model, PipelineParallel):
            groups += self.model.tied, self.model.ranks
        elif self.zero:
            groups.append(self.zero.ranks)
        remove_hooks(self.gpt)
        vars(self).clear()
        gc.collect()  # modules refer to each other, and to memory that goes with the communicators
        for group in groups:
            group.free()

    def parallelize(self) -> None:
        """Divide the model over tp and sp."""
        config = self.config
        plan = plan_of(config, self.tokens.vocab_size)
        sp = self.sp if self.mesh.sp.size > 1 else None
        parallelize(self.gpt, plan, self.mesh.tp, sp, config.sequence_parallel, self.place)
        if config.recompute != "none":
            recompute_model(self.gpt, config.recompute, self.place)
        if config.compile:
            self.gpt.compile()

    def replicated(self) -> DataParallel | Zero:
        """The model, of which each rank computes the whole, but for what tp divides, and keeps what ZeRO leaves it."""
        config = self.config
        if config.zero_stage == 0:
            arena = self.precision.arena(self.gpt, self.mesh.comm, config.device)
            return DataParallel(self.gpt, self.replicas, arena, config.bucket_mb, wire_dtype=self.precision.wire_dtype)
        given = self.gpt, ShardGroups.of(self.replicas, zero_group(config)), self.make_optimizer
        if config.zero_stage == 3:
            layers = [f"transformer.h.{number}" for number in range(config.n_layer)]
            return ShardedParameters(*given, layers, config.device, **self.reduced)
        kind = ShardedStates if config.zero_stage == 1 else ShardedGradients
        return kind(*given, config.device, config.bucket_mb, **self.reduced)

    @property
    def reduced(self) -> dict[str, Any]:
        """In what parameters and gradients are held, and how gradients travel."""
        return {**self.precision.arena_dtypes, "wire_dtype": self.precision.wire_dtype}

    def shared_update(self) -> Zero | OptimizerShard | ShardedLayers | None:
        """What of ZeRO there is."""
        if isinstance(self.model, PipelineParallel):
            return self.model.zero
        return self.model if isinstance(self.model, Zero) else None

    def own_update(self) -> MasterWeights:
        """What the optimizer updates where ranks share nothing."""
        arena = self.model.arena
        assert isinstance(arena, Arena)
        return MasterWeights.of(self.gpt, arena)

    @property
    def shard(self) -> collectives.Communicator | None:
        """The ranks that have pieces of the weights each."""
        return self.zero.ranks.shard if self.zero else None

    @property
    def own_weights(self) -> list[torch.nn.Parameter]:
        """What this rank's optimizer updates."""
        return list(self.masters.pieces.values())

    def pipelined(self) -> PipelineParallel:
        """The model, of which each rank has some stages."""
        layers = [within(self.computing, layer) for layer in gpt2_layers(self.gpt)]
        if self.config.balance == "measured" or self.config.schedule == SEARCH:
            layers = self.measured(layers)
        make = self.make_optimizer if self.config.zero_stage else None
        given = self.gpt, layers, self.schedule, self.mesh, self.config.device, self.prepare
        return PipelineParallel(*given, make, zero_group(self.config), self.config.zero_stage, **self.reduced)

    def measured(self, layers: list[Layer]) -> list[Layer]:
        """The layers with the times that they take as costs; by these a schedule is searched, if that is asked for."""
        self.gpt.to(self.config.device)  # ahead of the arena, which moves only what is left to this rank
        batch = self.batch(self.windows, np.arange(self.config.micro_batch_size))
        times = agreed(measure(self.gpt, layers, batch, self.prepare), self.mesh.comm)
        layers = [layer._replace(cost=sum(each)) for layer, each in zip(layers, times, strict=True)]
        if self.config.schedule == SEARCH:
            with torch.no_grad():
                sent = layers[0].run(None, batch)
            parts = balance([layer.cost for layer in layers], self.schedule.num_stages)
            costs = stage_costs(times, parts, message_s(sent, self.mesh.pp))
            each = self.schedule.num_stages // self.config.pp
            limit = self.config.max_alive or self.schedule.num_stages
            with self.mesh.comm.agreed("search"):
                self.schedule = search(self.config.pp, self.num_micro_batches, each, costs, limit)
        return layers

    def prepare(self, batch: Batch) -> None:
        """Dropout draws by the samples' numbers."""
        self.place.samples = batch.samples

    def announcement(self) -> str:
        batch = f"dp {self.dp.size} x micro_batch_size {self.config.micro_batch_size}"
        lines = [
            f"{self.tokens.name}: {len(self.tokens.ids):,} tokens, vocabulary {self.tokens.vocab_size}",
            f"GPT of {self.num_params:,} parameters; batch {self.sampler.batch_size} = {batch} "
            f"x num_micro_batches {self.num_micro_batches}",
        ]
        if self.out_dir and self.out_dir != self.config.out_dir:
            lines.append(f"out_dir {self.out_dir}, as {self.config.out_dir} has what another run has left")
        if self.mesh.tp.size * self.mesh.sp.size > 1:
            lines.append(f"layers over tp {self.mesh.tp.size}, sequences over sp {self.mesh.sp.size} by {self.sp}")
        if isinstance(self.model, PipelineParallel):
            lines.append(f"{self.schedule.num_stages} stages over pp {self.mesh.pp.size} by {self.schedule.name}")
        return "\n".join(lines)

    @property
    def first(self) -> int:
        """The step to begin with."""
        return self.saving.first if self.saving else 1

    def shares(self) -> Iterator[np.ndarray]:
        """This rank's sample indices of each step from the first one on, epoch after epoch."""
        return islice(self.all_shares(), (self.first - 1) % len(self.sampler), None)

    def all_shares(self) -> Iterator[np.ndarray]:
        """Of each step of the first step's epoch, and of those after."""
        for epoch in range((self.first - 1) // len(self.sampler), sys.maxsize):
            self.sampler.set_epoch(epoch)
            self.windows.set_epoch(epoch)
            yield from self.sampler

    def step(self, iteration: int, share: np.ndarray) -> PendingStep:
        """One update of the weights.  The host does not wait for its device.  Collective."""
        config = self.config
        begin_s, waited_s = time.perf_counter(), self.model.exposed_s
        lr = learning_rate(iteration, config.lr, config.warmup_iters, config.max_iters)
        first_sample = iteration * len(self.windows)
        batches = [self.batch(self.windows, part, first_sample) for part in np.split(share, self.num_micro_batches)]
        with self.traced(iteration):
            loss = self.accumulate_gradients(batches)
        norm, verdict = self.update(lr, loss)
        computed_s = time.perf_counter()
        numbers = torch.cat([torch.stack([self.average(loss), loss, norm]), verdict.numbers])
        comm_s = self.model.exposed_s - waited_s + time.perf_counter() - computed_s
        known = {
            "iter": iteration,
            "lr": lr,
            "bubble": self.model.pipeline.bubble() if isinstance(self.model, PipelineParallel) else None,
            "memory_mib": self.memory_mib(),
        }
        return PendingStep(self, verdict.names, read_back(numbers), begin_s, comm_s, known)

    def accumulate_gradients(self, batches: list[Batch]) -> torch.Tensor:
        """Forward and backward of each micro-batch; the last one averages the gradients over the ranks.

        Returns the mean loss, in float64 on the device; of a pipeline, on the rank that has it, and 0 on others.
        """
        weight = self.scale.value / len(batches)
        if isinstance(self.model, PipelineParallel):
            return self.model.step(batches, [weight] * len(batches)) / self.scale.value
        losses = []
        for index, batch in enumerate(batches, 1):
            with nullcontext() if index == len(batches) else self.model.no_sync():
                loss = self.loss(batch)
                loss.backward(weight.to(loss.dtype))
            losses.append(loss.detach().double() / len(batches))
        return sum(losses[1:], losses[0])

    @contextmanager
    def traced(self, iteration: int) -> Iterator[None]:
        """Take down what the pipeline's ranks do in a step, if it is the one that `trace` asks for.  Collective."""
        if not self.config.trace or iteration != min(self.first + TRACED - 1, self.config.max_iters):
            yield
            return
        assert isinstance(self.model, PipelineParallel)
        spans: list[Span] = []
        self.model.pipeline.spans = spans
        yield
        self.model.pipeline.spans = None
        spans = gather(self.mesh.pp, spans)
        if self.mesh.comm.rank == 0:
            save_trace(self.config.trace, spans)
            save_picture(picture_of(self.config.trace), price(self.schedule, measured(spans)), spans)

    def loss(self, batch: Batch) -> torch.Tensor:
        assert isinstance(self.model, DataParallel | Zero)
        self.prepare(batch)
        with self.computing():
            return self.model(batch.tokens, batch.targets, batch.positions, batch.documents)[1]

    def average(self, loss: torch.Tensor) -> torch.Tensor:
        """Over all ranks that have one.  Collective."""
        self.sums[0] = loss / self.dp.size
        self.add_up()
        return self.sums[0]

    def update(self, lr: float, loss: torch.Tensor) -> tuple[torch.Tensor, Verdict]:
        """Clip the gradients, update the weights unless the step is to be skipped, and clear the gradients.

        Returns the norm before clipping, and what the ranks have agreed on.  Collective.
        """
        self.masters.take_gradients(self.scale.inverse)
        norm = self.clip()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        verdict = self.guard.judge(loss, norm)
        self.optimizer.step(verdict.skipped)
        self.spread()
        self.model.zero_grad()
        return norm, verdict

    def spread(self) -> None:
        """Make the model's parameters what the weights are that the optimizer updates.  Collective."""
        (self.zero.gather if self.zero else self.masters.give_parameters)()

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss in nats a token over the held-back part, shared by the ranks."""
        windows = TokenWindows(self.val_ids, self.config.block_size, seed=None)
        sums = np.zeros(2)  # loss, samples
        self.gpt.eval()
        mine, size = np.arange(self.dp.rank, len(windows), self.dp.size), self.config.micro_batch_size
        parts = np.split(mine, range(size, len(mine), size)) if len(mine) else []
        most = -(-len(windows) // self.dp.size)  # samples of a rank
        parts += [mine[:0]] * (-(-most // size) - len(parts))  # as many on all ranks, which may share parameters
        for first in range(0, len(parts), self.num_micro_batches):
            together = parts[first : first + self.num_micro_batches]
            batches = [self.batch(windows, part if len(part) else np.zeros(1, np.int64)) for part in together]
            for part, loss in zip(together, self.losses(batches), strict=True):
                sums += loss * len(part), len(part)
        self.gpt.train()
        self.sums.copy_(torch.from_numpy(sums))
        self.add_up()
        total, count = self.sums.tolist()
        return total / (count / self.mesh.pp.size)

    def losses(self, batches: list[Batch]) -> list[float]:
        """Of each micro-batch; of a pipeline, on the rank that has them, and 0 on others."""
        if isinstance(self.model, PipelineParallel):
            return self.model.pipeline.losses(batches)
        return [float(self.loss(batch)) for batch in batches]

    def sample(self, gpt: GPT) -> str:
        """Text, or token ids, that go on from the first ones of the held-back part."""
        prompt = torch.from_numpy(self.val_ids[:16].astype(np.int64))[None].to(self.config.device)  # (1, seq)
        generator = torch.Generator(self.config.device).manual_seed(self.config.seed)
        gpt.eval()
        drawn = gpt.generate(prompt, self.config.sample_tokens, 0.8, top_k=50, generator=generator)
        ids = drawn[0].tolist()
        return bytes(ids).decode(errors="replace") if self.tokens.is_text else " ".join(map(str, ids))

    def batch(self, windows: TokenWindows, indices: np.ndarray, first_sample: int = 0) -> Batch:
        """This rank's tokens of some samples, which have numbers from `first_sample` on, by which dropout draws."""
        inputs, targets = map(torch.from_numpy, windows.batch(indices))
        end = self.config.document_end
        ends = None if end is None else torch.from_numpy(documents(inputs.numpy(), end))[:, self.positions]
        samples = torch.from_numpy(first_sample + indices)
        batch = Batch(inputs[:, self.positions], targets[:, self.positions], self.positions, ends, samples)
        return batch.to(self.config.device)

    def whole(self) -> GPT:
        """The plain model with the weights trained.  Collective."""
        gpt = make_model(self.config, self.tokens.vocab_size).to(self.config.device)
        whole = self.zero.whole() if self.zero else nullcontext()
        with whole, self.masters.exact(self.gpt, self.shard):
            fill(gpt, wholes(self.gpt, self.mesh), self.mesh.pp)
        return gpt

    def memory_mib(self) -> float:
        if self.config.device == "cpu":
            return peak_memory_mib()
        return torch.cuda.max_memory_allocated(self.config.device) / 2**20


def remove_hooks(model: torch.nn.Module) -> None:
    """Take the hooks off gradients.  Python's garbage collector does not see that torch keeps them, nor what they keep.

    Found in torch 2.13: PyFunctionTensorPostAccGradHooks has a reference of its own to the dict of hooks.
    """
    for param in model.parameters():
        if hooks := getattr(param, "_post_accumulate_grad_hooks", None):
            hooks.clear()
