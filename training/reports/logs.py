"""Sinks of a run's records: TensorBoard and Weights & Biases, if installed, Prometheus, and the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collectives.bench.surroundings import surroundings
from collectives.job.system import write
from collectives.schedule.draw import refuse
from training.report import report
from training.reports.announcement import announcement
from training.reports.measured_sections import conditions_section, measured_sections
from training.reports.prometheus import TextFile
from training.settings.config import Config

if TYPE_CHECKING:
    from training.parallel.run import TrainingRun

Sink = Callable[[dict[str, Any]], None]  # takes a record of metrics.jsonl


def check_logs(config: Config, rank: int = 0) -> None:
    """Raise ValueError on rank 0 for loggers that are not installed."""
    for package in ("tensorboard", "wandb"):
        value = getattr(config, package)
        if value and rank == 0 and find_spec(package) is None:
            raise ValueError(f"{package}={value} needs {package}: pip install '.[logs]', or omit it")
    if config.tensorboard and rank == 0:
        try:
            Path(config.tensorboard).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"tensorboard={config.tensorboard}: {error.strerror}: use another folder") from None


@contextmanager
def log_sinks(run: TrainingRun) -> Iterator[list[Sink]]:
    """Open the sinks of the run's records, on rank 0.  Collective.

    Raises: InputError for a sink that does not start.
    """
    config, sinks = run.config, list[Sink]()
    around = conditions(run) if config.report else {}
    with ExitStack() as closing:
        with run.mesh.comm.agreed("logs"):
            if run.mesh.comm.rank == 0 and config.tensorboard:
                sinks.append(closing.enter_context(tensorboard(config)))
            if run.mesh.comm.rank == 0 and config.wandb:
                sinks.append(closing.enter_context(wandb(config)))
            if run.mesh.comm.rank == 0 and config.prometheus:
                tokens = run.sampler.batch_size * config.block_size
                sinks.append(TextFile(config.prometheus, run.out_dir or "", tokens))
            if run.mesh.comm.rank == 0 and config.report:
                sinks.append(closing.enter_context(html(run, around)))
        yield sinks


@contextmanager
def tensorboard(config: Config) -> Iterator[Sink]:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(config.tensorboard) as writer:

        def sink(record: dict[str, Any]) -> None:
            for name, value in numbers(record).items():
                writer.add_scalar(name, value, record["iter"])

        yield sink


@contextmanager
def wandb(config: Config) -> Iterator[Sink]:
    try:
        import wandb as library

        run = library.init(project=config.wandb, config=dict(vars(config)))
    except Exception as error:  # its own exceptions, as for a missing login
        words = " ".join(str(error).split())
        raise ValueError(f"wandb={config.wandb} does not start ({words}): log in, or omit it") from None
    with run:
        yield lambda record: run.log(numbers(record), step=record["iter"])


@contextmanager
def html(run: TrainingRun, around: dict[str, Any]) -> Iterator[Sink]:
    """Write the report of all records so far on leaving, also after an error or an interrupt."""
    records: list[dict[str, Any]] = []
    settings = vars(run.config)
    try:
        yield records.append
    finally:
        sections = [*measured_sections(run.profiler), conditions_section(settings, around, announcement(run))]
        try:
            write(run.config.report, report({run.out_dir or "this run": records}, sections))
        except OSError as error:
            print(f"{run.config.report} can't be written ({error.strerror}): the run continues without it", flush=True)


def conditions(run: TrainingRun) -> dict[str, Any]:
    """Return the conditions of the run other than its settings.  Collective."""
    return surroundings(run.mesh.comm, run.config.device.partition(":")[0])


def check_files(config: Config, rank: int) -> None:
    """Raise ValueError on rank 0 for files that cannot be written, after the run's folder was created."""
    for name in ("report", "prometheus"):
        path = getattr(config, name)
        if path and config.eval_only:
            raise ValueError(f"{name}={path} applies to training: omit it with eval_only")
        if path and rank == 0:
            refuse(path, f"{name}=")


def numbers(record: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a record that are plotted over the iterations."""
    return {name: value for name, value in record.items() if value is not None and name not in ("iter", "max_iters")}
