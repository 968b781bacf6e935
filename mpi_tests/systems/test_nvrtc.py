"""NVIDIA's run-time compiler accepts every kernel."""

import os

import pytest

from collectives.arrays import cuda_kernels, cuda_programs
from mpi_tests.helpers import nvrtc
from mpi_tests.helpers.gpu_kernels import names

pytestmark = [
    pytest.mark.shares_cores,
    pytest.mark.skipif(nvrtc.library() is None, reason="needs NVRTC: pip install nvidia-cuda-nvrtc-cu12"),
]


@pytest.mark.filterwarnings("default")
@pytest.mark.proof
def test_nvrtc_compiles_every_kernel():
    """Compile each dtype and op for three generations of GPUs; with EVERY_KERNEL set, for every number of sources."""
    nums = range(1, 9) if "EVERY_KERNEL" in os.environ else (5,)
    kernels = sorted(set(names(nums)))
    for shift, arch in enumerate(("sm_70", "sm_80", "sm_90")):
        some = kernels if "EVERY_KERNEL" in os.environ else kernels[shift::3]
        options = [*cuda_kernels.OPTIONS, f"--gpu-architecture={arch}", "-ftz=true"]  # CuPy adds the last option
        code = nvrtc.ptx(cuda_kernels.SOURCE.read_text(), some, options)
        assert code.count(".entry") == len(some)
        assert "ld.global.cs.v4" in code  # loads of 16 bytes
        assert ".local" not in code  # loops are unrolled, and arrays in registers
        assert "fma" not in code
        assert ".ftz" not in code  # subnormal numbers are not flushed to zero


@pytest.mark.filterwarnings("default")
def test_nvrtc_compiles_programs():
    source = cuda_kernels.SOURCE.read_text() + cuda_programs.SOURCE.read_text()
    some = ["run<Sum, float, 2>", "run<Max, Bfloat16, 4>", "run<Sum, unsigned char, 1>", "run<Avg, double, 8>"]
    for arch in ("sm_80", "sm_90", "sm_100"):
        code = nvrtc.ptx(source, some, [*cuda_kernels.OPTIONS, f"--gpu-architecture={arch}", "-ftz=true"])
        assert code.count(".entry") == len(some)
        assert "ld.global.cs.v4" in code
        assert ".local" not in code
        bodies = code.split(".entry")[1:]
        assert {body.count("st.release.sys.global.u64") for body in bodies} == {1}  # for all ranks at once
        assert not any("membar" in body or "fence" in body for body in bodies)
        assert all("atom.acq_rel.sys.global.add.u32" in body and "ld.acquire.sys.global.u64" in body for body in bodies)


def test_nvrtc_reports_what_is_wrong():
    with pytest.raises(ValueError, match='identifier "Summ" is undefined'):
        nvrtc.ptx(cuda_kernels.SOURCE.read_text(), ["reduce<Summ, float, float, 2>"], cuda_kernels.OPTIONS)
