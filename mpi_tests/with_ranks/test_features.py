"""Run the training commands of the documentation and of the help, on smaller models, in the ranks of a test."""

import shlex
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import training.main
from mpi_tests.helpers import documents
from mpi_tests.helpers.documented import COMMAND, code, losses, rows
from mpi_tests.helpers.ranks import poll
from parallelism.planner.settings import parse
from training.config import Config

CELLS = [cell for page in ("features.md", "coming-from.md") for _, (_, *cells) in rows(page) for cell in cells]
IN_CELLS = {match.groups() for cell in CELLS for part in code(cell)[:1] if (match := COMMAND.match(part))}
IN_BLOCKS = {COMMAND.match(each.text).groups() for each in documents.COMMANDS if each.elsewhere == documents.IN_RANKS}
IN_HELP = {match.groups() for line in training.main.__doc__.splitlines() if (match := COMMAND.match(line))}
COMMANDS = sorted(IN_CELLS | IN_BLOCKS | IN_HELP)


@pytest.mark.sizes(1, 2, 4, 8)
def test_every_command_trains(mpi_comm, tmp_path, monkeypatch):
    from collectives import Communicator

    assert len(IN_CELLS) > 40
    assert len(IN_BLOCKS) > 8
    assert len(IN_HELP) > 4
    monkeypatch.chdir(tmp_path)  # rank 0's folder for files of all ranks
    folder = mpi_comm.bcast(str(tmp_path))
    comm = Communicator(mpi_comm)
    for index, flags in enumerate(flags for number, flags in COMMANDS if int(number) == comm.size):
        if "--tensorboard" in flags and not find_spec("tensorboard"):
            continue
        actual = losses(flags, comm, f"{folder}/{index}")
        assert comm.rank or (len(actual) == 2 and np.isfinite(actual).all()), flags
        assert comm.rank or actual[0] == pytest.approx(np.log(256), rel=0.1), flags
    comm.free()


@pytest.mark.sizes(4)
def test_commands_that_read_and_write_files(mpi_comm, tmp_path, monkeypatch):
    """Follow the pages in one folder; each command trains on as many ranks, and rank 0 starts the other programs."""
    folder = Path(mpi_comm.bcast(str(tmp_path)))
    if mpi_comm.rank == 0:
        documents.checkout(folder)
    poll(mpi_comm.Ibarrier().Test)
    monkeypatch.chdir(folder)
    texts = [each.text for each in documents.COMMANDS if each.elsewhere == documents.IN_FOLDER]
    assert len(texts) > 10
    for text in dict.fromkeys(texts):
        if match := COMMAND.match(documents.small(text)):
            check_that_it_trains(mpi_comm, int(match[1]), shlex.split(match[2]))
        elif mpi_comm.rank == 0:
            documents.run(text, folder)
        poll(mpi_comm.Ibarrier().Test)
        assert not documents.unwritten(text, folder), text


def check_that_it_trains(mpi_comm, num_ranks, flags):
    from collectives import Communicator

    part = mpi_comm.Split(mpi_comm.rank < num_ranks)
    if mpi_comm.rank < num_ranks:
        comm = Communicator(part)
        _, records = training.main.train(parse(Config, "", flags), comm)
        comm.free()
        steps = {record["iter"]: record["loss"] for record in records if "loss" in record}
        assert comm.rank or list(steps) == ([3] if "--resume" in flags else [1, 2]), flags
        assert np.isfinite(list(steps.values())).all()
    part.Free()
