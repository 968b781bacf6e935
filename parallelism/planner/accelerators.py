"""Accelerators: peaks by their makers, and the fractions of them that kernels reach, chosen on published runs.

benchmarks/published.py compares the predictions with published runs, half of which the fractions have not seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from parallelism.planner.roofline import Roofline

# Of a device's memory bandwidth in element-wise kernels, and the dimension with which a product takes twice as long.
MOVES, SMALL = 0.63, 180


class KernelFractions(NamedTuple):
    """The fractions of the peak that large products reach, and fused attention by its version, the newest last."""

    products: float
    attention: Mapping[str, float]


AMPERE = KernelFractions(0.80, {"flash 1": 0.32, "flash 2": 0.48})
HOPPER = KernelFractions(0.58, {"flash 1": 0.19, "flash 2": 0.45, "flash 3": 0.60})


class Accelerator(NamedTuple):
    """Peak speed of matrix products by dtype in FLOP/s, bytes of memory, and its bandwidth in bytes per second."""

    flops_per_s: Mapping[str, float]
    memory_bytes: float
    bytes_per_s: float
    fractions: KernelFractions

    def roofline(self, dtype: str, attention: str = "") -> Roofline | None:
        """Return the device's roofline in a dtype of 16 bits, for which there are fractions; None for others."""
        if dtype not in ("bfloat16", "float16"):
            return None
        by_version = self.fractions.attention
        fused = by_version[attention] if attention in by_version else [*by_version.values()][-1]
        return Roofline(self.flops_per_s[dtype], self.bytes_per_s, self.fractions.products, fused, MOVES, SMALL)


def speeds(half: float, single: float, double: float) -> dict[str, float]:
    """Return peaks by dtype, of values in TFLOP/s for 16, 32 and 64 bits."""
    return {"bfloat16": half * 1e12, "float16": half * 1e12, "float32": single * 1e12, "float64": double * 1e12}


# NVIDIA's datasheets of SXM modules: half of the value for sparse matrices; float32 without the tensor cores' TF32.
A100 = speeds(312, 19.5, 19.5)
H100 = speeds(989, 67, 67)
ACCELERATORS = {
    "a100-40": Accelerator(A100, 42.4e9, 1.555e12, AMPERE),  # 39.50 GiB, as PyTorch reports it
    "a100-80": Accelerator(A100, 85.1e9, 2.039e12, AMPERE),  # 79.25 GiB
    "h100": Accelerator(H100, 85.0e9, 3.35e12, HOPPER),  # 79.18 GiB
    "h200": Accelerator(H100, 141e9, 4.8e12, HOPPER),
}
BY_FABRIC = {"ndr": "h100", "pods": "h100", "slingshot": "a100-40"}  # the devices of a fabric's nodes
