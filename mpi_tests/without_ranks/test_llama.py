"""Llama compared with complex rotations, Hugging Face's formulas, and transformers if it is installed."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from models.config import ModelConfig
from models.decoder import Decoder, flops_per_token
from models.rotary import rotate, rotation_speeds, rotations
from mpi_tests.helpers.hugging_face import NumpyDecoder, llama3_speeds
from mpi_tests.helpers.models import llama, random_tokens, randomized
from parallelism.planner.presets import PRESETS
from training.settings.derived import checked
from training.weights.export import save_hugging_face, to_hugging_face
from training.weights.hf import initialize, load_hugging_face

SHAPE = {"vocab_size": 29, "block_size": 12, "n_layer": 2, "n_head": 4, "n_embd": 24}
CONFIGS = {
    "plain": llama(**SHAPE),
    "grouped": llama(**SHAPE, n_kv_head=2, n_hidden=40, rope_theta=500.0, norm_eps=1e-3),
    "tied": llama(**SHAPE, n_kv_head=1, n_hidden=20, tied=True),
    "slower": llama(**SHAPE, rope_theta=20.0, rope_factor=8.0, rope_original_length=20),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
TOKENS = random_tokens(2, 12)
SCALING = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGER = {"factor": 32.0, "original_max_position_embeddings": 7}

# Names and shapes of LlamaForCausalLM, for two heads of keys and values of size 6.
BLOCK_SHAPES = {
    "input_layernorm.weight": (24,),
    "self_attn.q_proj.weight": (24, 24),
    "self_attn.k_proj.weight": (12, 24),
    "self_attn.v_proj.weight": (12, 24),
    "self_attn.o_proj.weight": (24, 24),
    "post_attention_layernorm.weight": (24,),
    "mlp.gate_proj.weight": (40, 24),
    "mlp.up_proj.weight": (40, 24),
    "mlp.down_proj.weight": (24, 40),
}
SHAPES = {
    "model.embed_tokens.weight": (29, 24),
    **{f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in BLOCK_SHAPES.items()},
    "model.norm.weight": (24,),
    "lm_head.weight": (29, 24),
}


def small_weights(config):
    """Make a model with weights as large as those of a trained one."""
    model = Decoder(config)
    with torch.no_grad():
        for p, random in zip(model.parameters(), randomized(config).parameters(), strict=True):
            p.add_(random, alpha=0.1)
    return model.eval()


@pytest.mark.parametrize("positions", [None, [3, 0, 7], [[3, 0, 7], [1, 1, 2]]])
def test_rotations_are_products_of_complex_numbers(positions):
    x = torch.randn(2, 3, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    points = torch.complex(x[..., :4], x[..., 4:]).numpy()
    where = np.array([[0, 1, 2]] if positions is None else positions).reshape(-1, 1, 3, 1)
    turned = points * np.exp(1j * where * 500.0 ** (-np.arange(4) / 4))
    speeds = rotation_speeds(llama(n_embd=8, n_head=1, rope_theta=500.0))
    rotated = rotate(x, *rotations(x, None if positions is None else torch.tensor(positions), speeds))
    np.testing.assert_allclose(rotated, np.concatenate([turned.real, turned.imag], -1), rtol=0, atol=1e-14)


def test_16_bits_are_rotated_in_float32():
    x = torch.randn(1, 1, 2048, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    speeds = rotation_speeds(llama(n_embd=64, n_head=1))
    exact, rotated = (rotate(each, *rotations(each, None, speeds)) for each in (x.double(), x))
    assert rotated.dtype == torch.bfloat16
    assert (rotated - exact).abs().max() <= exact.abs().max() * 2**-8


def test_slow_rotations_are_slowed_down():
    """Llama 3.2's frequencies equal Hugging Face's formula, whose three cases all occur."""
    config = llama(**PRESETS["llama-1b"].settings)
    plain = rotation_speeds(replace(config, rope_factor=1.0)).numpy()
    np.testing.assert_allclose(plain, 5e5 ** -(np.arange(32) / 32), rtol=1e-12)
    scaled = rotation_speeds(config).numpy()
    np.testing.assert_allclose(scaled, llama3_speeds(plain, "llama3", 32, 1, 4, 8192), rtol=1e-12)
    ratios = plain / scaled
    assert (ratios == 1).any()
    assert (np.isclose(ratios, 32, rtol=1e-12)).any()
    assert ((ratios > 1.1) & (ratios < 31)).any()


def test_a_document_has_the_logits_that_it_has_alone():
    """Its place in the sequence has no effect, as attention depends only on distances between positions."""
    model = randomized(CONFIGS["grouped"])
    documents = torch.tensor([[0] * 5 + [1] * 7] * 2)
    logits, _ = model(TOKENS, documents=documents)
    torch.testing.assert_close(logits[:, :5], model(TOKENS[:, :5])[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logits[:, 5:], model(TOKENS[:, 5:])[0], rtol=1e-9, atol=1e-9)


@each_config
def test_logits_are_those_of_hugging_faces_formulas(tmp_path, config):
    save_hugging_face(small_weights(config), tmp_path)
    with torch.no_grad():
        logits, _ = load_hugging_face(tmp_path).eval()(TOKENS)
    tensors, settings = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    np.testing.assert_allclose(logits, NumpyDecoder(tensors, settings).logits(TOKENS), rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("default")
@each_config
def test_logits_are_those_of_transformers(tmp_path, config):
    """Our model loads a checkpoint of transformers, and transformers load ours."""
    transformers = pytest.importorskip("transformers")
    model = small_weights(config)
    save_hugging_face(model, tmp_path / "ours")
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours").eval()
    theirs.save_pretrained(tmp_path / "theirs")
    back = load_hugging_face(tmp_path / "theirs").eval()
    with torch.no_grad():
        logits, _ = model(TOKENS)
        torch.testing.assert_close(theirs(TOKENS).logits, logits, rtol=0, atol=1e-5)
        assert torch.equal(back(TOKENS)[0], logits)


def test_names_and_shapes():
    tensors = to_hugging_face(Decoder(CONFIGS["grouped"]))
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == SHAPES
    assert to_hugging_face(Decoder(CONFIGS["tied"])).keys() == SHAPES.keys() - {"lm_head.weight"}


@each_config
def test_round_trip(tmp_path, config):
    model = small_weights(config)
    save_hugging_face(model, tmp_path)
    loaded, initial = load_hugging_face(tmp_path), Decoder(config)
    initialize(initial, tmp_path)
    for other in (loaded, initial):
        for (name, p), (other_name, other_p) in zip(model.named_parameters(), other.named_parameters(), strict=True):
            assert name == other_name
            assert torch.equal(p, other_p), name
        assert (other.lm_head.weight is other.transformer.wte.weight) == config.tied
    assert loaded.config.hidden_width == config.hidden_width


def changed(folder, **changes):
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))


def test_settings_as_transformers_5_writes_them(tmp_path):
    model = small_weights(CONFIGS["grouped"])
    save_hugging_face(model, tmp_path)
    changed(tmp_path, rope_theta=..., rope_parameters={"rope_theta": 500.0, "rope_type": "default"})
    assert load_hugging_face(tmp_path).config == CONFIGS["grouped"]
    rope = {"rope_theta": 500.0, **SCALING, **LONGER}
    changed(tmp_path, rope_parameters=rope)
    expected = replace(CONFIGS["grouped"], rope_factor=32.0, rope_original_length=7)
    assert load_hugging_face(tmp_path).config == expected


def test_weights_in_several_files(tmp_path):
    """The files also have entries of older versions: rotary frequencies, and a tied head."""
    model = small_weights(CONFIGS["tied"])
    save_hugging_face(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    names = sorted(tensors)
    files = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert torch.equal(load_hugging_face(tmp_path).eval()(TOKENS)[0], model(TOKENS)[0])
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-1.safetensors: no such file"):
        load_hugging_face(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "self_attn.k_proj.bias is absent, but (12,) by config.json"),
        ({"attention_dropout": 0.1}, "config.json: attention_dropout is 0.1; only 0.0 can be loaded"),
        ({"hidden_act": "gelu_pytorch"}, "'gelu_pytorch' (nearest: gelu_pytorch_tanh); only silu, gelu_new, "),
        ({"hidden_act": "relu2"}, "config.json: hidden_act is 'relu2' (nearest: relu); only silu, gelu_new, "),
        ({"model_type": "qwen4"}, "config.json: model_type is 'qwen4' (nearest: qwen3); only gpt2, llama, mistral, "),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling has no factor; get the file again"),
        (
            {"rope_scaling": {**SCALING, **LONGER, "high_freq_factor": 8.0}},
            "high_freq_factor is 8.0; only 4.0 can be loaded",
        ),
        ({"rope_scaling": {**SCALING, "factor": 2.0}}, "rope_scaling has no original_max_position_embeddings; get"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_type is 'dynamic'; only default, linear, ",
        ),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters has no factor; get the file again"),
        (
            {"rope_scaling": {"rope_type": "yarn", **LONGER, "attention_factor": 2.0}},
            "attention_factor is 2.0; only 1.34",
        ),
        ({"rope_parameters": "none"}, "rope_parameters is 'none'; an object of settings is expected"),
        ({"head_dim": 8}, "model.layers.0.self_attn.k_proj.weight is (12, 24), but (16, 24) by config.json"),
        ({"intermediate_size": 41}, "mlp.down_proj.weight is (24, 40), but (24, 41) by config.json"),
        ({"hidden_size": ...}, "config.json: no hidden_size; pass a folder with a model of Hugging Face"),
        ({"rms_norm_eps": "small"}, "config.json: norm_eps='small' must be of type float"),
    ],
)
def test_settings_that_cannot_be_loaded(tmp_path, changes, message):
    save_hugging_face(Decoder(CONFIGS["grouped"]), tmp_path)
    changed(tmp_path, **changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_hugging_face(tmp_path)


def test_another_model_is_not_initialized(tmp_path):
    save_hugging_face(Decoder(CONFIGS["grouped"]), tmp_path)
    settings = "rope_theta=500.0, norm_eps=0.001, n_kv_head=2, n_hidden=40"  # but not rope_original_length
    with pytest.raises(ValueError, match=f"a Llama of {settings}, but this one is of .*: set {settings}"):
        initialize(Decoder(CONFIGS["plain"]), tmp_path)
    with pytest.raises(ValueError, match="a Llama, but this one is a GPT-2: set model to a Llama's"):
        initialize(Decoder(ModelConfig(**SHAPE)), tmp_path)


def test_heads_of_odd_sizes_are_refused():
    with pytest.raises(ValueError, match=r"n_embd=20 and n_head=4 make heads of 5, .*: use n_embd=24"):
        checked(llama(n_embd=20, n_head=4))


def test_flops_count_products():
    """Forward FLOPs per token are 2 per matrix element and 4 d T per block for attention; a step takes 3 times that."""
    for config in CONFIGS.values():
        model = Decoder(config)
        elements = sum(p.numel() for name, p in model.named_parameters() if name != "transformer.wte.weight")
        elements += model.transformer.wte.weight.numel() if config.tied else 0
        assert flops_per_token(config, model.num_params()) == 3 * (2 * elements + 2 * 4 * 24 * 12)
