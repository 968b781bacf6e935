"""Models by name and by depth: published sizes, overriding flags, invalid settings."""

import re

import pytest

from models.config import ModelConfig
from mpi_tests.helpers.launch import ROOT
from mpi_tests.helpers.models import llama
from parallelism.planner import ParallelLayout, TrainingJob
from parallelism.planner.flags import parse_request
from parallelism.planner.memory import rank_params
from parallelism.planner.presets import GPT2, LLAMA, PRESETS, shape_of
from parallelism.planner.settings import parse
from parallelism.planner.shape import ModelShape
from training.settings.checks import num_micro_batches
from training.settings.config import Config
from training.settings.derived import model_config

# Numbers of parameters of these models, as published with the weights.
PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-1b": 1_235_814_400,
    "llama-3b": 3_212_749_824,
    "llama-8b": 8_030_261_248,
    "mistral": 7_241_732_096,
    "mixtral": 46_702_792_704,
    "qwen2": 494_032_768,
    "qwen3": 596_049_920,
    "qwen3_moe": 30_532_122_624,
    "gemma3_text": 999_885_952,
    "smollm3": 3_075_098_624,
}
CONFIG_FILES = sorted(ROOT.glob("configs/*.toml"))


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_published(name):
    shape = shape_of(Config(model=name), PRESETS[name].settings["vocab_size"])
    assert rank_params(TrainingJob(shape, 1), ParallelLayout()) == (PARAMETERS[name],)


@pytest.mark.parametrize(("family", "kind"), [(GPT2, ModelConfig), (LLAMA, llama)], ids=["gpt2", "llama"])
def test_a_family_s_shape_is_its_models(family, kind):
    """The planner, which imports no model, derives the same sizes as the models."""
    for sizes in ({}, {"n_kv_head": 2}, {"n_hidden": 72}, {"n_embd": 256, "n_head": 8}):
        config = Config(model=f"{family.name}-tiny", **sizes)
        assert shape_of(config, 99) == ModelShape.of(kind(**sizes, vocab_size=99))


def test_the_default_is_as_small_as_ever():
    config = Config()
    assert (config.model, config.n_layer, config.n_head, config.n_embd, config.block_size) == (
        "gpt2-tiny",
        4,
        4,
        192,
        128,
    )
    assert (config.bias, config.lr) == (False, 3e-3)
    assert model_config(config, 256) == ModelConfig()


def test_flags_override_the_model_and_the_file():
    assert model_config(Config(model="gpt2-medium"), 100) == ModelConfig(100, 1024, 24, 16, 1024, bias=True)
    config = parse(Config, "", ["--model", "llama-8b", "--n_layer", "2", "--n_hidden", "64", "--tied"])
    expected = llama(256, 8192, 2, 32, 4096, n_kv_head=8, n_hidden=64, rope_theta=5e5, tied=True)
    assert model_config(config, 256) == expected


def test_a_model_on_the_command_line_comes_before_a_files_shape(tmp_path):
    (tmp_path / "a.toml").write_text("n_layer = 2\nn_embd = 64\nblock_size = 8\nlr = 0.1\nseed = 5")
    file = ["--config", str(tmp_path / "a.toml")]
    assert model_config(parse(Config, "", [*file, "--model", "gpt2"]), 50257) == ModelConfig(**PRESETS["gpt2"].settings)
    config = parse(Config, "", [*file, "--depth", "3", "--n_head", "4"])
    assert (config.n_layer, config.n_head, config.n_embd, config.block_size, config.seed) == (3, 4, 192, 8, 5)
    assert config.lr == pytest.approx(1.2e-3)
    assert parse(Config, "", file).n_layer == 2


def test_a_depth_sets_the_shape_the_batch_and_the_rate():
    config = Config(model="llama-8b", depth=12, block_size=1024)
    assert model_config(config, 256) == llama(256, 1024, 12, 12, 768, rope_theta=5e5)
    assert config.lr == pytest.approx(6e-4)
    deeper = Config(depth=48, block_size=1024, n_head=24, lr=0.1)
    assert (deeper.n_layer, deeper.n_embd, deeper.n_head, deeper.lr) == (48, 3072, 24, 0.1)
    assert Config(depth=48, block_size=1024).lr == pytest.approx(3e-4)


@pytest.mark.parametrize(
    ("settings", "dp_size", "num_samples", "expected"),
    [
        ({"depth": 12}, 1, 10**6, 512),
        ({"depth": 48}, 1, 10**6, 2048),
        ({"depth": 12}, 3, 10**6, 504),  # the nearest multiple of 3 x 8
        ({"depth": 12}, 1, 100, 96),  # limited by the number of samples
        ({"depth": 12, "micro_batch_size": 600}, 1, 1000, 600),
        ({"depth": 12, "num_micro_batches": 1}, 1, 10**6, 8),
        ({"depth": 12, "global_batch_size": 24}, 1, 10**6, 24),
        ({}, 2, 10**6, 16),
    ],
)
def test_a_depths_batch_is_what_ranks_can_share_and_data_has(settings, dp_size, num_samples, expected):
    config = Config(block_size=1024, **settings)
    assert num_micro_batches(config, dp_size, num_samples) * dp_size * config.micro_batch_size == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "gpt3"}, "model='gpt3' is unknown: use gpt2-tiny, gpt2, "),
        ({"depth": 0}, "depth=0 must be from 1 to 1000"),
        ({"model": "llama", "dropout": 0.1}, "dropout=0.1 is not a setting of model=llama: omit it, or use another"),
        ({"model": "llama", "bias": True}, "bias=True is not a setting of model=llama"),
        ({"model": "llama", "num_experts": 4}, "num_experts=4 is not a setting of model=llama"),
        ({"tied": False}, "tied=False is not a setting of model=gpt2-tiny"),
        ({"architecture": "{"}, "architecture='{' is not JSON: Expecting property name"),
        ({"architecture": "[]"}, "architecture='[]' must be a JSON object, such as {"),
        ({"architecture": '{"windows": 4}'}, "architecture='{\"windows\": 4}': windows is unknown (nearest: window); "),
        ({"architecture": '{"activation": "gelu2"}'}, "activation='gelu2' is unknown: use gelu_tanh, gelu, silu, relu"),
        ({"architecture": '{"layers": "fully"}'}, "layers='fully' has 'fully' (nearest: full): use full, window, "),
        ({"architecture": '{"layers": "window"}'}, "layers='window' need a window: set window to its tokens"),
        ({"architecture": '{"window": 1.5}'}, "window=1.5 must be of type int"),
        ({"architecture": '{"rope_scaling": "ntk"}'}, "rope_scaling='ntk' is unknown: use llama3, linear, yarn"),
    ],
)
def test_what_a_model_lacks_is_refused(settings, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        model_config(Config(**settings), 256)


@pytest.mark.parametrize("path", CONFIG_FILES, ids=lambda path: path.stem)
def test_the_planner_reads_the_shape_that_a_run_has(path):
    config, job = parse(Config, "", ["--config", str(path)]), parse_request(["--config", str(path)], None).job
    assert job.model == shape_of(config, job.model.vocab_size)
