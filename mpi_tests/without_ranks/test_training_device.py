"""The GPU of each rank, with a stand-in for torch's and CuPy's devices."""

from types import SimpleNamespace

import pytest
import torch

from collectives.arrays import views
from training.parallel.device import own_device

TWO_NODES = SimpleNamespace(nodes=((0, 2, 4), (1, 3)), node_of=(0, 1, 0, 1, 0))


@pytest.fixture
def current_devices(monkeypatch):
    """Record the devices that torch and CuPy make current on a node with two GPUs."""
    calls = {"torch": [], "cupy": []}

    def cupy_device(number):
        return SimpleNamespace(use=lambda: calls["cupy"].append(number))

    memory = SimpleNamespace(xp=SimpleNamespace(cuda=SimpleNamespace(Device=cupy_device)))
    monkeypatch.setattr(views, "device", lambda name: memory)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", calls["torch"].append)
    return calls


@pytest.mark.parametrize(
    ("rank", "name", "number"),
    [(0, "cuda", 0), (2, "cuda", 1), (4, "cuda", 0), (1, "cuda", 0), (3, "cuda", 1), (2, "cuda:0", 0)],
)
def test_ranks_of_a_node_take_its_gpus_in_turn(current_devices, rank, name, number):
    assert own_device(name, SimpleNamespace(rank=rank, topology=TWO_NODES)) == f"cuda:{number}"
    assert current_devices == {"torch": [number], "cupy": [number]}


def test_the_cpu_is_everyones(current_devices):
    assert own_device("cpu", SimpleNamespace(rank=3, topology=TWO_NODES)) == "cpu"
    assert current_devices == {"torch": [], "cupy": []}


def test_a_torch_that_sees_no_gpu(current_devices, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="this torch sees no CUDA device; install one built for CUDA, or use 'cpu'"):
        own_device("cuda", SimpleNamespace(rank=0, topology=TWO_NODES))
