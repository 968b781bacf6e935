"""Families of models beside formulas in NumPy, and beside transformers if that is installed."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from models.config import ModelConfig
from models.generate import generate
from mpi_tests.helpers.hugging_face import NumpyDecoder, gpt2_logits
from mpi_tests.helpers.models import family_config, random_tokens, randomized
from training.weights.export import save_hugging_face
from training.weights.hf import load_config, load_hugging_face
from training.weights.tables import TABLES, differences

SHAPE = {"vocab_size": 29, "block_size": 24, "n_layer": 3, "n_head": 4, "n_embd": 24, "n_kv_head": 2, "n_hidden": 20}
STRETCHED = {"rope_theta": 100.0, "rope_factor": 4.0, "rope_original_length": 16}
CONFIGS = {
    "gpt2": ModelConfig(**{**SHAPE, "n_head": 3, "n_kv_head": None}, bias=True),
    "llama": family_config("llama", **SHAPE, head_dim=8, qkv_bias=True, out_bias=True, mlp_bias=True),
    "llama with llama3": family_config("llama", **SHAPE, **STRETCHED),
    "llama with yarn": family_config("llama", **SHAPE, **STRETCHED, rope_scaling="yarn"),
    "llama with linear": family_config("llama", **SHAPE, **STRETCHED, rope_scaling="linear"),
    "mistral": family_config("mistral", **SHAPE, layers="window", window=5),
    "mixtral": family_config("mixtral", **SHAPE, num_experts=5),
    "qwen2": family_config("qwen2", **SHAPE, layers="full full window", window=5, tied=True),
    "qwen3": family_config("qwen3", **SHAPE, head_dim=10),
    "qwen3_moe": family_config("qwen3_moe", **SHAPE, head_dim=8, num_experts=5, experts_per_token=3),
    "qwen3_moe with scores": family_config("qwen3_moe", **SHAPE, num_experts=5, normalizes_choices=False),
    "gemma3_text": family_config("gemma3_text", **{**SHAPE, "n_layer": 7}, head_dim=8, window=5, attention_scale=0.25),
    "gemma3_text stretched": family_config("gemma3_text", **SHAPE, **STRETCHED, rope_scaling="linear", window=5,
                                       layers="window full"),
    "smollm3": family_config("smollm3", **{**SHAPE, "n_layer": 5}),
}  # fmt: skip
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
TOKENS = random_tokens(2, 24)


def formula(folder):
    """Return the logits of a folder's model by formulas in float64."""
    tensors, values = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    if values["model_type"] != "gpt2":
        return NumpyDecoder(tensors, values).logits(TOKENS)
    return gpt2_logits(tensors, TOKENS)


def test_every_family_has_a_case():
    assert {config.family for config in CONFIGS.values()} == {*TABLES}


@each_config
def test_logits_are_those_of_hugging_faces_formulas(tmp_path, config):
    config = replace(config, n_layer=2) if config.family == "gpt2" else config
    model = randomized(config).eval()
    save_hugging_face(model, tmp_path)
    with torch.no_grad():
        logits = model(TOKENS)[0]
    np.testing.assert_allclose(logits, formula(tmp_path), rtol=0, atol=1e-9 * float(logits.abs().max()))
    loaded = load_hugging_face(tmp_path).double()
    assert loaded.config.family == config.family
    assert differences(loaded.config, config) == []
    assert all(torch.equal(p, q.float().double()) for p, q in zip(loaded.parameters(), model.parameters(), strict=True))


@each_config
def test_a_cache_changes_nothing(config):
    """Each token drawn is the likeliest after all before it, beyond the window, too."""
    model = randomized(config).eval()
    tokens = generate(model, TOKENS[:, :3], 20, top_k=1)
    assert torch.equal(tokens[:, 3:], model(tokens)[0][:, 2:-1].argmax(-1))


@each_config
def test_a_document_has_the_logits_that_it_has_alone(config):
    model = randomized(config).eval()
    documents, positions = torch.tensor([[0] * 10 + [1] * 14] * 2), torch.tensor([*range(10), *range(14)])
    with torch.no_grad():
        logits, _ = model(TOKENS, positions=positions, documents=documents)
        torch.testing.assert_close(logits[:, 10:], model(TOKENS[:, 10:])[0], rtol=1e-9, atol=1e-9)


def theirs(config):
    """Return a model of transformers of the shape of ours, with random weights."""
    transformers = pytest.importorskip("transformers")
    table = TABLES[config.family]
    values = {**table.write(config), "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**values)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    return model


@pytest.mark.filterwarnings("default")
@each_config
def test_a_model_of_transformers_is_loaded_and_saved_again(tmp_path, config):
    model = theirs(config)
    model.save_pretrained(tmp_path / "theirs")
    ours = load_hugging_face(tmp_path / "theirs").eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(TOKENS)[0], model(TOKENS).logits, rtol=0, atol=1e-5)
    save_hugging_face(ours, tmp_path / "ours", tmp_path / "theirs")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert before.keys() == after.keys()
    assert all(
        torch.equal(tensor, after[name]) and tensor.dtype == after[name].dtype for name, tensor in before.items()
    )
    read = type(model.config).from_pretrained
    first, second = (read(tmp_path / name).to_dict() for name in ("theirs", "ours"))
    assert {**first, "_name_or_path": ""} == {**second, "_name_or_path": ""}


@pytest.mark.filterwarnings("default")
@each_config
def test_a_model_of_ours_is_loaded_by_transformers(tmp_path, config):
    transformers = pytest.importorskip("transformers")
    model = randomized(config).float().eval()
    save_hugging_face(model, tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(TOKENS)[0]
        torch.testing.assert_close(loaded(TOKENS).logits, logits, rtol=0, atol=1e-5 * float(logits.abs().max()))


# What a config.json that has only sizes stands for: defaults of transformers.
DEFAULTS = {
    "gpt2": {"norm_eps": 1e-5, "bias": True, "activation": "gelu_tanh"},
    "llama": {"rope_theta": 1e4, "tied": False, "qkv_bias": False, "mlp_bias": False, "head_dim": None},
    "mistral": {"rope_theta": 1e4, "tied": False, "layers": "window", "window": 4096},
    "mixtral": {"rope_theta": 1e6, "tied": False, "layers": "full", "normalizes_choices": True},
    "qwen2": {"rope_theta": 1e4, "tied": False, "layers": "full", "qkv_bias": True, "out_bias": False},
    "qwen3": {"rope_theta": 1e4, "tied": False, "layers": "full", "qkv_bias": False, "head_dim": 128},
    "qwen3_moe": {"rope_theta": 1e4, "tied": False, "normalizes_choices": False, "head_dim": None},
    "gemma3_text": {
        "rope_theta": 1e6,
        "local_rope_theta": 1e4,
        "tied": True,
        "head_dim": 256,
        "attention_scale": 1 / 16,
    },
    "smollm3": {"rope_theta": 2e6, "tied": True, "layers": "full full full unrotated"},
}


def sizes_alone(table):
    """Return the settings in config.json without which a family cannot be read."""
    written, needed = table.write(family_config(table.family.name, **{**SHAPE, "n_layer": 6})), {}
    for name, value in written.items():
        try:
            table.read({other: each for other, each in written.items() if other != name})
        except ValueError:
            needed[name] = value
    return needed


@pytest.mark.parametrize("family", TABLES)
def test_what_a_config_lacks_has_the_default(family):
    config = TABLES[family].read(sizes_alone(TABLES[family]))
    assert {name: getattr(config, name) for name in DEFAULTS[family]} == DEFAULTS[family]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("family", TABLES)
def test_the_defaults_are_those_of_transformers(family):
    transformers = pytest.importorskip("transformers")
    table = TABLES[family]
    values = sizes_alone(table)
    theirs = transformers.AutoConfig.for_model(family, **values).to_dict()
    kv_heads = {"num_key_value_heads": theirs.get("num_key_value_heads")}  # all files have them
    assert differences(table.read({**values, **kv_heads}), table.read(theirs)) == []


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("llama", {"num_attention_heads": 0}, "n_head=0 must be from 1 to "),
        ("gemma3_text", {"num_hidden_layers": 0}, "n_layer=0 must be from 1 to "),
        ("qwen2", {"num_hidden_layers": -1, "use_sliding_window": True}, "n_layer=-1 must be from 1 to "),
        ("qwen2", {"use_sliding_window": True, "layer_types": ["full_attention"]}, "an entry for each of num_hidden_"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers is [1]; an entry for each of num_hidden_layers="),
        ("gpt2", {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06; only 1e-05 can be loaded"),
    ],
)
def test_bad_sizes_in_one_line(tmp_path, family, change, words):
    config = family_config(family, vocab_size=19, n_layer=2, n_head=4, n_embd=16)
    (tmp_path / "config.json").write_text(json.dumps({**TABLES[family].write(config), **change}))
    with pytest.raises(ValueError, match=re.escape(words)):
        load_config(tmp_path)
