"""A virtual environment loads the MPI library that belongs to the mpirun on the PATH."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpi_tests.helpers.launch import ROOT


def link(tmp_path: Path, version: str, library: str) -> tuple[subprocess.CompletedProcess, Path]:
    """Run link_mpi.py in a new environment, with an mpirun of this version and its library under `system`."""
    system, venv = tmp_path / "system", tmp_path / "venv"
    for file, content in (
        (system / "bin" / "mpirun", f"#!/bin/sh\necho '{version}'\n"),
        (system / "lib" / library, ""),
    ):
        file.parent.mkdir(parents=True)
        file.write_text(content)
        file.chmod(0o755)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    path = {"PATH": f"{system / 'bin'}:/usr/bin:/bin"}
    command = [venv / "bin" / "python", ROOT / "hostfiles" / "link_mpi.py"]
    return subprocess.run(command, env=os.environ | path, capture_output=True, text=True), venv / "lib"


@pytest.mark.parametrize(
    ("version", "library", "name"),
    [
        ("mpirun (Open MPI) 4.1.4", "libmpi.so.40", "libmpi.so.40"),
        ("HYDRA build details:", "libmpi.so.12", "libmpi.so.12"),
        ("HYDRA build details:", "libmpich.so.12", "libmpi.so.12"),
    ],
)
def test_the_library_is_linked_by_the_name_that_mpi4py_asks_for(tmp_path, version, library, name):
    result, folder = link(tmp_path, version, library)
    assert result.returncode == 0, result.stderr
    assert (folder / name).readlink() == tmp_path / "system" / "lib" / library


@pytest.mark.parametrize("version", ["Unheard-of MPI 1.0", "mpirun (Open MPI) 4.1.4"])
def test_an_mpirun_without_a_known_library_is_refused(tmp_path, version):
    result, _ = link(tmp_path, version, "libother.so")
    assert result.returncode != 0
    assert f"no MPI library found beside {tmp_path}/system/bin/mpirun: take it off the PATH" in result.stderr


def test_nothing_is_linked_on_macos(monkeypatch):
    """On macOS, mpi4py's wheel finds Homebrew's MPI by itself."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(shutil, "which", lambda name: "/opt/homebrew/bin/mpirun")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("mpirun was asked for its version"))
    runpy.run_path(str(ROOT / "hostfiles" / "link_mpi.py"), run_name="__main__")
