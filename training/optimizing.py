"""Optimizer of a run, for the weights that this rank updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from models.config import LlamaConfig, ModelConfig
from models.learning_rate import STABLE
from models.muon import Muon, locally
from models.optimizer import Together, adamw, decay_groups
from models.sgd import SGD
from parallelism.data.replica import Replica
from parallelism.mesh import Mesh, replica_axes
from parallelism.step.optimizer import Optimizer
from parallelism.zero.matrices import MatrixOwners
from training.config import Config

BLOCKS = "transformer.h."
USERS = dict.fromkeys(("beta1", "beta2", "eps"), ("adamw", "muon")) | {"muon_lr": ("muon",)}  # optimizers by setting


def check_optimizer(config: Config) -> None:
    """Refuse settings of other optimizers, and invalid decays of the learning rate."""
    if config.momentum is not None and config.optimizer == "adamw":
        raise ValueError(f"momentum={config.momentum} applies to sgd and muon, not to adamw: omit it, or set optimizer")
    for field in fields(config):
        value, users = getattr(config, field.name), USERS.get(field.name)
        if users and config.optimizer not in users and value != field.default:
            of = f"applies to {' and '.join(users)}, not to {config.optimizer}"
            raise ValueError(f"{field.name}={value} {of}: omit it, or set optimizer")
    if config.lr_schedule == "constant" and (config.min_lr is not None or config.lr_decay_iters is not None):
        raise ValueError("min_lr and lr_decay_iters apply to decaying rates, not to lr_schedule=constant: omit them")
    if config.min_lr is not None and config.min_lr > config.lr:
        raise ValueError(f"min_lr={config.min_lr} must be at most lr={config.lr}, from which it falls")
    check_course(config)


def check_course(config: Config) -> None:
    """Refuse learning rates that would decay before the end of the warm-up."""
    decay, warmed = config.lr_decay_iters, f"warmup_iters={config.warmup_iters}"
    if decay is None:
        return
    if config.lr_schedule == STABLE and config.warmup_iters + decay > config.max_iters:
        raise ValueError(
            f"{warmed} and lr_decay_iters={decay} are more than max_iters={config.max_iters} with lr_schedule=wsd: use "
            "fewer of one"
        )
    if config.lr_schedule != STABLE and config.warmup_iters >= decay:
        raise ValueError(f"{warmed} must be below lr_decay_iters={decay}, by which the learning rate has fallen")


def make_optimizer(config: Config, replica: Replica, mesh: Mesh, shape: ModelConfig) -> Optimizer:
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


def adamw_settings(config: Config) -> tuple[float, float, tuple[float, float], float]:
    return config.lr, config.weight_decay, (config.beta1, config.beta2), config.eps


def muon(config: Config, replica: Replica, mesh: Mesh, shape: ModelConfig) -> Muon:
    """Return a Muon for the matrices of blocks; queries, keys and values, computed at once, are separate matrices.

    Collective.
    """
    names = [name for name, param in replica.params.items() if name.startswith(BLOCKS) and param.dim() >= 2]
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
        return shape.n_head, shape.num_kv_heads, shape.num_kv_heads
    is_gated = isinstance(shape, LlamaConfig) and name.endswith("mlp.c_fc.weight")
    return (1, 1) if is_gated else (1,)
