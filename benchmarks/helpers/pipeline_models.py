"""Models for timing pipelines: a GPT, and stages that sleep; each as a plain model, and as our and torch's pipeline."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from helpers.sleeping_stages import Layer, Naps, Sleeping
from helpers.torch_pipelines import GPTStage, TorchPipeline
from torch import Tensor, nn
from torch.nn import functional as F

import collectives
from models.config import ModelConfig
from models.decoder import CrossEntropy, Decoder
from parallelism.mesh import Mesh
from parallelism.pipeline.balance import balance
from parallelism.pipeline.driver import Pipeline
from parallelism.pipeline.pipeline_parallel import PipelineParallel
from parallelism.pipeline.schedule.actions import Schedule
from parallelism.pipeline.stage import Batch, Stage, cut
from training.parallel.decoder import layers_of

Result = tuple[float, dict[str, Tensor]]  # loss and gradients


class Ours(NamedTuple):
    """Our pipeline of a model, and stages like its own, whose actions can be timed outside of its steps."""

    stages: Mapping[int, Stage | Sleeping]
    step: Callable[[], float]
    gradients: Callable[[], dict[str, Tensor]]
    zero_grad: Callable[[], None]


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}


class Model:
    """A model and a batch.  `computes`: whether its ranks need cores; `activation`: the tensor that stages send."""

    computes: bool

    def __init__(self, comm: collectives.Communicator, num_micro_batches: int, batch: Iterable[Tensor], sent: Tensor):
        self.comm, self.num_micro_batches, self.batch, self.activation = comm, num_micro_batches, tuple(batch), sent
        parts = zip(*(x.chunk(num_micro_batches) for x in self.batch), strict=True)
        self.batches = [Batch(tokens, targets) for tokens, targets in parts]

    def plain(self, num_stages: int) -> Result:
        raise NotImplementedError

    def ours(self, schedule: Schedule) -> Ours:
        raise NotImplementedError

    def torch(self, schedule: Schedule) -> TorchPipeline:
        raise NotImplementedError


class Gpt(Model):
    computes = True

    def __init__(self, comm: collectives.Communicator, num_micro_batches: int, samples: int, config: ModelConfig):
        draws = torch.Generator().manual_seed(0)
        shape = samples * num_micro_batches, config.block_size
        batch = (torch.randint(config.vocab_size, shape, generator=draws) for _ in range(2))
        sent = torch.randn(samples, config.block_size, config.n_embd, generator=draws)
        super().__init__(comm, num_micro_batches, batch, sent)
        self.config = config

    def plain(self, num_stages: int) -> Result:
        model = Decoder(self.config)
        _, loss = model(*self.batch)
        loss.backward()
        return loss.item(), gradients_of(model)

    def ours(self, schedule: Schedule) -> Ours:
        model = Decoder(self.config)
        pp = PipelineParallel(model, layers_of(model), schedule, Mesh(self.comm, pp=self.comm.size))
        step, gradients = partial(pp.step, self.batches), partial(gradients_of, model)
        timed, splits = Decoder(self.config), any(stage.splits for stage in pp.stages.values())
        stages = cut(timed, layers_of(timed), pp.parts, splits=splits)
        return Ours(stages, step, gradients, pp.zero_grad)

    def torch(self, schedule: Schedule) -> TorchPipeline:
        num_stages = schedule.num_stages
        modules = {stage: self.stage(stage, num_stages) for stage in schedule.stages(self.comm.rank)}
        tied = schedule.home[0], schedule.home[num_stages - 1]
        return TorchPipeline(
            schedule.name, modules, num_stages, self.batch, self.num_micro_batches, CrossEntropy(), tied
        )

    def stage(self, stage: int, num_stages: int) -> GPTStage:
        model = Decoder(self.config)
        layers = layers_of(model)
        part = balance([layer.cost for layer in layers], num_stages)[stage]  # as in our pipeline
        cut(model, layers, {stage: part})
        return GPTStage(model, part)


class Sleep(Model):
    computes = False

    def __init__(
        self, comm: collectives.Communicator, num_micro_batches: int, shape: tuple[int, ...], forward_s: float
    ):
        draws = torch.Generator().manual_seed(0)
        whole = num_micro_batches * shape[0], *shape[1:]
        batch = (torch.randn(whole, generator=draws) for _ in range(2))
        super().__init__(comm, num_micro_batches, batch, torch.randn(shape, generator=draws))
        self.naps = Naps(forward_s, forward_s, forward_s)

    def layers(self, stages: Iterable[int], naps: Naps) -> dict[str, Layer]:
        return {str(stage): Layer(naps, 1 + stage / 10) for stage in stages}

    def plain(self, num_stages: int) -> Result:
        model = nn.Sequential(OrderedDict(self.layers(range(num_stages), Naps(0, 0, 0))))
        tokens, targets = self.batch
        loss = F.mse_loss(model(tokens), targets)
        loss.backward()
        return loss.item(), gradients_of(model)

    def ours(self, schedule: Schedule) -> Ours:
        layers, last = self.layers(schedule.stages(self.comm.rank), self.naps), str(schedule.num_stages - 1)
        stages = {int(name): Sleeping(layer, name == "0", name == last) for name, layer in layers.items()}
        pipeline, model = Pipeline(stages, schedule, self.comm), nn.ModuleDict(layers)
        return Ours(stages, partial(pipeline.step, self.batches), partial(gradients_of, model), model.zero_grad)

    def torch(self, schedule: Schedule) -> TorchPipeline:
        layers = self.layers(schedule.stages(self.comm.rank), self.naps)
        modules = {int(name): nn.Sequential(OrderedDict({name: layer})) for name, layer in layers.items()}
        num_stages = schedule.num_stages
        return TorchPipeline(schedule.name, modules, num_stages, self.batch, self.num_micro_batches, F.mse_loss)
