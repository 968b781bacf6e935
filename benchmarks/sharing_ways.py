"""Ways to train one model on several ranks, each with a batch of its own: what benchmarks/sharing.py times."""

from functools import partial

from torch import Tensor, nn

import collectives
from models.gpt import GPT
from models.optimizer import adamw
from parallelism.arena import Arena
from parallelism.data_parallel import DataParallel
from parallelism.zero import ShardedStates, Zero
from parallelism.zero_gradients import ShardedGradients
from parallelism.zero_parameters import ShardedParameters
from parallelism.zero_units import Ranks

make_optimizer = partial(adamw, lr=1e-3, weight_decay=0.1)


class Way:
    """A model as it is trained in one way."""

    model: nn.Module

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        _, loss = self.model(tokens, targets)
        loss.backward()
        self.update()
        return loss.detach()

    def update(self) -> None:
        """Update the parameters, and clear the gradients."""
        raise NotImplementedError


class Alone(Way):
    """The computing of a step: the whole model's forward and backward pass, and the update of one of `shares`."""

    def __init__(self, gpt: GPT, shares: int = 1):
        self.model = gpt
        self.parts = {p: nn.Parameter(part(p.data, shares)) for p in gpt.parameters()}
        self.optimizer = make_optimizer(self.parts.values())
        self.shares = shares

    def update(self) -> None:
        for param, own in self.parts.items():
            own.grad = part(param.grad, self.shares)
        self.optimizer.step()
        self.model.zero_grad(set_to_none=False)


def part(x: Tensor, shares: int) -> Tensor:
    """One share of a tensor's elements, with as many dims."""
    return x if shares == 1 else x.view(-1)[: x.numel() // shares].view((1,) * (x.dim() - 1) + (-1,))


class Replicated(Way):
    """Plain data parallelism."""

    def __init__(self, gpt: GPT, comm: collectives.Communicator):
        self.model = DataParallel(gpt, comm, Arena(gpt, comm))
        self.optimizer = make_optimizer(gpt.parameters())

    def update(self) -> None:
        self.optimizer.step()
        self.model.zero_grad()


class Shared(Way):
    """ZeRO of one stage."""

    def __init__(self, gpt: GPT, comm: collectives.Communicator, zero_stage: int):
        ranks = Ranks.of(comm)
        layers = [f"transformer.h.{number}" for number in range(gpt.config.n_layer)]
        self.model: Zero
        if zero_stage == 3:
            self.model = ShardedParameters(gpt, ranks, make_optimizer, layers)
        else:
            self.model = (ShardedStates if zero_stage == 1 else ShardedGradients)(gpt, ranks, make_optimizer)

    def update(self) -> None:
        self.model.update()
        self.model.zero_grad()
