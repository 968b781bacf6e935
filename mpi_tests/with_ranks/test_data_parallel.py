"""Data parallelism against the plain module on the whole batch, in double precision."""

import numpy as np
import pytest
import torch
from torch import nn

from mpi_tests.helpers.models import share
from parallelism import DataParallel
from parallelism.buffers.arena import Arena
from parallelism.data.buckets import cut_buckets

pytestmark = pytest.mark.sizes(1, 2, 3, 4)
SAMPLES = 24  # divisible by 1, 2, 3 and 4 ranks


class Model(nn.Module):
    """A model with frozen parameters, parameters used only on request, and a buffer."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 5), nn.Tanh(), nn.Linear(5, 1))
        self.extra = nn.Linear(1, 1)
        self.layers[0].bias.requires_grad_(False)
        self.register_buffer("shift", torch.randn(1))
        self.double()

    def forward(self, x, use_extra=True):
        y = self.layers(x) + self.shift
        return (self.extra(y) if use_extra else y).square().mean()


def batch(seed: int = 1) -> torch.Tensor:
    return torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parallel(comm, seed: int = 0, bucket_mb: float = 4.0) -> tuple[DataParallel, Arena]:
    model = DataParallel(Model(seed), comm, bucket_mb=bucket_mb)
    return model, model.replica.arena


def assert_same_gradients(model: nn.Module, reference: nn.Module) -> None:
    for (name, param), plain in zip(model.named_parameters(), reference.parameters(), strict=True):
        expected = torch.zeros_like(plain) if plain.grad is None else plain.grad
        if param.requires_grad:
            torch.testing.assert_close(param.grad, expected, rtol=1e-12, atol=1e-14, msg=name)
        else:
            assert param.grad is None


@pytest.mark.parametrize("bucket_mb", [1e-6, 2e-4, 4.0])  # a bucket for each parameter, a few, one for all
def test_gradients_are_those_of_the_whole_batch(comm, bucket_mb):
    model, arena = parallel(comm, bucket_mb=bucket_mb)
    reference = Model()
    for seed in (1, 2):  # the second step runs the plans again
        arena.zero_grad()
        reference.zero_grad()
        model(share(comm, batch(seed))).backward()
        reference(batch(seed)).backward()
        assert_same_gradients(model.module, reference)


def test_ranks_start_from_the_weights_and_buffers_of_rank_0(comm):
    model, _ = parallel(comm, seed=comm.rank)
    for param, expected in zip(model.module.state_dict().values(), Model(0).state_dict().values(), strict=True):
        assert torch.equal(param, expected)


def test_no_sync_accumulates_and_the_next_pass_reduces_the_sum(comm):
    model, _ = parallel(comm, bucket_mb=1e-6)
    micro = share(comm, batch()).chunk(2)
    with model.no_sync():
        (model(micro[0]) / 2).backward()
    alone = Model()
    (alone(micro[0]) / 2).backward()
    assert_same_gradients(model.module, alone)
    (model(micro[1]) / 2).backward()
    reference = Model()
    reference(batch()).backward()
    assert_same_gradients(model.module, reference)


def test_gradients_that_an_optimizer_replaces_are_refused(comm):
    """By default an optimizer sets gradients to None: new ones would not be reduced."""
    model, _ = parallel(comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        model(batch()).backward()
        optimizer.step()
    optimizer.zero_grad()
    why = r"^the gradient of layers.0.weight was replaced, .*: clear gradients by the module's zero_grad\(\), or by "
    with pytest.raises(RuntimeError, match=why):
        model(batch()).backward()


def test_parameters_that_a_pass_does_not_reach_count_as_zero(comm):
    model, arena = parallel(comm, bucket_mb=1e-6)
    for _ in range(2):  # a pass without them must not affect the next one
        arena.zero_grad()
        model(share(comm, batch()), use_extra=False).backward()
        reference = Model()
        reference(batch(), use_extra=False).backward()
        assert_same_gradients(model.module, reference)


def test_a_parameter_reached_on_one_rank_only_is_averaged_with_zeros(comm):
    model, arena = parallel(comm, bucket_mb=1e-6)
    model(batch(), use_extra=comm.rank == 0).backward()
    reference = Model()
    reference(batch()).backward()
    expected = reference.extra.weight.grad.numpy().ravel() / comm.size
    np.testing.assert_allclose(arena.gradients[arena.slices["extra.weight"]], expected, rtol=1e-12)


def test_buckets_start_while_the_backward_pass_goes_on(comm):
    model, _ = parallel(comm, bucket_mb=1e-6)
    events = []
    for bucket in model.replica.buckets:
        start = bucket.plan.start
        bucket.plan.start = lambda start=start: (events.append("bucket"), start())[1]
    model.module.layers[0].weight.register_hook(lambda _: events.append("last gradient"))
    model(share(comm, batch())).backward()
    assert events.index("last gradient") >= 4
    assert events.count("bucket") == len(model.replica.buckets)


def test_buckets_cover_every_gradient_once(comm):
    model = Model()
    arena = Arena(model, comm)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    slices = {name: arena.slices[name] for name in names}
    for max_length in (0, 75, 10**6):
        buckets = cut_buckets(slices, lambda name: None, max_length)
        assert sorted(name for inside in buckets for name in inside) == sorted(names)
        assert [name for inside in reversed(buckets) for name in inside] == [n for n in arena.slices if n in names]


def test_a_bucket_of_nothing_is_refused(comm):
    with pytest.raises(ValueError, match="bucket_mb=0 must be above 0"):
        parallel(comm, bucket_mb=0)
