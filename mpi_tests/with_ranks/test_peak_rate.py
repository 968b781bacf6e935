"""The peak of all devices of a run: listed, measured, shared by ranks, or set."""

import pytest
import torch

from training.reports import peak_rate

A100, UNKNOWN = "NVIDIA A100-SXM4-80GB", "NVIDIA A10G"


@pytest.mark.sizes(1, 2, 3)
def test_a_peak_that_is_set_counts_for_each_rank_on_cpus(comm):
    assert peak_rate.peak_rate(comm, "cpu", "float32", tflops=2) == (comm.size * 2e12, "peak_tflops")


@pytest.mark.sizes(1, 3)
def test_ranks_of_a_cpu_add_up_and_measure_once(comm, monkeypatch):
    """One rank has measured before, others have not: none waits for another in vain."""
    peak_rate.measured_flops_per_s.cache_clear()
    if comm.rank == 0:
        peak_rate.measured_flops_per_s("cpu", "float64", comm.size)
    first = peak_rate.peak_rate(comm, "cpu", "float64")
    rates = comm.all_gather_object(peak_rate.measured_flops_per_s("cpu", "float64", comm.size))
    assert first == (pytest.approx(sum(rates)), "matrix products measured on the CPU")
    assert peak_rate.peak_rate(comm, "cpu", "float64") == first


@pytest.mark.sizes(2, 3)
def test_a_listed_gpu_that_ranks_share_counts_once(comm, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: A100)
    source = f"data sheet of {A100}"
    assert peak_rate.peak_rate(comm, "cuda:0", "bfloat16") == (pytest.approx(312e12), source)
    assert peak_rate.peak_rate(comm, f"cuda:{comm.rank}", "bfloat16") == (pytest.approx(comm.size * 312e12), source)
    assert peak_rate.peak_rate(comm, "cuda:0", "float16", tflops=100) == (pytest.approx(100e12), "peak_tflops")


@pytest.mark.sizes(2)
def test_an_unknown_gpu_is_measured_and_its_rank_s_share_added(comm, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: (A100, UNKNOWN)[comm.rank])
    monkeypatch.setattr(peak_rate, "measured_flops_per_s", lambda device, dtype, num_ranks: 1e12 * num_ranks)
    rate, source = peak_rate.peak_rate(comm, f"cuda:{comm.rank}", "float32")
    assert rate == pytest.approx(19.5e12 + 2e12)
    measured = f"matrix products measured on {UNKNOWN}, which the table of peaks lacks; peak_tflops sets its own"
    assert source == f"data sheet of {A100}; {measured}"
