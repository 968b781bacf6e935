"""The arena: parameters and gradients are slices of flat tensors in symmetric memory."""

import pytest
import torch
from torch import nn

from parallelism.buffers.arena import ALIGNMENT_BYTES, Arena

pytestmark = pytest.mark.sizes(1, 2)


class Tied(nn.Module):
    """A model with uneven sizes, a frozen parameter and a tied one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 3)
        self.hidden = nn.Linear(3, 5)
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.back = nn.Linear(5, 3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.back(self.frozen * self.hidden(self.embed(tokens)).tanh()))


def inside(tensor: torch.Tensor, flat: torch.Tensor) -> bool:
    begin = flat.data_ptr()
    return begin <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= begin + flat.nbytes


def test_parameters_and_gradients_lie_in_the_arena(comm):
    plain, module = Tied(), Tied()
    arena = Arena(module, comm)
    for tokens in (torch.tensor([1, 2, 6]), torch.tensor([0])):
        plain(tokens).square().sum().backward()
        module(tokens).square().sum().backward()
    assert [len(flat) for flat in comm.peers(arena.parameters)] == [len(arena.parameters)] * comm.size
    for (name, param), reference in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert inside(param, arena.parameters)
        assert param.data_ptr() % 4 == 0
        assert torch.equal(param, reference)
        assert torch.equal(arena.parameters[arena.slices[name]], reference.detach().ravel())
        if param.requires_grad:
            assert inside(param.grad, arena.gradients)
            assert torch.equal(param.grad, reference.grad)
        else:
            assert param.grad is None
    assert module.head.weight.data_ptr() == module.embed.weight.data_ptr()


def test_the_arena_and_the_module_have_the_same_memory(comm):
    module = Tied()
    arena = Arena(module, comm)
    arena.parameters[:] = 2.0
    assert all(torch.all(p == 2.0) for p in module.parameters())
    with torch.no_grad():
        module.hidden.bias.fill_(3.0)
    assert torch.all(arena.parameters[arena.slices["hidden.bias"]] == 3.0)


def test_slices_are_aligned_and_disjoint(comm):
    arena = Arena(Tied().double(), comm)
    assert arena.parameters.dtype == torch.float64
    ends = 0
    for span in arena.slices.values():
        assert span.start * 8 % ALIGNMENT_BYTES == 0
        assert span.start >= ends
        ends = span.stop


def test_zero_grad_keeps_the_gradients_in_place(comm):
    module = Tied()
    arena = Arena(module, comm)
    module(torch.tensor([1])).sum().backward()
    assert arena.gradients.any()
    arena.zero_grad()
    assert not arena.gradients.any()
    assert inside(module.hidden.weight.grad, arena.gradients)


def test_bfloat16(comm):
    module = nn.Linear(4, 3).bfloat16()
    before = module.weight.detach().clone()
    arena = Arena(module, comm)
    assert arena.parameters.dtype == torch.bfloat16
    assert torch.equal(module.weight, before)
    assert inside(module.weight, arena.parameters)


def test_mixed_dtypes_are_refused(comm):
    with pytest.raises(ValueError, match=r"one dtype, the module has \['torch.float32', 'torch.float64'\]"):
        Arena(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), comm)


def test_a_module_without_parameters_is_refused(comm):
    with pytest.raises(ValueError, match="no parameters"):
        Arena(nn.ReLU(), comm)
