"""A run's records for TensorBoard and for Weights & Biases, where these are installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.config import Config

if TYPE_CHECKING:
    from training.run import TrainingRun

Sink = Callable[[dict[str, Any]], None]  # of a record, as metrics.jsonl has it


def check_logs(config: Config, rank: int = 0) -> None:
    """Raise ValueError on rank 0 for what is not installed."""
    for package in ("tensorboard", "wandb"):
        value = getattr(config, package)
        if value and rank == 0 and find_spec(package) is None:
            raise ValueError(f"{package}={value} needs {package}: pip install '.[logs]', or leave it out")
    if config.tensorboard and rank == 0:
        try:
            Path(config.tensorboard).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"tensorboard={config.tensorboard}: {error.strerror}: use another folder") from None


@contextmanager
def log_sinks(run: TrainingRun) -> Iterator[list[Sink]]:
    """What takes the run's records, on rank 0.  Collective.

    Raises: InputError for what does not begin.
    """
    config, sinks = run.config, list[Sink]()
    with ExitStack() as closing:
        with run.mesh.comm.agreed("logs"):
            if run.mesh.comm.rank == 0 and config.tensorboard:
                sinks.append(closing.enter_context(tensorboard(config)))
            if run.mesh.comm.rank == 0 and config.wandb:
                sinks.append(closing.enter_context(wandb(config)))
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
    except Exception as error:  # of its own kinds, as where nobody is logged in
        words = " ".join(str(error).split())
        raise ValueError(f"wandb={config.wandb} does not begin ({words}): log in, or leave it out") from None
    with run:
        yield lambda record: run.log(numbers(record), step=record["iter"])


def numbers(record: dict[str, Any]) -> dict[str, float]:
    """What of a record is drawn over its iterations."""
    return {name: value for name, value in record.items() if value is not None and name not in ("iter", "max_iters")}
