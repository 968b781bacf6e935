"""Weights written for other programs: dtypes, several files, what is copied along, and what no other program has."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from models.config import ModelConfig
from models.decoder import Decoder
from mpi_tests.helpers.models import family_config, random_tokens, randomized
from training.weights import export
from training.weights.export import refusal, save_hugging_face, to_hugging_face
from training.weights.hf import load_hugging_face

SHAPE = {"vocab_size": 29, "block_size": 12, "n_layer": 2, "n_head": 4, "n_embd": 24, "n_kv_head": 2, "n_hidden": 20}
QWEN = family_config("qwen3", **SHAPE, head_dim=8)
TOKENS = random_tokens(2, 12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_dtype_of_the_weights(tmp_path, dtype):
    model = randomized(QWEN)
    save_hugging_face(model, tmp_path, dtype=dtype)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in to_hugging_face(model).items():
        assert torch.equal(tensors[name], tensor.to(getattr(torch, dtype))), name
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == dtype
    loaded = dict(load_hugging_face(tmp_path).named_parameters())
    assert all(torch.equal(loaded[name], p.to(getattr(torch, dtype)).float()) for name, p in model.named_parameters())


def test_weights_in_several_files(tmp_path, monkeypatch):
    """They are those of one file, which later ones replace, and the other way round."""
    model = randomized(QWEN)
    save_hugging_face(model, tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    monkeypatch.setattr(export, "MOST_BYTES", 9000)
    save_hugging_face(model, tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in whole.values())}
    files = sorted({*index["weight_map"].values()})
    assert files == [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    shards = {file: load_file(tmp_path / file) for file in files}
    assert all(sum(tensor.nbytes for tensor in shard.values()) <= 9000 or len(shard) == 1 for shard in shards.values())
    assert index["weight_map"].keys() == whole.keys()
    assert all(torch.equal(shards[file][name], whole[name]) for name, file in index["weight_map"].items())
    assert not (tmp_path / "model.safetensors").exists()
    assert torch.equal(load_hugging_face(tmp_path)(TOKENS)[0], model.float()(TOKENS)[0])
    monkeypatch.setattr(export, "MOST_BYTES", 10**9)
    save_hugging_face(Decoder(QWEN), tmp_path)
    assert not (tmp_path / "model.safetensors.index.json").exists()
    assert torch.equal(load_hugging_face(tmp_path)(TOKENS)[0], Decoder(QWEN)(TOKENS)[0])


def test_the_rest_of_a_folder_goes_along(tmp_path):
    """Its tokenizer, chat template and settings of generation, and what config.json has beside a description."""
    source, target = tmp_path / "source", tmp_path / "target"
    save_hugging_face(randomized(QWEN), source)
    path = source / "config.json"
    values = json.loads(path.read_text()) | {"eos_token_id": 7, "initializer_range": 0.5, "torch_dtype": "float64"}
    values.pop("dtype")
    path.write_text(json.dumps(values))
    rest = {"tokenizer.json": "{}", "tokenizer_config.json": "[]", "chat_template.jinja": "{{ x }}",
            "generation_config.json": '{"top_k": 3}'}  # fmt: skip
    for name, text in rest.items():
        (source / name).write_text(text)
    (source / "README.md").write_text("not this")
    save_hugging_face(load_hugging_face(source), target, source, "bfloat16")
    written = json.loads((target / "config.json").read_text())
    assert written == {**values, "torch_dtype": "bfloat16"}
    assert {name: (target / name).read_text() for name in rest} == rest
    assert not (target / "README.md").exists()
    save_hugging_face(Decoder(family_config("qwen3", **{**SHAPE, "block_size": 6}, head_dim=8)), target, source)
    shorter = {**values, "max_position_embeddings": 6, "torch_dtype": "float32"}
    assert json.loads((target / "config.json").read_text()).items() >= shorter.items()


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (family_config("mixtral", **SHAPE), "mixtral"),
        (family_config("qwen3_moe", **SHAPE, head_dim=8), "qwen3_moe"),
        (family_config("mixtral", **SHAPE, has_qk_norms=True), "qwen3_moe"),
        (family_config("llama", **SHAPE, qkv_bias=True), "qwen2"),
    ],
)
def test_a_model_is_written_as_the_family_that_has_it(tmp_path, config, kind):
    assert refusal(config) == ""
    model = randomized(config)
    save_hugging_face(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == kind
    assert torch.equal(load_hugging_face(tmp_path)(TOKENS)[0], model.float()(TOKENS)[0])


MIXTURE = {**SHAPE, "num_experts": 4, "n_kv_head": None}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (ModelConfig(**MIXTURE), "a GPT-2 of Hugging Face has no num_experts=4: "),
        (ModelConfig(**SHAPE), "a GPT-2 of Hugging Face has no n_kv_head=2: "),
        (family_config("mixtral", **SHAPE, router="sigmoid"), "a Mixtral of Hugging Face has no router=sigmoid: "),
        (family_config("llama", **SHAPE, norms="after"), "a Llama of Hugging Face has no norms=after: "),
    ],
)
def test_what_no_family_has_is_written_for_this_program(tmp_path, config, words):
    model = randomized(config)
    assert re.match(re.escape(words) + "the weights are in a format of our own, for --init_from and", refusal(config))
    assert ("--model mixtral and qwen3_moe" in refusal(config)) == (config.num_experts > 0)
    save_hugging_face(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "decoder"
    loaded = load_hugging_face(tmp_path)
    assert loaded.config == config
    assert torch.equal(loaded(TOKENS)[0], model.float()(TOKENS)[0])
