"""Checkpoints of several ranks: a GPT saved in one layout and loaded in another, and what cannot be written or read."""

import errno
import os
import signal
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import parallelism.checkpoint.checkpoints as module
from collections import defaultdict
from collectives import InputError
from models.gpt import GPT, GPTConfig
from mpi_tests.test_gpt import randomized
from parallelism.checkpoint import Checkpoints, Extent, Part, Stop, model_parts, state_parts
from parallelism.checkpoint.checkpoints import gather_texts
from parallelism.mesh import Mesh
from parallelism.pipeline_schedule import registry
from parallelism.plan import gpt2_plan, parallelize
from parallelism.reduction import TiedGradients, tied_names
from parallelism.stage import cut, gpt2_layers
from parallelism.arena import Arena

CONFIG = GPTConfig(vocab_size=29, block_size=8, n_layer=3, n_head=4, n_embd=16, bias=True, n_kv_head=2)


@pytest.fixture
def folder(comm, tmp_path):
    """One that all ranks share."""
    return Path(gather_texts(comm, str(tmp_path))[0]) / "checkpoints"


@pytest.fixture
def checkpoints(comm, folder):
    made = Checkpoints(folder, comm)
    yield made
    made.release()


def state_of(p, seed):
    """An AdamW's of a parameter: numbers that tell elements apart."""
    return {"exp_avg": p * 3 + seed, "step": torch.tensor(float(seed))}


def parts_of(model, tp, tied, states):
    for name, part in model_parts(model, tp.rank, tp.size, tied).items():
        yield part
        yield from state_parts(part, states[name])


class Held:
    """What a rank of a layout has of a GPT and its optimizer; as it should be, and cleared."""

    def __init__(self, comm, pp, tp, seed=1):
        mesh = Mesh(comm, pp=pp, tp=tp)
        whole = randomized(CONFIG)
        model = randomized(CONFIG)
        parallelize(model, gpt2_plan(CONFIG.vocab_size, CONFIG.n_head, CONFIG.n_kv_head), mesh.tp)
        self.tied = tied_names(model)
        if pp > 1:
            per_stage = np.array_split(range(CONFIG.n_layer + 1), pp)
            stages = {mesh.pp.rank: range(per_stage[mesh.pp.rank][0], per_stage[mesh.pp.rank][-1] + 1)}
            cut(model, gpt2_layers(model), stages)
            TiedGradients(self.tied, model, Arena(model, comm), mesh.pp)
        self.model, self.tp = model, mesh.tp
        self.states = {name: state_of(p.detach(), seed) for name, p in model.named_parameters()}
        self.parts = [*parts_of(model, mesh.tp, self.tied, self.states)]
        self.expected = [part.tensor.clone() for part in self.parts]
        whole_names = dict(whole.named_parameters())
        assert {part.name for part in self.parts} <= whole_names.keys()

    def clear(self):
        for part in self.parts:
            part.tensor.fill_(7)

    def check(self):
        for part, expected in zip(self.parts, self.expected, strict=True):
            assert torch.equal(part.tensor, expected), str(part)


LAYOUTS = {2: [(1, 1), (2, 1), (1, 2)], 4: [(1, 1), (4, 1), (1, 4), (2, 2)]}


@pytest.mark.sizes(1, 2, 4)
def test_a_gpt_is_loaded_into_any_layout(comm, folder, checkpoints):
    for step, layout in enumerate(LAYOUTS.get(comm.size, [(1, 1)])):
        saved = Held(comm, *layout)
        checkpoints.save(step, saved.parts, {"layout": layout}, own=comm.rank)
        saved.clear()  # while it is written
        checkpoints.wait()
        for other in LAYOUTS.get(comm.size, [(1, 1)]):
            held = Held(comm, *other)
            held.clear()
            loaded = checkpoints.load(held.parts, checkpoints.newest())
            held.check()
            assert loaded[1:] == (step, {"layout": [*layout]}, comm.rank)


@pytest.mark.sizes(4)
def test_fewer_ranks_go_on(comm, folder, checkpoints):
    checkpoints.save(5, Held(comm, 2, 2).parts, {}, own=comm.rank)
    checkpoints.close()
    fewer = comm.split(0 if comm.rank < 3 else None)
    if fewer:
        held = Held(fewer, 1, 1)
        held.clear()
        others = Checkpoints(folder, fewer)
        loaded = others.load(held.parts, others.newest())
        held.check()
        assert loaded.own == comm.rank
        others.close()
        alone = fewer.split(0 if comm.rank < 1 else None)
        held = alone and Held(alone, 1, 1)
        fewer.free()
    # more ranks than have written have no state of their own
