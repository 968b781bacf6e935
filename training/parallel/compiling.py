"""Compile a model by torch.compile: as a whole if a rank holds all of it, or else block by block."""

from __future__ import annotations

import shutil

import torch

from models.decoder import Decoder
from training.settings.fields import RunSettings

BACKEND = "inductor"
WHOLE = {"pp": (1,), "tp": (1,), "sp": (1,), "zero_stage": (0, 1, 2), "recompute": ("none",), "num_experts": (0,)}


def compiles_whole(config: RunSettings) -> bool:
    """Return whether a rank computes the whole model without collectives, so that it can be compiled as one."""
    return config.compile and all(getattr(config, name) in values for name, values in WHOLE.items())


def check_compiler(config: RunSettings) -> None:
    """Raise ValueError if there is no C++ compiler, which torch.compile needs for the CPU."""
    if not config.compile or config.device != "cpu":
        return
    from torch._inductor import config as settings

    names = [name for name in settings.cpp.cxx if name]
    if BACKEND == "inductor" and not any(map(shutil.which, names)):
        raise ValueError(f"compile starts {' or '.join(names)}, which is not installed: install it, or omit compile")


def compile_model(model: Decoder, config: RunSettings) -> None:
    """Set up compilation at the first forward pass: of the whole model, or of blocks without parallel modules."""
    for kind in {type(module) for module in model.modules()}:
        if kind.__module__.startswith("parallelism.") and not is_left_out(kind.forward):
            kind.forward = torch.compiler.disable(kind.forward)
    if compiles_whole(config):
        model.compile(backend=BACKEND)
        return
    for block in model.transformer.h:
        block.forward = torch.compile(block.forward, backend=BACKEND)  # recomputation wraps this


def is_left_out(function: object) -> bool:
    return getattr(function, "_torchdynamo_disable", False)
