"""Resume from the newest checkpoint, and write checkpoints until killed.

python -m mpi_tests.helpers.saving DIRECTORY
"""

import os
import sys
import time

import torch

import collectives
from parallelism.checkpoint import Checkpoints, Extent, TensorShard

LENGTH = 1 << 19  # elements per rank: 2 MiB


def state(step, rank=0, size=1, parts=1):
    """Return one of `size` ranks' shard of a parameter at a step; the parameter has the length of `parts` shards."""
    length = LENGTH * parts
    extent = Extent((length * size,), length * rank, length)
    numbers = torch.arange(float(extent.begin), extent.end)
    return TensorShard("x", "parameter", extent, numbers + step)


def main():
    comm = collectives.world()
    print(f"rank {comm.rank} {os.getpid()}", flush=True)
    checkpoints = Checkpoints(sys.argv[1], comm, keep=2)
    path, step = checkpoints.newest(), 0
    if path:
        part = state(0, comm.rank, comm.size)
        step = checkpoints.load([part], path).step
        assert torch.equal(part.tensor, state(step, comm.rank, comm.size).tensor)
    while True:
        step += 1
        checkpoints.save(step, [state(step, comm.rank, comm.size)], {})
        while not checkpoints.poll():
            time.sleep(1e-3)
        if comm.rank == 0:
            print(f"whole {step}", flush=True)


if __name__ == "__main__":
    main()
