"""Sample text from a trained model."""

from __future__ import annotations

import numpy as np
import torch

from models.generate import generate
from models.model import Model
from models.token_files import TokenSequence
from models.tokenizer import Tokenizer
from training.settings.config import Config


def sample(gpt: Model, prompt: np.ndarray | TokenSequence, config: Config, tokenizer: Tokenizer) -> str:
    """Return a continuation of some tokens, as text or token ids, or a line with the reason why there is none."""
    start = torch.from_numpy(np.asarray(prompt, np.int64))[None].to(config.device)  # (1, seq)
    generator = torch.Generator(config.device).manual_seed(config.seed)
    gpt.eval()
    try:
        tokens = generate(gpt, start, config.sample_tokens, 0.8, top_k=50, generator=generator)
    except ValueError as error:
        return f"no sample: {error}"
    return tokenizer.decode(tokens[0].tolist())
