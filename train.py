"""Train a GPT with hand-written collectives.

mpirun -n 2 python train.py
mpirun --hostfile hostfiles/local.txt -np 4 python train.py --data input.txt --max_iters 1000
mpirun -n 2 python train.py --config configs/reference.toml
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import collectives
from collectives import environment
from models.data import Tokens, Windows, load_tokens, split
from models.flags import parse
from models.gpt import GPT, GPTConfig, flops_per_token
from models.hf import save_hugging_face
from models.report import Metrics, Report, peak_memory_mib
from parallelism.arena import Arena
from parallelism.data_parallel import DataParallel
from parallelism.mesh import Mesh
from parallelism.sampler import DistributedSampler


def flag(default: Any, text: str, **more: Any) -> Any:
    default = {"default_factory": list} if default is list else {"default": default}
    return field(**default, metadata={"help": text, **more})


@dataclass
class Config:
    data: list[str] = flag(list, "UTF-8 text files, or .bin files of uint16 tokens; none: Python's language reference")
    val_fraction: float = flag(0.1, "part of the data, at its end, that is held back for validation")
    out_dir: str = flag("out", "where metrics.jsonl, loss.png and the weights go; none if empty")
    seed: int = flag(1337, "of the initial weights and of the order of the samples")
    n_layer: int = flag(4, "blocks")
    n_head: int = flag(4, "attention heads")
    n_embd: int = flag(192, "width")
    block_size: int = flag(128, "tokens a sample")
    dropout: float = flag(0.0, "dropout probability")
    bias: bool = flag(False, "biases in linear layers and norms")
    micro_batch_size: int = flag(8, "samples a rank computes at once")
    num_micro_batches: int = flag(1, "micro-batches a rank computes before it updates the weights")
    global_batch_size: int | None = flag(None, "samples a step: sets num_micro_batches")
    max_iters: int = flag(800, "steps")
    eval_interval: int = flag(200, "steps between validations; one follows the last step anyway")
    lr: float = flag(3e-3, "learning rate after warm-up; falls to a tenth along a cosine")
    warmup_iters: int = flag(50, "steps of linear warm-up")
    weight_decay: float = flag(0.1, "AdamW's, of matrices")
    grad_clip: float = flag(1.0, "largest norm of the gradient; 0: no limit")
    dtype: str = flag(
        "float32", "bfloat16 computes in it, with float32 weights", choices=("float32", "float64", "bfloat16")
    )
    device: str = flag("cpu", "cpu or cuda")
    dp: int | None = flag(None, "ranks in data parallel: all of them")
    bucket_mb: float = flag(4.0, "MiB of gradients that are reduced together")
    peak_tflops: float | None = flag(None, "of one device, to report model FLOP/s as a share of it (MFU)")
    sample_tokens: int = flag(200, "tokens of text to generate in the end")


def main() -> None:
    comm = collectives.world()
    if comm.rank:
        sys.stdout = open(os.devnull, "w")  # other ranks are silent  # noqa: SIM115
    torch.set_num_threads(environment.threads_per_rank())
    with comm.agreed():
        config = parse(Config, __doc__)
    train(config, comm)


def train(config: Config, comm: collectives.Communicator) -> GPT:
    """Train on the ranks of `comm`; returns the trained model.  Collective.

    Raises: InputError for settings that don't fit together or to the data, before anything is computed.
    """
    mesh = Mesh(comm, dp=config.dp)
    with comm.agreed():
        tokens = load_tokens(config.data)
        train_ids, val_ids = split(tokens, config.val_fraction, config.block_size)
        windows = Windows(train_ids, config.block_size, config.seed)
        num_micro_batches = micro_batches(config, mesh.dp.size)
        sampler = make_sampler(config, len(windows), num_micro_batches, mesh.dp)
        gpt = make_model(config, tokens.vocab_size)
        comm.empty(0, device=config.device)  # refused here if there is no such device
    with comm.agreed():
        out_dir = prepare_out_dir(config, comm.rank)
    arena = Arena(gpt, comm, config.device)
    model = DataParallel(gpt, mesh.dp, arena, config.bucket_mb)
    optimizer = make_optimizer(config, gpt)
    announce(config, comm, tokens, gpt, num_micro_batches)

    mean_loss = np.empty(1)
    average = mesh.dp.plan("all_reduce", mean_loss, op="avg")
    flops = flops_per_token(gpt.config, gpt.num_params()) * config.block_size
    progress = comm.rank == 0 and environment.on_terminal()
    with Report(out_dir, config.max_iters, tokens.vocab_size, progress) as report:
        for iteration, share in zip(range(1, config.max_iters + 1), endless(sampler, windows), strict=False):
            begin, waited = time.perf_counter(), model.exposed_s
            lr = learning_rate(config, iteration)
            mean_loss[0] = accumulate_gradients(config, model, windows, np.split(share, num_micro_batches))
            grad_norm = clip_gradients(config, gpt)
            update(optimizer, lr)
            arena.zero_grad()
            synchronize(config)
            computed = time.perf_counter()
            average()
            now = time.perf_counter()
            samples_per_s = sampler.batch_size / (now - begin)
            comm_s = model.exposed_s - waited + now - computed
            metrics = Metrics(
                iter=iteration,
                max_iters=config.max_iters,
                loss=float(mean_loss[0]),
                grad_norm=grad_norm,
                lr=lr,
                tokens_per_s=samples_per_s * config.block_size,
                flops_per_s=samples_per_s * flops,
                mfu=config.peak_tflops and samples_per_s * flops / (config.peak_tflops * 1e12 * comm.size),
                compute_ms=(now - begin - comm_s) * 1e3,
                comm_ms=comm_s * 1e3,
                memory_mib=memory_mib(config),
            )
            report.iteration(metrics)
            if iteration == config.max_iters or iteration % config.eval_interval == 0:
                report.validation(iteration, validate(config, gpt, val_ids, mesh.dp))
    if comm.rank == 0:
        print(sample(config, gpt, tokens, val_ids))
        if out_dir:
            save_hugging_face(gpt, out_dir)
    return gpt


def micro_batches(config: Config, dp_size: int) -> int:
    """How many micro-batches a rank computes a step: as set, or what makes up the global batch."""
    for name in ("micro_batch_size", "num_micro_batches", "max_iters", "eval_interval"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name}={getattr(config, name)} must be at least 1")
    if config.global_batch_size is None:
        return config.num_micro_batches
    together = dp_size * config.micro_batch_size
    if config.global_batch_size < 1 or config.global_batch_size % together:
        nearest = max(1, round(config.global_batch_size / together)) * together
        raise ValueError(
            f"global_batch_size={config.global_batch_size} can't be shared by dp={dp_size} ranks in micro-batches of "
            f"{config.micro_batch_size}: use a multiple of {together}, such as {nearest}, or another micro_batch_size"
        )
    return config.global_batch_size // together


def make_sampler(
    config: Config, num_samples: int, num_micro_batches: int, dp: collectives.Communicator
) -> DistributedSampler:
    batch = dp.size * config.micro_batch_size * num_micro_batches
    return DistributedSampler(num_samples, batch, dp.rank, dp.size, seed=config.seed)


def make_model(config: Config, vocab_size: int) -> GPT:
    shape = {name: getattr(config, name) for name in ("block_size", "n_layer", "n_head", "n_embd", "dropout", "bias")}
    gpt = GPT(GPTConfig(vocab_size=vocab_size, **shape), seed=config.seed)
    return gpt.double() if config.dtype == "float64" else gpt


def prepare_out_dir(config: Config, rank: int) -> str | None:
    """Rank 0 makes sure, before hours are spent, that it can write there."""
    if not config.out_dir or rank:
        return None
    probe = Path(config.out_dir) / ".writable"
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"out_dir {config.out_dir} can't be written ({error.strerror}): pass another --out_dir"
        ) from None
    return config.out_dir


def make_optimizer(config: Config, gpt: GPT) -> torch.optim.AdamW:
    """AdamW, with decay on matrices only."""
    params = list(gpt.parameters())
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)


def announce(config: Config, comm: collectives.Communicator, tokens: Tokens, gpt: GPT, num_micro_batches: int) -> None:
    batch = comm.size * config.micro_batch_size * num_micro_batches
    print(
        f"{tokens.name}: {len(tokens.ids):,} tokens, vocabulary {tokens.vocab_size}\n"
        f"GPT of {gpt.num_params():,} parameters; batch {batch} = dp {comm.size} x micro_batch_size "
        f"{config.micro_batch_size} x num_micro_batches {num_micro_batches}",
        flush=True,
    )


def endless(sampler: DistributedSampler, windows: Windows) -> Iterator[np.ndarray]:
    """This rank's sample indices of each step, epoch after epoch."""
    for epoch in range(sys.maxsize):
        sampler.set_epoch(epoch)
        windows.set_epoch(epoch)
        yield from sampler


def accumulate_gradients(config: Config, model: DataParallel, windows: Windows, micro: list[np.ndarray]) -> float:
    """Forward and backward of each micro-batch; the last one averages the gradients over the ranks."""
    total = 0.0
    for index, indices in enumerate(micro):
        inputs, targets = to_device(config, *windows.batch(indices))
        with nullcontext() if index == len(micro) - 1 else model.no_sync():
            with computing(config):
                _, loss = model(inputs, targets)
            (loss / len(micro)).backward()
        total += float(loss.detach()) / len(micro)
    return total


def clip_gradients(config: Config, gpt: GPT) -> float:
    limit = config.grad_clip if config.grad_clip > 0 else math.inf
    return float(torch.nn.utils.clip_grad_norm_(gpt.parameters(), limit))


def update(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()


def learning_rate(config: Config, iteration: int) -> float:
    """Linear warm-up, then a cosine to a tenth; iterations count from 1."""
    if iteration <= config.warmup_iters:
        return config.lr * iteration / config.warmup_iters
    done = (iteration - config.warmup_iters) / max(1, config.max_iters - config.warmup_iters)
    return config.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


@torch.no_grad()
def validate(config: Config, gpt: GPT, val_ids: np.ndarray, dp: collectives.Communicator) -> float:
    """Mean loss in nats a token over the held-back part, shared by the ranks."""
    windows = Windows(val_ids, config.block_size, seed=None)
    sums = np.zeros(2)
    gpt.eval()
    mine = np.arange(dp.rank, len(windows), dp.size)
    for begin in range(0, len(mine), config.micro_batch_size):
        indices = mine[begin : begin + config.micro_batch_size]
        with computing(config):
            _, loss = gpt(*to_device(config, *windows.batch(indices)))
        sums += float(loss) * len(indices), len(indices)
    gpt.train()
    total, count = dp.all_reduce(sums)
    return float(total / count)


def sample(config: Config, gpt: GPT, tokens: Tokens, val_ids: np.ndarray) -> str:
    """Text, or token ids, that go on from the first ones of the held-back part."""
    prompt = torch.from_numpy(val_ids[:16].astype(np.int64))[None].to(config.device)  # (1, seq)
    gpt.eval()
    generator = torch.Generator(config.device).manual_seed(config.seed)
    drawn = gpt.generate(prompt, config.sample_tokens, temperature=0.8, top_k=50, generator=generator)[0].tolist()
    return bytes(drawn).decode(errors="replace") if tokens.is_text else " ".join(map(str, drawn))


def to_device(config: Config, *arrays: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(array).to(config.device) for array in arrays]


def computing(config: Config) -> Any:
    bfloat16 = config.dtype == "bfloat16"
    return torch.autocast(config.device.partition(":")[0], torch.bfloat16, enabled=bfloat16)


def synchronize(config: Config) -> None:
    if config.device != "cpu":
        torch.cuda.synchronize(config.device)


def memory_mib(config: Config) -> float:
    on_cpu = config.device == "cpu"
    return peak_memory_mib() if on_cpu else torch.cuda.max_memory_allocated(config.device) / 2**20


if __name__ == "__main__":
    main()
