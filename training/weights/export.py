"""Write models in Hugging Face's format: config.json, weights in safetensors, and the tokenizer's files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from collectives.job.system import replacing
from models.config import ModelConfig
from models.decoder import Decoder
from training.weights.hf import existing, read_json
from training.weights.rules import newer_form
from training.weights.tables import OWN, TABLES, differences, misfits, table_of

MOST_BYTES = 5 * 10**9  # of a file of weights, as of transformers
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NO_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # defaults may be out of the vocabulary
COPIED = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json"),
)


def to_hugging_face(model: Decoder) -> dict[str, Tensor]:
    """Convert the weights to the names and layout of the model's family."""
    return table_of(model.config).to_theirs(model)


def hugging_face_config(config: ModelConfig, source: str | Path = "") -> dict[str, Any]:
    """Return the contents of config.json.  What a description lacks is that of the folder `source`, if there is one."""
    table = table_of(config)
    written = table.write(config)
    if table is OWN:
        return written
    values = read_json(existing(Path(source) / "config.json")) if source else {}
    if values.get("model_type") != table.family.name:
        return {**NO_TOKENS, **written}
    if not differences(config, table.read(values)):
        return values
    return {**values, **(newer_form(written) if "rope_parameters" in values else written)}


def refusal(config: ModelConfig) -> str:
    """Return why no program but ours can read a model, in a line; empty if others can."""
    if table_of(config) is not OWN:
        return ""
    family = TABLES[config.family].family
    remedy = "; mixtures that others read are --model mixtral and qwen3_moe" if config.num_experts else ""
    return (
        f"a {family.label} of Hugging Face has no {', '.join(misfits(TABLES[config.family], config))}: the weights are "
        f"in a format of our own, for --init_from and training.sample{remedy}"
    )


def save_hugging_face(model: Decoder, directory: str | Path, source: str | Path = "", dtype: str | None = None) -> None:
    """Write config.json and the weights, which replace older ones together, once all are written.

    Weights of more than 5 GB are in several files with an index.  `dtype` is theirs, by default the model's.  `source`
    is the folder of the initial weights, whose tokenizer, chat template and settings of generation are copied.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = to_hugging_face(model)
    if dtype:
        tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    values = hugging_face_config(model.config, source)
    name = "torch_dtype" if "torch_dtype" in values else "dtype"
    values[name] = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    shards = shards_of(tensors)
    texts: dict[str, Any] = {"config.json": values}
    if WHOLE not in shards:
        names = {name: file for file, shard in shards.items() for name in shard}
        texts[INDEX] = {"metadata": {"total_size": nbytes(tensors)}, "weight_map": names}
    with ExitStack() as files:
        for file, content in texts.items():
            text = files.enter_context(replacing(directory / file))
            text.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
        for file, shard in shards.items():
            weights = files.enter_context(replacing(directory / file))
            write_weights(shard, weights, directory / file)
            shutil.copymode(text, weights)  # safetensors restricts access to the owner
    (directory / (INDEX if WHOLE in shards else WHOLE)).unlink(missing_ok=True)
    copy_rest(source, directory)


def nbytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def shards_of(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each file, as transformers names them; each has at most MOST_BYTES, or one tensor."""
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and nbytes(shards[-1]) + tensor.nbytes > MOST_BYTES:
            shards.append({})
        shards[-1][name] = tensor
    if len(shards) == 1:
        return {WHOLE: shards[0]}
    return {f"model-{number:05}-of-{len(shards):05}.safetensors": shard for number, shard in enumerate(shards, 1)}


def write_weights(tensors: dict[str, Tensor], path: Path, target: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{target} can't be written ({error}): free some space, or use another folder") from None


def copy_rest(source: str | Path, directory: Path) -> None:
    """Copy a folder's files of the tokenizer, its chat template and its settings of generation."""
    if source and Path(source).resolve() != directory.resolve():
        for path in (Path(source) / name for name in COPIED):
            if path.is_file():
                shutil.copy(path, directory / path.name)
