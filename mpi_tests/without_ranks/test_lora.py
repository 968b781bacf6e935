"""Adapters on a plain model: what they compute, PEFT's files in both directions, and what is refused."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import training.merge
from models.config import ModelConfig
from models.decoder import Decoder
from mpi_tests.helpers.models import llama
from parallelism.planner.settings import parse
from training.lora.adapters import attach_adapters, factors_of, merge
from training.lora.peft import adapter_factors, load_adapter, save_adapter
from training.settings.config import Config
from training.weights.export import save_hugging_face, to_hugging_face
from training.weights.hf import load_hugging_face

SHAPE = {"vocab_size": 19, "block_size": 8, "n_layer": 2, "n_head": 4, "n_embd": 16}
MODELS = {"gpt2": ModelConfig(**SHAPE, bias=True), "llama": llama(**SHAPE, n_kv_head=2, n_hidden=24)}
TARGETS = {"gpt2": ["c_attn", "mlp.c_proj"], "llama": ["q_proj", "v_proj", "attn.c_proj", "up_proj"]}
TOKENS = torch.arange(12).view(2, 6)


def settings(rank=3, targets=(), **others):
    return SimpleNamespace(lora_rank=rank, lora_alpha=5.0, lora_targets=[*targets], seed=7, init_from="", **others)


def adapted(name, targets=()):
    """Return a model in float64 with adapters that have random matrices, and their targets."""
    model = Decoder(MODELS[name]).double()
    attached = attach_adapters(model, settings(targets=targets))
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return model, attached


@pytest.mark.parametrize("targets", [[], "some"])
@pytest.mark.parametrize("name", MODELS)
def test_a_layer_adds_the_product_of_its_matrices(name, targets):
    model, attached = adapted(name, TARGETS[name] if targets else [])
    logits, _ = model(TOKENS)
    factors = {path: [f.numpy() for f in each] for path, each in factors_of(model, attached).items()}
    expected = {name: weight.numpy() for name, weight in to_hugging_face(Decoder(MODELS[name]).double()).items()}
    for path, (a, b) in factors.items():
        change = 5 / 3 * np.einsum("or,ri->oi", b, a)
        expected[f"{path}.weight"] = expected[f"{path}.weight"] + (change.T if name == "gpt2" else change)
    merge(model, attached)
    for key, weight in to_hugging_face(model).items():
        np.testing.assert_allclose(weight.numpy(), expected[key], rtol=1e-12, atol=1e-14, err_msg=key)
    torch.testing.assert_close(logits, model(TOKENS)[0], rtol=1e-10, atol=1e-12)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_adapters_alone_are_trained_and_begin_without_effect():
    model = Decoder(MODELS["llama"])
    before = model(TOKENS)[0]
    attach_adapters(model, settings())
    assert torch.equal(model(TOKENS)[0], before)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    paths = ["c_attn.lora.q_proj", "c_attn.lora.k_proj", "c_attn.lora.v_proj", "c_proj.lora.o_proj"]
    of_attention = {f"transformer.h.0.attn.{path}.{factor}.weight" for path in paths for factor in "AB"}
    assert {name for name in trained if name.startswith("transformer.h.0.attn.")} == of_attention
    assert all(".lora." in name for name in trained)
    assert len(trained) == 2 * 7 * 2


@pytest.mark.filterwarnings("ignore")  # of the libraries about each other
@pytest.mark.parametrize("name", MODELS)
def test_peft_computes_the_same_with_our_adapter(tmp_path, name):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    save_hugging_face(Decoder(MODELS[name]), tmp_path / "base")
    for targets in ([], TARGETS[name]):
        model, attached = adapted(name, targets)
        save_adapter(model.float(), attached, settings(targets=targets), tmp_path / "adapter")
        base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
        torch.testing.assert_close(model(TOKENS)[0], theirs(TOKENS).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # of the libraries about each other
@pytest.mark.parametrize("name", MODELS)
def test_an_adapter_of_peft_computes_the_same_here(tmp_path, name):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    save_hugging_face(Decoder(MODELS[name]), tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    names = ["c_fc", "attn.c_proj"] if name == "gpt2" else ["q_proj", "down_proj"]
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=names, init_lora_weights=False, task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(base, config)
    theirs.save_pretrained(tmp_path / "adapter")
    run = Config(init_from=str(tmp_path / "base"), lora_from=str(tmp_path / "adapter"), vocab_size=19)
    assert (run.lora_rank, run.lora_alpha) == (2, 3)
    model = load_hugging_face(tmp_path / "base")
    attach_adapters(model, run, load_adapter(run.lora_from).factors)
    torch.testing.assert_close(model(TOKENS)[0], theirs.eval()(TOKENS).logits, rtol=1e-4, atol=1e-5)


@pytest.fixture
def folders(tmp_path):
    """Return folders of a model and of an adapter for it."""
    model, attached = adapted("llama", ["q_proj", "v_proj"])
    save_hugging_face(Decoder(MODELS["llama"]), tmp_path / "base")
    save_adapter(model.float(), attached, settings(targets=["q_proj", "v_proj"]), tmp_path / "adapter")
    return tmp_path / "base", tmp_path / "adapter"


def test_files_are_those_of_peft(folders):
    _, adapter = folders
    tensors, config = (
        load_file(adapter / "adapter_model.safetensors"),
        json.loads((adapter / "adapter_config.json").read_text()),
    )
    paths = [
        f"base_model.model.model.layers.{block}.self_attn.{name}" for block in (0, 1) for name in ("q_proj", "v_proj")
    ]
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        **{f"{path}.lora_A.weight": (3, 16) for path in paths},
        **{f"{path}.lora_B.weight": (16 if "q_proj" in path else 8, 3) for path in paths},
    }
    own = {"peft_type": "LORA", "r": 3, "lora_alpha": 5.0, "target_modules": ["self_attn.q_proj", "self_attn.v_proj"]}
    assert own.items() <= config.items()


NAMES = "c_attn, c_fc, c_proj, down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
REFUSED = {
    "no such layer": (
        ["--lora_rank", 2, "--lora_targets", "q_proj", "query"],
        f"lora_targets=query is not a linear layer of the blocks: use {NAMES}",
    ),
    "no rank": (
        ["--lora_targets", "q_proj"],
        "lora_targets=['q_proj'] has no effect without lora_rank: omit it, or set lora_rank",
    ),
    "no alpha": (["--lora_alpha", 2], "lora_alpha=2.0 has no effect without lora_rank: omit it, or set lora_rank"),
    "too small": (["--lora_rank", 0], "lora_rank=0 must be from 1 to"),
    "too large": (["--lora_rank", 17], "lora_rank=17 is more than the width n_embd=16: use at most that"),
    "another rank": (
        ["--lora_from", "{adapter}", "--lora_rank", 2],
        "lora_rank=2, but lora_from={adapter} has 3: omit lora_rank",
    ),
    "no adapter": (
        ["--lora_from", "{base}"],
        "lora_from={base}: no adapter_config.json; pass a folder with an adapter of PEFT",
    ),
}


@pytest.mark.parametrize(("flags", "words"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit(folders, flags, words):
    base, adapter = folders
    every = ["--init_from", base, "--vocab_size", 19, *flags]
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        attach_adapters(
            load_hugging_face(base), parse(Config, "", [str(word).format(base=base, adapter=adapter) for word in every])
        )
    assert words.format(base=base, adapter=adapter) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_adapters_need_weights_that_exist():
    with pytest.raises(ValueError, match="lora_rank=2 adapts weights that exist: set init_from"):
        Config(lora_rank=2)


def damaged(adapter, name="r", value=3, drop="", shape=None):
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    tensors = load_file(adapter / "adapter_model.safetensors")
    remaining = {
        key: tensor if shape is None else tensor.new_zeros(shape)
        for key, tensor in tensors.items()
        if not drop or drop not in key
    }
    save_file(remaining, adapter / "adapter_model.safetensors")


def changes_the_model(name):
    return f"adapter_config.json: init_lora_weights is {name!r}, which changes the model's own weights"


DAMAGES = {
    "pissa": ({"name": "init_lora_weights", "value": "pissa"}, changes_the_model("pissa")),
    "infinite": ({"name": "lora_alpha", "value": float("inf")}, "adapter_config.json: r=3 and lora_alpha=inf; get it"),
    "invoked": (
        {"name": "alora_invocation_tokens", "value": [1]},
        "adapter_config.json: alora_invocation_tokens is [1]; such adapters cannot be loaded",
    ),
    "kind": ({"name": "use_dora", "value": True}, "adapter_config.json: use_dora is True; only False can be loaded"),
    "rank": ({"value": "x"}, "adapter_config.json: r='x' and lora_alpha=5.0; get it again"),
    "one of two": (
        {"drop": "0.self_attn.q_proj.lora_B"},
        "0.self_attn.q_proj.lora_B.weight is not one of a pair of lora_A and",
    ),
    "layer": (
        {"drop": "layers.1"},
        "model.layers.1.self_attn.q_proj has no adapter there, or is not a layer of the model",
    ),
    "shape": ({"shape": (3, 3)}, "model.layers.0.self_attn.q_proj has a matrix (3, 3), but (3, 16) by init_from"),
}


@pytest.mark.parametrize(("damage", "words"), DAMAGES.values(), ids=DAMAGES)
def test_adapters_that_do_not_fit(folders, damage, words):
    base, adapter = folders
    damaged(adapter, **damage)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        adapter_factors(load_hugging_face(base), Config(init_from=str(base), lora_from=str(adapter), vocab_size=19))
    assert words in str(caught.value)
    assert str(adapter) in str(caught.value)


def test_adapters_of_some_blocks_are_found_again(tmp_path):
    """Those of the second block alone, and of one layer in both."""
    model, attached = adapted("llama", ["layers.1.self_attn.q_proj", "down_proj"])
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    save_hugging_face(Decoder(MODELS["llama"]), base)
    save_adapter(model, attached, settings(), adapter)
    written = json.loads((adapter / "adapter_config.json").read_text())
    assert written["target_modules"] == ["mlp.down_proj", "model.layers.1.self_attn.q_proj"]
    run = Config(init_from=str(base), lora_from=str(adapter), vocab_size=19)
    factors = adapter_factors(load_hugging_face(base), run)
    assert factors.keys() == factors_of(model, attached).keys()


def test_a_program_merges_an_adapter(folders, tmp_path, monkeypatch, capsys):
    base, adapter = folders
    out, path = tmp_path / "merged", "model.layers.1.self_attn.v_proj.weight"
    monkeypatch.setattr(sys, "argv", ["merge", *map(str, ("--from", base, "--adapter", adapter, "--out", out))])
    assert training.merge.main() == 0
    assert capsys.readouterr().out == f"4 adapters merged: python -m training.sample --from {out}\n"
    factors = load_file(adapter / "adapter_model.safetensors")
    a, b = (factors[f"base_model.model.{path.replace('weight', f'lora_{name}.weight')}"] for name in "AB")
    before, after = (load_file(folder / "model.safetensors")[path] for folder in (base, out))
    torch.testing.assert_close(after, before + 5 / 3 * b @ a)
    monkeypatch.setattr(sys, "argv", ["merge", *map(str, ("--from", base, "--adapter", base, "--out", out))])
    assert training.merge.main() == 2
    words = f"lora_from={base}: no adapter_config.json; pass a folder with an adapter of PEFT"
    assert capsys.readouterr().err == f"training.merge: {words}\n"
