"""Faults that are planted in one step of a reproducible run are named in that step, beside a run in another layout."""

import os
import random
from types import SimpleNamespace

import pytest
import torch

from collectives import Communicator
from mpi_tests.helpers.folders import shared_folder
from mpi_tests.helpers.trained import GLOBAL_BATCH, on
from parallelism.numerics.exact import Rounding
from training import compare, loop

NUM_EACH = int(os.environ.get("PLANTED", "1"))
STEPS = 5
SETTINGS = {
    "reproducible": True, "global_batch_size": GLOBAL_BATCH, "micro_batch_size": 2, "n_layer": 4, "max_iters": STEPS,
    "eval_interval": STEPS, "hash_interval": 1,
}  # fmt: skip
LAYOUTS = [{}, {"zero_stage": 1}, {"zero_stage": 3}, {"pp": 2}, {"pp": 2, "zero_stage": 2, "schedule": "zb_h1"}]


@pytest.fixture(scope="module")
def clean(mpi_comm):
    """Yield the folder of a clean run on two ranks, and that for others."""
    comm = Communicator(mpi_comm)
    with shared_folder(mpi_comm) as folder:
        part = comm.split(0 if comm.rank < 2 else None)
        if part:
            on(part, **SETTINGS, out_dir=str(folder / "clean"))
            part.free()
        comm.barrier()
        yield folder
    comm.free()


def plant(monkeypatch, kind: str, step: int, here: bool, draw: random.Random) -> None:
    """Plant a fault in a step of this rank, if `here`; a flipped bit on all ranks that hold the weight."""
    now, run_step, update, add = SimpleNamespace(step=0, batches=None), loop.step, loop.update, Rounding.add
    index = draw.randrange(12)

    def faulty_step(run, iteration, batches):
        before, now.step, now.batches, now.adds = now.batches, iteration, batches, 0
        if kind == "batch" and here and iteration == step:
            batches = [*batches[:-1], before[-1]]
        hook = None
        if kind == "rounding" and here and iteration >= step:  # as by kernels of another torch
            block = next(m for name, m in run.model.named_modules() if name.endswith("mlp.c_proj"))
            hook = block.register_forward_hook(lambda module, args, y: y * (1 + 2**-22))
        pending = run_step(run, iteration, batches)
        if hook:
            hook.remove()
        return pending

    def faulty_add(self, gradient):
        now.adds += 1
        add(self, gradient)
        if kind == "addend" and here and now.step == step and now.adds == 1 + index:
            add(self, gradient)

    def faulty_update(run, lr, loss):
        outcome = update(run, lr, loss)
        piece = run.masters.pieces.get("transformer.h.1.ln_2.weight")
        if kind == "bit" and now.step == step and piece is not None and len(piece):
            piece.data.view(torch.int32)[0] ^= 1 << draw.randrange(20)
        return outcome

    monkeypatch.setattr(loop, "step", faulty_step)
    monkeypatch.setattr(loop, "update", faulty_update)
    monkeypatch.setattr(Rounding, "add", faulty_add)


@pytest.mark.parametrize("number", range(NUM_EACH))
@pytest.mark.parametrize("kind", ["addend", "bit", "batch", "rounding"])
@pytest.mark.sizes(4)
def test_a_planted_fault_is_named_in_its_step(comm, clean, monkeypatch, kind, number):
    draw = random.Random(f"{kind} {number}")
    step, rank, layout = draw.randint(2, STEPS), draw.randrange(comm.size), draw.choice(LAYOUTS)
    if layout.get("pp") and kind == "batch":
        rank = 0  # of the first stage, which reads the tokens
    plant(monkeypatch, kind, step, comm.rank == rank, draw)
    folder = clean / f"{kind}-{number}"
    on(comm, **SETTINGS, **layout, out_dir=str(folder))
    first, second, *_ = compare.compare(compare.HashedRun(clean / "clean"), compare.HashedRun(folder))
    assert first == f"step {step} differs; step {step - 1} is equal"
    assert "is the first parameter that differs" in second
