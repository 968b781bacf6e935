"""Small models with reproducible values, and comparisons of their tensors."""

import gc

import pytest
import torch

from models.config import ModelConfig
from models.decoder import Decoder
from parallelism.placement import shard_of
from parallelism.planner.presets import FAMILIES


def llama(*sizes, **settings) -> ModelConfig:
    """Describe a Llama, of the sizes in their order, and with the default settings of the family."""
    names = "vocab_size", "block_size", "n_layer", "n_head", "n_embd"
    return family_config("llama", **dict(zip(names, sizes, strict=False)), **settings)


def family_config(family, **settings) -> ModelConfig:
    return ModelConfig(**{**FAMILIES[family].common, **FAMILIES[family].settings, **settings})


def own_rows(comm, x: torch.Tensor) -> torch.Tensor:
    return x.chunk(comm.size)[comm.rank]


def random_tokens(batch, seq, seed=0):
    return torch.randint(29, (batch, seq), generator=torch.Generator().manual_seed(seed))


def randomized(config):
    """Make a float64 model with random biases and norms, which are constant in a freshly initialised one."""
    model = Decoder(config).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator))
    return model


CONFIG = ModelConfig(vocab_size=29, block_size=8, n_layer=2, n_head=8, n_embd=32, bias=True, n_kv_head=4)
TOKENS, TARGETS = random_tokens(2, 8), random_tokens(2, 8, seed=1)


def plain_gradients(config=CONFIG):
    model = randomized(config)
    model(TOKENS, TARGETS)[1].backward()
    return {name: p.grad for name, p in model.named_parameters()}


def tensors_alive():
    """Return the size in bytes of each live tensor's storage, by address."""
    gc.collect()
    alive = (x for x in gc.get_objects() if issubclass(type(x), torch.Tensor))
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in alive}


each_mode = pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence-parallel"])


def close(actual, expected, rtol=1e-10):
    actual, expected = actual.detach(), expected.detach()
    scale = expected.abs().max()
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=rtol * float(scale))


def part(parameter, whole, comm):
    shard = shard_of(parameter, "tp")
    return shard.local(whole, comm.rank, comm.size) if shard else whole
