"""Cut a model into stages, and run its micro-batches by three schedules.

mpirun -n 2 python examples/pipeline.py
"""

import torch
from torch import nn

import collectives
from parallelism import Batch, Layer, Mesh, PipelineParallel, make_schedule


def new_model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8)))


def layer(model, number):
    def run(x, batch):
        y = model[number](batch.tokens if number == 0 else x)
        return (y - batch.targets).square().mean() if number == len(model) - 1 else y

    return Layer(f"layer {number}", (str(number),), run, cost=1)


comm = collectives.world()
x, targets = torch.randn(2, 8, 4, 16, generator=torch.Generator().manual_seed(1))  # 8 micro-batches of 4 samples
plain = new_model()
loss = (plain(x) - targets).square().mean()
loss.backward()

for name in ("gpipe", "1f1b", "zb_v"):
    model, schedule = new_model(), make_schedule(name, num_ranks=comm.size, num_micro_batches=8)
    layers = [layer(model, number) for number in range(8)]
    pipeline = PipelineParallel(model, layers, schedule, Mesh(comm, pp=comm.size))
    own_loss = pipeline.step([Batch(*each) for each in zip(x, targets, strict=True)])
    if pipeline.has_loss:
        torch.testing.assert_close(own_loss.float(), loss.detach())
    for parameter, param in model.named_parameters():
        torch.testing.assert_close(param.grad, plain.get_parameter(parameter).grad)
    stages = {stage: list(part) for stage, part in pipeline.parts.items()}
    print(f"rank {comm.rank}, {name}: layers of each stage {stages}; loss and gradients agree")
