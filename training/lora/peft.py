"""Adapters as PEFT keeps them: adapter_config.json, and adapter_model.safetensors with its names of the matrices.

Source: peft 0.21, tuners/lora/config.py and utils/save_and_load.py.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import save_file

from collectives.job.system import replacing
from models.decoder import Decoder
from training.lora.adapters import Factors, factors_of, shapes_of
from training.lora.targets import Target, targets_of
from training.settings.fields import RunSettings
from training.weights.gpt2 import GPT2Table
from training.weights.hf import read_json, read_weights
from training.weights.tables import table_of

SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# What other adapters have, which these have not.
FIXED = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "lora_bias": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
}


# What changes an adapter's meaning, where it is set; and ways to begin that leave the model's weights as they are.
UNKNOWN = ("alora_invocation_tokens", "use_qalora", "layer_replication", "target_parameters")
BEGINNINGS = (None, True, False, "gaussian", "orthogonal")


class Adapter(NamedTuple):
    """A folder's adapter: its settings, as a run's, and its matrices by paths of layers."""

    rank: int
    alpha: float
    names: list[str]  # of its layers, or their paths
    factors: Mapping[str, Factors]


def fill_from_adapter(settings: RunSettings) -> None:
    """Set a run's settings of adapters to those of `lora_from`, if that is set, and its alpha to the default.

    Raises: ValueError for settings that differ from the folder's, or that have no effect or no meaning.
    """
    if settings.lora_from:
        adapter = load_adapter(settings.lora_from)
        of_folder = {"lora_rank": adapter.rank, "lora_alpha": adapter.alpha, "lora_targets": adapter.names}
        for name, value in of_folder.items():
            own = getattr(settings, name)
            if own not in (None, [], value):
                raise ValueError(f"{name}={own}, but lora_from={settings.lora_from} has {value}: omit {name}")
            setattr(settings, name, value)
    rank = settings.lora_rank
    if rank is None:
        for name in ("lora_alpha", "lora_targets"):
            if value := getattr(settings, name):
                raise ValueError(f"{name}={value} has no effect without lora_rank: omit it, or set lora_rank")
        return
    if not settings.init_from:
        raise ValueError(f"lora_rank={rank} adapts weights that exist: set init_from")
    if rank > settings.n_embd:
        raise ValueError(f"lora_rank={rank} is more than the width n_embd={settings.n_embd}: use at most that")
    if settings.lora_alpha is None:
        settings.lora_alpha = 2.0 * rank


def adapter_factors(model: Decoder, settings: RunSettings) -> dict[str, Factors] | None:
    """Return the matrices of a run's adapters by paths of layers, or None for new ones.

    Raises: ValueError for targets that the model lacks, or matrices that are not those of its layers.
    """
    if settings.lora_rank is None:
        return None
    targets = targets_of(model, settings.lora_targets)
    if not settings.lora_from:
        return None
    factors, folder = dict(load_adapter(settings.lora_from).factors), settings.lora_from
    if missing := {target.path for target in targets} ^ factors.keys():
        raise ValueError(f"lora_from={folder}: {min(missing)} has no adapter there, or is not a layer of the model")
    for target in targets:
        for factor, shape in zip(factors[target.path], shapes_of(model, target, settings.lora_rank), strict=True):
            if tuple(factor.shape) != shape:
                own = tuple(factor.shape)
                raise ValueError(f"lora_from={folder}: {target.path} has a matrix {own}, but {shape} by init_from")
    return factors


def module_names(paths: Sequence[str], num_blocks: int) -> list[str]:
    """Return the names of layers by which PEFT finds them: that in its block, if all blocks have it, or the path.

    >>> module_names(["h.0.attn.q", "h.1.attn.q", "h.1.attn.v"], num_blocks=2)
    ['attn.q', 'h.1.attn.v']
    """
    in_block = [".".join(path.split(".")[-2:]) for path in paths]
    times = Counter(in_block)
    return sorted({name if times[name] == num_blocks else path for path, name in zip(paths, in_block, strict=True)})


def names_of(path: str) -> tuple[str, str]:
    """Return the names of a layer's matrices.

    >>> names_of("transformer.h.0.attn.c_attn")[0]
    'base_model.model.transformer.h.0.attn.c_attn.lora_A.weight'
    """
    a, b = (f"{PREFIX}{path}.lora_{factor}.weight" for factor in "AB")
    return a, b


def save_adapter(model: Decoder, targets: list[Target], settings: RunSettings, folder: Path) -> None:
    """Write a plain model's adapters, each file replaced atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: factor.cpu().contiguous()
        for path, factors in factors_of(model, targets).items()
        for name, factor in zip(names_of(path), factors, strict=True)
    }
    values = {
        **FIXED,
        "base_model_name_or_path": settings.init_from,
        "task_type": "CAUSAL_LM",
        "r": settings.lora_rank,
        "lora_alpha": settings.lora_alpha,
        "lora_dropout": 0.0,
        "target_modules": module_names([target.path for target in targets], model.config.n_layer),
        # GPT-2's layers keep the transpose of their weights.
        "fan_in_fan_out": isinstance(table_of(model.config), GPT2Table),
        "inference_mode": True,
    }
    with replacing(folder / SETTINGS) as config, replacing(folder / WEIGHTS) as weights:
        config.write_text(json.dumps(values, indent=2) + "\n")
        save_file(tensors, weights, metadata={"format": "pt"})


def load_adapter(folder: str | Path) -> Adapter:
    """Read a folder's adapter.

    Raises: ValueError for missing or damaged files, and for adapters of another kind than these.
    """
    folder = Path(folder)
    for file in (SETTINGS, WEIGHTS):
        if not (folder / file).is_file():
            raise ValueError(f"lora_from={folder}: no {file}; pass a folder with an adapter of PEFT")
    settings, tensors = read_json(folder / SETTINGS), read_weights(folder / WEIGHTS)
    for name, value in FIXED.items():
        other = settings.get(name)
        if other and other != value:
            raise ValueError(f"{folder / SETTINGS}: {name} is {other!r}; only {value!r} can be loaded")
    for name in UNKNOWN:
        if value := settings.get(name):
            raise ValueError(f"{folder / SETTINGS}: {name} is {value!r}; such adapters cannot be loaded")
    if (beginning := settings.get("init_lora_weights")) not in BEGINNINGS:
        raise ValueError(
            f"{folder / SETTINGS}: init_lora_weights is {beginning!r}, which changes the model's own weights; such "
            "adapters cannot be loaded"
        )
    factors, modules = paired(folder / WEIGHTS, tensors), settings.get("target_modules")
    names = sorted(map(str, modules)) if isinstance(modules, list) else sorted(factors)
    return Adapter(*numbers_of(folder / SETTINGS, settings), names, factors)


def numbers_of(path: Path, settings: Mapping[str, Any]) -> tuple[int, float]:
    match settings.get("r"), settings.get("lora_alpha"):
        case int(rank), (int() | float()) as alpha if rank >= 1 and 0 < alpha < math.inf:
            return rank, float(alpha)
    raise ValueError(f"{path}: r={settings.get('r')!r} and lora_alpha={settings.get('lora_alpha')!r}; get it again")


def paired(path: Path, tensors: Mapping[str, Any]) -> dict[str, Factors]:
    """Return the matrices by paths of layers; raise ValueError for other tensors, or one without its other."""
    suffix = ".lora_A.weight"
    paths = [name[len(PREFIX) : -len(suffix)] for name in tensors if name.startswith(PREFIX) and name.endswith(suffix)]
    expected = {name for layer in paths for name in names_of(layer)}
    if not paths or (differing := expected ^ tensors.keys()):
        word = min(differing) if paths else next(iter(tensors), "nothing")
        raise ValueError(f"{path}: {word} is not one of a pair of lora_A and lora_B of linear layers; get it again")
    return {layer: Factors(*(tensors[name] for name in names_of(layer))) for layer in paths}
