"""Records for TensorBoard and Weights & Biases, by stand-ins and by a reader; and lines before the first step."""

import re
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from numba.core import event

from collectives.runtime import kernels
from collectives.runtime.compiling import FirstCompilation
from models.report import Metrics, TrainingReport
from mpi_tests.helpers.launch import ROOT, environment
from training.config import Config
from training.logs import check_logs, log_sinks

RECORDS = [{"iter": 1, "max_iters": 2, "loss": 4.0, "mfu": None}, {"iter": 2, "val_loss": 3.5}]


def give(rank=0, **settings):
    """Give sinks the records of a run on a rank."""
    comm = SimpleNamespace(rank=rank, agreed=lambda name: nullcontext())
    with log_sinks(SimpleNamespace(config=Config(**settings), mesh=SimpleNamespace(comm=comm))) as sinks:
        for record in RECORDS:
            for sink in sinks:
                sink(record)


class Recorder:
    """A stand-in for TensorBoard's writer as well as for the module and the run of Weights & Biases."""

    def __init__(self, *arguments):
        self.calls = [*arguments]

    def init(self, **arguments):
        self.calls.append(arguments)
        return self

    def log(self, values, step):
        self.calls.append((step, values))

    def add_scalar(self, *arguments):
        self.calls.append(arguments)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.calls.append("closed")


def test_tensorboard_gets_numbers_by_their_steps(monkeypatch):
    writers = []

    def make_writer(folder):
        writers.append(Recorder(folder))
        return writers[0]

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=make_writer))
    give(tensorboard="runs")
    assert writers[0].calls == ["runs", ("loss", 4.0, 1), ("val_loss", 3.5, 2), "closed"]


def test_tensorboard_reads_them(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    give(tensorboard=str(tmp_path))
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 4.0)]
    assert [(event.step, event.value) for event in events.Scalars("val_loss")] == [(2, 3.5)]


def test_wandb_gets_the_settings_and_numbers_by_their_steps(monkeypatch):
    library = Recorder()
    monkeypatch.setitem(sys.modules, "wandb", library)
    give(wandb="gpt", seed=5)
    begun, *logged = library.calls
    assert (begun["project"], begun["config"]["seed"]) == ("gpt", 5)
    assert logged == [(1, {"loss": 4.0}), (2, {"val_loss": 3.5}), "closed"]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_what_is_not_installed_is_refused_where_it_is_needed(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    words = f"{name}=x needs {name}: pip install '.[logs]', or leave it out"
    with pytest.raises(ValueError, match=re.escape(words)):
        check_logs(Config(**{name: "x"}))
    check_logs(Config(**{name: "x"}), rank=1)
    give(rank=1, **{name: "x"})


def test_wandb_that_does_not_begin_is_one_line(monkeypatch):
    def init(**arguments):
        raise RuntimeError("no key\nis set")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    with pytest.raises(ValueError, match=r"wandb=gpt does not begin \(no key is set\): log in, or leave it out"):
        give(wandb="gpt")


def test_every_third_iteration_is_reported_and_the_last(tmp_path, capsys):
    sunk = []
    settings = {"max_iters": 5, "vocab_size": 64, "progress": False, "log_interval": 3, "sinks": [sunk.append]}
    with TrainingReport(str(tmp_path), **settings) as report:
        for number in range(1, 6):
            report.iteration(Metrics(number, 5, 1.0, *[0.0] * 4, None, *[0.0] * 3))
        report.validation(5, 3.5)
    assert [record["iter"] for record in report.records] == [3, 5, 5]
    assert sunk == report.records
    assert [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines()] == ["iter 3/5", *["iter 5/5"] * 2]


def test_kernels_that_are_compiled_are_said_once(capsys):
    listener = FirstCompilation()
    for dispatcher in (SimpleNamespace(py_func=np.sum), kernels.run, kernels.run):
        listener.on_start(event.Event("numba:compile", event.EventStatus.START, {"dispatcher": dispatcher}))
    assert capsys.readouterr().err == "collectives: compiling kernels, once; they stay on disk\n"


STARTED = {"Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), "MPICH": ("PMI_SIZE", "PMI_RANK")}


@pytest.mark.parametrize(("size", "rank"), STARTED.values(), ids=STARTED)
def test_the_first_line_comes_before_long_imports(tmp_path, size, rank):
    """Stand-ins for what takes long end the process, so that nothing can follow them."""
    for name in ("torch", "numpy", "mpi4py", "numba", "matplotlib"):
        (tmp_path / f"{name}.py").write_text(f"import sys; sys.exit('{name} is imported')")
    for number, said in (("0", "64 ranks are starting\n"), ("1", "")):
        env = {**environment(), "PYTHONPATH": str(tmp_path), size: "64", rank: number}
        ended = subprocess.run([sys.executable, "train.py"], cwd=ROOT, env=env, capture_output=True, text=True)
        assert ended.stdout == said
        assert "is imported" in ended.stderr
