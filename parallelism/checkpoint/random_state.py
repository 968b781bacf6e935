"""The states of the random number generators of a process: torch's, NumPy's and Python's, as JSON can hold them."""

from __future__ import annotations

import random
from base64 import b64decode, b64encode
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # of this rank's device
    version, internal, gauss = random.getstate()
    numpy = dict(np.random.get_state(legacy=False))
    return {
        "torch": packed(torch.get_rng_state()),
        "cuda": "" if cuda is None else packed(cuda),
        "numpy": numpy | {"state": numpy["state"] | {"key": numpy["state"]["key"].tolist()}},
        "python": [version, list(internal), gauss],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Raises: ValueError for what `random_state` has not given."""
    try:
        _set_random_state(state)
    except (LookupError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"no state of random numbers that a run has saved ({error})") from None


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(unpacked(state["torch"]))
    if state["cuda"]:
        torch.cuda.set_rng_state(unpacked(state["cuda"]))
    np.random.set_state(state["numpy"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))


def packed(state: Tensor) -> str:
    return b64encode(state.numpy().tobytes()).decode()


def unpacked(text: str) -> Tensor:
    return torch.frombuffer(bytearray(b64decode(text)), dtype=torch.uint8)
