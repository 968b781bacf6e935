"""Public names of parallelism/: each is there, documented, and imported only when it is used."""

import ast
import importlib
import pkgutil
import subprocess
import sys

import pytest

import parallelism
from mpi_tests.helpers.launch import ROOT

INSIDE = [module.name for module in pkgutil.iter_modules(parallelism.__path__) if module.ispkg]
PACKAGES = ["parallelism", *(f"parallelism.{name}" for name in INSIDE)]


@pytest.mark.parametrize("package", PACKAGES)
def test_each_name_is_there_and_has_a_docstring_of_its_own(package):
    module = importlib.import_module(package)
    assert module.__all__
    assert len({*module.__all__}) == len(module.__all__)
    for name in module.__all__:
        value = getattr(module, name)
        assert value.__name__ == name
        assert "__doc__" in vars(value) if isinstance(value, type) else value.__doc__, name
        assert value.__doc__.strip()
        assert not value.__doc__.startswith(f"{name}("), name  # what a dataclass has without one
    assert {*module.__all__} <= {*dir(module)}
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        module.nothing  # noqa: B018


def test_what_the_whole_exports_its_packages_do_too():
    """Mesh and placements, which are of no package, are the only exceptions."""
    inside = {name for package in PACKAGES[1:] for name in importlib.import_module(package).__all__}
    alone = {name for name in parallelism.__all__ if name not in inside}
    assert alone == {"Mesh", "Replicate", "Shard", "Within", "place"}


def test_packages_alone_import_neither_torch_nor_mpi():
    code = f"import sys, {', '.join(PACKAGES)}; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "parallelism.planner" in result.stdout
    assert not {"torch", "mpi4py", "numpy", "collectives.communicator"} & {*result.stdout.split()}


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.py")), ids=lambda path: path.name)
def test_examples_import_public_names(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "parallelism":
            assert {alias.name for alias in node.names} <= {*importlib.import_module(node.module).__all__}
