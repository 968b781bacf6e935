"""Data parallelism by torch: DDP, and FSDP2, which shares parameters, gradients and the optimizer's states."""

from sharing_ways import Way
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from models.gpt import GPT


class Theirs(Way):
    """A model wrapped by torch, with its own optimizer."""

    def __init__(self, model: nn.Module, make_optimizer):
        self.model, self.optimizer = model, make_optimizer(model.parameters())

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def ddp(gpt: GPT, group: distributed.ProcessGroup, make_optimizer) -> Theirs:
    """With gradients that are views of its buckets, which takes least memory."""
    return Theirs(DistributedDataParallel(gpt, process_group=group, gradient_as_bucket_view=True), make_optimizer)


def fsdp2(gpt: GPT, group: distributed.ProcessGroup, make_optimizer) -> Theirs:
    """Layers, and the rest; gathered layers are let go after their forward pass, as stage 3 does."""
    mesh = distributed.DeviceMesh.from_group(group, "cpu")
    for block in gpt.transformer.h:
        fully_shard(block, mesh=mesh)
    return Theirs(fully_shard(gpt, mesh=mesh), make_optimizer)
