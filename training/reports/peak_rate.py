"""Peak rate of a run's devices in matrix products, to which its model FLOP/s utilization (MFU) relates."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch

import collectives

MEASURED_S = 0.1  # of products, after a warm-up of about as long
LONGEST_S = MEASURED_S / 8  # of a product that is followed by larger ones
LARGEST = {"cpu": 1024, "cuda": 4096}  # number of rows of a matrix


class DevicePeak(NamedTuple):
    """Dense peak of a device whose name in torch matches `pattern`, in TFLOP/s by dtype; accumulated in float32.

    Products of float32 matrices are those without TF32; those of float64 use tensor cores where there are any.
    """

    pattern: str
    bfloat16: float | None
    float16: float
    float32: float
    float64: float | None


NVIDIA = "(NVIDIA )?"
# Datasheets and white papers of NVIDIA and AMD; of pairs of values the one without sparsity, else half of that with it.
PEAKS = (
    DevicePeak("Tesla V100-SXM[23]-.*", None, 125, 15.7, 7.8),  # V100 datasheet, 2020
    DevicePeak("Tesla V100-PCIE-.*", None, 112, 14, 7),
    DevicePeak("Tesla T4", None, 65, 8.1, None),  # T4 datasheet
    DevicePeak(f"{NVIDIA}A100[- ].*(GB|PCIe)", 312, 312, 19.5, 19.5),  # A100 datasheet, 2021
    DevicePeak(f"{NVIDIA}A10", 125, 125, 31.2, None),  # A10 datasheet
    DevicePeak("NVIDIA H100 80GB HBM3", 989.4, 989.4, 66.9, 66.9),  # SXM; H100 white paper, table 2
    DevicePeak("NVIDIA H100 PCIe", 756, 756, 51.2, 51.2),
    DevicePeak("NVIDIA H100 NVL", 835.5, 835.5, 60, 60),  # H100 datasheet, 2024
    DevicePeak("NVIDIA (H200|GH200 .*GB)", 989.4, 989.4, 66.9, 66.9),  # H200 and GH200 datasheets
    DevicePeak("NVIDIA H200 NVL", 835.5, 835.5, 60, 60),
    DevicePeak("NVIDIA B200", 2250, 2250, 75, 37),  # HGX B200 datasheet, an eighth
    DevicePeak("NVIDIA L4", 121, 121, 30.3, None),  # L4 datasheet
    DevicePeak("NVIDIA L40", 181, 181, 90.5, None),  # L40 and L40S datasheets
    DevicePeak("NVIDIA L40S", 362, 362, 91.6, None),
    DevicePeak(f"{NVIDIA}GeForce RTX 3090", 71, 71, 35.6, None),  # GA102 white paper
    DevicePeak("NVIDIA GeForce RTX 4090", 165.2, 165.2, 82.6, None),  # Ada white paper
    DevicePeak("NVIDIA GeForce RTX 5090", 209.5, 209.5, 104.8, None),  # RTX Blackwell white paper
    DevicePeak("AMD Instinct MI250X.*", 191.5, 191.5, 47.9, 47.9),  # CDNA 2 white paper; a device is half of a card
    DevicePeak("AMD Instinct MI300X.*", 1307.4, 1307.4, 163.4, 163.4),  # MI300X datasheet
)


class PeakRate(NamedTuple):
    """Peak FLOP/s of all devices of a run together, and where the number comes from."""

    flops_per_s: float
    source: str


def listed_flops_per_s(name: str, dtype: str) -> float | None:
    """Return a device's peak by its name in torch, or None for one that is not in the table, or lacks the dtype.

    >>> listed_flops_per_s("NVIDIA A100-SXM4-80GB", "bfloat16"), listed_flops_per_s("Tesla V100-SXM2-16GB", "bfloat16")
    (312000000000000.0, None)
    """
    peak = next((peak for peak in PEAKS if re.fullmatch(peak.pattern, name)), None)
    tflops = getattr(peak, dtype) if peak else None
    return tflops and tflops * 1e12


def peak_rate(comm: collectives.Communicator, device: str, dtype: str, tflops: float | None = None) -> PeakRate:
    """Return the peak of all ranks' devices: `tflops` for each, or else by their names, or else measured.  Collective.

    A device that several ranks share counts once.  All ranks measure at once, as cores of a host share its power.
    """
    name = torch.cuda.get_device_name(device) if device != "cpu" else "the CPU"
    listed = tflops * 1e12 if tflops else listed_flops_per_s(name, dtype)
    own = comm.topology.node_of[comm.rank], device
    num_sharing = 1 if device == "cpu" else comm.all_gather_object(own).count(own)
    comm.barrier()
    if listed:
        rate, source = listed / num_sharing, "peak_tflops" if tflops else f"data sheet of {name}"
    else:
        rate = measured_flops_per_s(device, dtype, len(comm.topology.nodes[own[0]]))
        source = f"matrix products measured on {name}"
        source += "" if device == "cpu" else ", which the table of peaks lacks; peak_tflops sets its own"
    rates, sources = zip(*comm.all_gather_object((rate, source)), strict=True)
    return PeakRate(sum(rates), "; ".join(Counter(sources)))


@cache
def measured_flops_per_s(device: str, dtype: str, num_ranks: int) -> float:
    """Measure this rank's FLOP/s in products of matrices, beside the others of the `num_ranks` on its host.

    It is measured once in a process.  The matrices are as large as a time of some 0.2 s allows.
    """
    size, product = 64, square_product(64, device, dtype)
    while size < LARGEST[torch.device(device).type] and seconds(product, device) < LONGEST_S:
        size *= 2
        product = square_product(size, device, dtype)
    count, begin_s = 0, time.perf_counter()
    while (end_s := time.perf_counter()) < begin_s + MEASURED_S or not count:
        seconds(product, device)
        count += 1
    del product
    if device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return count * 2 * size**3 / (end_s - begin_s)


def square_product(size: int, device: str, dtype: str) -> Callable[[], object]:
    """Return a product of matrices, to call often.  It draws from no generator of the program."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.rand(size, size, generator=generator, device=device, dtype=getattr(torch, dtype))
    y = torch.empty_like(x)
    product = partial(torch.mm, x, x, out=y)
    product()  # the first one sets up
    return product


def seconds(product: Callable[[], object], device: str) -> float:
    """Return the seconds of a product."""
    begin_s = time.perf_counter()
    product()
    if device != "cpu":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin_s
