"""all_reduce and training through torch.distributed, over these collectives and over gloo, in one run.

    mpirun -n 2 python benchmarks/torch_backend.py

Times are of the slowest rank, the median of rounds that take turns between the two backends.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import collectives.torch_backend  # noqa: F401  registers the backend
from models.config import GPTConfig
from models.gpt import GPT, TransformerBlock

BACKENDS = ("collectives", "gloo")
LARGEST_BYTES = 64 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.1, help="about how long a round takes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("collectives")
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    say(f"all_reduce of float32 on {dist.get_world_size()} ranks, times in us")
    say(f"{'bytes':>10} {'collectives':>12} {'gloo':>12} {'ratio':>8}")
    for nbytes in (1 << power for power in range(10, LARGEST_BYTES.bit_length(), 2)):
        times = measure(groups, nbytes, args.rounds, args.seconds)
        ours, theirs = times["collectives"], times["gloo"]
        say(f"{nbytes:>10} {ours:>12.1f} {theirs:>12.1f} {theirs / ours:>8.1f}")
    say("training of a GPT: seconds a step, and how much longer than one that does not communicate")
    for name, wrap, silent in (("DDP", wrap_ddp, silent_ddp), ("FSDP2", wrap_fsdp2, lambda model, _: model)):
        models = [silent(build(), groups["gloo"]), *(wrap(build(), group) for group in groups.values())]
        alone, *trainings = map(Training, models)
        for _ in range(1 + args.rounds):
            for training in (alone, *trainings):
                training.step()
        for backend, training in zip(groups, trainings, strict=True):
            exposed_s = training.median_s(less=alone)
            say(f"{name:>6} {backend:>12} {training.median_s():8.4f} s, exposed {exposed_s:8.4f} s")
    dist.destroy_process_group()


def build() -> torch.nn.Module:
    return GPT(GPTConfig(n_layer=4, n_head=4, n_embd=256, block_size=128))


def wrap_ddp(model: torch.nn.Module, group: dist.ProcessGroup) -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(model, process_group=group)


def silent_ddp(model: torch.nn.Module, group: dist.ProcessGroup) -> torch.nn.Module:
    """All that DDP does, its copies of gradients to buckets and back too, but the all_reduce."""
    made = wrap_ddp(model, group)
    made.register_comm_hook(None, as_it_is)
    return made


def as_it_is(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def wrap_fsdp2(model: torch.nn.Module, group: dist.ProcessGroup) -> torch.nn.Module:
    mesh = DeviceMesh.from_group(group, "cpu")
    for block in [module for module in model.modules() if isinstance(module, TransformerBlock)]:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Training:
    """Steps of one model, with the seconds that each took on the slowest rank."""

    def __init__(self, model: torch.nn.Module):
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters())
        self.tokens = torch.randint(0, 256, (2, 129), generator=torch.Generator().manual_seed(dist.get_rank()))
        self.steps_s: list[float] = []

    def step(self) -> None:
        dist.barrier()
        start = time.perf_counter()
        _, loss = self.model(self.tokens[:, :-1], self.tokens[:, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps_s.append(slowest(time.perf_counter() - start))

    def median_s(self, less: "Training | None" = None) -> float:
        """Of the steps but the first, less what the same round's took of another."""
        others_s = less.steps_s if less else [0.0] * len(self.steps_s)
        return statistics.median(own - other for own, other in list(zip(self.steps_s, others_s, strict=True))[1:])


def measure(groups: dict, nbytes: int, rounds: int, seconds: float) -> dict[str, float]:
    """Microseconds for each backend."""
    x = torch.zeros(nbytes // 4)
    times: dict[str, list[float]] = {name: [] for name in groups}
    for group in groups.values():
        time_of(x, group, 3)  # binds, and compiles
    calls = {name: max(2, int(seconds / slowest(time_of(x, group, 3)))) for name, group in groups.items()}
    for _ in range(rounds):
        for name, group in groups.items():
            times[name].append(slowest(time_of(x, group, calls[name])))
    return {name: 1e6 * statistics.median(seen) for name, seen in times.items()}


def time_of(x: torch.Tensor, group: dist.ProcessGroup, calls: int) -> float:
    """Seconds a call."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(x, group=group)
    return (time.perf_counter() - start) / calls


def slowest(time_s: float) -> float:
    times = torch.tensor([time_s], dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.item()


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
