"""Exact sums beside integers and fractions of Python, with and without compiled kernels."""

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch

from parallelism.numerics import clipping, exact
from parallelism.numerics.clipping import highest, power_of_two, sum_of_squares
from parallelism.numerics.exact import Rounding
from parallelism.tensor.tiles import tiled, tree_sum


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def kernels(request, monkeypatch):
    if request.param == "torch":
        for module in (clipping, exact):
            monkeypatch.setattr(module, "kernels", lambda: None)


def drawn(seed: int, *shape: int, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 10 ** torch.randn(shape, generator=generator)).to(dtype)


def rounding(exponent: int) -> Rounding:
    exponents = torch.tensor(exponent)
    return Rounding(power_of_two(-exponents), power_of_two(exponents), torch.zeros((), dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("exponent", [-30, -3])
def test_a_sum_of_gradients_is_that_of_rounded_fractions_in_any_order(dtype, exponent):
    gradients = [drawn(seed, 4, 5, dtype=dtype) for seed in range(6)]
    sums = [rounding(exponent) for _ in range(2)]
    sums[1].total = torch.full((4, 5), 7)
    sums[1].is_clear = True
    for total, order in zip(sums, (gradients, gradients[::-1]), strict=True):
        for gradient in order:
            total.add(gradient)
    quantum = Fraction(2) ** exponent
    elements = zip(*(gradient.flatten().tolist() for gradient in gradients), strict=True)
    want = [sum(round(Fraction(x) / quantum) for x in xs) for xs in elements]
    for total in sums:
        assert total.total.flatten().tolist() == want
        assert total.peak == max(gradient.double().abs().max() for gradient in gradients)
        floats = total.floats(torch.float32)
        assert floats.shape == (4, 5)
        assert floats.data_ptr() == total.total.data_ptr()
        assert floats.flatten().tolist() == [torch.tensor(float(x * quantum), dtype=torch.float32).item() for x in want]


def test_a_gradient_with_strides_and_an_empty_one():
    total = rounding(-20)
    total.total = torch.zeros(4, 5, dtype=torch.int64)
    gradient = drawn(1, 5, 4).t()
    total.add(gradient)
    assert torch.equal(total.total, (gradient.double() * 2**20).round().long())
    total.is_clear = True
    total.settle()
    assert not total.total.any()
    total.add(gradient)
    total.settle()
    assert total.total.any()
    empty = rounding(-20)
    empty.total = torch.zeros(0, dtype=torch.int64)
    empty.add(torch.zeros(0))
    assert empty.peak == 0


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_a_sum_without_memory_moves_to_its_home(count):
    total, home = rounding(-20), torch.full((20,), 7)
    gradients = [drawn(seed, 5, 4).t() for seed in range(count)]
    for _ in range(2):
        for gradient in gradients:
            total.add(gradient)
        total.move(home)
        want = sum((gradient.double() * 2**20).round().long() for gradient in gradients)
        assert torch.equal(home, torch.zeros(20, dtype=torch.int64) + (want.reshape(-1) if count else 0))
        home.fill_(9)  # the next sum has other memory


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_peak_of_a_gradient_that_is_not_finite(value):
    total = rounding(-20)
    for each in (1.0, value, 2.0):
        total.add(torch.tensor([0.5, each, 0.25]))
    assert math.isnan(total.peak) if math.isnan(value) else total.peak == math.inf
    peaks = highest([torch.tensor([1.0, -3.0]), torch.tensor([2.0, value])], torch.device("cpu")).tolist()
    assert peaks[0] == 3
    assert not math.isfinite(peaks[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_of_squares_are_those_of_rounded_fractions(dtype):
    tensors, scale = [drawn(seed, 50, dtype=dtype) for seed in range(3)], 2.0**10
    high, low = sum_of_squares(tensors, torch.tensor(scale, dtype=torch.float64), 24).tolist()
    squares = [round(Fraction((float(x) * scale) ** 2)) for tensor in tensors for x in tensor]
    assert (high << 24) + low == sum(squares)


@pytest.mark.parametrize("num_tiles", [2, 4, 8])
def test_products_in_tiles_are_products(num_tiles):
    """Pieces of a dim are each cut; the sum has the same bits if halves of the tiles are added by two ranks."""
    x, weight = drawn(1, 3, 5, 48), drawn(2, 48, 7)
    product = tiled(lambda part: x[..., part] @ weight[part], 48, num_tiles, pieces=(1, 2, 3))
    torch.testing.assert_close(product.double(), x.double() @ weight.double(), rtol=1e-5, atol=1e-3)
    ends = [0, 8, 24, 48]
    halves = []
    for rank in range(2):
        own = torch.cat([torch.arange(a, b).chunk(2)[rank] for a, b in pairwise(ends)])
        xs, weights = x[..., own], weight[own]
        halves.append(tiled(lambda part: xs[..., part] @ weights[part], 24, num_tiles // 2, pieces=(1, 2, 3)))  # noqa: B023
    assert torch.equal(tree_sum(halves), product)
