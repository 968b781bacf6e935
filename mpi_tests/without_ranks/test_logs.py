"""Records for TensorBoard, Weights & Biases and Prometheus, with stand-ins and parsers; the first line of output."""

import math
import re
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from numba.core import event

from collectives.runtime.backends import kernels
from mpi_tests.helpers.launch import ROOT, environment
from mpi_tests.helpers.pages import Page
from mpi_tests.helpers.trained import facts
from training.reports.html import HTMLReport
from training.reports.log import RunLog, open_log
from training.reports.metrics import Metrics, Validation
from training.reports.prometheus import TextFile
from training.reports.sink import Sink
from training.settings.config import Config
from training.settings.paths import check_files, check_logs

RECORDS = [{"iter": 1, "max_iters": 2, "loss": 4.0, "mfu": None}, {"iter": 2, "val_loss": 3.5}]


FACTS = facts()


def give(rank=0, **settings):
    """Pass the records of a run to the sinks of a rank."""
    comm = SimpleNamespace(rank=rank, agreed=lambda name: nullcontext())
    with open_log(comm, FACTS._replace(config=Config(**settings))) as log:
        for record in RECORDS:
            log.record(record)


class Recorder:
    """A stand-in for TensorBoard's writer and for the module and the run of Weights & Biases."""

    def __init__(self, *arguments):
        self.calls = [*arguments]

    def init(self, **arguments):
        self.calls.append(arguments)
        return self

    def log(self, values, step):
        self.calls.append((step, values))

    def add_scalar(self, *arguments):
        self.calls.append(arguments)

    def close(self):
        self.calls.append("closed")

    def finish(self, exit_code):
        self.calls.append(f"finished with {exit_code}")


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
    init, *logged = library.calls
    assert (init["project"], init["config"]["seed"]) == ("gpt", 5)
    assert logged == [(1, {"loss": 4.0}), (2, {"val_loss": 3.5}), "finished with 0"]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_what_is_not_installed_is_refused_where_it_is_needed(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    words = f"{name}=x needs {name}: pip install '.[logs]', or omit it"
    with pytest.raises(ValueError, match=re.escape(words)):
        check_logs(Config(**{name: "x"}))
    check_logs(Config(**{name: "x"}), rank=1)
    give(rank=1, **{name: "x"})


def test_wandb_that_does_not_begin_is_one_line(monkeypatch):
    def init(**arguments):
        raise RuntimeError("no key\nis set")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    with pytest.raises(ValueError, match=r"wandb=gpt does not start \(no key is set\): log in, or omit it"):
        give(wandb="gpt")


# A line of Prometheus's text format: a name, labels, a number.
SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)\{run="((?:[^"\\\n]|\\["\\n])*)"\} (\S+)')
METRICS = {"loss": 2.5, "lr": 1e-3, "mfu": None, "compute_ms": 20.0, "memory_mib": 3.0, "bubble": 0.25}


def write_records(path, run="out"):
    """Write two records; return the samples of the file, with their HELP and TYPE, by name."""
    sink = TextFile(str(path))
    sink.open(FACTS._replace(config=Config(block_size=16), out_dir=run), print)
    sink.write({"iter": 7, "max_iters": 9, **METRICS})
    sink.write({"iter": 7, "val_loss": math.nan})
    text = path.read_text()
    assert text.endswith("\n")
    lines = text.splitlines()
    samples = {}
    for head, kind, sample in zip(*[iter(lines)] * 3, strict=True):
        name, label, number = SAMPLE.fullmatch(sample).groups()
        assert re.fullmatch(rf"# HELP {name} \S.*", head)
        (word,) = re.fullmatch(rf"# TYPE {name} (counter|gauge)", kind).groups()
        assert (word == "counter") == name.endswith("_total")
        samples[name] = (label, float(number))
    return samples


def test_prometheus_has_the_latest_numbers_in_base_units(tmp_path):
    samples = {name: number for name, (_, number) in write_records(tmp_path / "run.prom").items()}
    assert math.isnan(samples.pop("training_validation_loss_nats"))
    assert samples == {
        "training_steps_total": 7,
        "training_planned_steps": 9,
        "training_tokens_total": 7 * 64,
        "training_loss_nats": 2.5,
        "training_learning_rate": 1e-3,
        "training_compute_seconds": pytest.approx(0.02),
        "training_peak_memory_bytes": 3 << 20,
        "training_pipeline_bubble_ratio": 0.25,
    }
    assert [*tmp_path.iterdir()] == [tmp_path / "run.prom"]


def test_prometheus_s_own_parser_reads_them(tmp_path):
    parser = pytest.importorskip("prometheus_client.parser")
    samples = write_records(tmp_path / "run.prom", 'a "b"\\c\n')
    families = [*parser.text_string_to_metric_families((tmp_path / "run.prom").read_text())]
    read = {sample.name: sample for family in families for sample in family.samples}
    assert read.keys() == samples.keys()
    assert {sample.labels["run"] for sample in read.values()} == {'a "b"\\c\n'}
    assert read["training_tokens_total"].value == 7 * 64
    assert {family.type for family in families if family.name in ("training_steps", "training_tokens")} == {"counter"}


def test_a_metrics_file_that_cannot_be_written_is_said_once(tmp_path, capsys):
    sink = TextFile(str(tmp_path / "none" / "run.prom"))
    sink.open(FACTS, print)
    sink.write({"iter": 1})
    sink.write({"iter": 2})
    assert capsys.readouterr().out.count("can't be written (No such file or directory): the run continues") == 1


@pytest.mark.parametrize("name", ["report", "prometheus"])
def test_files_of_a_run_are_refused_ahead_of_it(tmp_path, name):
    path = tmp_path / "none" / "file"
    with pytest.raises(
        ValueError, match=re.escape(f"{name}={path} can't be written (No such file or directory): pass")
    ):
        check_files(Config(**{name: str(path)}), rank=0)
    check_files(Config(**{name: str(path)}), rank=1)


def test_an_interrupt_leaves_the_report_of_what_there_is(tmp_path):
    path = tmp_path / "report.html"

    def interrupted():
        with RunLog(FACTS, [HTMLReport(str(path))]) as log:
            log.open()
            log.record(RECORDS[0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    page = Page(path.read_text())
    assert [row["loss"] for row in page.tables["records"]] == [4.0]
    assert {row["what"]: row["value"] for row in page.tables["machine"]}["run"] == FACTS.announcement


class ListSink(Sink):
    """Keeps the records, and notes its end."""

    def open(self, facts, show):
        self.records = []

    def write(self, record):
        self.records.append(record)

    def close(self):
        self.records.append("closed")


class BrokenSink(Sink):
    def open(self, facts, show):
        raise ValueError("does not start")


def test_a_sink_that_does_not_start_closes_those_before_it():
    first = ListSink("")
    with RunLog(FACTS, [first, BrokenSink("")]) as log, pytest.raises(ValueError, match="does not start"):
        log.open()
    assert first.records == ["closed"]


def test_every_third_iteration_is_reported_and_the_last(capsys):
    sink = ListSink("")
    with RunLog(FACTS._replace(config=Config(max_iters=5, log_interval=3)), [sink]) as log:
        log.open()
        for number in range(1, 6):
            log.step(Metrics(number, 5, 1.0, *[0.0] * 4, None, *[0.0] * 3))
        log.validation(5, Validation(3.5))
    assert [record["iter"] for record in log.records] == [3, 5, 5]
    assert sink.records == [*log.records, "closed"]
    assert [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines()] == ["iter 3/5", *["iter 5/5"] * 2]


def test_kernels_that_are_compiled_are_said_once(capsys):
    listener = kernels.FirstCompilation()
    for dispatcher in (SimpleNamespace(py_func=np.sum), kernels.run, kernels.run):
        listener.on_start(event.Event("numba:compile", event.EventStatus.START, {"dispatcher": dispatcher}))
    assert capsys.readouterr().err == "collectives: compiling kernels, once; they stay on disk\n"


STARTED = {"Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), "MPICH": ("PMI_SIZE", "PMI_RANK")}


@pytest.mark.parametrize(("size", "rank"), STARTED.values(), ids=STARTED)
def test_the_first_line_comes_before_long_imports(tmp_path, size, rank):
    """Stand-ins for slow modules end the process, so that no later output is possible."""
    for name in ("torch", "numpy", "mpi4py", "numba", "matplotlib"):
        (tmp_path / f"{name}.py").write_text(f"import sys; sys.exit('{name} is imported')")
    for number, line in (("0", "64 ranks are starting\n"), ("1", "")):
        env = {**environment(), "PYTHONPATH": str(tmp_path), size: "64", rank: number}
        result = subprocess.run([sys.executable, "train.py"], cwd=ROOT, env=env, capture_output=True, text=True)
        assert result.stdout == line
        assert "is imported" in result.stderr
