"""What is known of a run when it begins: its announcement, and what its sinks may use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from training.reports.profile import StepProfiler
from training.settings.fields import AUTO, RunSettings


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
    surroundings: Mapping[str, Any]  # for the report
    profiler: StepProfiler  # for the report

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.config.block_size

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
        if config.compile:
            lines.append("torch.compile works in the first step, which can take minutes")
        return "\n".join(lines)
