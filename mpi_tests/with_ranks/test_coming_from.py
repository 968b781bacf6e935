"""Run the right-hand cells of docs/coming-from.md, except those on training; beside mpi4py, both sides."""

from functools import partial

import numpy as np
import pytest
import torch
from mpi4py import MPI

from mpi_tests.helpers.documented import COMMAND, code, rows
from mpi_tests.helpers.folders import shared_folder

ROWS = [(heading, *cells) for heading, cells in rows("coming-from.md") if cells[1] != "here"]
PYTHON = [(*row, code(row[2])) for row in ROWS if code(row[2]) and not COMMAND.match(code(row[2])[0])]
COUNT = 12  # elements, divisible among 1, 2 and 4 ranks
MISSING = "✗"


def arrays(comm):
    """Return a rank's arrays by their names on the page."""
    x = np.arange(COUNT) + 100.0 * comm.rank
    names = {"x": x, "y": np.zeros(COUNT), "part": x[: COUNT // comm.size].copy()}
    names |= {
        "t": torch.from_numpy(x.copy()),
        "u": torch.zeros(COUNT).double(),
        "v": torch.from_numpy(x[: COUNT // comm.size].copy()),
    }
    names |= {"flags": np.arange(COUNT) % (comm.rank + 2), "pairs": np.zeros(COUNT, "f4,i4"), "function": largest}
    names["pairs"]["f0"], names["pairs"]["f1"] = np.cos(x), comm.rank
    return names | {"counts": [COUNT // comm.size] * comm.size}


def largest(source, into, datatype):
    """Reduce by the maximum, with the signature required by MPI.Op.Create."""
    a, b = (np.frombuffer(memory) for memory in (source, into))
    b[:] = np.fmax(a, b)


def models(folder):
    """Return what the page's code has of a model: one of four layers, one with experts, an optimizer, batches."""
    from models.config import ModelConfig
    from models.mixture import Mixture
    from parallelism import Batch, Layer

    torch.manual_seed(0)  # the same on all ranks
    linear, gelu = torch.nn.Linear, torch.nn.GELU
    model = torch.nn.Sequential(linear(8, 32), gelu(), linear(32, 8), linear(8, 8), linear(8, 8))
    blocks = (("0", "1"), ("2",), ("3",), ("4",))

    def run(x, batch, names):
        for name in names:
            x = model[int(name)](batch.tokens if name == "0" else x)
        return (x - batch.targets).square().mean() if "4" in names else x

    mixture = torch.nn.Sequential(Mixture(ModelConfig(n_embd=8, num_experts=4, experts_per_token=2)))
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter)
    return {
        "model": model,
        "mixture": mixture,
        "optimizer": torch.optim.SGD(model.parameters()),
        "adamw": lambda parameters: torch.optim.AdamW([{"params": list(parameters)}], fused=True),
        "layers": [Layer(names[0], names, partial(run, names=names), cost=1) for names in blocks],
        "batches": [Batch(torch.randn(2, 3, 8), torch.randn(2, 3, 8)) for _ in range(4)],
        "rows": torch.randn(4, 8),
        "folder": folder,
    }


@pytest.fixture
def names(comm, mpi_comm, monkeypatch):
    """Return the names in the page's code, except arrays."""
    import collectives
    import collectives.horovod.torch as hvd
    import parallelism

    monkeypatch.setattr("collectives.world", lambda: comm)
    hvd.init(mpi_comm)
    yield {
        "collectives": collectives,
        "np": np,
        "MPI": MPI,
        "comm": comm,
        "hvd": hvd,
        **{name: getattr(parallelism, name) for name in parallelism.__all__},
    }
    hvd.shutdown()


@pytest.mark.sizes(2, 4)
def test_the_code_on_the_right_runs(names, comm, mpi_comm):
    assert len(ROWS) > 80
    for heading, theirs, here in ROWS:
        assert here.startswith(MISSING) != bool(code(here)), (heading, theirs)
    for heading, theirs, here, lines in PYTHON:
        with shared_folder(mpi_comm) as folder:
            scope = names | arrays(comm) | models(folder)
            for line in lines:
                run(line, scope, (heading, theirs, here))


def run(line, scope, where):
    try:
        exec(line, scope)
    except Exception as error:
        error.add_note(f"{where}")
        raise


@pytest.mark.sizes(1, 2, 4)
def test_mpi_and_these_leave_the_same_in_the_arrays(names, comm, mpi_comm):
    number = 0
    for heading, theirs, here, lines in PYTHON:
        if heading != "mpi4py" or "Reduce(x, y" in theirs or "Win" in theirs or "bcast" in theirs:
            continue
        by_mpi = arrays(comm) | {"MPI": MPI, "comm": mpi_comm}
        right = names | arrays(comm)
        for line in code(theirs):
            run(line.replace("MPI.COMM_WORLD", "comm"), by_mpi, theirs)
        for line in lines:
            run(line, right, here)
        for name in ("x", "y", "part", "flags", "pairs"):
            assert np.array_equal(by_mpi[name], right[name]), (theirs, name)
            number += not np.array_equal(by_mpi[name], arrays(comm)[name])
    assert number >= (16 if comm.size > 1 else 1)
