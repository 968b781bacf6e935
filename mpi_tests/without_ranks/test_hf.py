import json
import os
import re
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from models.config import ModelConfig
from models.decoder import Decoder
from mpi_tests.helpers.hugging_face import gpt2_logits
from training.weights.export import save_hugging_face, to_hugging_face
from training.weights.hf import initialize, load_hugging_face

SMALL: dict[str, Any] = {
    "vocab_size": 29,
    "block_size": 12,
    "n_layer": 2,
    "n_head": 3,
    "n_embd": 24,
    "dropout": 0.1,
}

# Names and shapes of GPT2LMHeadModel, for a width of 24.
BLOCK_SHAPES = {
    "ln_1.weight": (24,),
    "ln_1.bias": (24,),
    "attn.c_attn.weight": (24, 72),
    "attn.c_attn.bias": (72,),
    "attn.c_proj.weight": (24, 24),
    "attn.c_proj.bias": (24,),
    "ln_2.weight": (24,),
    "ln_2.bias": (24,),
    "mlp.c_fc.weight": (24, 96),
    "mlp.c_fc.bias": (96,),
    "mlp.c_proj.weight": (96, 24),
    "mlp.c_proj.bias": (24,),
}
SHAPES = {
    "transformer.wte.weight": (29, 24),
    "transformer.wpe.weight": (12, 24),
    **{f"transformer.h.{i}.{name}": shape for i in range(2) for name, shape in BLOCK_SHAPES.items()},
    "transformer.ln_f.weight": (24,),
    "transformer.ln_f.bias": (24,),
}


def randomized(bias):
    model = Decoder(ModelConfig(**SMALL, bias=bias))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator))
    return model


@pytest.mark.parametrize("bias", [False, True])
def test_names_and_shapes(bias):
    tensors = to_hugging_face(randomized(bias))
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == SHAPES


def test_layout():
    model = randomized(bias=True)
    tensors = to_hugging_face(model)
    block = model.transformer.h[1]
    assert torch.equal(tensors["transformer.h.1.attn.c_proj.weight"], block.attn.c_proj.weight.T)
    assert torch.equal(tensors["transformer.h.1.mlp.c_fc.bias"], block.mlp.c_fc.bias)
    assert torch.equal(tensors["transformer.wpe.weight"], model.transformer.wpe.weight)


def test_biases_that_the_model_lacks_are_0():
    tensors = to_hugging_face(randomized(bias=False))
    biases = [tensor for name, tensor in tensors.items() if name.endswith("bias")]
    assert len(biases) == 13
    assert not any(bias.any() for bias in biases)


@pytest.mark.parametrize("bias", [False, True])
def test_round_trip(tmp_path, bias):
    model = randomized(bias)
    save_hugging_face(model, tmp_path / "export")
    loaded = load_hugging_face(tmp_path / "export")
    assert loaded.config == model.config
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    for (name, p), (loaded_name, loaded_p) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert name == loaded_name
        assert torch.equal(p, loaded_p), name
    assert sorted(path.name for path in (tmp_path / "export").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_parameters_in_one_flat_array_can_be_saved(tmp_path):
    model = randomized(bias=True)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
        p.data = part.view_as(p)
    save_hugging_face(model, tmp_path)
    assert torch.equal(load_hugging_face(tmp_path).transformer.wpe.weight, model.transformer.wpe.weight)


def test_config_file(tmp_path):
    save_hugging_face(randomized(bias=False), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "dtype": "float32",
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": True,
        "bias": False,
        "vocab_size": 29,
        "n_positions": 12,
        "n_ctx": 12,
        "n_embd": 24,
        "n_layer": 2,
        "n_head": 3,
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_failed_save_leaves_the_old_files(tmp_path, monkeypatch):
    model = randomized(bias=True)
    save_hugging_face(model, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def half(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("training.weights.export.save_file", half)
    with pytest.raises(OSError, match="disk full"):
        save_hugging_face(randomized(bias=False), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file(tmp_path, name):
    save_hugging_face(randomized(bias=True), tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=f"{name}: no such file; pass a folder with a model of Hugging Face"):
        load_hugging_face(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, "model_type is 'bert'; only gpt2, llama, mistral, mixtral, qwen2, "),
        ({"activation_function": "quick_gelu"}, "activation_function is 'quick_gelu'; only silu, "),
        (
            {"n_positions": 13},
            "model.safetensors: transformer.wpe.weight is (12, 24), but (13, 24) by config.json; "
            "pass files saved together",
        ),
        ({"n_layer": 3}, "transformer.h.2.attn.c_attn.bias is absent, but (72,) by config.json"),
    ],
)
def test_a_config_that_does_not_fit(tmp_path, change, message):
    save_hugging_face(randomized(bias=True), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=re.escape(message)):
        load_hugging_face(tmp_path)


def test_a_config_without_sizes(tmp_path):
    save_hugging_face(randomized(bias=True), tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config.json: no n_embd; pass a folder with a model of"):
        load_hugging_face(tmp_path)


def test_a_tensor_that_gpt2_lacks(tmp_path):
    save_hugging_face(randomized(bias=True), tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"lm_head.bias": torch.ones(29)}, path)
    with pytest.raises(ValueError, match=r"lm_head.bias is \(29,\), but absent by config.json"):
        load_hugging_face(tmp_path)


TOKENS = torch.randint(29, (2, 12), generator=torch.Generator().manual_seed(2))


def small_weights(bias):
    """Make a model with weights as large as those of a trained one."""
    model = Decoder(ModelConfig(**SMALL, bias=bias))
    with torch.no_grad():
        for p, random in zip(model.parameters(), randomized(bias).parameters(), strict=True):
            p.add_(random, alpha=0.1)
    return model.eval()


@pytest.mark.parametrize("bias", [False, True])
def test_logits_are_those_of_hugging_faces_formulas(tmp_path, bias):
    save_hugging_face(small_weights(bias), tmp_path)
    with torch.no_grad():
        logits, _ = load_hugging_face(tmp_path).eval()(TOKENS)
    np.testing.assert_allclose(logits, gpt2_logits(load_file(tmp_path / "model.safetensors"), TOKENS), atol=1e-5)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("bias", [False, True])
def test_logits_are_those_of_transformers(tmp_path, bias):
    """Our model loads a checkpoint of transformers, and transformers load ours."""
    transformers = pytest.importorskip("transformers")
    model = small_weights(bias)
    save_hugging_face(model, tmp_path / "ours")
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours").eval()
    theirs.save_pretrained(tmp_path / "theirs")
    back = load_hugging_face(tmp_path / "theirs").eval()
    with torch.no_grad():
        logits, _ = model(TOKENS)
        torch.testing.assert_close(theirs(TOKENS).logits, logits, rtol=0, atol=1e-5)
        assert torch.equal(back(TOKENS)[0], logits)


def old_names(tensors):
    """Rename tensors to the names in GPT-2's first files: without the prefix, with masks."""
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 12, 12) for i in range(2)}
    masks |= {f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(2)}
    return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()} | masks


def test_names_of_older_files(tmp_path):
    model = randomized(bias=False)
    save_hugging_face(model, tmp_path)
    save_file(old_names(to_hugging_face(model)), tmp_path / "model.safetensors")
    loaded = load_hugging_face(tmp_path)
    assert loaded.config == model.config
    for p, expected in zip(loaded.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, expected)


def test_weights_pickled_by_torch(tmp_path):
    model = randomized(bias=True)
    save_hugging_face(model, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    tensors = to_hugging_face(model)
    torch.save(tensors | {"lm_head.weight": tensors["transformer.wte.weight"]}, tmp_path / "pytorch_model.bin")
    for p, expected in zip(load_hugging_face(tmp_path).parameters(), model.parameters(), strict=True):
        assert torch.equal(p, expected)


def write_parts(folder, tensors):
    """Write weights as older versions of transformers save large models."""
    names, files = sorted(tensors), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"pytorch_model-{number:05}-of-00002.bin"
        torch.save({name: tensors[name] for name in part}, folder / file)
        files |= dict.fromkeys(part, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def test_weights_pickled_by_torch_in_parts(tmp_path):
    model = randomized(bias=True)
    save_hugging_face(model, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    write_parts(tmp_path, to_hugging_face(model))
    for p, expected in zip(load_hugging_face(tmp_path).parameters(), model.parameters(), strict=True):
        assert torch.equal(p, expected)


class Ends:
    def __reduce__(self):
        return os.abort, ()


@pytest.mark.parametrize("content", [{"lm_head.weight": Ends()}, Ends(), torch.ones(3), {"step": 3}])
def test_pickles_of_other_things_are_refused_and_not_run(tmp_path, content):
    save_hugging_face(randomized(bias=True), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    write_parts(tmp_path, {"a": torch.ones(1), "b": torch.ones(1)})
    torch.save(content, tmp_path / "pytorch_model-00002-of-00002.bin")
    with pytest.raises(ValueError, match=r"pytorch_model-00002-of-00002.bin: can't be read \(.+\); get the file again"):
        load_hugging_face(tmp_path)


def test_safetensors_come_before_pickles(tmp_path):
    model = randomized(bias=True)
    save_hugging_face(model, tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    names = to_hugging_face(model)
    index = {"weight_map": dict.fromkeys(names, "a.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    torch.save({"old": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    assert torch.equal(load_hugging_face(tmp_path).transformer.wpe.weight, model.transformer.wpe.weight)


def test_a_width_of_the_mlp(tmp_path):
    """`n_inner` in config.json; null stands for 4 n_embd."""
    model = Decoder(ModelConfig(**SMALL, n_hidden=40, bias=True))
    save_hugging_face(model, tmp_path)
    path = tmp_path / "config.json"
    assert json.loads(path.read_text())["n_inner"] == 40
    assert load_file(tmp_path / "model.safetensors")["transformer.h.0.mlp.c_fc.weight"].shape == (24, 40)
    loaded = load_hugging_face(tmp_path)
    with torch.no_grad():
        logits, _ = loaded.eval()(TOKENS)
    np.testing.assert_allclose(logits, gpt2_logits(load_file(tmp_path / "model.safetensors"), TOKENS), atol=1e-5)
    for width, message in (
        (None, r"c_fc.bias is \(40,\), but \(96,\) by config.json"),
        ("x", "n_hidden='x' must be of"),
    ):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"n_inner": width}))
        with pytest.raises(ValueError, match=message):
            load_hugging_face(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("content", [b"", b"no weights at all, but a line of text"])
def test_files_that_are_no_weights(tmp_path, name, content):
    save_hugging_face(randomized(bias=True), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name}: can't be read \(.+\); get the file again"):
        load_hugging_face(tmp_path)


def test_another_model_without_weights_of_ours(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ValueError, match=r"model_type is 'mamba' \(nearest: llama\); only gpt2, llama, mistral, "):
        load_hugging_face(tmp_path)


def test_a_head_of_its_own(tmp_path):
    model = randomized(bias=True)
    save_hugging_face(model, tmp_path)
    save_file(to_hugging_face(model) | {"lm_head.weight": torch.ones(29, 24)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head.weight is \(29, 24\), but absent by config.json"):
        load_hugging_face(tmp_path)


@pytest.mark.parametrize("changes", [{}, {"block_size": 5}, {"bias": True}, {"dropout": 0.5}, {"n_kv_head": 3}])
def test_initialize(tmp_path, changes):
    """A model may have fewer positions than the file, and biases that the file lacks."""
    save_hugging_face(randomized(bias=False), tmp_path)
    model = Decoder(ModelConfig(**{**SMALL, "bias": False, **changes}))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(3)
    initialize(model, tmp_path)
    with torch.no_grad():
        seq = model.config.block_size
        logits, expected = (each.eval()(TOKENS[:, :seq])[0] for each in (model, randomized(bias=False)))
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"n_layer": 4, "n_embd": 48},
            "GPT-2 of n_layer=2, n_embd=24, n_hidden=96, but this one is of n_layer=4, n_embd=48, n_hidden=192: set",
        ),
        ({"n_hidden": 40}, "GPT-2 of n_hidden=96, but this one is of n_hidden=40: set n_hidden=96"),
        ({"block_size": 13}, "GPT-2 of block_size=12, but this one is of block_size=13: set block_size=12"),
        ({"vocab_size": 256}, "GPT-2 of vocab_size=29, but this one is of vocab_size=256: set vocab_size=29"),
        ({"bias": False}, "GPT-2 of bias=True, but this one is of bias=False: set bias=True"),
        ({"n_kv_head": 1}, "GPT-2 of n_kv_head=3, but this one is of n_kv_head=1: set n_kv_head=3"),
    ],
)
def test_another_model_is_not_initialized(tmp_path, changes, message):
    save_hugging_face(randomized(bias=True), tmp_path)
    model = Decoder(ModelConfig(**{**SMALL, "bias": True, **changes}))
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=re.escape(message)):
        initialize(model, tmp_path)
    for p, expected in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, expected)


def test_the_weights_are_as_readable_as_the_config(tmp_path):
    save_hugging_face(Decoder(ModelConfig(block_size=4, n_layer=1, n_head=1, n_embd=4)), tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "config.json").stat().st_mode


def test_a_mixture_is_saved_and_loaded(tmp_path):
    mixture = {"num_experts": 4, "experts_per_token": 1, "expert_capacity": 1.5, "balance_loss": 0.1}
    model = Decoder(ModelConfig(**SMALL, **mixture), seed=3)
    model.transformer.h[1].mlp.router.bias += torch.tensor([0.1, -0.1, 0.2, 0.0])
    save_hugging_face(model, tmp_path)
    loaded, model_from_file = load_hugging_face(tmp_path), Decoder(model.config)
    initialize(model_from_file, tmp_path)
    assert loaded.config == model.config
    for other in (loaded, model_from_file):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
        assert torch.equal(other.transformer.h[1].mlp.router.bias, model.transformer.h[1].mlp.router.bias)
    with pytest.raises(ValueError, match="num_experts=4, but this one is of num_experts=0: set num_experts=4"):
        initialize(Decoder(ModelConfig(**SMALL)), tmp_path)
