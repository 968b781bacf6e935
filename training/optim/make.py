"""Optimizer of a run, for the weights that this rank updates."""

from __future__ import annotations

from collections.abc import Sequence

from models.config import ModelConfig
from parallelism.data.replica import Replica
from parallelism.mesh import Mesh, replica_axes
from parallelism.step.optimizer import Optimizer
from parallelism.zero.matrices import MatrixOwners
from training.optim.muon import Muon, locally
from training.optim.optimizer import Together, adamw, decay_groups
from training.optim.sgd import SGD
from training.settings.fields import RunSettings

BLOCKS = "transformer.h."


def make_optimizer(config: RunSettings, replica: Replica, mesh: Mesh, shape: ModelConfig) -> Optimizer:
    """Make the optimizer of a rank's weights of a model of this shape.  Collective."""
    params = [*replica.masters.pieces.values()]
    if config.optimizer == "sgd":
        momentum = 0.9 if config.momentum is None else config.momentum
        return SGD(decay_groups(params, config.weight_decay), config.lr, momentum)
    if config.optimizer == "muon":
        matrices = muon(config, replica, mesh, shape)
        rest = set(params).difference(matrices.matrices.values())
        return Together(matrices, adamw([p for p in params if p in rest], *adamw_settings(config)))
    return adamw(params, *adamw_settings(config))


def adamw_settings(config: RunSettings) -> tuple[float, float, tuple[float, float], float]:
    return config.lr, config.weight_decay, (config.beta1, config.beta2), config.eps


def muon(config: RunSettings, replica: Replica, mesh: Mesh, shape: ModelConfig) -> Muon:
    """Return a Muon for the matrices of blocks; queries, keys and values, computed at once, are separate matrices.

    Collective.
    """
    params = {name: param for name, param in replica.params.items() if param.requires_grad and param.dim() >= 2}
    names = [name for name in params if name.startswith(BLOCKS)]
    ranks = mesh.along(*replica_axes(mesh.shape), "tp")
    pieces = {name: replica.masters.pieces[name] for name in names if name in replica.masters.pieces}
    optimizer = Muon(
        pieces,
        config.muon_lr,
        0.95 if config.momentum is None else config.momentum,
        config.weight_decay,
        {name: rows_of(name, shape) for name in names},
        MatrixOwners(replica, names, mesh, config.device) if names and ranks.size > 1 else locally,
    )
    optimizer.param_groups[0]["lr_factor"] = config.muon_lr / config.lr
    return optimizer


def rows_of(name: str, shape: ModelConfig) -> Sequence[int]:
    """Return the relative row counts of the matrices that are stacked in a parameter."""
    if name.endswith("attn.c_attn.weight"):
        return shape.head_counts
    return (1, 1) if shape.is_gated and name.endswith("mlp.c_fc.weight") else (1,)
