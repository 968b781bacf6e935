"""Run the training commands of the documentation's tables and blocks, on smaller models, in the ranks of a test."""

from importlib.util import find_spec

import numpy as np
import pytest

from mpi_tests.helpers import documents
from mpi_tests.helpers.documented import COMMAND, code, losses, rows

CELLS = [cell for page in ("features.md", "coming-from.md") for _, (_, *cells) in rows(page) for cell in cells]
IN_CELLS = {match.groups() for cell in CELLS for part in code(cell)[:1] if (match := COMMAND.match(part))}
IN_BLOCKS = {COMMAND.match(each.text).groups() for each in documents.COMMANDS if each.elsewhere == documents.IN_RANKS}
COMMANDS = sorted(IN_CELLS | IN_BLOCKS)


@pytest.mark.sizes(1, 2, 4, 8)
def test_every_command_trains(mpi_comm, tmp_path, monkeypatch):
    from collectives import Communicator

    assert len(IN_CELLS) > 40
    assert len(IN_BLOCKS) > 8
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
