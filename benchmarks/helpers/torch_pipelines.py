"""Pipelines of torch.distributed.pipelining over gloo."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from models.decoder import Decoder

SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "breadth_first": ScheduleLoopedBFS,
    "zb_h1": ScheduleInterleavedZeroBubble,
    "zb_v": ScheduleZBVZeroBubble,
}


class TorchPipeline:
    """Modules by stage number, run by a schedule; the loss is the mean of the micro-batches' losses.

    The first stage gets the tokens, and `loss` the last stage's output and the targets.  `tied` are the ranks of the
    first and the last stage if these have a tied parameter: its gradients, which pipelining leaves to the user, are
    summed at the end of a step.
    """

    def __init__(
        self,
        name: str,
        modules: Mapping[int, nn.Module],
        num_stages: int,
        batch: tuple[Tensor, Tensor],
        num_micro_batches: int,
        loss: Callable[[Tensor, Tensor], Tensor],
        tied: Sequence[int] = (),
    ):
        device, kind = torch.device("cpu"), SCHEDULES[name]
        stages = [PipelineStage(module, stage, num_stages, device) for stage, module in sorted(modules.items())]
        single = issubclass(kind, PipelineScheduleSingle)
        self.running: Any = kind(stages[0] if single else stages, num_micro_batches, loss_fn=loss)
        self.modules, self.batch = modules, batch
        self.is_first, self.is_last = 0 in modules, num_stages - 1 in modules
        self.tied = distributed.new_group(sorted(set(tied))) if tied else None

    def step(self) -> float:
        """Return the loss on the rank of the last stage, 0 on others."""
        tokens, targets = self.batch
        losses: list[Tensor] = []
        self.running.step(
            *([tokens] if self.is_first else []),
            target=targets if self.is_last else None,
            losses=losses,
            return_outputs=False,
        )
        if self.tied is not None and (self.is_first or self.is_last):
            self.sum_up_tied()
        return float(torch.stack(losses).detach().mean()) if losses else 0.0

    def sum_up_tied(self) -> None:
        here = [p.grad for name, p in self.parameters().items() if name in TIED]
        for a, b in combinations(here, 2):  # on one rank
            b.copy_(a.add_(b))
        if len(here) == 1:
            distributed.all_reduce(here[0], group=self.tied)

    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for module in self.modules.values() for name, p in module.named_parameters()}

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.parameters().items()}

    def zero_grad(self) -> None:
        for module in self.modules.values():
            module.zero_grad()


TIED = ("transformer.wte.weight", "lm_head.weight")


class GPTStage(nn.Module):
    """Some layers of a GPT, numbered as by `layers_of`; `model` has been cut."""

    def __init__(self, model: Decoder, layers: range):
        super().__init__()
        num_blocks = model.config.n_layer
        self.transformer, self.lm_head = model.transformer, model.lm_head
        self.blocks = range(layers.start, min(layers.stop, num_blocks))
        self.is_first, self.is_last = layers.start == 0, layers.stop > num_blocks

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.transformer.embed(x)
        for number in self.blocks:
            x = self.transformer.h[number](x)
        return self.lm_head(self.transformer.ln_f(x)) if self.is_last else x
