"""ZeRO in pipelines: trained over stages and replicas, a model is the plain one's, trained in one process."""

import numpy as np
import pytest
import torch

from models.gpt import GPT, GPTConfig
from parallelism.clip import clip_grad_norm
from parallelism.dropout import Place
from parallelism.mesh import Mesh
from parallelism.pipeline_parallel import PipelineParallel
from parallelism.pipeline_schedule import registry
from parallelism.plan import gpt2_plan, parallelize
from parallelism.recompute import recompute
from parallelism.shard import wholes
from parallelism.stage import Batch, gpt2_layers

CONFIG = GPTConfig(vocab_size=19, block_size=8, n_layer=8, n_head=2, n_embd=8, bias=True)
STEPS, COUNT, SAMPLES = 4, 4, 2  # micro-batches a rank computes, and samples of each
CLIP = 0.3
FROZEN = {
    "none": (),
    "some": ("transformer.wpe.weight", "transformer.h.1", "transformer.h.2.mlp.c_fc.weight", "transformer.ln_f"),
    "tied": ("transformer.wte.weight", "transformer.h.7.attn"),
}

each_stage = pytest.mark.parametrize("zero_stage", [2, 3])


def adamw(params):
    params = list(params)
    matrices, others = [p for p in params if p.dim() >= 2], [p for p in params if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))


def made(dtype, frozen, seed=0):
    model = GPT(CONFIG, seed).to(dtype)
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(FROZEN[frozen] or ("none",)))
    return model


def tokens(step, count):
    """Of so many samples."""
    drawn = torch.Generator().manual_seed(step)
    ids = torch.randint(CONFIG.vocab_size, (count, CONFIG.block_size + 1), generator=drawn)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def plain_training(num_replicas, dtype, frozen):
    """Losses, norms and parameters of the plain model, whole batches and torch alone."""
    model = made(dtype, frozen)
    optimizer = adamw(p for p in model.parameters() if p.requires_grad)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        _, loss = model(*tokens(step, num_replicas * COUNT * SAMPLES))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}


class Run:
    """A model in stages, whose replicas share by ZeRO."""

    def __init__(self, mesh, zero_stage, schedule, dtype, frozen, group, recomputed):
        self.mesh = mesh
        self.model = made(dtype, frozen, seed=mesh.dp.rank)  # those of dp rank 0 are taken
        parallelize(self.model, gpt2_plan(CONFIG.vocab_size, CONFIG.n_head), mesh.tp)
        for block in self.model.transformer.h if recomputed else ():
            recompute(block, Place())
        made_for = registry.make(schedule, mesh.pp.size, COUNT)
        given = self.model, gpt2_layers(self.model), made_for, mesh
        self.pp = PipelineParallel(*given, make_optimizer=adamw, zero_group=group, zero_stage=zero_stage)
        self.zero = self.pp.zero

    def batches(self, step):
        inputs, targets = (x.chunk(self.mesh.dp.size)[self.mesh.dp.rank] for x in tokens(step, self.num_samples))
        return [Batch(*pair) for pair in zip(inputs.chunk(COUNT), targets.chunk(COUNT), strict=True)]

    @property
    def num_samples(self):
        return self.mesh.dp.size * COUNT * SAMPLES

    def train(self):
        """Returns the losses of all samples, and the norms."""
        losses, norms = np.zeros(STEPS), []
        for step in range(STEPS):
            losses[step] = self.pp.step(self.batches(step)) / self.mesh.dp.size
            own = [piece.own for piece in self.zero.pieces]
            norms.append(clip_grad_norm(own, CLIP, self.mesh.tp, self.mesh.pp, self.zero.ranks.shard))
            self.zero.update()
            self.pp.zero_grad()
        return self.mesh.along("dp", "pp").all_reduce(losses), norms

    def parameters(self):
        with self.zero.whole():
            return {name: p.clone() for name, p in wholes(self.model, self.mesh.tp).items()}

    def free(self):
        self.pp.tied.free()


@pytest.fixture
def started(comm):
    """Makes runs; gives their communicators back in the end."""
    runs = []

    def start(zero_stage, schedule="1f1b", dtype=torch.float64, frozen="none", group="all", recomputed=False, tp=1):
        mesh = Mesh(comm, pp=2, tp=tp)
        runs.append(Run(mesh, zero_stage, schedule, dtype, frozen, group, recomputed))
        return runs[-1]

    yield start
    for run in runs:
        run.free()
        run.mesh.free()


def check(run, frozen="none", tolerance=1e-10):
    dtype = torch.float64 if tolerance < 1e-8 else torch.float32
    want_losses, want_norms, want = plain_training(run.mesh.dp.size, dtype, frozen)
    losses, norms = run.train()
    np.testing.assert_allclose(losses, want_losses, rtol=tolerance)
    np.testing.assert_allclose(norms, want_norms, rtol=tolerance)
    for name, p in run.parameters().items():
        torch.testing.assert_close(p, want[name], rtol=0, atol=tolerance * float(want[name].abs().max()), msg=name)


@each_stage
@pytest.mark.parametrize("schedule", registry.names())
@pytest.mark.sizes(4)
def test_every_schedule_trains_as_one_process(started, schedule, zero_stage):
    check(started(zero_stage, schedule))
