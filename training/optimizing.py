"""The optimizer of a run, on what this rank updates."""

from __future__ import annotations

from collections.abc import Sequence

from models.gpt import GPTConfig
from models.muon import Muon, locally
from models.optimizer import Optimizer, Together, adamw, decay_groups
from models.sgd import SGD
from parallelism.data.replica import Replica
from parallelism.mesh import Mesh, replica_axes
from parallelism.zero.matrices import MatrixOwners
from training.config import Config

BLOCKS = "transformer.h."


def make_optimizer(config: Config, replica: Replica, mesh: Mesh, shape: GPTConfig) -> Optimizer:
    """Make the optimizer of what a rank updates of a GPT of some shape.  Collective."""
    params = [*replica.masters.pieces.values()]
    if config.optimizer == "sgd":
        momentum = 0.9 if config.momentum is None else config.momentum
        return SGD(decay_groups(params, config.weight_decay), config.lr, momentum)
    if config.optimizer == "muon":
        matrices = muon(config, replica, mesh, shape)
        rest = [param for param in params if param not in set(matrices.matrices.values())]
        return Together(matrices, adamw(rest, *adamw_settings(config)))
    return adamw(params, *adamw_settings(config))


def adamw_settings(config: Config) -> tuple[float, float, tuple[float, float], float]:
    return config.lr, config.weight_decay, (config.beta1, config.beta2), config.eps


def muon(config: Config, replica: Replica, mesh: Mesh, shape: GPTConfig) -> Muon:
    """Muon on the matrices of blocks; queries', keys' and values' are apart, as its authors found best.  Collective."""
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


def rows_of(name: str, shape: GPTConfig) -> Sequence[int]:
    """The relative numbers of rows of the matrices that a parameter is stacked of."""
    return (shape.n_head, shape.num_kv_heads, shape.num_kv_heads) if name.endswith("attn.c_attn.weight") else (1,)
