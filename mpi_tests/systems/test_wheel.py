"""The wheel contains all files that its programs read, and they run from it outside of a checkout."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mpi_tests.helpers.launch import ROOT, environment, find_mpirun, watched

pytestmark = pytest.mark.shares_cores
PACKAGES = ("collectives", "models", "parallelism", "teaching", "training")
FILES = {  # files that programs read
    "collectives/arrays": "*.cu",
    "collectives/bench": "*.[cj]s*",
    "parallelism/planner/configs": "*.toml",
    "collectives/job/hostfiles": "*",
    "teaching/page": "*.[chj][st]*",
    "teaching/page/scenes": "*.js",
}
SMALL = "--max_iters 2 --n_layer 2 --n_head 4 --n_embd 8 --block_size 8 --micro_batch_size 2 --sample_tokens 2"
SMALL += " --val_fraction 0.002 --out_dir out"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build from a copy, since a build leaves files among the sources, and picks up those of earlier builds."""
    folder = tmp_path_factory.mktemp("wheel")
    names = [*PACKAGES, "configs", "hostfiles", "pyproject.toml", "README.md", "LICENSE"]
    for name in names:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / "source" / name, **({"symlinks": True} if copy is shutil.copytree else {}))
    pip(["wheel", "--no-build-isolation", "--wheel-dir", folder, folder / "source"])
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def site(wheel):
    """Return a folder with only the wheel installed; other packages come from this environment.

    Its compiled kernels are the checkout's: Numba takes them for those of a source with the same time and size.
    """
    target = wheel.parent / "site"
    pip(["install", "--target", target, wheel])
    for source in (path for package in PACKAGES for path in (ROOT / package).rglob("*kernels.py")):
        installed = target / source.relative_to(ROOT)
        shutil.copystat(source, installed)
        for compiled in source.parent.glob(f"__pycache__/{source.stem}.*.nb[ci]"):
            shutil.copy(compiled, installed.parent / "__pycache__")
    return target


def pip(words):
    command = [sys.executable, "-m", "pip", *map(str, words), "--quiet", "--no-deps", "--no-index"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def outside(site, folder, *words):
    """Run a program from the wheel, outside of a checkout."""
    command = ["env", f"--chdir={folder}", f"PYTHONPATH={site}", *words]
    result = watched(command, environment(), 600)  # the first compiles kernels
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_it_holds_what_programs_read(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    for folder, pattern in FILES.items():
        expected = {f"{folder}/{path.name}" for path in (ROOT / folder).glob(pattern) if path.is_file()}
        assert expected, folder
        assert expected <= names
    assert {f"{package}/__init__.py" for package in PACKAGES} <= names
    assert not [name for name in names if name.startswith(("mpi_tests", "benchmarks", "train.py"))]


def test_its_scripts_and_license_are_named(wheel):
    archive = zipfile.ZipFile(wheel)
    texts = {Path(name).name: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name}
    assert "collectives-train = training.__main__:main" in texts["entry_points.txt"]
    assert "Apache License" in texts["LICENSE"]
    assert "License-Expression: Apache-2.0" in texts["METADATA"]


def test_it_trains_on_ranks(site, tmp_path):
    words = ["-n", 2, sys.executable, "-m", "training", "--config", "small", *SMALL.split()]
    assert "iter 2/2" in outside(site, tmp_path, find_mpirun(), *words)
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_text_is_continued_as_training_says(site, tmp_path):
    output = outside(site, tmp_path, sys.executable, "-m", "training", *SMALL.split())
    command = re.search(r"^for more: python (.*)$", output, re.MULTILINE)[1].split()
    assert outside(site, tmp_path, sys.executable, *command, "--prompt", "def ").startswith("def ")


@pytest.mark.parametrize(
    "module", ["training", "training.sample", "collectives.bench", "parallelism.planner", "teaching.page"]
)
def test_help_names_the_program_as_it_was_started(site, tmp_path, module):
    assert f"usage: python -m {module} " in outside(site, tmp_path, sys.executable, "-m", module, "--help")


def test_hostfiles_are_where_their_script_says(site, tmp_path):
    (folder,) = outside(site, tmp_path, sys.executable, site / "bin" / "collectives-hostfiles").splitlines()
    assert Path(folder) == site / "collectives" / "job" / "hostfiles"
    output = outside(site, tmp_path, "bash", "-c", f"source {folder}/activate.sh && echo $OMPI_MCA_mca_base_env_list")
    assert output == "PATH\n"


OWN_SCRIPT = """
import torch
from torch import nn

import collectives
import models
import parallelism.planner.ranks  # measures a block
import training
from parallelism import ColumnParallel, DataParallel, Mesh, RowParallel, parallelize

comm = collectives.world()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1))
mesh = Mesh(comm, tp=2)
parallelize(model, {"0": ColumnParallel(), "2": RowParallel()}, mesh.tp)
model = DataParallel(model, mesh.dp)
optimizer = torch.optim.SGD(model.parameters(), lr=training.LR)
x = torch.randn(16, 6)
for _ in range(models.STEPS):
    model.zero_grad()
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.5f}")
"""


def test_a_folder_with_models_and_training_of_its_own_trains_and_plans(site, tmp_path):
    """The packages of a user's own come first; those of the same names here, if installed, are not imported."""
    for name, line in (("models", "STEPS = 3"), ("training", "LR = 0.05")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(line)
    (tmp_path / "own.py").write_text(OWN_SCRIPT)
    words = ["-n", 2, sys.executable, "own.py"]
    first, second = re.findall(r"loss (\S+)", outside(site, tmp_path, find_mpirun(), *words))
    assert first == second
    planned = outside(site, tmp_path, sys.executable, "-m", "parallelism.planner", "--config", "small", "--gpus", 2)
    assert re.search(r"^mpirun -n 2 python -m training --config \S*/small.toml .*--dp", planned, re.MULTILINE)
