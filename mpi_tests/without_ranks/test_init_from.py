"""A run that begins with the weights of a folder: its shape, its tokenizer, and the settings that contradict them."""

import json
import pickle
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from collectives.algorithms.groups import Topology
from models.config import ModelConfig
from models.decoder import Decoder
from mpi_tests.helpers.launch import ROOT
from mpi_tests.helpers.models import family_config, llama
from parallelism.planner.settings import parse, to_toml
from training.data.tokenizer import save_tokenizer, token_ids
from training.sample import tokenizer_of
from training.settings.config import Config
from training.settings.derived import model_config, tokens_of
from training.weights.export import save_hugging_face
from training.weights.hf import load_hugging_face
from training.weights.tables import differences

SHAPE = {"block_size": 16, "n_layer": 2, "n_head": 4, "n_embd": 16}
SHAPES = {
    "gpt2": ModelConfig(**SHAPE),
    "gpt2 with biases": ModelConfig(**SHAPE, bias=True),
    "gpt2 of another width": ModelConfig(**SHAPE, n_kv_head=2, n_hidden=24, bias=True),
    "gpt2 of experts": ModelConfig(**SHAPE, num_experts=4, experts_per_token=1, expert_capacity=1.5),
    "gpt2 of another vocabulary": ModelConfig(**{**SHAPE, "vocab_size": 300}),
    "llama": llama(**SHAPE, n_kv_head=4, n_hidden=64),
    "llama with all settings": llama(
        **SHAPE, n_kv_head=1, n_hidden=20, rope_theta=500.0, rope_factor=4.0, rope_original_length=8, norm_eps=1e-3,
        tied=True,
    ),
    "mistral": family_config("mistral", **SHAPE, layers="window", window=6),
    "mixtral": family_config("mixtral", **SHAPE, num_experts=3, n_kv_head=2, n_hidden=20),
    "qwen2": family_config("qwen2", **SHAPE, n_kv_head=2, n_hidden=20, layers="full window", window=3),
    "qwen3": family_config("qwen3", **SHAPE, n_kv_head=2, n_hidden=20, head_dim=6),
    "qwen3_moe": family_config("qwen3_moe", **SHAPE, n_kv_head=2, n_hidden=20, head_dim=6, normalizes_choices=False),
    "gemma3_text": family_config("gemma3_text", **SHAPE, n_kv_head=2, n_hidden=20, window=5, attention_scale=0.25,
                             layers="window full", rope_scaling="linear", rope_factor=2.0),
    "smollm3": family_config("smollm3", **SHAPE, n_kv_head=2, n_hidden=20, layers="full unrotated"),
    "decoder": ModelConfig(**SHAPE, norms="after", num_experts=2),
}  # fmt: skip


def folder_of(tmp_path, shape, seed=5):
    model = Decoder(shape, seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)  # biases of 0 can't be told from none
    save_hugging_face(model, tmp_path)
    return tmp_path


def begin(folder, *flags):
    words = ["--init_from", folder, "--data", ROOT / "README.md", "--micro_batch_size", 2, *flags]
    return parse(Config, "", [*map(str, words)]).checked(Topology.from_ids((0,)))


@pytest.mark.parametrize("name", SHAPES)
def test_the_shape_and_the_weights_are_those_of_the_folder(tmp_path, name):
    folder, shape = folder_of(tmp_path, SHAPES[name]), SHAPES[name]
    flags = ["--tokenizer", "bytes"] if shape.vocab_size != 256 else []
    inputs, expected = begin(folder, *flags), load_hugging_face(folder)
    assert inputs.model.config == expected.config
    assert differences(expected.config, shape) == []
    assert inputs.tokens.vocab_size == shape.vocab_size
    weights = dict(expected.named_parameters())
    assert {*weights} == {name for name, _ in inputs.model.named_parameters()}
    assert all(torch.equal(p, weights[name]) for name, p in inputs.model.named_parameters())


@pytest.mark.parametrize("name", ["gpt2 of another width", "llama"])
def test_settings_that_agree_may_be_repeated(tmp_path, name):
    """So may those that a run leaves in its folder."""
    folder, shape = folder_of(tmp_path, SHAPES[name]), SHAPES[name]
    config = Config(init_from=str(folder), model=f"{name.split()[0]}-tiny", **SHAPE, n_kv_head=shape.n_kv_head,
                    n_hidden=shape.n_hidden, bias=shape.bias if "gpt2" in name else None)  # fmt: skip
    again = Config(**vars(Config(init_from=str(folder))))
    assert model_config(config, 256) == model_config(again, 256) == shape


@pytest.mark.parametrize("name", SHAPES)
def test_a_file_of_settings_has_the_whole_description(tmp_path, name):
    """A run leaves it in its folder; the folder of the weights is not needed to read it."""
    folder = folder_of(tmp_path, SHAPES[name])
    config = Config(init_from=str(folder))
    (tmp_path / "a.toml").write_text(to_toml(replace(config, init_from="")))
    again = parse(Config, "", ["--config", str(tmp_path / "a.toml")])
    size = SHAPES[name].vocab_size
    assert model_config(again, size) == model_config(config, size) == load_hugging_face(folder).config


def test_a_context_may_be_shorter_and_the_rate_another(tmp_path):
    config = begin(folder_of(tmp_path, SHAPES["gpt2"]), "--block_size", 4, "--dropout", 0.5).model.config
    assert (config.block_size, config.dropout, config.n_embd) == (4, 0.5, 16)


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("gpt2", ["--n_layer", 3], "a GPT-2 of n_layer=2, but this one is of n_layer=3: set n_layer=2"),
        ("gpt2", ["--model", "gpt2-tiny", "--block_size", 8], "a GPT-2 of n_layer=2, n_embd=16, n_hidden=64, but this"),
        ("gpt2", ["--model", "llama-tiny"], "a GPT-2, but this one is a Llama: set model to a GPT-2's"),
        ("gpt2", ["--depth", 2, "--block_size", 8], "a GPT-2 of n_head=4, n_embd=16, "),
        (
            "gpt2",
            ["--vocab_size", 300],
            "a GPT-2 of vocab_size=256, but this one is of vocab_size=300: set vocab_size=",
        ),
        ("gpt2", ["--num_experts", 4], "a GPT-2 of num_experts=0, but this one is of num_experts=4: set num_experts=0"),
        ("gpt2 with biases", ["--no-bias"], "a GPT-2 of bias=True, but this one is of bias=False: set bias=True"),
        ("llama", ["--tied"], "a Llama of tied=False, but this one is of tied=True: set tied=False"),
        ("llama", ["--n_hidden", 8], "a Llama of n_hidden=64, but this one is of n_hidden=8: set n_hidden=64"),
    ],
)
def test_flags_that_contradict_the_folder_are_refused(tmp_path, name, flags, message):
    folder = folder_of(tmp_path, SHAPES[name])
    with pytest.raises(ValueError, match=f"^{re.escape(f'{folder}: {message}')}"):
        begin(folder, *flags)


def test_a_folder_on_the_command_line_comes_before_a_files_shape(tmp_path):
    folder = folder_of(tmp_path / "weights", SHAPES["llama"])
    (tmp_path / "a.toml").write_text(
        "model = 'gpt2'\nbias = false\nn_layer = 7\nvocab_size = 50304\nlr = 0.1\nseed = 5"
    )
    config = parse(Config, "", ["--config", str(tmp_path / "a.toml"), "--init_from", str(folder)])
    assert model_config(config, config.vocab_size) == SHAPES["llama"]
    assert (config.seed, config.lr) == (5, 0.1)


@pytest.fixture
def words(tmp_path):
    """Return a folder of a model of 300 tokens whose tokenizer knows the words of the README."""
    tokenizers = pytest.importorskip("tokenizers")
    names = sorted({*(ROOT / "README.md").read_text().split()} - {"[UNK]"})[:250]
    vocabulary = {"[UNK]": 0, **{name: number for number, name in enumerate(names, 1)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    folder = folder_of(tmp_path / "words", SHAPES["gpt2 of another vocabulary"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_the_tokenizer_is_that_of_the_folder(words, tmp_path):
    tokens = begin(words).tokens
    assert (tokens.tokenizer.name, tokens.vocab_size) == ("tokenizer.json", 300)
    expected = tokens.tokenizer.encode((ROOT / "README.md").read_text())
    assert np.asarray(tokens.ids).tolist()[: len(expected)] == expected
    np.arange(250).astype("<u2").tofile(tmp_path / "train.bin")  # the vocabulary decides the dtype, too
    tokens = begin(words, "--data", tmp_path / "train.bin", "--block_size", 8).tokens
    assert (tokens.tokenizer.name, len(tokens.ids)) == ("tokenizer.json", 250)
    assert tokenizer_of(words, load_hugging_face(words), None).decode([1]) == tokens.tokenizer.decode([1])


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(words):
    message = f"init_from={words}: tokenizer.json has 251 tokens, but the model only 200: pass a folder whose files"
    save_hugging_face(Decoder(ModelConfig(**{**SHAPE, "vocab_size": 200})), words)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        begin(words)


def test_other_tokens_than_the_folders_are_refused(words, tmp_path):
    message = (
        f"init_from={words} has tokens of tokenizer.json, but the data of bytes: omit tokenizer, or use other data"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        begin(words, "--tokenizer", "bytes")
    characters = "".join(map(chr, range(65, 91)))
    meta = {"stoi": {c: token for token, c in enumerate(characters)}, "itos": dict(enumerate(characters))}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 26, **meta}))
    np.arange(26).astype("<u2").tofile(tmp_path / "train.bin")
    message = f"tokens of {tmp_path / 'meta.pkl'} and of {words / 'tokenizer.json'}: pass data that has one tokenizer"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        begin(words, "--data", tmp_path / "train.bin")


def test_a_copy_of_the_folders_tokenizer_is_the_same(words, tmp_path):
    text = (words / "tokenizer.json").read_text()
    (tmp_path / "copy.json").write_text(json.dumps(json.loads(text)))
    assert begin(words, "--tokenizer", tmp_path / "copy.json").tokens.tokenizer.name == "copy.json"


def test_text_for_a_folder_without_a_tokenizer_needs_one(tmp_path):
    folder = folder_of(tmp_path, SHAPES["gpt2 of another vocabulary"])
    with pytest.raises(ValueError, match=r"^text needs the model's tokenizer, which its folder lacks: set tokenizer$"):
        begin(folder)
    save_tokenizer(token_ids(300), folder, 300)
    with pytest.raises(ValueError, match=r"^text needs the model's tokenizer"):
        tokens_of(Config(init_from=str(folder)))
    np.arange(250).astype("<u2").tofile(tmp_path / "train.bin")
    assert begin(folder, "--data", tmp_path / "train.bin", "--block_size", 8).tokens.vocab_size == 300
