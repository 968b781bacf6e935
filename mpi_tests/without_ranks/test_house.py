"""The architecture check: it reports each kind of violation in a small tree in one line."""

import pytest

from mpi_tests.helpers import house
from mpi_tests.helpers.house import PACKAGES, Floor, House, Limits, main

TREE = {
    "low/__init__.py": "",
    "low/pure.py": "class Move:\n    pass\n",
    "low/run.py": "import numpy\n\nfrom low.pure import Move\n",
    "high/__init__.py": "",
    "high/top.py": "import low.run\n",
    "tests/__init__.py": "",
}
NO_LIMITS = {}
LIMITS = {"low": Limits(lines=5, files=3, entries=2)}
FLOORS = {
    "pure": Floor(("low.pure",), without=("numpy",)),
    "low": Floor(("low",), imports=("pure",)),
    "high": Floor(("high",), imports=("low",)),
}


@pytest.fixture
def violations(tmp_path):
    """Return a function that yields the violations in the small tree, with some of its files replaced."""

    def look(changes=None, limits=NO_LIMITS, floors=FLOORS, same_class=None):
        for name, text in (TREE | (changes or {})).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return House(tmp_path, ["low", "high"]).violations(limits, floors, same_class or {})

    return look


def test_a_tidy_tree_has_none(violations):
    assert violations(limits=LIMITS) == []


@pytest.mark.parametrize(
    ("limits", "line"),
    [
        (Limits(4, 3, 2), "low/ has 5 lines: the limit is 4"),
        (Limits(5, 2, 2), "low/ has 3 files: the limit is 2"),
        (Limits(5, 3, 1), "low/ has 2 entries: the limit is 1"),
    ],
)
def test_limits(violations, limits, line):
    assert violations(limits={"low": limits}) == [line]


def test_entries_are_folders_and_other_files_too(violations):
    lines = violations({"low/part/__init__.py": "", "low/kernel.cu": "int x;\n", "low/__pycache__/run.pyc": ""}, LIMITS)
    assert lines == ["low/ has 4 files: the limit is 3", "low/ has 4 entries: the limit is 2"]


CIRCLES = {
    "two modules": (
        {"high/top.py": "import high.other\n", "high/other.py": "if True:\n    from high.top import x\n"},
        "high/other.py: imports itself, high.other -> high.top -> high.other",
    ),
    "relative": (
        {"high/top.py": "from . import other\n", "high/other.py": "from .top import x\n"},
        "high/other.py: imports itself, high.other -> high.top -> high.other",
    ),
    "a registry in an __init__": (
        {"high/__init__.py": "from high import top\n", "high/top.py": "from high import table\n"},
        "high/__init__.py: imports itself, high -> high.top -> high",
    ),
    "the __init__ around what is imported": (
        {"high/part/__init__.py": "import high.top\n", "high/part/a.py": "", "high/top.py": "import high.part.a\n"},
        "high/part/__init__.py: imports itself, high.part -> high.top -> high.part",
    ),
    "a longer one beside": (
        {
            "high/top.py": "import high.a\n",
            "high/a.py": "import high.b\nimport high.top\n",
            "high/b.py": "import high.c\n",
            "high/c.py": "import high.a\n",
        },
        "high/a.py: imports itself, high.a -> high.top -> high.a (2 more modules are in circles with these)",
    ),
}


@pytest.mark.parametrize(("changes", "line"), CIRCLES.values(), ids=CIRCLES)
def test_circles(violations, changes, line):
    assert violations(changes) == [line]


@pytest.mark.parametrize(
    "text",
    [
        "def late():\n    import high.top\n",
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    import high.top\n",
        "import typing\n\nif typing.TYPE_CHECKING:\n    import high.top\n",
    ],
)
def test_circles_through_functions_and_types(violations, text):
    changes = {"high/top.py": "import high.other\n", "high/other.py": text}
    assert violations(changes) == ["high/other.py: imports itself, high.other -> high.top -> high.other"]


def test_members_may_import_each_other_below_an_init_that_imports_all(violations):
    members = {"high/top.py": "from high import other\n", "high/other.py": ""}
    assert violations({"high/__init__.py": "from high import other, top\n", **members}) == []


def test_class_names_in_two_files(violations):
    changes = {"high/top.py": "x = 1\n\nclass Move:\n    class Inner: pass\n", "high/a.py": "class Inner: pass\n"}
    assert violations(changes) == ["low/pure.py:1: class Move is also defined in high/top.py:3: rename all but one"]
    assert violations(changes, same_class={"Move": "the same move"}) == []


FLOOR_LINES = {
    "upward": (
        {"low/run.py": "import high.top\n", "high/top.py": ""},
        "low/run.py:1: imports high.top, of floor high: floor low may import pure",
    ),
    "upward, later": (
        {"low/run.py": "def late():\n    from high import top\n", "high/top.py": ""},
        "low/run.py:2: imports high.top, of floor high: floor low may import pure",
    ),
    "upward, for types": (
        {
            "low/run.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from high.top import T\n",
            "high/top.py": "",
        },
        "low/run.py:3: imports high.top, of floor high: floor low may import pure",
    ),
    "within a package": (
        {"low/run.py": "", "low/pure.py": "from low.run import x, y\n"},
        "low/pure.py:1: imports low.run, of floor low: floor pure may import no other",
    ),
    "a floor left out": (
        {"high/top.py": "import low.pure\n"},
        "high/top.py:1: imports low.pure, of floor pure: floor high may import low",
    ),
    "a library": (
        {"low/pure.py": "import numpy.linalg\n"},
        "low/pure.py:1: imports numpy.linalg, which floor pure does without",
    ),
    "tests": (
        {"high/top.py": "from tests import helpers\n"},
        "high/top.py:1: imports tests, on no floor: floor high may import low",
    ),
}


@pytest.mark.parametrize(("changes", "line"), FLOOR_LINES.values(), ids=FLOOR_LINES)
def test_floors(violations, changes, line):
    assert violations(changes) == [line]


def test_a_library_may_be_imported_for_types(violations):
    assert violations({"low/pure.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import numpy\n"}) == []


def test_a_floor_is_a_package_as_well_as_a_module(violations):
    floors = FLOORS | {"pure": Floor(("low.pure", "low.part"), without=("numpy",))}
    lines = violations({"low/part/__init__.py": "", "low/part/move.py": "import numpy\n"}, floors=floors)
    assert lines == ["low/part/move.py:1: imports numpy, which floor pure does without"]


def test_a_table_that_is_out_of_date(violations):
    floors = FLOORS | {"pure": Floor(("low.pure", "low.gone"))}
    assert violations(floors=floors) == ["FLOORS names low.gone, which is not there: edit the table"]
    unplaced = {name: floor for name, floor in FLOORS.items() if name != "high"}
    assert violations(floors=unplaced) == [
        "high/__init__.py: is on no floor of FLOORS",
        "high/top.py: is on no floor of FLOORS",
    ]


def test_the_command_fails_where_there_is_one(tmp_path, capsys):
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    modules = {module for floor in house.FLOORS.values() for module in floor.modules}
    for module in sorted(modules, key=len, reverse=True):  # a package's contents before the package
        folder = tmp_path / module.replace(".", "/")
        path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    assert main(tmp_path) == 0
    assert capsys.readouterr().err == ""
    (tmp_path / "models" / "config.py").write_text("import training\n")
    assert main(tmp_path) == 1
    line = "models/config.py:1: imports training, of floor training: floor models may import no other\n"
    assert capsys.readouterr().err == line


def test_parallelism_knows_no_model_and_imports_no_driver_from_below(tmp_path):
    modules = {
        "models/gpt.py": "",
        "parallelism/__init__.py": "",
        "parallelism/step/a.py": "if TYPE_CHECKING:\n    import models.gpt\n",
        "parallelism/zero/a.py": "def f():\n    import parallelism.pipeline.driver\n",
        "parallelism/pipeline/driver.py": "import parallelism.zero.a\n",
    }
    for path, text in modules.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    lines = House(tmp_path, ["models", "parallelism"]).imports_between_floors(house.FLOORS)
    assert [line.partition(": floor")[0] for line in lines if "not there" not in line] == [
        "parallelism/step/a.py:2: imports models.gpt, of floor models",
        "parallelism/zero/a.py:2: imports parallelism.pipeline.driver, of floor pipeline",
    ]
