"""The recipes in containers/ run the same steps, and have the dependencies of pyproject.toml."""

import re
import runpy
import sys
import tomllib
from contextlib import nullcontext
from types import ModuleType

import pytest

from mpi_tests.container import DOCKERFILE, instructions
from mpi_tests.helpers.launch import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = {"torch": "+torch", "plots": "+plots", "train": "+train"}
REQUIREMENT = re.compile(r"([a-z0-9_]+)>=([\d.]+)$")


def test_apptainer_installs_as_docker_does():
    steps = [words for name, words in instructions(DOCKERFILE.read_text()) if name == "RUN"]
    recipe = (ROOT / "containers" / "collectives.def").read_text()
    sections = dict(re.findall(r"^%(\w+)\n((?:    .*\n)+)", recipe, re.MULTILINE))
    post, test = ([line.strip() for line in sections[name].splitlines()][1:] for name in ("post", "test"))
    assert len(steps) == 5
    assert [*post, *test] == steps
    assert "From: debian:bookworm-slim\n" in recipe
    assert dict(instructions(DOCKERFILE.read_text()))["FROM"] == "debian:bookworm-slim"


def directive(declared):
    return lambda words, **more: declared.append((words, more))


@pytest.fixture
def recipe(monkeypatch):
    """Return the arguments of the Spack recipe's directives by their names, as recorded by a stand-in for Spack."""
    declared = {}
    spack, systems = ModuleType("spack.package"), ModuleType("spack_repo.builtin.build_systems.python")
    systems.PythonPackage = object
    for name in ("version", "license", "variant", "depends_on", "requires"):
        setattr(spack, name, directive(declared.setdefault(name, [])))
    spack.default_args = lambda **_: nullcontext()
    for module in (spack, systems):
        parts = module.__name__.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert "PyHandwrittenCollectives" in runpy.run_path(str(ROOT / "containers" / "spack" / "package.py"))
    return declared


def test_spack_s_recipe_needs_what_the_project_does(recipe):
    project = PROJECT["project"]
    requirements = {(text, None) for text in [*project["dependencies"], *PROJECT["build-system"]["requires"]]}
    requirements |= {(text, when) for extra, when in EXTRAS.items() for text in project["optional-dependencies"][extra]}
    matches = [(REQUIREMENT.match(text), when) for text, when in requirements]
    expected = {(f"py-{match[1].replace('_', '-')}@{match[2]}:", when) for match, when in matches if match}
    dependencies = {(name, more.get("when")) for name, more in recipe["depends_on"] if name.startswith("py-")}
    assert len(expected) == 10
    assert dependencies == expected
    assert (f"python@{project['requires-python'].removeprefix('>=')}:", None) in {
        (name, more.get("when")) for name, more in recipe["depends_on"]
    }
    assert {f"+{name}" for name, _ in recipe["variant"]} == {*EXTRAS.values()}


def test_spack_s_recipe_is_of_this_version(recipe):
    import collectives

    assert recipe["version"] == [(collectives.__version__, {})]
    assert recipe["license"] == [(PROJECT["project"]["license"], {})]
