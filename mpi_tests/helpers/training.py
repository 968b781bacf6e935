"""A training loop over any mesh, as train.py has it, on a model and samples of its own."""

import numpy as np
import torch

from models.gpt import GPT, GPTConfig
from models.optimizer import adamw
from parallelism.data.data_parallel import DataParallel
from parallelism.mesh import Mesh
from parallelism.numerics.clipping import GradientClip
from parallelism.numerics.master_weights import MasterWeights
from parallelism.numerics.non_finite import GradientMonitor, StepGuard
from parallelism.numerics.precision import Precision
from parallelism.pipeline.gradients import tied_names
from parallelism.pipeline.pipeline_parallel import PipelineParallel, within
from parallelism.pipeline.schedule import registry
from parallelism.pipeline.stage import Batch, gpt2_layers
from parallelism.tensor.sharding_plan import parallelize
from parallelism.zero.gradients import ShardedGradients
from parallelism.zero.parameters import ShardedParameters
from parallelism.zero.states import ShardedStates, Zero
from parallelism.zero.units import ShardGroups
from training.gpt import gpt2_plan

CONFIG = GPTConfig(vocab_size=29, block_size=8, n_layer=2, n_head=2, n_embd=32, bias=True)


SAMPLES, MICRO_BATCHES, STEPS = 24, 2, 8


MODES = {
    "float32": Precision(),
    "float32 sent as bfloat16": Precision(grad_dtype="bfloat16"),
    "bfloat16 by autocast": Precision("bfloat16"),
    "float16 by autocast": Precision("float16"),
    "bfloat16": Precision("bfloat16", master_weights=True),
    "bfloat16, gradients too": Precision("bfloat16", master_weights=True, grad_dtype="bfloat16"),
    "float16": Precision("float16", master_weights=True),
    "float16, gradients too": Precision("float16", master_weights=True, grad_dtype="float16"),
}


UNSKIPPED = 2.0**12  # a loss scale by which no gradient here overflows


def samples(step):
    """Of a step's whole batch, the same on every rank."""
    ids = torch.randint(CONFIG.vocab_size, (SAMPLES, 1), generator=torch.Generator().manual_seed(step))
    ids = (ids * 3 ** torch.arange(CONFIG.block_size + 1)) % CONFIG.vocab_size  # so that there is something to learn
    return ids[:, :-1], ids[:, 1:]


def parts(step, dp):
    """This rank's micro-batches."""
    tokens, targets = (x.chunk(dp.size)[dp.rank].chunk(MICRO_BATCHES) for x in samples(step))
    return [Batch(*pair) for pair in zip(tokens, (t.contiguous() for t in targets), strict=True)]


class Training:
    """As train.py does it."""

    def __init__(self, comm, precision, scale=UNSKIPPED, schedule="1f1b", zero_stage=0, **axes):
        self.mesh, self.said = Mesh(comm, **axes), []
        self.gpt, self.precision, self.scale = GPT(CONFIG), precision, precision.loss_scale()
        self.scale.value.clamp_(max=scale)
        parallelize(self.gpt, gpt2_plan(CONFIG.vocab_size, CONFIG.n_head), self.mesh.tp)
        monitor, tied = GradientMonitor(self.gpt), tied_names(self.gpt)
        self.model = self.replicated(zero_stage) if self.mesh.pp.size == 1 else self.pipelined(schedule, zero_stage)
        self.zero = self.model if isinstance(self.model, Zero) else getattr(self.model, "zero", None)
        self.masters = self.zero.masters if self.zero else MasterWeights.of(self.gpt, self.model.arena)
        self.optimizer = self.zero.optimizer if self.zero else make_optimizer(self.masters.pieces.values())
        self.shard = self.zero.ranks.shard if self.zero else None
        self.guard = StepGuard(comm, "skip", self.scale, monitor, self.said.append)
        self.clip = GradientClip(1.0, self.gpt, self.masters, self.mesh, tied, self.shard)

    @property
    def asked(self):
        return {**self.precision.arena_dtypes, "wire_dtype": self.precision.wire_dtype}

    def replicated(self, zero_stage):
        if zero_stage == 0:
            arena = self.precision.arena(self.gpt, self.mesh.comm)
            return DataParallel(self.gpt, self.mesh.dp, arena, 0.02, wire_dtype=self.precision.wire_dtype)
        given = self.gpt, ShardGroups.of(self.mesh.dp), make_optimizer
        if zero_stage == 3:
            layers = [f"transformer.h.{number}" for number in range(CONFIG.n_layer)]
            return ShardedParameters(*given, layers, **self.asked)
        kind = ShardedStates if zero_stage == 1 else ShardedGradients
        return kind(*given, bucket_mb=0.02, **self.asked)

    def pipelined(self, schedule, zero_stage):
        layers = [within(self.computing, layer) for layer in gpt2_layers(self.gpt)]
        made = registry.make(schedule, self.mesh.pp.size, MICRO_BATCHES)
        sharing = {"make_optimizer": make_optimizer, "zero_stage": zero_stage} if zero_stage else {}
        return PipelineParallel(self.gpt, layers, made, self.mesh, **sharing, **self.asked)

    def computing(self):
        return self.precision.computing("cpu")

    def step(self, step):
        """The whole batch's loss."""
        loss = self.gradients(parts(step, self.mesh.dp))
        self.masters.take_gradients(self.scale.inverse)
        norm = self.clip()
        verdict = self.guard.judge(loss, norm)
        self.optimizer.step(verdict.skipped)
        self.guard.tell(step, verdict.names, verdict.numbers.tolist(), float(loss), float(norm))
        (self.zero.gather if self.zero else self.masters.give_parameters)()
        self.model.zero_grad()
        return self.mesh.along("dp", "pp").all_reduce(np.array([float(loss) / self.mesh.dp.size]))[0]

    def gradients(self, batches):
        weight = self.scale.value / len(batches)
        if isinstance(self.model, PipelineParallel):
            return self.model.step(batches, [weight] * len(batches)) / self.scale.value
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            self.model.sync = batch is batches[-1]
            with self.computing():
                _, loss = self.model(batch.tokens, batch.targets)
            loss.backward(weight.to(loss.dtype))
            total += loss.detach().double() / len(batches)
        return total

    def weights(self):
        return flat(self.masters)

    def free(self):
        if isinstance(self.model, PipelineParallel):
            self.model.tied.free()
        self.mesh.free()


def make_optimizer(pieces):
    return adamw(pieces, 3e-3, 0.1)


def flat(masters):
    return torch.cat([piece.detach().flatten() for piece in masters.pieces.values()])
