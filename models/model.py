"""Construction of models of either family."""

from __future__ import annotations

from models.config import LlamaConfig, ModelConfig
from models.gpt import GPT
from models.llama import Llama

Model = GPT | Llama


def make(config: ModelConfig, seed: int = 1337) -> Model:
    """Make a model of this shape, with initial weights by the seed."""
    return Llama(config, seed) if isinstance(config, LlamaConfig) else GPT(config, seed)
