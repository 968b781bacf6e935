"""Compare all_reduce of torch.distributed over these collectives with gloo, in one run.

    mpirun -n 2 python benchmarks/torch_backend.py

Times are those of the slowest rank, medians of rounds that alternate between the two backends.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist

import collectives.torch_backend  # noqa: F401  registers the backend

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
    dist.destroy_process_group()


def measure(groups: dict, nbytes: int, rounds: int, seconds: float) -> dict[str, float]:
    """Return the microseconds of each backend."""
    x = torch.zeros(nbytes // 4)
    times: dict[str, list[float]] = {name: [] for name in groups}
    for group in groups.values():
        time_of(x, group, 3)  # binds plans, and compiles
    calls = {name: max(2, int(seconds / slowest(time_of(x, group, 3)))) for name, group in groups.items()}
    for _ in range(rounds):
        for name, group in groups.items():
            times[name].append(slowest(time_of(x, group, calls[name])))
    return {name: 1e6 * statistics.median(samples) for name, samples in times.items()}


def time_of(x: torch.Tensor, group: dist.ProcessGroup, calls: int) -> float:
    """Return the seconds of a call."""
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
