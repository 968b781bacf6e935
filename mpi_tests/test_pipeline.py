"""A pipeline against the plain model: loss and every gradient, of the whole batch in one."""

import pytest
import torch

from models.gpt import GPT, GPTConfig
from parallelism.mesh import Mesh
from parallelism.pipeline_parallel import PipelineParallel
from parallelism.pipeline_schedule import registry
from parallelism.stage import Batch, gpt2_layers

CONFIG = GPTConfig(vocab_size=19, block_size=8, n_layer=16, n_head=2, n_embd=8, bias=True)
SEQ = 6


def batches_of(count, samples=2, seed=0):
    """Micro-batches of a batch."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(CONFIG.vocab_size, (count * samples, SEQ + 1), generator=generator)
    return [Batch(part[:, :-1], part[:, 1:]) for part in ids.chunk(count)]


def plain_gradients(batches, dtype):
    """Loss and gradients of the plain model on all of it."""
    model = GPT(CONFIG).to(dtype)
    _, loss = model(torch.cat([b.tokens for b in batches]), torch.cat([b.targets for b in batches]))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.sizes(1, 2, 3, 4, 8)
def test_loss_and_gradients_of_the_plain_model(comm, name, dtype, tolerance):
    mesh = Mesh(comm, pp=comm.size)
    for count in {1, comm.size, 2 * comm.size + 1}:
        batches = batches_of(count)
        want_loss, want = plain_gradients(batches, dtype)
        model = GPT(CONFIG).to(dtype)
        pp = PipelineParallel(model, gpt2_layers(model), registry.make(name, comm.size, count), mesh)
        for _ in range(2):  # the second step must find nothing of the first
            pp.arena.zero_grad()
            loss = pp.step(batches)
            assert loss == (pytest.approx(want_loss, rel=tolerance) if pp.has_loss else 0)
            for part, p in model.named_parameters():
                torch.testing.assert_close(p.grad, want[part], rtol=tolerance, atol=tolerance * 0.1)
        assert [loss is not None for loss in pp.pipeline.losses(batches)] == [True] * count
        assert sum(pp.pipeline.losses(batches)) == (pytest.approx(want_loss * count) if pp.has_loss else 0)
