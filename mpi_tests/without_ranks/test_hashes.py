"""The hash of weights and states: its sums against a loop over integers, and what changes it."""

import itertools
import math
import random
import struct

import pytest
import torch

from parallelism.checkpoint import Extent, TensorShard, hashes
from parallelism.checkpoint.extent import LocalShard
from parallelism.checkpoint.hashes import combined, element_sums, part_sums
from parallelism.placement import Shard

WORD = (1 << 64) - 1
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8]


@pytest.fixture(params=["compiled", "torch"])
def way(request, monkeypatch):
    """Compute by Numba, as on a CPU, or by torch, as on a GPU, in blocks of 7 elements."""
    if request.param == "torch":
        monkeypatch.setattr(hashes, "kernels", lambda: None)
        monkeypatch.setattr(hashes, "BLOCK", 7)


def splitmix64(state):
    """Return the output of a SplitMix64 whose state is advanced from `state`."""
    z = (state + 0x9E3779B97F4A7C15) & WORD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & WORD
    return z ^ (z >> 31)


def slow_sums(x):
    """Compute both sums with integers of any length, from the tensor's bytes in memory."""
    code = {1: "b", 2: "h", 4: "i", 8: "q"}[x.element_size()]
    words = struct.unpack(f"={x.numel()}{code}", bytes(x.reshape(-1).view(torch.uint8).tolist()))
    mixed = [splitmix64((position - 1) * 0x9E3779B97F4A7C15 + word & WORD) for position, word in enumerate(words)]
    again = [splitmix64((number - 1) * 0x9E3779B97F4A7C15 + 1 & WORD) for number in mixed]
    return sum(mixed) & WORD, sum(again) & WORD


def numbers(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).mul(20).to(dtype)


def part(x, shape=None, begin=0, shards=(), name="x"):
    return TensorShard(name, "parameter", Extent(shape or tuple(x.shape), begin, x.numel(), shards), x)


def sums(*parts):
    """Add up the parts' sums."""
    return tuple(sum(each) & WORD for each in zip(*map(element_sums, parts), strict=True))


def test_the_reference_is_splitmix64():
    """The first outputs for seed 0, as published with its reference implementation."""
    assert [splitmix64(0), splitmix64(0x9E3779B97F4A7C15)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("way")
def test_sums_are_those_of_a_loop_over_integers(dtype):
    for shape in ((), (0,), (1,), (7,), (3, 5, 2)):
        x = numbers(*shape, dtype=dtype)
        assert element_sums(part(x)) == slow_sums(x)


@pytest.mark.usefixtures("way")
def test_any_ranges_have_the_whole_s_sums():
    x, draw = numbers(60), random.Random(1)
    for _ in range(20):
        cuts = [0, *sorted(draw.choices(range(61), k=4)), 60]
        parts = [part(x[begin:end].clone(), (60,), begin) for begin, end in itertools.pairwise(cuts)]
        assert sums(*parts) == slow_sums(x)


SHARDS = {
    "columns": [(Shard(1, 8), 4)],
    "stacked rows": [(Shard(0, 6, pieces=(1, 2)), 2)],
    "padded": [(Shard(2, 5, padded=True), 3)],
    "nested": [(Shard(1, 8, pieces=(2, 1, 1)), 2), (Shard(1, 4, padded=True), 3)],
    "two dims": [(Shard(0, 6), 3), (Shard(2, 5, padded=True), 2)],
}


@pytest.mark.parametrize("shards", SHARDS.values(), ids=SHARDS)
@pytest.mark.usefixtures("way")
def test_any_shards_have_the_whole_s_sums(shards):
    """Each is cut once more, as ZeRO does."""
    x, parts = numbers(6, 8, 5), []
    for ranks in itertools.product(*(range(size) for _, size in shards)):
        local = x
        for (shard, size), rank in zip(shards, ranks, strict=True):
            local = shard.local(local, rank, size)
        local = local.reshape(-1)
        owned = tuple(LocalShard(shard, rank, size) for (shard, size), rank in zip(shards, ranks, strict=True))
        cut = len(local) * 2 // 3
        parts += [part(local[:cut], (6, 8, 5), 0, owned), part(local[cut:], (6, 8, 5), cut, owned)]
    assert sums(*parts) == slow_sums(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_every_flipped_bit_changes_both_sums(dtype):
    x = numbers(6, dtype=dtype)
    x[2] = 0
    bits = x.view(hashes.BITS[x.element_size()])
    outcomes = [element_sums(part(x))]
    for index, bit in itertools.product(range(len(x)), range(8 * x.element_size())):
        before = bits[index].clone()
        bits[index] ^= 1 << bit if bit < 8 * x.element_size() - 1 else -1 << bit
        outcomes.append(element_sums(part(x)))
        bits[index] = before
    for which in zip(*outcomes, strict=True):
        assert len({*which}) == 1 + 6 * 8 * x.element_size()


def test_every_swap_of_two_elements_changes_both_sums():
    x, outcomes = numbers(12), []
    for a, b in [(0, 0), *itertools.combinations(range(12), 2)]:
        y = x.clone()
        y[[a, b]] = x[[b, a]]
        outcomes.append(element_sums(part(y)))
    for which in zip(*outcomes, strict=True):
        assert len({*which}) == 1 + math.comb(12, 2)


def test_the_sign_of_zero_and_each_nan_count():
    assert len({element_sums(part(torch.tensor([value]))) for value in (0.0, -0.0, math.nan, -math.nan)}) == 4


def hash_of(*ranks):
    return combined([dict(enumerate(map(part_sums, parts), 10 * index)) for index, parts in enumerate(ranks)])


def test_names_kinds_shapes_and_dtypes_count():
    x = numbers(4)
    cases = [
        part(x),
        part(x, name="y"),
        part(x)._replace(kind="exp_avg"),
        part(x, (2, 2)),
        part(x.view(torch.int32)),
        part(x.clone().fill_(0)),
    ]
    assert len({hash_of([case]).hash for case in cases}) == len(cases)
    digests = [digest for case in cases for kinds in hash_of([case]).tensors.values() for digest in kinds.values()]
    assert len({*digests}) == len(cases)


def test_neither_the_order_nor_the_ranks_count():
    x, y = part(numbers(4)), part(numbers(2, 3), name="y")
    states = x._replace(kind="exp_avg", tensor=numbers(4) * 2)
    whole = hash_of([x, states, y])
    assert [*whole.tensors] == ["x", "y"]
    assert [*whole.tensors["x"]] == ["parameter", "exp_avg"]
    assert hash_of([y, states], [], [x]) == whole
