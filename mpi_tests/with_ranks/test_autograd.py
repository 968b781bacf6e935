"""Collectives in the backward pass: torch's gradcheck of a function that all ranks compute alike."""

import pytest
import torch

from parallelism.buffers import autograd
from parallelism.buffers.tensor_collectives import TensorCollectives

# Results of a pair on the ranks' parts of `xs` (size, 2, 2 size), one on each rank, and the expected values.
PAIRS = {
    "reduce_scatter": (
        lambda x, axis: autograd.reduce_scatter(x, axis, dim=1),
        lambda xs, rank: xs.sum(0)[:, 2 * rank : 2 * rank + 2],
    ),
    "all_to_all": (
        lambda x, axis: autograd.all_to_all(x, axis, split_dim=1, join_dim=0),
        lambda xs, rank: torch.cat([x[:, 2 * rank : 2 * rank + 2] for x in xs]),
    ),
}
# The same for pairs whose results are equal on all ranks.
ALIKE = {
    "reduce": (autograd.reduce, lambda xs: xs.sum(0)),
    "gather": (lambda x, axis: autograd.gather(x, axis, dim=1), lambda xs: torch.cat(xs.unbind(), dim=1)),
}


on_few = pytest.mark.sizes(1, 2, 3, proof=range(1, 9))


@pytest.fixture
def axis(comm):
    return TensorCollectives(comm)


def parts(axis):
    """Return all ranks' shards on each rank, so that gradcheck makes the same calls on all of them."""
    generator = torch.Generator().manual_seed(axis.size)
    return torch.randn(axis.size, 2, 2 * axis.size, dtype=torch.float64, generator=generator, requires_grad=True)


def weighed(y, axis):
    """Return the sum over ranks of their tensors, each with weights of its own."""
    generator = torch.Generator().manual_seed(axis.rank)
    weights = torch.rand(y.shape, dtype=y.dtype, generator=generator)
    return autograd.reduce((weights * y**3).sum(), axis)


def check(function, xs):
    assert torch.autograd.gradcheck(function, xs)


@on_few
@pytest.mark.parametrize("name", PAIRS)
def test_each_rank_has_a_result_of_its_own(axis, name):
    pair, expected = PAIRS[name]
    xs = parts(axis)
    torch.testing.assert_close(pair(xs[axis.rank], axis), expected(xs, axis.rank))
    check(lambda xs: weighed(pair(autograd.copy(xs, axis)[axis.rank], axis), axis), xs)


@on_few
@pytest.mark.parametrize("name", ALIKE)
def test_all_ranks_have_the_same_result(axis, name):
    pair, expected = ALIKE[name]
    xs = parts(axis)
    torch.testing.assert_close(pair(xs[axis.rank], axis), expected(xs))
    check(lambda xs: pair(autograd.copy(xs, axis)[axis.rank], axis) ** 3, xs)


def test_split(axis):
    xs = parts(axis)
    torch.testing.assert_close(autograd.split(xs, axis, dim=2), xs[:, :, 2 * axis.rank : 2 * axis.rank + 2])
    check(lambda xs: weighed(autograd.split(xs, axis, dim=2), axis), xs)


@pytest.mark.sizes(2, 3)
def test_parts_must_be_equal(axis):
    with pytest.raises(ValueError, match=rf"dim 0 of \(7,\) is not divisible by {axis.size} ranks"):
        autograd.split(torch.zeros(7), axis)
    with pytest.raises(ValueError, match=rf"reduce_scatter: a first dim of 7 is not divisible by {axis.size} ranks"):
        autograd.reduce_scatter(torch.zeros(7), axis)


def test_several_are_under_way_at_once(axis):
    inputs = [torch.full((3,), float(axis.rank + nth)) for nth in range(4)]
    pending = [axis.start("all_reduce", x) for x in inputs]
    ranks = axis.size * (axis.size - 1) // 2
    for nth in reversed(range(4)):
        assert pending[nth].wait().tolist() == [ranks + nth * axis.size] * 3
    assert axis.all_reduce(inputs[0]).tolist() == [ranks] * 3
    assert inputs[0].tolist() == [axis.rank] * 3
    assert sum(map(len, axis._free_plans.values())) == 4


def test_bfloat16(axis):
    x = torch.full((2, 3), 1.5, dtype=torch.bfloat16)
    assert torch.equal(axis.all_gather(x), torch.full((2 * axis.size, 3), 1.5, dtype=torch.bfloat16))
