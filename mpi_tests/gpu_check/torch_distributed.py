"""torch.distributed over the collectives' backend, on a device's tensors.

python -m mpi_tests.gpu_check.torch_distributed cuda
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import collectives.torch_backend  # noqa: F401  registers the backend
from mpi_tests.gpu_check.child import BadEndError
from mpi_tests.gpu_check.rows import SKIPPED, Row, Setting, verdict
from mpi_tests.gpu_check.started import lines_on_ranks
from mpi_tests.gpu_check.training import need

RANKS, COUNT, STEPS, TOLERANCE = 2, 1 << 16, 3, 1e-5
NAME = f"torch.distributed, {RANKS} ranks"


def check(setting: Setting) -> Iterator[Row]:
    need(setting)
    left = list(CASES)
    try:
        for line in lines_on_ranks(setting, RANKS, "-m", "mpi_tests.gpu_check.torch_distributed", setting.device):
            if line.startswith('{"case"'):
                result = json.loads(line)
                left.remove(result["case"])
                text = f"within {result['worst']:.1e}"
                good = result["worst"] <= TOLERANCE
                yield Row(f"{NAME}, {result['case']}", f"within {TOLERANCE:g}", text, verdict(good))
    except BadEndError as error:
        yield Row(f"{NAME}, {left.pop(0)}" if left else NAME, "an end", str(error), error.verdict)
    for case in left:
        yield Row(f"{NAME}, {case}", f"within {TOLERANCE:g}", "not reached", SKIPPED)


def of(rank: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a rank's input."""
    return (torch.arange(COUNT, device=device) % 13 + rank).to(dtype)


def worst(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).abs().max())


def all_reduce(device: str) -> float:
    """Sum floats of 32 and of 16 bits."""
    errors = []
    for dtype in (torch.float32, torch.bfloat16):
        x = of(dist.get_rank(), device, dtype)
        dist.all_reduce(x)
        errors.append(worst(x, sum(of(rank, device).double() for rank in range(RANKS)).to(dtype)))  # type: ignore[union-attr]
    return max(errors)


def gather_and_scatter(device: str) -> float:
    """Scatter sums, gather them, and exchange chunks."""
    x, shard = of(dist.get_rank(), device), torch.empty(COUNT // RANKS, device=device)
    total, chunks = torch.empty(COUNT, device=device), torch.empty(COUNT, device=device)
    dist.reduce_scatter_tensor(shard, x)
    dist.all_gather_into_tensor(total, shard)
    dist.all_to_all_single(chunks, x)
    inputs = [of(rank, device) for rank in range(RANKS)]
    exchanged = torch.cat([each.chunk(RANKS)[dist.get_rank()] for each in inputs])
    return max(worst(total, sum(inputs)), worst(chunks, exchanged))  # type: ignore[arg-type]


def asynchronous(device: str) -> float:
    """Wait for a sum on a stream other than the one on which its input is made, after long work."""
    streams = [torch.cuda.Stream() for _ in range(2)] if device != "cpu" else []
    errors = []
    for step in range(STEPS):
        with torch.cuda.stream(streams[0] if streams else None):
            busy = torch.zeros(1 << (26 if streams else 1), device=device)
            for _ in range(20):
                busy += 1
            x = of(dist.get_rank() + step, device)
            work = dist.all_reduce(x, async_op=True)
        with torch.cuda.stream(streams[1] if streams else None):
            work.wait()
            errors.append(worst(x, sum(of(rank + step, device) for rank in range(RANKS))))  # type: ignore[arg-type]
    return max(errors)


def model(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)).to(device)


def trained(module: nn.Module, x: Tensor) -> list[float]:
    """Return the mean losses of a few steps of training."""
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.1), []
    for _ in range(STEPS):
        loss = module(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def beside_one_process(module: nn.Module, device: str) -> float:
    """Train on a rank's part of a batch, and compare the mean losses with those of the whole batch."""
    torch.manual_seed(1)
    whole = torch.randn(8 * RANKS, 64, device=device)
    losses = torch.tensor(trained(module, whole.chunk(RANKS)[dist.get_rank()]), device=device)
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    return worst(losses, torch.tensor(trained(model(device), whole), device=device))


def ddp(device: str) -> float:
    return beside_one_process(DistributedDataParallel(model(device)), device)


def fsdp(device: str) -> float:
    module = model(device)
    fully_shard(module, mesh=init_device_mesh(device, (RANKS,)))
    return beside_one_process(module, device)


CASES = {
    "all_reduce": all_reduce,
    "reduce_scatter, all_gather, all_to_all": gather_and_scatter,
    "asynchronous, between streams": asynchronous,
    "DistributedDataParallel": ddp,
    "FSDP2": fsdp,
}


def main() -> None:
    device = sys.argv[1]
    dist.init_process_group("collectives")
    if device != "cpu":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    for name, case in CASES.items():
        error = torch.tensor([case(device)])
        dist.all_reduce(error, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            print(json.dumps({"case": name, "worst": float(error)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
