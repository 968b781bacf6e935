"""A training loop over any mesh like train.py's, with a small model and generated samples."""

import numpy as np
import torch

from models.config import ModelConfig
from models.decoder import Decoder
from parallelism.mesh import Mesh
from parallelism.numerics.clipping import GradientClip
from parallelism.numerics.non_finite import GradientMonitor, StepGuard
from parallelism.numerics.precision import Precision
from parallelism.pipeline.pipeline_parallel import PipelineParallel
from parallelism.pipeline.schedule import registry
from parallelism.pipeline.stage import Batch, within
from parallelism.step.local_parameters import tied_names
from parallelism.tensor.sharding_plan import parallelize
from training.optim.optimizer import adamw
from training.parallel.decoder import layers_of, plan_of

CONFIG = ModelConfig(vocab_size=29, block_size=8, n_layer=2, n_head=2, n_embd=32, bias=True)


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


UNSKIPPED = 2.0**12  # a loss scale with which no gradient here overflows


def samples(step):
    """Return the samples of a step's whole batch, the same on every rank."""
    ids = torch.randint(CONFIG.vocab_size, (SAMPLES, 1), generator=torch.Generator().manual_seed(step))
    ids = (ids * 3 ** torch.arange(CONFIG.block_size + 1)) % CONFIG.vocab_size  # a pattern to learn
    return ids[:, :-1], ids[:, 1:]


def parts(step, dp):
    """Return this rank's micro-batches."""
    tokens, targets = (x.chunk(dp.size)[dp.rank].chunk(MICRO_BATCHES) for x in samples(step))
    return [Batch(*pair) for pair in zip(tokens, (t.contiguous() for t in targets), strict=True)]


class Training:
    """A training run like train.py's."""

    def __init__(self, comm, precision, scale=UNSKIPPED, schedule="1f1b", zero_stage=0, **axes):
        self.mesh, self.warnings = Mesh(comm, **axes), []
        self.gpt, self.precision, self.scale = Decoder(CONFIG), precision, precision.loss_scale()
        self.scale.value.clamp_(max=scale)
        parallelize(self.gpt, plan_of(CONFIG), self.mesh.tp)
        tied = tied_names(self.gpt)
        self.model = self.staged(schedule, zero_stage)
        self.replica = self.model.replica
        monitor = GradientMonitor(self.replica.own.names)
        self.model.listeners.insert(0, monitor)
        self.masters, self.optimizer, self.shard = self.replica.masters, self.replica.optimizer, self.replica.shard
        self.guard = StepGuard(comm, "skip", self.scale, monitor, self.warnings.append)
        self.clip = GradientClip(1.0, self.gpt, self.masters, self.mesh, tied)

    def staged(self, schedule, zero_stage):
        layers = [within(self.computing, layer) for layer in layers_of(self.gpt)]
        pipeline_schedule = registry.make_schedule(schedule, self.mesh.pp.size, MICRO_BATCHES)
        options = {"make_optimizer": make_optimizer, "zero_stage": zero_stage, "bucket_mb": 0.02}
        precision = {**self.precision.arena_dtypes, "wire_dtype": self.precision.wire_dtype}
        return PipelineParallel(self.gpt, layers, pipeline_schedule, self.mesh, **options, **precision)

    def computing(self, batch):
        return self.precision.computing("cpu")

    def step(self, step):
        """Train for a step; return the whole batch's loss."""
        loss = self.gradients(parts(step, self.mesh.dp))
        self.masters.take_gradients(self.scale.inverse)
        norm = self.clip()
        verdict = self.guard.judge(loss, norm)
        self.optimizer.step(verdict.skipped)
        self.guard.tell(step, verdict.names, verdict.numbers.tolist(), float(loss), float(norm))
        self.replica.gather()
        self.model.zero_grad()
        return self.mesh.along("dp", "pp").all_reduce(np.array([float(loss) / self.mesh.dp.size]))[0]

    def gradients(self, batches):
        weight = self.scale.value / len(batches)
        return self.model.step(batches, [weight] * len(batches)) / self.scale.value

    def weights(self):
        return flat(self.masters)

    def free(self):
        self.model.free()
        self.mesh.free()


def make_optimizer(pieces):
    return adamw(pieces, 3e-3, 0.1)


def flat(masters):
    return torch.cat([piece.detach().flatten() for piece in masters.pieces.values()])
