"""Announcement: the description that a run prints before it begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.settings.config import AUTO

if TYPE_CHECKING:
    from training.parallel.run import TrainingRun


def announcement(run: TrainingRun) -> str:
    config, mesh, tokens, schedule = run.config, run.mesh, run.tokens, run.model.schedule
    batch = f"dp {mesh.dp.size} x micro_batch_size {config.micro_batch_size}"
    lines = [
        f"{tokens.name}: {len(tokens.ids):,} tokens, vocabulary {tokens.vocab_size}",
        f"{type(run.gpt).__name__} of {run.num_params:,} parameters; batch {run.sampler.batch_size} = {batch} "
        f"x num_micro_batches {run.samples.num_micro_batches}",
    ]
    if config.depth is not None:
        follow = ", ".join(f"{name} {getattr(config, name):.4g}" for name in ("n_layer", "n_head", "n_embd", "lr"))
        lines.append(f"depth {config.depth}: {follow}, batch {run.sampler.batch_size}")
    if run.source:
        lines.append(f"weights of {run.source}" + (f", after step {run.first - 1}" if run.first > 1 else ""))
    if config.resume == AUTO and run.first == 1 and not config.eval_only:
        lines.append(f"resume {AUTO}: no complete checkpoint in {config.checkpoint_dir}, so the run begins with step 1")
    if run.out_dir and run.out_dir != config.out_dir:
        lines.append(f"out_dir {run.out_dir}, as {config.out_dir} has another run's results")
    layers = [f"layers over tp {mesh.tp.size}"] * (mesh.tp.size > 1)
    sequences = [f"sequences over sp {mesh.sp.size} by {run.sp}"] * (mesh.sp.size > 1)
    if layers or sequences:
        lines.append(", ".join(layers + sequences))
    if mesh.pp.size > 1:
        lines.append(f"{schedule.num_stages} stages over pp {mesh.pp.size} by {schedule.name}")
    if config.compile:
        lines.append("torch.compile works in the first step, which can take minutes")
    return "\n".join(lines)
