"""Memory of a rank when a model is split: attention's activations, parameters, and the loss of a large vocabulary.

    mpirun -n 8 python benchmarks/memory.py --output benchmarks/results/memory-openmpi-8.json

Each table is for 1, 2, 4 and 8 of the ranks, and for the rank that holds most.  "kept" are the tensors saved for the
backward pass without parameters, each memory counted once.  "peak" is the largest increase of the process's memory in
a forward and a backward pass; shared memory counts where the rank has touched it.  "process" is the increase after
building and splitting the whole model.  Linux with glibc only.

For all modes of sequence parallelism, which takes longer: --modes ring ulysses hybrid --n_head 8.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers.result_files import output, table, write
from torch import Tensor, nn

import collectives
from collectives.job.progress_bar import progress_bar
from collectives.job.settings import Parser, positive
from models.attention import SelfAttention
from models.config import ModelConfig
from models.decoder import CrossEntropy, Decoder
from parallelism.sequence.sequence_parallel import SequenceAttention, SequenceParallel
from parallelism.sequence.token_shards import MODES, TokenShards
from parallelism.tensor.sharding_plan import Loss, Vocabulary, parallelize
from training.parallel.decoder import plan_of
from training.settings.derived import checked

SIZES = (1, 2, 4, 8)
MIB = 1 << 20
M_MMAP_THRESHOLD = -3  # of mallopt, glibc's malloc.h
LIBC = ctypes.CDLL(None)


class SavedTensors:
    """Context that records the memory of tensors saved for the backward pass, except for a module's parameters."""

    def __init__(self, module: nn.Module):
        self.parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
        self.bytes_at: dict[int, int] = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.note, lambda x: x)

    def note(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in self.parameters:
            self.bytes_at[storage.data_ptr()] = storage.nbytes()
        return x

    def mib(self) -> float:
        return sum(self.bytes_at.values()) / MIB


def process_mib(field: str) -> float:
    """Return VmRSS, the memory of this process, or VmHWM, its peak, in MiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def shared_by_others_mib() -> float:
    """Return the shared memory that this process has touched, minus its proportional part, in MiB."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    part_kib = next(int(line.split()[1]) for line in lines if line.startswith("Pss_Shmem"))
    return process_mib("RssShmem") - part_kib / 1024


def settled_mib() -> float:
    """Return this process's memory in MiB after freeing unused memory, and reset its peak."""
    gc.collect()
    LIBC.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return process_mib("VmRSS")


def passes_mib(module: nn.Module, forward: Callable[[], Tensor]) -> dict[str, float]:
    """Return the MiB that a forward pass saves, and the peak of both passes."""
    before, saved = settled_mib(), SavedTensors(module)
    with saved.hooks:
        result = forward()
    kept_mib = saved.mib()
    result.sum().backward()
    return {"kept": kept_mib, "peak": process_mib("VmHWM") - before}


def attention(comm: collectives.Communicator, args: argparse.Namespace, mode: str) -> dict[str, float]:
    """Measure the attention of one layer, with its projections."""
    module = SelfAttention(ModelConfig(n_head=args.n_head, n_embd=args.n_embd))
    sp = SequenceParallel(comm, mode, "contiguous" if mode == "ulysses" else "zigzag")
    module.attend = SequenceAttention(sp)
    num_tokens = len(sp.positions(args.seq))
    brief, long = (torch.randn(1, n, args.n_embd, requires_grad=True) for n in (4, num_tokens))
    module(brief).sum().backward()  # excludes memory of loading and compiling
    return passes_mib(module, lambda: module(long))


def parameters(comm: collectives.Communicator, args: argparse.Namespace) -> dict[str, float]:
    """Measure a GPT after a backward pass."""
    config = ModelConfig(vocab_size=args.vocab_size, n_head=8, n_embd=args.model_n_embd)
    before = settled_mib()
    model = Decoder(config)
    parallelize(model, plan_of(config), comm)
    grown = settled_mib() - before
    tokens = torch.zeros(1, 8, dtype=torch.long)
    model(tokens, tokens)[1].backward()
    params = list(model.parameters())
    groups = {"parameters": params, "gradients": [p.grad for p in params]}
    return {name: sum(x.nbytes for x in tensors) / MIB for name, tensors in groups.items()} | {"process": grown}


class Head(nn.Module):
    def __init__(self, n_embd: int, vocab_size: int):
        super().__init__()
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.loss = CrossEntropy()

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.lm_head(x), targets)


def loss(comm: collectives.Communicator | None, args: argparse.Namespace) -> dict[str, float]:
    """Measure the logits and their loss, split or by the plain modules."""
    module = Head(args.n_embd, args.vocab_size)
    if comm:
        parallelize(module, {"lm_head": Vocabulary(args.vocab_size), "loss": Loss(args.vocab_size)}, comm)
    x = torch.randn(1, args.tokens, args.n_embd, requires_grad=True)
    targets = torch.randint(args.vocab_size, (1, args.tokens))
    return passes_mib(module, lambda: module(x, targets))


def parts(world: collectives.Communicator) -> Iterator[tuple[int, collectives.Communicator | None]]:
    """Yield communicators of the first ranks, or None on the others, which wait."""
    for size in SIZES:
        if size <= world.size:
            yield size, world.split(0 if world.rank < size else None)
            world.barrier()


def most(comm: collectives.Communicator, figures: dict[str, float]) -> dict[str, float]:
    """Return the figures of the rank with the most memory."""
    highest = comm.all_reduce(np.array(list(figures.values())), op="max")
    return dict(zip(figures, highest.tolist(), strict=True))


def figures_by_size(world: collectives.Communicator, axis: str, measure: Callable) -> dict[str, dict[str, float]]:
    return {f"{axis} {size}": most(part, measure(part)) for size, part in parts(world) if part}


def parse(size: int) -> argparse.Namespace:
    """Parse the flags; raise ValueError for invalid ones."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq", type=positive, default=32768, help="tokens of the sequence that attention is about")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["ring"])
    parser.add_argument("--n_head", type=positive, default=4)
    parser.add_argument("--n_embd", type=positive, default=64, help="width of attention, and of what the head is given")
    parser.add_argument("--tokens", type=positive, default=4096, help="tokens that the loss is about")
    parser.add_argument("--vocab_size", type=positive, default=50257)
    parser.add_argument("--model_n_embd", type=positive, default=256, help="width of the GPT, a multiple of 8")
    parser.add_argument("--output", type=output, help="write the numbers as JSON")
    args = parser.parse_args()
    largest = max(number for number in SIZES if number <= size)
    TokenShards(args.seq, largest).check()
    checked(ModelConfig(n_head=args.n_head, n_embd=args.n_embd))
    if set(args.modes) - {"ring"} and args.n_head % largest:
        raise ValueError(f"--n_head {args.n_head}: {largest} ranks can't exchange these heads, use a multiple")
    return args


def main() -> None:
    torch.set_num_threads(1)
    world = collectives.world()
    with world.agreed("memory"):
        args = parse(world.size)
    LIBC.mallopt(M_MMAP_THRESHOLD, 1 << 16)  # return freed memory immediately
    results: dict[str, Any] = {}
    for mode in progress_bar(args.modes, "mode", world.rank):
        title = f"attention to {args.seq} tokens, {mode}, MiB"
        results[title] = figures_by_size(world, "sp", lambda comm, mode=mode: attention(comm, args, mode))
    results["a GPT's parameters, MiB"] = figures_by_size(world, "tp", lambda comm: parameters(comm, args))
    plain = {"plain": loss(None, args)} if world.rank == 0 else {}
    title = f"loss of {args.tokens} tokens, vocabulary of {args.vocab_size}, MiB"
    results[title] = plain | figures_by_size(world, "tp", lambda comm: loss(comm, args))
    if world.rank == 0:
        for title, rows in results.items():
            columns = next(iter(rows.values()))
            cells = [[name, *(f"{mib:.1f}" for mib in row.values())] for name, row in rows.items()]
            print(table([title, *columns], cells), end="\n\n")
        if args.output:
            write(args.output, results, **vars(args))


if __name__ == "__main__":
    main()
