"""Train in several layouts one after the other, in one job, and print the numbers of each as a line of JSON.

python -m mpi_tests.gpu_check.layouts cuda 20 bf16_sp autocast
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from typing import Any

import torch
from mpi4py import MPI

import collectives
from collectives.job import environment
from mpi_tests.gpu_check.mixes import MIXES, Mix
from parallelism.planner.settings import parse
from training.loop import train
from training.settings.config import Config


def numbers(comm: collectives.Communicator, mix: Mix, device: str, iterations: int) -> dict[str, list[float]]:
    """Return the losses of a training run by iteration, and the norm of the first gradients.  Collective."""
    run = ["--device", device, "--max_iters", str(iterations), "--out_dir", ""]
    config = parse(Config, "", [*run, *mix.words(comm.size)])
    with stream_of(mix, device):
        _, records = train(config, comm)
    steps = [record for record in records if "loss" in record]
    return {"losses": [step["loss"] for step in steps], "norm": [steps[0]["grad_norm"]]}


def stream_of(mix: Mix, device: str) -> AbstractContextManager:
    return torch.cuda.stream(torch.cuda.Stream()) if mix.on_side_stream and device != "cpu" else nullcontext()


def main() -> None:
    comm, (device, iterations, *names) = collectives.world(), sys.argv[1:]
    torch.set_num_threads(environment.threads_per_rank())
    for name in names:
        try:
            with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
                result: dict[str, Any] = numbers(comm, MIXES[name], device, int(iterations))
        except collectives.InputError as error:  # on all ranks
            result = {"refused": str(error)}
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            MPI.COMM_WORLD.Abort(1)
        if comm.rank == 0:
            print(json.dumps({"mix": name, **result}), flush=True)


if __name__ == "__main__":
    main()
