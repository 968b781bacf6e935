"""GPT as a Hugging Face GPT-2 directory, which GPT2LMHeadModel.from_pretrained loads, and back."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from models.files import replacing
from models.gpt import GPT, GPTConfig

# Hugging Face keeps these as Conv1D, with weights (in, out) where nn.Linear has (out, in).
CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")

# GPTConfig's fields by their names in config.json.
FIELDS = {
    "vocab_size": "vocab_size",
    "n_positions": "block_size",
    "n_embd": "n_embd",
    "n_layer": "n_layer",
    "n_head": "n_head",
    "resid_pdrop": "dropout",
}

# What every GPT of models/gpt.py has in common.
FIXED = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}


def to_hugging_face(model: GPT) -> dict[str, torch.Tensor]:
    """Name and lay out the weights as GPT2LMHeadModel saves them, with biases of 0 where there are none."""
    tensors = {}
    for name, p in model.named_parameters():  # lists lm_head.weight only as the wte.weight it is tied to
        weight = p.detach().cpu()
        tensors[name] = (weight.t() if name.endswith(CONV1D) else weight).contiguous()
        if not model.config.bias and not name.endswith(("wte.weight", "wpe.weight")):
            tensors[name.removesuffix("weight") + "bias"] = weight.new_zeros(len(weight))
    return tensors


def hugging_face_config(config: GPTConfig) -> dict[str, Any]:
    grouped = {} if config.n_kv_head is None else {"n_kv_head": config.n_kv_head}  # which is no GPT-2 of theirs
    return {
        **FIXED,
        **grouped,
        **{theirs: getattr(config, ours) for theirs, ours in FIELDS.items()},
        "architectures": ["GPT2LMHeadModel"],
        "n_ctx": config.block_size,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        # The default, 50256, lies outside a smaller vocabulary.
        "bos_token_id": None,
        "eos_token_id": None,
    }


def save_hugging_face(model: GPT, directory: str | Path):
    """Write model.safetensors and config.json, each replaced as a whole."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with replacing(directory / "config.json") as temporary:
        temporary.write_text(json.dumps(hugging_face_config(model.config), indent=2) + "\n")
    with replacing(directory / "model.safetensors") as temporary:
        save_file(to_hugging_face(model), temporary, metadata={"format": "pt"})
        shutil.copymode(directory / "config.json", temporary)  # safetensors leaves it to its owner alone


def load_hugging_face(directory: str | Path) -> GPT:
    """Read what `save_hugging_face` or GPT2LMHeadModel.save_pretrained wrote.

    The model has biases if any in the file is not 0.

    Raises: ValueError if a file is missing or is not that of a GPT-2 of this kind.
    """
    config_path, weights_path = Path(directory) / "config.json", Path(directory) / "model.safetensors"
    for path in (config_path, weights_path):
        if not path.is_file():
            raise ValueError(f"{path}: no such file; pass a directory written by save_hugging_face")
    tensors = load_file(weights_path)
    bias = any(bool(tensor.any()) for name, tensor in tensors.items() if name.endswith(".bias"))
    model = GPT(read_config(config_path, bias))
    check_shapes(weights_path, tensors, to_hugging_face(model))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(tensors[name].t() if name.endswith(CONV1D) else tensors[name])
    return model


def read_config(path: Path, bias: bool) -> GPTConfig:
    values = json.loads(path.read_text())
    for key, expected in FIXED.items():
        if values.get(key, expected) != expected:
            raise ValueError(f"{path}: {key} is {values[key]!r}; only {expected!r} can be loaded")
    if missing := FIELDS.keys() - values.keys():
        raise ValueError(f"{path}: no {min(missing)}; pass a directory written by save_hugging_face")
    fields = {ours: values[theirs] for theirs, ours in FIELDS.items()}
    return GPTConfig(**fields, bias=bias, n_kv_head=values.get("n_kv_head"))


def check_shapes(path: Path, tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]):
    for name in sorted(tensors.keys() | expected.keys()):
        found, wanted = (tuple(t[name].shape) if name in t else "absent" for t in (tensors, expected))
        if found != wanted:
            raise ValueError(f"{path}: {name} is {found}, but {wanted} by config.json; pass files saved together")
