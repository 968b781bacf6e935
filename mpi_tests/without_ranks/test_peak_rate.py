"""Peaks of devices beside their units, clocks and widths, measured rates, and the MFU of a step by hand."""

from types import SimpleNamespace

import pytest
import torch

from parallelism.buffers.transfer import Moment, Readback
from training.reports import peak_rate
from training.reports.peak_rate import PEAKS, listed_flops_per_s, measured_flops_per_s
from training.reports.pending import Meter, PendingStep

# Name in torch, multiprocessors or compute units, FLOP of each in a clock in float16 and float32,
# and the boost clocks in MHz at which products of these run.
UNITS = [
    ("Tesla V100-SXM2-32GB", 80, (1024, 128), (1530, 1530)),
    ("Tesla T4", 40, (1024, 128), (1590, 1590)),
    ("NVIDIA A100-SXM4-40GB", 108, (2048, 128), (1410, 1410)),
    ("A100-SXM4-80GB", 108, (2048, 128), (1410, 1410)),
    ("NVIDIA A100 80GB PCIe", 108, (2048, 128), (1410, 1410)),
    ("NVIDIA A10", 72, (1024, 256), (1695, 1695)),
    ("NVIDIA H100 80GB HBM3", 132, (4096, 256), (1830, 1980)),
    ("NVIDIA H100 PCIe", 114, (4096, 256), (1620, 1755)),
    ("NVIDIA H200", 132, (4096, 256), (1830, 1980)),
    ("NVIDIA GH200 480GB", 132, (4096, 256), (1830, 1980)),
    ("NVIDIA L4", 58, (1024, 256), (2040, 2040)),
    ("NVIDIA L40", 142, (512, 256), (2490, 2490)),
    ("NVIDIA L40S", 142, (1024, 256), (2490, 2490)),
    ("NVIDIA GeForce RTX 3090", 82, (512, 256), (1695, 1695)),
    ("NVIDIA GeForce RTX 4090", 128, (512, 256), (2520, 2520)),
    ("NVIDIA GeForce RTX 5090", 170, (512, 256), (2407, 2407)),
    ("AMD Instinct MI250X", 110, (1024, 256), (1700, 1700)),
    ("AMD Instinct MI300X", 304, (2048, 256), (2100, 2100)),
]


@pytest.mark.parametrize(("name", "units", "widths", "clocks"), UNITS, ids=[row[0] for row in UNITS])
def test_peaks_are_units_times_widths_times_clocks(name, units, widths, clocks):
    for dtype, width, mhz in zip(("float16", "float32"), widths, clocks, strict=True):
        assert listed_flops_per_s(name, dtype) == pytest.approx(units * width * mhz * 1e6, rel=0.015)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("NVIDIA A10G", "float16"),
        ("NVIDIA GeForce RTX 3090 Ti", "float16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "float16"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "float16"),
        ("Tesla V100-SXM2-16GB", "bfloat16"),
        ("a new one", "float32"),
    ],
)
def test_other_devices_and_dtypes_have_no_listed_peak(name, dtype):
    assert listed_flops_per_s(name, dtype) is None


def test_a_wider_dtype_is_not_faster():
    for peak in PEAKS:
        assert peak.bfloat16 in (None, peak.float16)
        assert peak.float16 > peak.float32 >= (peak.float64 or 0)


@pytest.mark.parametrize("flops_per_s", [1e9, 1e13])
def test_a_measured_rate_is_the_work_by_its_time(monkeypatch, flops_per_s):
    """Time passes as on a device of this rate, on which larger products are not more efficient."""
    now_s, sizes = [0.0], []

    def square_product(size, device, dtype):
        sizes.append(size)

        def product():
            now_s[0] += 2 * size**3 / flops_per_s

        return product

    monkeypatch.setattr(peak_rate, "square_product", square_product)
    monkeypatch.setattr(peak_rate, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    rate = measured_flops_per_s.__wrapped__("cpu", "float32", 1)
    assert rate == pytest.approx(flops_per_s)
    assert sizes == ([64, 128, 256] if flops_per_s == 1e9 else [64, 128, 256, 512, 1024])
    assert 0.1 <= now_s[0] < 0.2


def test_a_measurement_draws_no_random_numbers():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    assert measured_flops_per_s("cpu", "float32", 1) > 0
    assert torch.rand(3).tolist() == expected.tolist()


def test_mfu_is_the_model_s_operations_by_time_and_peak():
    """1,000 tokens of 6 MFLOP in half a second are 12 GFLOP/s, 1.2% of a peak of 1 TFLOP/s."""
    guard = SimpleNamespace(tell=lambda *arguments: None)
    meter = Meter(guard, 10, tokens_per_step=1000, flops_per_token=6_000_000, peak_flops_per_s=1e12)
    begin, readback = Moment("cpu"), Readback(torch.tensor([2.0, 2.0, 1.0]))
    begin.host_s, readback.ended.host_s = 7.0, 7.5
    so_far = {"iter": 1, "lr": 0.1, "bubble": None, "memory_mib": 1.0}
    metrics = PendingStep(meter, [], readback, begin, 0.1, so_far).metrics()
    assert metrics.tokens_per_s == pytest.approx(2000)
    assert metrics.flops_per_s == pytest.approx(12e9)
    assert metrics.mfu == pytest.approx(0.012)
    assert (metrics.compute_ms, metrics.comm_ms) == pytest.approx((400, 100))
