"""The commands of docs/features.md, on smaller models, in ranks that run already."""

import re
import shlex
from importlib.util import find_spec

import numpy as np
import pytest

from models.flags import parse
from mpi_tests.helpers.launch import ROOT
from train import train
from training.config import Config

COMMANDS = re.findall(r"`mpirun -n (\d+) python train\.py ?([^`]*)`", (ROOT / "docs" / "features.md").read_text())
# A flag that comes again overrides the one before: of the commands', those that set a size lose.
SMALLER = (
    "--n_layer 4 --n_head 4 --n_embd 32 --block_size 16 --micro_batch_size 4 --max_iters 2 --warmup_iters 0 "
    "--val_fraction 0.002 --sample_tokens 2 --bucket_mb 0.02 --out_dir="
)


@pytest.mark.sizes(1, 2, 4, 8)
def test_every_command_of_the_table_trains(mpi_comm, tmp_path, monkeypatch):
    from collectives import Communicator

    assert len(COMMANDS) > 30
    monkeypatch.chdir(tmp_path)  # of rank 0 for what all write
    folder = mpi_comm.bcast(str(tmp_path))
    comm = Communicator(mpi_comm)
    for flags in (flags for number, flags in COMMANDS if int(number) == comm.size):
        if "--tensorboard" in flags and not find_spec("tensorboard"):
            continue
        here = re.sub(r"(--checkpoint_dir|--tensorboard) (\w+)", rf"\1 {folder}/\2", flags)
        _, records = train(parse(Config, "", shlex.split(f"{here} {SMALLER}")), comm)
        losses = [record["loss"] for record in records if "loss" in record]
        assert comm.rank or (len(losses) == 2 and np.isfinite(losses).all()), flags
        assert comm.rank or losses[0] == pytest.approx(np.log(256), rel=0.1), flags
    comm.free()
