"""Save and load models in Hugging Face's format, as AutoModelForCausalLM.from_pretrained does.

families.py and gpt2.py have a table for each family; export.py writes.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from models.config import ModelConfig
from models.decoder import Decoder
from models.mixture import routers
from parallelism.planner.presets import FAMILIES
from training.settings.derived import checked
from training.weights.rules import meaning
from training.weights.tables import OWN, TABLES, differences, effective_settings

# Files of weights, in order of preference; an index names several files.
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
FIRST: tuple[str, ...] = (
    "vocab_size",
    "block_size",
    "n_layer",
    "n_head",
    "n_embd",
    "bias",
    "num_experts",
    "rope_theta",
    "rope_factor",
)
FIRST += ("rope_original_length", "norm_eps", "tied", "n_kv_head", "n_hidden")  # in messages


def load_config(directory: str | Path) -> ModelConfig:
    """Return the shape in a directory's config.json.

    Raises: ValueError if the file is missing, or of another kind of model.
    """
    return read_config(existing(Path(directory) / "config.json"))[1]


def load_hugging_face(directory: str | Path) -> Decoder:
    """Load a model that this program saved, or save_pretrained of one of the families.

    Raises: ValueError if a file is missing, or of another kind of model.
    """
    table, config = read_config(existing(Path(directory) / "config.json"))
    path, tensors = read_tensors(Path(directory))
    tensors = table.weights_in(tensors)
    head, embedding = tensors.get("lm_head.weight"), tensors.get(table.embedding)
    if config.tied and head is not None and embedding is not None and torch.equal(head, embedding):
        del tensors["lm_head.weight"]
    model = Decoder(table.fitted(config, tensors))
    check_shapes(path, tensors, table.to_theirs(model))
    ours = table.to_ours(tensors, model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(ours[name])
        for name, router in routers(model):
            router.bias.copy_(ours.get(f"{name}.bias", router.bias))
    return model


def initialize(model: Decoder, directory: str | Path) -> None:
    """Copy the weights that `load_hugging_face` reads to a model; positions beyond the model's are dropped.

    Raises: ValueError if a file is missing, or with both values if the models differ.
    """
    loaded = load_hugging_face(directory)
    family, own = (FAMILIES[each.config.family].label for each in (loaded, model))
    if family != own:
        raise ValueError(f"{directory}: a {family}, but this one is a {own}: set model to a {family}'s")
    ours, theirs = effective_settings(model.config), effective_settings(loaded.config)
    differing = {*differences(model.config, loaded.config)}
    if not model.config.embeds_positions or ours["block_size"] <= theirs["block_size"]:
        differing.discard("block_size")
    if ours["bias"]:  # biases in the file may all be 0
        differing.discard("bias")
    if differing:
        names = sorted(differing, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
        our_sizes, their_sizes = (", ".join(f"{name}={of[name]}" for name in names) for of in (ours, theirs))
        raise ValueError(f"{directory}: a {family} of {their_sizes}, but this one is of {our_sizes}: set {their_sizes}")
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


def read_config(path: Path) -> tuple[Any, ModelConfig]:
    """Return the table of a config.json, and the description in it.

    Raises: ValueError for a family that is unknown, or a setting that cannot be loaded.
    """
    values = read_json(path)
    try:
        table = meaning("model_type", values.get("model_type", "gpt2"), {**TABLES, OWN.family.name: OWN})
        return table, checked(table.read(values))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    except (AttributeError, TypeError) as error:  # text where numbers are expected, for example
        raise ValueError(f"{path}: {error}; get the file again") from None


def check_shapes(path: Path, tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]):
    for name in sorted(tensors.keys() | expected.keys()):
        file_shape, config_shape = (tuple(t[name].shape) if name in t else "absent" for t in (tensors, expected))
        if file_shape != config_shape:
            raise ValueError(
                f"{path}: {name} is {file_shape}, but {config_shape} by config.json; pass files saved together"
            )
