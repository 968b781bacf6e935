"""Check that a run can write to the paths in its settings."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from collectives.schedule.draw import refuse, refuse_picture
from training.settings.derived import picture_of
from training.settings.fields import RunSettings


def check_profile(settings: RunSettings, rank: int) -> None:
    if settings.profile and rank == 0:
        refuse(settings.profile, "profile=")
        refuse_picture(picture_of(settings.profile), "profile: its picture ")


def check_logs(settings: RunSettings, rank: int = 0) -> None:
    """Raise ValueError on rank 0 for loggers that are not installed."""
    for package in ("tensorboard", "wandb"):
        value = getattr(settings, package)
        if value and rank == 0 and find_spec(package) is None:
            raise ValueError(f"{package}={value} needs {package}: pip install '.[logs]', or omit it")
    if settings.tensorboard and rank == 0:
        try:
            Path(settings.tensorboard).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"tensorboard={settings.tensorboard}: {error.strerror}: use another folder") from None


def prepare_folders(settings: RunSettings, rank: int) -> None:
    """Check on rank 0, before the training begins, that its folders are writable."""
    if rank or settings.eval_only:
        return
    for name in ("out_dir", "checkpoint_dir"):
        if folder := getattr(settings, name):
            probe = Path(folder) / ".writable"
            try:
                probe.parent.mkdir(parents=True, exist_ok=True)
                probe.touch()
                probe.unlink()
            except OSError as error:
                why = "not a folder" if isinstance(error, FileExistsError) else error.strerror
                raise ValueError(f"{name} {folder} can't be written ({why}): pass another --{name}") from None


def check_files(settings: RunSettings, rank: int) -> None:
    """Raise ValueError on rank 0 for files that cannot be written, after the run's folder was created."""
    for name in ("report", "prometheus"):
        path = getattr(settings, name)
        if path and rank == 0:
            refuse(path, f"{name}=")
