"""GPT as a Hugging Face GPT-2 directory, which GPT2LMHeadModel.from_pretrained loads, and back."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from models.files import replacing
from models.gpt import GPT, GPTConfig
from models.mixture import routers

# Hugging Face keeps these as Conv1D, with weights (in, out) where nn.Linear has (out, in).
CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")

# Where weights are, the first that there is.
WEIGHTS = ("model.safetensors", "pytorch_model.bin")

# Tensors that are no weights: which tokens attend to which.
MASK = re.compile(r"\bh\.\d+\.attn\.(masked_)?bias$")

# GPTConfig's fields by their names in config.json.
FIELDS = {
    "vocab_size": "vocab_size",
    "n_positions": "block_size",
    "n_embd": "n_embd",
    "n_layer": "n_layer",
    "n_head": "n_head",
    "resid_pdrop": "dropout",
}

# GPTConfig's fields of mixtures, which are no GPT-2 of theirs, by the same names in config.json.
MIXTURE = ("num_experts", "experts_per_token", "expert_capacity", "balance_loss")

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
    tensors = {f"{name}.bias": router.bias.cpu() for name, router in routers(model)}
    for name, p in model.named_parameters():  # lists lm_head.weight only as the wte.weight it is tied to
        weight = p.detach().cpu()
        tensors[name] = transposed(name, weight).contiguous()
        has_bias = weight.dim() < 3 and not name.endswith(("wte.weight", "wpe.weight", "router.weight"))
        if has_bias and not model.config.bias:
            tensors[name.removesuffix("weight") + "bias"] = weight.new_zeros(len(weight))
    return tensors


def transposed(name: str, weight: torch.Tensor) -> torch.Tensor:
    """A weight as theirs, or theirs as ours; those of experts are (in, out) in both."""
    return weight.t() if name.endswith(CONV1D) and weight.dim() == 2 else weight


def hugging_face_config(config: GPTConfig) -> dict[str, Any]:
    grouped = {} if config.n_kv_head is None else {"n_kv_head": config.n_kv_head}  # which is no GPT-2 of theirs
    mixture = {name: getattr(config, name) for name in MIXTURE} if config.num_experts else {}
    return {
        **FIXED,
        **grouped,
        **mixture,
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
        try:
            save_file(to_hugging_face(model), temporary, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{directory / 'model.safetensors'} can't be written: {error}") from None
        shutil.copymode(directory / "config.json", temporary)  # safetensors leaves it to its owner alone


def load_hugging_face(directory: str | Path) -> GPT:
    """Read what `save_hugging_face` or GPT2LMHeadModel.save_pretrained wrote.

    The model has biases if any in the file is not 0.

    Raises: ValueError if a file is missing or is not that of a GPT-2 of this kind.
    """
    config = read_config(existing(Path(directory) / "config.json"))
    path, tensors = read_tensors(Path(directory))
    bias = any(
        bool(tensor.any()) for name, tensor in tensors.items() if name.endswith(".bias") and "router" not in name
    )
    model = GPT(replace(config, bias=bias))
    check_shapes(path, tensors, to_hugging_face(model))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(transposed(name, tensors[name]))
        for name, router in routers(model):
            router.bias.copy_(tensors[f"{name}.bias"])
    return model


def initialize(model: GPT, directory: str | Path) -> None:
    """Give a model the weights of one that `load_hugging_face` reads; of its positions, as many as the model has.

    Raises: ValueError if a file is missing, or the models differ: with what differs, in both.
    """
    loaded = load_hugging_face(directory)
    ours, theirs = sizes(model.config), sizes(loaded.config)
    ours["block_size"] = max(ours["block_size"], theirs["block_size"])
    theirs["bias"] |= ours["bias"]  # which may be 0
    if differing := [name for name in ours if ours[name] != theirs[name]]:
        wanted, found = (", ".join(f"{name}={of[name]}" for name in differing) for of in (ours, theirs))
        raise ValueError(f"{directory}: a GPT-2 of {found}, but this one is of {wanted}: set {found}")
    given = dict(loaded.named_parameters())
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(given[name][: len(p)] if name in given else torch.zeros_like(p))
        for (_, router), (_, another) in zip(routers(model), routers(loaded), strict=True):
            router.bias.copy_(another.bias)


def sizes(config: GPTConfig) -> dict[str, int]:
    names = "vocab_size", "block_size", "n_layer", "n_head", "n_embd", "bias", "num_experts"
    return {**{name: getattr(config, name) for name in names}, "n_kv_head": config.num_kv_heads}


def read_tensors(directory: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """The file of weights, and what is in there, named as GPT2LMHeadModel does.

    GPT2Model's names lack "transformer."; older files have masks of attention, too, and the head beside the embedding.
    """
    paths = [directory / name for name in WEIGHTS]
    path = existing(next((path for path in paths if path.is_file()), paths[0]))
    try:
        safe = path.suffix == ".safetensors"
        tensors = load_file(path) if safe else torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, UnpicklingError, EOFError, RuntimeError) as error:
        why = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{path}: can't be read ({why}); get the file again") from None
    tensors = {named(name): tensor for name, tensor in tensors.items() if not MASK.search(name)}
    head, embedding = (tensors.get(name) for name in ("lm_head.weight", "transformer.wte.weight"))
    if head is not None and embedding is not None and torch.equal(head, embedding):
        del tensors["lm_head.weight"]
    return path, tensors


def existing(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"{path}: no such file; pass a directory written by save_hugging_face")
    return path


def named(name: str) -> str:
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


def read_config(path: Path) -> GPTConfig:
    try:
        values = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error}); get the file again") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: a {type(values).__name__}, but settings by name are wanted; get the file again")
    for key, expected in FIXED.items():
        if values.get(key, expected) != expected:
            raise ValueError(f"{path}: {key} is {values[key]!r}; only {expected!r} can be loaded")
    if missing := FIELDS.keys() - values.keys():
        raise ValueError(f"{path}: no {min(missing)}; pass a directory written by save_hugging_face")
    fields = {ours: values[theirs] for theirs, ours in FIELDS.items()}
    try:
        own = {name: values[name] for name in ("n_kv_head", *MIXTURE) if name in values}
        return GPTConfig(**fields, **own)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def check_shapes(path: Path, tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]):
    for name in sorted(tensors.keys() | expected.keys()):
        found, wanted = (tuple(t[name].shape) if name in t else "absent" for t in (tensors, expected))
        if found != wanted:
            raise ValueError(f"{path}: {name} is {found}, but {wanted} by config.json; pass files saved together")
