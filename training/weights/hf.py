"""Save and load models in Hugging Face's format, as AutoModelForCausalLM.from_pretrained does.

hf_gpt2.py and hf_llama.py define the names and shapes of each family.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from collectives.job.system import replacing
from models.config import LlamaConfig, ModelConfig
from models.mixture import routers
from models.model import Model, make
from training.settings.derived import checked
from training.weights import hf_gpt2, hf_llama

# Files of weights, in order of preference; an index names several files.
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)

FAMILIES: dict[str, Any] = {"gpt2": hf_gpt2, "llama": hf_llama}  # by the model_type in config.json


def family_of(config: ModelConfig) -> Any:
    return hf_llama if isinstance(config, LlamaConfig) else hf_gpt2


def to_hugging_face(model: Model) -> dict[str, torch.Tensor]:
    """Convert the weights to the names and layout of GPT2LMHeadModel or LlamaForCausalLM."""
    return family_of(model.config).to_theirs(model)


def hugging_face_config(config: ModelConfig) -> dict[str, Any]:
    return family_of(config).config_file(config)


def save_hugging_face(model: Model, directory: str | Path):
    """Write model.safetensors and config.json, each replaced atomically, once both are written."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with replacing(directory / "config.json") as config, replacing(directory / "model.safetensors") as weights:
        config.write_text(json.dumps(hugging_face_config(model.config), indent=2, allow_nan=False) + "\n")
        try:
            save_file(to_hugging_face(model), weights, metadata={"format": "pt"})
        except SafetensorError as error:
            path = directory / "model.safetensors"
            raise OSError(f"{path} can't be written ({error}): free some space, or use another folder") from None
        shutil.copymode(config, weights)  # safetensors restricts access to the owner


def load_config(directory: str | Path) -> ModelConfig:
    """Return the shape in a directory's config.json.

    Raises: ValueError if the file is missing, or of another kind of model.
    """
    return read_config(existing(Path(directory) / "config.json"))


def load_hugging_face(directory: str | Path) -> Model:
    """Load a model saved by `save_hugging_face`, or by save_pretrained of GPT2LMHeadModel or LlamaForCausalLM.

    Raises: ValueError if a file is missing, or of another kind of model.
    """
    config = load_config(directory)
    family = family_of(config)
    path, tensors = read_tensors(Path(directory))
    tensors = family.weights_in(tensors)
    head, embedding = tensors.get("lm_head.weight"), tensors.get(family.EMBEDDING)
    if config.tied and head is not None and embedding is not None and torch.equal(head, embedding):
        del tensors["lm_head.weight"]
    model = make(family.fitted(config, tensors))
    check_shapes(path, tensors, to_hugging_face(model))
    ours = family.to_ours(tensors, config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(ours[name])
        for name, router in routers(model):
            router.bias.copy_(ours[f"{name}.bias"])
    return model


def initialize(model: Model, directory: str | Path) -> None:
    """Copy the weights that `load_hugging_face` reads to a model; positions beyond the model's are dropped.

    Raises: ValueError if a file is missing, or with both values if the models differ.
    """
    loaded = load_hugging_face(directory)
    family, own = family_of(loaded.config), family_of(model.config)
    if family is not own:
        raise ValueError(f"{directory}: a {family.NAME}, but this one is a {own.NAME}: set model to a {family.NAME}'s")
    ours, theirs = family.sizes(model.config), family.sizes(loaded.config)
    if model.config.embeds_positions:
        ours["block_size"] = max(ours["block_size"], theirs["block_size"])
        theirs["bias"] |= ours["bias"]  # biases in the file may all be 0
    if differing := [name for name in ours if ours[name] != theirs[name]]:
        our_sizes, their_sizes = (", ".join(f"{name}={of[name]}" for name in differing) for of in (ours, theirs))
        raise ValueError(
            f"{directory}: a {family.NAME} of {their_sizes}, but this one is of {our_sizes}: set {their_sizes}"
        )
    weights = dict(loaded.named_parameters())
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name][: len(p)] if name in weights else torch.zeros_like(p))
        for (_, router), (_, another) in zip(routers(model), routers(loaded), strict=True):
            router.bias.copy_(another.bias)


def read_tensors(directory: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Read a directory's weights, from one file or from those in an index; return its path and the tensors."""
    paths = [directory / name for name in WEIGHTS]
    path = existing(next((path for path in paths if path.is_file()), paths[0]))
    if path.suffix != ".json":
        return path, read_weights(path)
    names = read_json(path).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{path}: no weight_map of file names; get the file again")
    files = [existing(directory / Path(name).name) for name in sorted(set(names.values()))]
    return path, {name: tensor for file in files for name, tensor in read_weights(file).items()}


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(tensors, dict) or not all(isinstance(each, torch.Tensor) for each in tensors.values()):
            raise UnpicklingError("not a dict of tensors")
        return tensors
    except (SafetensorError, UnpicklingError, EOFError, RuntimeError) as error:
        why = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{path}: can't be read ({why}); get the file again") from None


def existing(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"{path}: no such file; pass a folder with a model of Hugging Face")
    return path


def read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error}); get the file again") from None
    if not isinstance(values, dict):
        raise ValueError(
            f"{path}: a {type(values).__name__}, but an object of settings is expected; get the file again"
        )
    return values


def read_config(path: Path) -> ModelConfig:
    values = read_json(path)
    kind = values.get("model_type", "gpt2")
    if kind not in FAMILIES:
        raise ValueError(f"{path}: model_type is {kind!r}; only {' and '.join(FAMILIES)} can be loaded")
    family = FAMILIES[kind]
    for key, expected in family.FIXED.items():
        if values.get(key, expected) != expected:
            raise ValueError(f"{path}: {key} is {values[key]!r}; only {expected!r} can be loaded")
    if missing := family.FIELDS.keys() - values.keys():
        raise ValueError(f"{path}: no {min(missing)}; pass a folder with a model of Hugging Face")
    try:
        config = checked(family.read_config(values))
        if values.get("head_dim") not in (None, config.head_size):
            raise ValueError(f"head_dim is {values['head_dim']}; only hidden_size / num_attention_heads can be loaded")
        return config
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def check_shapes(path: Path, tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]):
    for name in sorted(tensors.keys() | expected.keys()):
        file_shape, config_shape = (tuple(t[name].shape) if name in t else "absent" for t in (tensors, expected))
        if file_shape != config_shape:
            raise ValueError(
                f"{path}: {name} is {file_shape}, but {config_shape} by config.json; pass files saved together"
            )
