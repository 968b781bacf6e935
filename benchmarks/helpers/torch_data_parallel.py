"""Data parallelism by torch: DDP, and FSDP2, which shards parameters, gradients and optimizer states."""

from helpers.data_parallel_variants import Way, adamw
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from models.decoder import Decoder


def ddp(gpt: Decoder) -> Way:
    """Make a DDP whose gradients are views of its buckets, which needs least memory."""
    model = DistributedDataParallel(gpt, process_group=distributed.new_group(), gradient_as_bucket_view=True)
    optimizer = adamw(gpt.parameters())
    return Way(model, optimizer, optimizer.step)


def fsdp2(gpt: Decoder) -> Way:
    """Make an FSDP2 by layers, each released after its forward pass, as in ZeRO stage 3."""
    mesh = distributed.DeviceMesh.from_group(distributed.new_group(), "cpu")
    for block in gpt.transformer.h:
        fully_shard(block, mesh=mesh)
    model = fully_shard(gpt, mesh=mesh)
    optimizer = adamw(gpt.parameters())
    return Way(model, optimizer, optimizer.step)
