"""What is known of a run when it begins: its announcement, and what its sinks may use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

import collectives
from collectives.job import system
from training.reports.metrics import scaled
from training.reports.peak_rate import PeakRate
from training.reports.profile import StepProfiler
from training.settings.fields import AUTO, RunSettings


def bit_conditions(config: RunSettings, comm: collectives.Communicator) -> dict[str, Any]:
    """Return what the bits of a run depend on beside its data and other settings.  Collective."""
    kernels = torch.backends.cpu.get_cpu_capability()  # of torch's own; its libraries choose by the processor
    gpu = {"gpu": torch.cuda.get_device_name(config.device)} if torch.cuda.is_available() else {}
    own = {"cpu": f"{system.processor()} ({kernels})", **gpu, "threads": torch.get_num_threads()}
    own["torch"] = str(torch.__version__)
    every = comm.all_gather_object(own)
    of_ranks = {name: on_ranks([each[name] for each in every]) for name in own}
    return {**of_ranks, "micro_batch_size": config.micro_batch_size}


def on_ranks(values: Sequence[Any]) -> Any:
    """Return the value of all ranks, or each one with its ranks.

    >>> on_ranks([2, 2]), on_ranks([2, 1, 2])
    (2, '2 on rank 0, 2 and 1 on rank 1')
    """
    ranks = {value: [str(rank) for rank, each in enumerate(values) if each == value] for value in values}
    if len(ranks) == 1:
        return values[0]
    return " and ".join(f"{value} on rank {', '.join(its)}" for value, its in ranks.items())


class RunFacts(NamedTuple):
    config: RunSettings
    data: str  # its name
    num_tokens: int
    vocab_size: int
    family: str
    num_params: int
    batch_size: int  # samples in a step
    num_micro_batches: int  # of a rank
    lengths: Mapping[str, int]  # of the mesh's axes
    attention: str  # how sp ranks divide it
    schedule: str
    num_stages: int
    source: str  # of the weights; empty: drawn at random
    first: int  # step
    out_dir: str  # empty: none, or not this rank's
    conditions: Mapping[str, Any]  # of the run's bits
    conditions_before: Mapping[str, Any]  # those of the checkpoint
    surroundings: Mapping[str, Any]  # for the report
    peak: PeakRate | None  # of all devices; None: the run only validates
    profiler: StepProfiler  # for the report

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.config.block_size

    @property
    def compares_bits(self) -> bool:
        """Whether the run's bits are to be compared with another one's."""
        return self.config.hash_interval > 0 or self.config.reproducible

    @property
    def resumed_with(self) -> dict[str, Any]:
        """Conditions that differ from those of the checkpoint, in a run whose bits are to be compared."""
        before = self.conditions_before if self.compares_bits else {}
        return {name: value for name, value in self.conditions.items() if before.get(name, value) != value}

    @property
    def announcement(self) -> str:
        config, lengths, num_micro_batches = self.config, self.lengths, self.num_micro_batches
        batch = f"dp {lengths['dp']} x micro_batch_size {config.micro_batch_size}"
        lines = [
            f"{self.data}: {self.num_tokens:,} tokens, vocabulary {self.vocab_size}",
            f"{self.family} of {self.num_params:,} parameters; batch {self.batch_size} = {batch} "
            f"x num_micro_batches {num_micro_batches}",
        ]
        if config.depth is not None:
            follow = ", ".join(f"{name} {getattr(config, name):.4g}" for name in ("n_layer", "n_head", "n_embd", "lr"))
            lines.append(f"depth {config.depth}: {follow}, batch {self.batch_size}")
        if self.source:
            lines.append(f"weights of {self.source}" + (f", after step {self.first - 1}" if self.first > 1 else ""))
        if config.resume == AUTO and self.first == 1 and not config.eval_only:
            lines.append(
                f"resume {AUTO}: no complete checkpoint in {config.checkpoint_dir}, so the run begins with step 1"
            )
        if self.out_dir and self.out_dir != config.out_dir:
            lines.append(f"out_dir {self.out_dir}, as {config.out_dir} has another run's results")
        layers = [f"layers over tp {lengths['tp']}"] * (lengths["tp"] > 1)
        sequences = [f"sequences over sp {lengths['sp']} by {self.attention}"] * (lengths["sp"] > 1)
        if layers or sequences:
            lines.append(", ".join(layers + sequences))
        if lengths["pp"] > 1:
            lines.append(f"{self.num_stages} stages over pp {lengths['pp']} by {self.schedule}")
        if self.compares_bits:
            now = ", ".join(f"{name} {value}" for name, value in self.conditions.items())
            lines.append(f"the same bits need the same data and settings, and {now}")
        if changed := self.resumed_with:
            pairs = [f"{name} {value}, before {self.conditions_before[name]}" for name, value in changed.items()]
            lines.append(f"resumed with {'; '.join(pairs)}: the bits may differ from those of an uninterrupted run")
        if self.peak:
            rate, prefix = scaled(self.peak.flops_per_s)
            lines.append(f"MFU is of {rate:.1f} {prefix}FLOP/s in {config.dtype}: {self.peak.source}")
        if config.compile:
            lines.append("torch.compile works in the first step, which can take minutes")
        return "\n".join(lines)
