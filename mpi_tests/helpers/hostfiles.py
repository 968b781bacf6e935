"""The repository's hostfiles and batch scripts."""

from pathlib import Path

from mpi_tests.helpers.launch import ROOT

FOLDER = ROOT / "hostfiles"


def entries(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if not line.startswith("#")]
