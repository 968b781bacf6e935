"""Text that a trained GPT goes on with."""

from __future__ import annotations

import numpy as np
import torch

from models.gpt import GPT
from training.config import Config


def sample(gpt: GPT, prompt: np.ndarray, config: Config, is_text: bool) -> str:
    """Text, or token ids, that go on from some tokens."""
    start = torch.from_numpy(prompt.astype(np.int64))[None].to(config.device)  # (1, seq)
    generator = torch.Generator(config.device).manual_seed(config.seed)
    gpt.eval()
    ids = gpt.generate(start, config.sample_tokens, 0.8, top_k=50, generator=generator)[0].tolist()
    return bytes(ids).decode(errors="replace") if is_text else " ".join(map(str, ids))
