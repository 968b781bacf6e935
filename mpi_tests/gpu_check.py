"""What only a machine with a GPU can show: collectives on CuPy memory, the arena there, and train.py --device cuda.

    python -m mpi_tests.gpu_check

Prints what it ran on and each check's outcome; "skipped" and exit code 0 where there is no GPU.
"""

import json
import platform
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path

import numpy as np

from mpi_tests.launch import launch

TRAIN = ["--max_iters", "20", "--n_layer", "2", "--n_embd", "64", "--block_size", "32", "--warmup_iters", "5"]


def main() -> int:
    try:
        import cupy
    except ImportError:
        print("skipped: CuPy is not installed")
        return 0
    if not cupy.cuda.is_available():
        print("skipped: no CUDA device")
        return 0
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    packages = ", ".join(f"{package} {version(package)}" for package in ("mpi4py", "numpy", "torch"))
    print(f"{date.today()}  {name}, {platform.platform()}, Python {platform.python_version()}")
    print(f"cupy {cupy.__version__}, {packages}")
    failed = 0
    for check in (findings_of_the_doctor, arrays_of_one_process, collectives_of_ranks, training):
        try:
            print(f"passed  {check.__name__}: {check()}", flush=True)
        except Exception as error:
            failed += 1
            print(f"failed  {check.__name__}: {error}", flush=True)
    return failed


def findings_of_the_doctor() -> str:
    """The device works, and another process reads its memory; what MPI does with it is as it may be."""
    from collectives.doctor import cuda
    from collectives.doctor.finding import Setting

    findings = list(cuda.cuda(Setting(limit_s=100)))
    assert len(findings) >= 3, findings
    assert all(finding.verdict == "ok" for finding in findings[:-1]), findings
    return findings[-1].text


def arrays_of_one_process() -> str:
    """Views and folds of every dtype, and parameters of torch in CuPy memory."""
    import cupy
    import torch

    from collectives.arrays import DTYPES, device, flat, to_torch

    cuda = device("cuda")
    for dtype in sorted(DTYPES, key=str):
        low, high = cuda.empty(1000, dtype), cuda.empty(1000, dtype)
        low.fill(1)
        high.fill(1)
        cuda.begin()
        cuda.fold("max", low, high, low) if dtype.kind != "c" else cuda.fold("prod", low, high, low)
        cuda.synchronize()
        assert bool((low == high).all()), dtype
    tensor = torch.ones(8, device="cuda", dtype=torch.bfloat16)
    flat(tensor)[1].fill(3)
    cupy.cuda.get_current_stream().synchronize()
    assert bool((tensor == 3).all())
    assert to_torch(cuda.empty(4, np.dtype("float32"))).is_cuda
    return f"{len(DTYPES)} dtypes"


def collectives_of_ranks() -> str:
    ended = launch(2, sys.executable, "-m", "mpi_tests.gpu_check", "--rank", timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout.strip()


def run_rank() -> None:
    """All collectives on CuPy arrays, right after work on another stream, against NumPy."""
    import cupy

    import collectives

    comm = collectives.world()
    ranks = range(comm.size)
    cases = 0
    for count in (0, 1, 3, 1000, 1 << 20, 5_000_000):
        inputs = [np.arange(count, dtype=np.float32) % 97 + rank for rank in ranks]
        total = sum(inputs)
        with cupy.cuda.Stream(non_blocking=True):
            for algorithm in [row.name for row in collectives.algorithms.rows("all_reduce") if not row.reach]:
                for asked in ({}, {"wire_dtype": "bfloat16"}):  # which rounds none of these numbers
                    x = cupy.asarray(inputs[comm.rank])
                    x *= 1
                    comm.all_reduce(x, algorithm=algorithm, **asked)
                    assert np.array_equal(cupy.asnumpy(x), total), (algorithm, count, asked)
                    cases += 1
            half = cupy.asarray(inputs[comm.rank]).astype(np.float16)
            (fused,) = comm.all_reduce(comm.fuse([half]), reproducible=True)
            assert np.array_equal(cupy.asnumpy(fused), total.astype(np.float16))
            x = cupy.asarray(inputs[comm.rank])
            assert np.array_equal(cupy.asnumpy(comm.all_gather(x)), np.concatenate(inputs))
            assert np.array_equal(cupy.asnumpy(comm.reduce_scatter(x)), np.array_split(total, comm.size)[comm.rank])
            cases += 3
    comm.barrier()
    if comm.rank == 0:
        print(f"{cases} cases on {comm.size} ranks")


def training() -> str:
    """The losses on the GPU, on 1 and 2 ranks that share it, are those of the CPU."""
    losses = {}
    with tempfile.TemporaryDirectory() as folder:
        for device, ranks in (("cpu", 1), ("cuda", 1), ("cuda", 2)):
            out_dir = Path(folder) / f"{device}-{ranks}"
            flags = [*TRAIN, "--device", device, "--out_dir", out_dir, "--micro_batch_size", 8 // ranks]
            ended = launch(ranks, sys.executable, "train.py", *flags, timeout=300)
            assert ended.returncode == 0, ended.stdout + ended.stderr
            records = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
            losses[device, ranks] = np.array([r["loss"] for r in records if "loss" in r])
    worst = max(float(np.max(np.abs(loss / losses["cpu", 1] - 1))) for loss in losses.values())
    assert worst < 1e-3, worst
    return f"losses agree within {worst:.1e}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--rank"]:
        run_rank()
    else:
        sys.exit(main())
