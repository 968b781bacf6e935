"""The planner's counts for every family of models, beside real ones."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models.config import ModelConfig
from models.decoder import Decoder, flops_per_token
from mpi_tests.helpers.models import family_config
from mpi_tests.helpers.saved import saved_bytes
from parallelism.planner import ParallelLayout, TrainingJob
from parallelism.planner.counts import block_saved
from parallelism.planner.flops import block_flops, layer_flops
from parallelism.planner.memory import rank_params
from parallelism.planner.presets import PRESETS, shape_of
from parallelism.planner.shape import ModelShape
from training.parallel.decoder import fuse, recompute_model
from training.settings.config import Config
from training.settings.derived import model_config

SHAPE = {"vocab_size": 101, "block_size": 32, "n_layer": 4, "n_head": 4, "n_embd": 64, "n_kv_head": 2, "n_hidden": 160}
CONFIGS = {
    "gpt2": ModelConfig(**SHAPE, bias=True),
    "llama": family_config("llama", **SHAPE, qkv_bias=True, out_bias=True, mlp_bias=True, head_dim=24),
    "mistral": family_config("mistral", **SHAPE, layers="window", window=8),
    "mixtral": family_config("mixtral", **SHAPE, num_experts=4),
    "qwen2": family_config("qwen2", **SHAPE),
    "qwen3": family_config("qwen3", **SHAPE, head_dim=32),
    "qwen3_moe": family_config("qwen3_moe", **SHAPE, head_dim=32),
    "gemma3_text": family_config("gemma3_text", **SHAPE, head_dim=32, layers="window", window=8, attention_scale=0.1),
    "smollm3": family_config("smollm3", **SHAPE),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
SAMPLES = 3


@each_config
def test_parameters_are_those_of_the_model(config):
    job = TrainingJob(ModelShape.of(config), 1)
    assert rank_params(job, ParallelLayout()) == (sum(p.numel() for p in Decoder(config).parameters()),)


@each_config
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_block_keeps_what_autograd_saves(recompute, config):
    model = Decoder(config)
    fuse(model)
    if recompute == "selective":
        recompute_model(model, recompute)
    block, x = model.transformer.h[0], torch.randn(SAMPLES, 32, 64, requires_grad=True)
    job = TrainingJob(ModelShape.of(config), SAMPLES)
    layout = ParallelLayout(recompute=recompute, micro_batch_size=SAMPLES)
    predicted_bytes = block_saved(job, layout).nbytes(job.precision)
    assert predicted_bytes == pytest.approx(saved_bytes(lambda: block(x), block), rel=0.02)


@each_config
def test_a_block_computes_what_torch_counts(config):
    """Torch counts attention without its mask, and so a window as long as the sequence."""
    block, shape = Decoder(config).transformer.h[0], ModelShape.of(config)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        block(torch.ones(SAMPLES, 32, 64))
    beyond = 4 * 4 * shape.head_size * (32 - 8) if config.window else 0  # 4 d for each token
    assert counter.get_total_flops() == SAMPLES * 32 * (block_flops(shape, 0) + beyond)


@each_config
def test_a_step_computes_three_times_a_forward_pass(config):
    model = Decoder(config)
    step, forward = flops_per_token(config, model.num_params()), sum(layer_flops(ModelShape.of(config)))
    assert step == pytest.approx(3 * forward, rel=0.02)  # norms and biases are no products


@pytest.mark.parametrize("name", PRESETS)
def test_a_presets_shape_is_its_models(name):
    """The planner, which imports no model, derives the same sizes as the models."""
    config = Config(model=name)
    assert shape_of(config, 99) == ModelShape.of(model_config(config, 99))
