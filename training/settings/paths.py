"""Check that a run can write to the paths in its settings."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from collectives.schedule.draw import refuse, refuse_picture
from training.settings.config import Config, picture_of


def check_trace(config: Config, rank: int) -> None:
    if config.trace and config.pp == 1:
        raise ValueError(f"trace={config.trace} traces a pipeline: use pp of 2 or more, or omit it")
    if config.trace and rank == 0:
        refuse(config.trace, "trace=")
        refuse_picture(picture_of(config.trace), "trace: its picture ")


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


def prepare_folders(config: Config, rank: int) -> None:
    """Check on rank 0, before the training begins, that its folders are writable."""
    if rank or config.eval_only:
        return
    for name in ("out_dir", "checkpoint_dir"):
        if folder := getattr(config, name):
            probe = Path(folder) / ".writable"
            try:
                probe.parent.mkdir(parents=True, exist_ok=True)
                probe.touch()
                probe.unlink()
            except OSError as error:
                why = "not a folder" if isinstance(error, FileExistsError) else error.strerror
                raise ValueError(f"{name} {folder} can't be written ({why}): pass another --{name}") from None


def check_files(config: Config, rank: int) -> None:
    """Raise ValueError on rank 0 for files that cannot be written, after the run's folder was created."""
    for name in ("report", "prometheus"):
        path = getattr(config, name)
        if path and config.eval_only:
            raise ValueError(f"{name}={path} applies to training: omit it with eval_only")
        if path and rank == 0:
            refuse(path, f"{name}=")
