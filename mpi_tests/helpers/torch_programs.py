"""Programs of plain torch.distributed, each of which returns numbers that must not depend on the backend."""

import copy
import tempfile
from collections.abc import Callable
from inspect import getsource

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

STEPS, BATCH, WIDTH = 3, 4, 16
INIT = """
import torch, torch.distributed as dist
import collectives.torch_backend
dist.init_process_group("collectives")
x = torch.ones(2)
dist.all_reduce(x)
print(dist.get_rank(), dist.get_world_size(), x.tolist())
"""


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))


def batch(step: int) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def train(module: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        x = batch(step)
        loss = F.mse_loss(module(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def ddp() -> list[float]:
    return train(nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=1e-3))


def power_sgd() -> list[float]:
    """Train with PowerSGD, whose hook starts reductions in callbacks of futures and waits for them."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    ddp = nn.parallel.DistributedDataParallel(model())
    ddp.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2), powerSGD_hook)
    return train(ddp)


def uneven_inputs() -> list[float]:
    """Train with more batches on later ranks; gradients are divided by the number of ranks that still have one."""
    rank = dist.get_rank()
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    gradients = []
    with ddp.join(divide_by_initial_world_size=False):
        for _ in range(3 + 2 * rank):  # the first calls are made in the group's thread, the later ones in DDP's
            ddp.zero_grad()
            ddp(torch.full((1, 1), rank + 1.0)).sum().backward()
            gradients.append(ddp.module.weight.grad.item())
    return gradients


def compressed_gradients() -> list[float]:
    """Reduce in 16 bits by DDP's built-in hook; these sums are exact."""
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    ddp(torch.full((1, 3), dist.get_rank() + 1.00001)).sum().backward()
    return ddp.module.weight.grad.flatten().tolist()


def compiled() -> list[float]:
    """Train a compiled model with buffers, which are broadcast during the forward pass."""
    module = nn.Sequential(model(), nn.BatchNorm1d(WIDTH))
    losses = train(torch.compile(nn.parallel.DistributedDataParallel(module), backend="eager"))
    torch.compiler.reset()
    return losses


def fsdp2() -> list[float]:
    from torch.distributed.fsdp import fully_shard

    module = model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(module[0], mesh=mesh)
    fully_shard(module, mesh=mesh)
    return train(module)


def tensor_parallel() -> list[float]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    loss = F.mse_loss(module(x), x)
    loss.backward()
    gradient = module[0].weight.grad.full_tensor()
    return [loss.item(), *gradient.flatten()[:5].tolist()]


def pipelined(schedule: str) -> list[float]:
    from torch.distributed import pipelining  # here, as it imports the compiler, which takes 2 s

    rank, size = dist.get_rank(), dist.get_world_size()
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(size)]
    stage = pipelining.PipelineStage(layers[rank], rank, size, torch.device("cpu"))
    run = getattr(pipelining, schedule)(stage, n_microbatches=4, loss_fn=F.mse_loss)
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    for layer in layers:
        nn.init.eye_(layer.weight)
        nn.init.constant_(layer.bias, 0.1)
    losses: list[torch.Tensor] = []
    run.step(*[x] * (rank == 0), target=x if rank == size - 1 else None, losses=losses if rank == size - 1 else None)
    return [*(loss.item() for loss in losses), *layers[rank].weight.grad.flatten()[:3].tolist()]


def gpipe() -> list[float]:
    return pipelined("ScheduleGPipe")


def one_f_one_b() -> list[float]:
    return pipelined("Schedule1F1B")


def checkpoint() -> list[float]:
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module = fully_shard(model(), mesh=mesh)
    train(module)
    dcp.save(get_model_state_dict(module), checkpoint_id=folder[0])
    other = fully_shard(copy.deepcopy(model()), mesh=mesh)
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=folder[0])
    return [x for tensor in state.values() for x in tensor.full_tensor().flatten()[:4].tolist()]


PROGRAMS = (
    ddp,
    power_sgd,
    uneven_inputs,
    compressed_gradients,
    compiled,
    fsdp2,
    tensor_parallel,
    gpipe,
    one_f_one_b,
    checkpoint,
)


def lacking(program: Callable) -> str:
    """Return why this version of torch cannot run a program on the CPU with any backend, or ""."""
    from torch.distributed import pipelining

    first_messages = getattr(pipelining.PipelineStage, "_get_init_p2p_neighbors_ops", None)
    if program in (fsdp2, checkpoint) and not hasattr(torch.cpu.Stream, "record_event"):
        return "no FSDP2 on the CPU"
    if program is one_f_one_b and not hasattr(pipelining.schedules, "_wait_batch_p2p"):
        return "1F1B waits for one message of several, and hangs over gloo"
    if program in (gpipe, one_f_one_b) and first_messages and "dtype" not in getsource(first_messages):
        return "stages send 8 bytes to who receives 4"
    return ""
