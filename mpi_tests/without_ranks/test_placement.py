"""Placements of parameters, and the shards that follow from them."""

import torch
from torch import nn

from parallelism.placement import Replicate, Shard, like, place, placement_of, shard_of, shards_of


def test_a_parameter_carries_one_value_that_is_added_to():
    param = nn.Parameter(torch.zeros(4, 6))
    assert placement_of(param) == {}
    place(param, ep=Shard(0, 8))
    place(param, tp=Shard(1, 12), dp=Replicate())
    assert placement_of(param) == {"ep": Shard(0, 8), "tp": Shard(1, 12), "dp": Replicate()}
    assert shards_of(param) == {"ep": Shard(0, 8), "tp": Shard(1, 12)}
    assert (shard_of(param, "tp"), shard_of(param, "dp"), shard_of(param, "sp")) == (Shard(1, 12), None, None)
    assert placement_of(like(param, torch.ones(3))) == placement_of(param)
    assert placement_of(like(param, torch.ones(3), tp=Replicate())) == {**placement_of(param), "tp": Replicate()}
    assert not like(param.requires_grad_(False), torch.ones(3)).requires_grad
