"""Releasable buffers: they are zero afterwards, keep their address, and the process's memory decreases."""

from pathlib import Path

import pytest
import torch

from parallelism.buffers.arena import ReleasableBuffer


def resident_mib() -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_what_is_set_to_zero_is_at_its_place(dtype):
    memory = ReleasableBuffer(1000, dtype)
    address = memory.tensor.data_ptr()
    for _ in range(2):
        assert memory.tensor.dtype == dtype
        assert torch.equal(memory.tensor, torch.zeros(1000, dtype=dtype))
        memory.tensor.fill_(3)
        memory.zero()
    assert memory.tensor.data_ptr() == address


def test_nothing_is_held_before_and_after():
    before = resident_mib()
    memory = ReleasableBuffer(64 << 18, torch.float32)
    assert resident_mib() - before < 8
    memory.tensor.fill_(1)
    assert resident_mib() - before > 56
    memory.zero()
    assert resident_mib() - before < 8


def test_without_such_memory(monkeypatch):
    monkeypatch.delattr("mmap.MADV_DONTNEED")
    memory = ReleasableBuffer(10, torch.float32)
    memory.tensor.fill_(1)
    memory.zero()
    assert torch.equal(memory.tensor, torch.zeros(10))


def test_no_elements():
    memory = ReleasableBuffer(0, torch.float32)
    memory.zero()
    assert memory.tensor.shape == (0,)
