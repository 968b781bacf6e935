"""Placements: what is said of a parameter, and over which axes it follows that ranks have the same."""

import torch
from torch import nn

from parallelism.mesh import Within, mesh_shape
from parallelism.numerics.master_weights import like
from parallelism.placement import Replicate, Shard, place, placement_of, replicated_axes, shard_of, shards_of


def test_a_parameter_carries_one_value_that_is_added_to():
    param = nn.Parameter(torch.zeros(4, 6))
    assert placement_of(param) == {}
    place(param, ep=Shard(0, 8))
    place(param, tp=Shard(1, 12), dp=Replicate())
    assert placement_of(param) == {"ep": Shard(0, 8), "tp": Shard(1, 12), "dp": Replicate()}
    assert shards_of(param) == {"ep": Shard(0, 8), "tp": Shard(1, 12)}
    assert (shard_of(param, "tp"), shard_of(param, "dp"), shard_of(param, "sp")) == (Shard(1, 12), None, None)
    assert placement_of(like(param, torch.ones(3))) == placement_of(param)


def test_ranks_have_the_same_along_axes_that_shard_nothing_of_it():
    layout = mesh_shape(32, dp=4, pp=2, sp=2, tp=2, ep=Within("dp", 2))
    whole, expert = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    place(expert, ep=Shard(0, 8), tp=Shard(1, 12))
    assert replicated_axes(whole, layout) == ("dp/ep", "ep", "pp", "sp", "tp")
    assert replicated_axes(whole, layout, "dp", "sp") == ("dp/ep", "ep", "sp")
    assert replicated_axes(expert, layout, "dp", "sp") == ("dp/ep", "sp")
