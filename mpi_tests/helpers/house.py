"""Enforce the architecture: the size of collectives/, allowed imports, and unique class names.

python -m mpi_tests.helpers.house

Prints a line for each violation, and exits with 1 if there are any:

- limits: lines, files and entries at the top of a package (`LIMITS`);
- circles: import cycles between modules of the packages, by imports in functions and for types, too;
- names: a class name that two files define;
- floors: an import that `FLOORS` does not allow.  Edit this table when modules move.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("collectives", "parallelism", "models", "training", "teaching")


class Limits(NamedTuple):
    """Maximum size of a package."""

    lines: int
    files: int
    entries: int  # at its top, beside __init__.py


LIMITS = {
    "collectives": Limits(lines=25_550, files=148, entries=13),
    "parallelism": Limits(lines=14_400, files=113, entries=14),
}


class Floor(NamedTuple):
    """A layer of modules, and the layers and libraries that they may import.

    A module belongs to the floor that names it or its innermost enclosing package: `collectives.schedule.moves` stands
    for moves.py as well as for all of moves/.
    """

    modules: tuple[str, ...]
    imports: tuple[str, ...] = ()  # other floors
    without: tuple[str, ...] = ()  # libraries that it must not import


MPI_AND_ARRAYS = ("mpi4py", "numpy", "cupy", "torch", "ml_dtypes", "numba")
PURE_SCHEDULES = ("moves", "spec", "proof", "network", "cost", "draw", "events")
PURE = tuple(f"collectives.schedule.{name}" for name in PURE_SCHEDULES)

BELOW = ("pure", "settings", "job")
ALL = (*BELOW, "choice", "arrays", "runtime", "face")
PARALLEL = (
    "lazy",
    "mesh",
    "buffers",
    "placement",
    "step",
    "numerics",
    "data",
    "zero",
)  # each may import those before it
SCHEDULES = ("lazy", "step", "pipeline schedules")
DIVIDED = ("sequence", "experts", "tensor")
PARALLELISM = (*PARALLEL, *DIVIDED, "pipeline schedules", "pipeline", "checkpoint", "planner", "parallelism")
BELOW_TRAINING = (*ALL, "torch", *PARALLELISM, "models")
ROOMS = (
    *("layouts", "ranges", "tokens", "optimizers", "fields", "weights", "lora", "optim", "reports"),
    *("health", "parallel", "config"),
)
FLOORS = {
    "pure": Floor(("collectives.algorithms", *PURE), without=MPI_AND_ARRAYS),
    "choice": Floor(("collectives.runtime.choose",), imports=(*BELOW, "graphs"), without=MPI_AND_ARRAYS),
    "graphs": Floor(("collectives.graphs",), imports=BELOW, without=MPI_AND_ARRAYS),
    "simulation": Floor(("collectives.schedule",), imports=(*BELOW, "choice"), without=("mpi4py", "cupy", "torch")),
    "settings": Floor(("collectives.job.settings", "collectives.job.system"), without=MPI_AND_ARRAYS),
    "job": Floor(("collectives.job",), imports=("settings",), without=("numpy", "cupy", "torch")),
    "arrays": Floor(("collectives.arrays",), imports=BELOW),
    "runtime": Floor(("collectives.runtime",), imports=(*BELOW, "choice", "arrays")),
    "face": Floor(("collectives.communicator", "collectives"), imports=(*BELOW, "choice", "arrays", "runtime")),
    "torch": Floor(("collectives.torch_backend", "collectives.torch"), imports=ALL),
    "horovod": Floor(("collectives.horovod",), imports=ALL),
    "mpi4py": Floor(("collectives.mpi4py",), imports=ALL),
    "charts": Floor(("collectives.bench.page",), without=MPI_AND_ARRAYS),
    "surroundings": Floor(("collectives.bench.surroundings",), imports=ALL),
    "programs": Floor(
        ("collectives.bench", "collectives.doctor"),
        imports=(*ALL, "simulation", "torch", "programs", "charts", "surroundings", "network speeds", "graphs"),
    ),
    "network speeds": Floor(
        tuple(f"collectives.bench.{name}" for name in ("constants", "trial", "benchmarks")), imports=ALL
    ),
    "models": Floor(("models",), without=("mpi4py",)),
    "layouts": Floor(
        ("training.parallel.decoder",),
        imports=(*ALL, *PARALLELISM, "models"),
    ),
    "ranges": Floor(("training.settings.ranges",), imports=BELOW_TRAINING),
    "tokens": Floor(("training.data",), imports=(*BELOW_TRAINING, "ranges")),
    "optimizers": Floor(
        tuple(f"training.optim.{name}" for name in ("optimizer", "muon", "sgd", "learning_rate")),
        imports=BELOW_TRAINING,
    ),
    "fields": Floor(
        tuple(f"training.settings.{name}" for name in ("fields", "derived")),
        imports=(*BELOW_TRAINING, "layouts", "ranges", "tokens", "optimizers"),
    ),
    "weights": Floor(("training.weights",), imports=(*BELOW_TRAINING, "fields")),
    "lora": Floor(("training.lora",), imports=(*BELOW_TRAINING, "layouts", "fields", "weights")),
    "optim": Floor(("training.optim",), imports=(*BELOW_TRAINING, "optimizers", "fields")),
    "reports": Floor(("training.reports",), imports=(*BELOW_TRAINING, "fields", "charts", "surroundings")),
    "health": Floor(("training.health",), imports=(*BELOW_TRAINING, "reports")),
    "parallel": Floor(("training.parallel",), imports=(*BELOW_TRAINING, "layouts", "fields", "tokens")),
    "config": Floor(
        ("training.settings",),
        imports=(*BELOW_TRAINING, "layouts", "tokens", "optimizers", "fields", "weights", "lora", "parallel"),
    ),
    "run": Floor(("training.parallel.run",), imports=(*BELOW_TRAINING, *ROOMS, "surroundings")),
    "training": Floor(("training",), imports=(*BELOW_TRAINING, *ROOMS, "run", "charts")),
    **{
        name: Floor((f"parallelism.{name}",), imports=(*ALL, *PARALLEL[:number]))
        for number, name in enumerate(PARALLEL)
    },
    "sequence": Floor(("parallelism.sequence",), imports=(*ALL, *PARALLEL[:6])),
    "experts": Floor(("parallelism.experts",), imports=(*ALL, *PARALLEL[:6])),
    "tensor": Floor(("parallelism.tensor",), imports=(*ALL, *PARALLEL[:6], "sequence", "experts")),
    "pipeline schedules": Floor(("parallelism.pipeline.schedule",), imports=(*ALL, "step"), without=MPI_AND_ARRAYS),
    "pipeline": Floor(("parallelism.pipeline",), imports=(*ALL, *PARALLEL, "pipeline schedules")),
    "checkpoint": Floor(("parallelism.checkpoint",), imports=(*ALL, *PARALLEL[:6])),
    "planner": Floor(
        ("parallelism.planner",),
        imports=(
            *ALL,
            "simulation",
            "network speeds",
            "charts",
            *PARALLEL[:6],
            "data",
            "sequence",
            "pipeline schedules",
            "pipeline",
        ),
    ),
    "parallelism": Floor(("parallelism",), imports=PARALLELISM),
    "exercises": Floor(("teaching.exercise",), imports=("pure", "settings", *SCHEDULES), without=MPI_AND_ARRAYS),
    "page": Floor(
        ("teaching.page", "teaching"),
        imports=(*BELOW, "choice", "simulation", *PARALLELISM, "scenes by torch"),
        without=MPI_AND_ARRAYS,
    ),
    "scenes by torch": Floor(
        ("teaching.page.scenes.attention", "teaching.page.scenes.zero"),
        imports=("page", *PARALLELISM),
        without=("mpi4py", "cupy"),
    ),
}

SAME_CLASS: dict[str, str] = {}  # class names that several files may define, with the reason


class Import(NamedTuple):
    """An import of a module, or of a name in it, by a statement."""

    module: str
    name: str | None
    line: int
    for_types: bool  # beneath TYPE_CHECKING


class Module(NamedTuple):
    """A source file and its module name; for an __init__.py, that of the package."""

    name: str
    path: Path
    is_package: bool
    source: str

    @classmethod
    def read(cls, tree: Path, path: Path) -> Module:
        parts = path.relative_to(tree).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        return cls(".".join(parts[:-1] if is_package else parts), path.relative_to(tree), is_package, path.read_text())

    @property
    def syntax(self) -> ast.Module:
        return ast.parse(self.source, str(self.path))

    @property
    def classes(self) -> dict[str, int]:
        """The line numbers of the module's top-level classes by name."""
        return {node.name: node.lineno for node in self.syntax.body if isinstance(node, ast.ClassDef)}

    def imports(self) -> Iterator[Import]:
        return self._imports(self.syntax.body, for_types=False)

    def _imports(self, nodes: Iterable[ast.AST], for_types: bool) -> Iterator[Import]:
        for node in nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(alias.name, None, node.lineno, for_types)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    yield Import(self._absolute(node), alias.name, node.lineno, for_types)
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                yield from self._imports(node.body, for_types=True)
                yield from self._imports(node.orelse, for_types)
            else:
                yield from self._imports(ast.iter_child_nodes(node), for_types)

    def _absolute(self, node: ast.ImportFrom) -> str:
        package = self.name.split(".") if self.is_package else self.name.split(".")[:-1]
        beginning = package[: len(package) - node.level + 1] if node.level else []
        return ".".join([*beginning, *([node.module] if node.module else [])])


class House:
    """The packages of a tree."""

    def __init__(self, tree: Path, packages: Iterable[str] = PACKAGES):
        self.tree, self.packages = tree, tuple(packages)
        paths = [path for package in self.packages for path in sorted((tree / package).rglob("*.py"))]
        self.modules = {module.name: module for module in (Module.read(tree, path) for path in paths)}

    @cached_property
    def neighbours(self) -> set[str]:
        """The names importable from the top of the tree: packages, tests, scripts."""
        folders = {path.parent.name for path in self.tree.glob("*/*.py")}
        return folders | {path.stem for path in self.tree.glob("*.py")}

    def target(self, each: Import) -> str:
        """Return the imported module; for `from package import module`, that module."""
        whole = f"{each.module}.{each.name}"
        return whole if each.name and whole in self.modules else each.module

    def imported_with(self, module: Module) -> set[str]:
        """Return the modules that a module imports, and their packages; its own packages only if it names them."""
        around = {module.name, *packages_around(module.name)}
        targets = {self.target(each) for each in module.imports()}
        more = {package for target in targets for package in packages_around(target)} - around
        return (targets | more) & self.modules.keys()

    def too_large(self, limits: Mapping[str, Limits]) -> Iterator[str]:
        for package, limit in limits.items():
            for what, count, most in zip(Limits._fields, self.size(package), limit, strict=True):
                if count > most:
                    yield f"{package}/ has {count:,} {what}: the limit is {most:,}"

    def size(self, package: str) -> Limits:
        """Return the size of a package as counted by `wc -l` and `ls`, without folders that only contain caches."""
        own = [module for module in self.modules.values() if module.path.parts[0] == package]
        paths = [path for path in (self.tree / package).iterdir() if not path.name.startswith((".", "__", "py.typed"))]
        entries = [path for path in paths if path.is_file() or any(path.glob("[!_]*")) or any(path.glob("*.py"))]
        return Limits(sum(module.source.count("\n") for module in own), len(own), len(entries))

    def circles(self) -> Iterator[str]:
        """Yield the shortest cycle in each group of modules that import each other."""
        graph = {name: sorted(self.imported_with(module)) for name, module in self.modules.items()}
        reached = {name: reachable(graph, name) for name in graph}
        named: set[str] = set()
        for name in graph:
            if name in reached[name] and name not in named:
                group = {other for other in reached[name] if name in reached[other]}
                named |= group
                path = min((circle(graph, member) for member in sorted(group)), key=len)
                others = len(group) - len(path) + 1
                more = f" ({others} more modules are in circles with these)" if others else ""
                yield f"{self.modules[path[0]].path}: imports itself, {' -> '.join(path)}{more}"

    def duplicate_classes(self, allowed: Mapping[str, str]) -> Iterator[str]:
        lines = defaultdict(list)
        for module in self.modules.values():
            for name, line in module.classes.items():
                lines[name].append(f"{module.path}:{line}")
        for name, several in sorted(lines.items()):
            if len(several) > 1 and name not in allowed:
                yield f"{several[0]}: class {name} is also defined in {', '.join(several[1:])}: rename all but one"

    def imports_between_floors(self, floors: Mapping[str, Floor]) -> Iterator[str]:
        """Yield imports that a floor forbids; imports for type checking count between floors, but not of libraries."""
        floor_of = {module: name for name, floor in floors.items() for module in floor.modules}
        for module in sorted(floor_of.keys() - self.modules.keys()):
            yield f"FLOORS names {module}, which is not there: edit the table"
        for module in self.modules.values():
            own = innermost(floor_of, module.name)
            if own is None:
                yield f"{module.path}: is on no floor of FLOORS"
                continue
            complaints = {(each.line, self._complaint(each, own, floors, floor_of)) for each in module.imports()}
            for line, complaint in sorted(complaints):
                if complaint:
                    yield f"{module.path}:{line}: {complaint}"

    def _complaint(self, each: Import, own: str, floors: Mapping[str, Floor], floor_of: Mapping[str, str]) -> str:
        """Return the reason why a floor forbids an import, or ""."""
        target = self.target(each)
        top = target.partition(".")[0]
        if top in floors[own].without and not each.for_types:
            return f"imports {target}, which floor {own} does without"
        if top not in self.neighbours:
            return ""
        floor = innermost(floor_of, target)
        if floor == own or floor in floors[own].imports:
            return ""
        of_floor = f"of floor {floor}" if floor else "on no floor"
        allowed = ", ".join(floors[own].imports) or "no other"
        return f"imports {target}, {of_floor}: floor {own} may import {allowed}"

    def violations(
        self, limits: Mapping[str, Limits], floors: Mapping[str, Floor], same_class: Mapping[str, str]
    ) -> list[str]:
        """Return a line for each violation."""
        classes, imports = self.duplicate_classes(same_class), self.imports_between_floors(floors)
        return [*self.too_large(limits), *self.circles(), *classes, *imports]


def packages_around(module: str) -> list[str]:
    """Return the packages that a module is in.

    >>> packages_around("a.b.c")
    ['a.b', 'a']
    """
    parts = module.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]


def innermost(floor_of: Mapping[str, str], module: str) -> str | None:
    """Return the floor that names a module, or else the innermost package around it."""
    return next((floor_of[name] for name in (module, *packages_around(module)) if name in floor_of), None)


def reachable(graph: Mapping[str, Iterable[str]], start: str) -> set[str]:
    """Return the nodes that can be reached from `start` in one step or more."""
    reached: set[str] = set()
    ahead = [*graph[start]]
    while ahead:
        name = ahead.pop()
        if name not in reached:
            reached.add(name)
            ahead += graph[name]
    return reached


def circle(graph: Mapping[str, Iterable[str]], start: str) -> list[str]:
    """Return the shortest cycle through `start`.

    >>> circle({"a": "bc", "b": "c", "c": "a"}, "a")
    ['a', 'c', 'a']
    """
    came_from: dict[str, str] = {}
    ahead = deque([start])
    while start not in came_from:
        name = ahead.popleft()
        for following in graph[name]:
            if following not in came_from:
                came_from[following] = name
                ahead.append(following)
    path = [start, came_from[start]]
    while path[-1] != start:
        path.append(came_from[path[-1]])
    return path[::-1]


def main(tree: Path = ROOT) -> int:
    house = House(tree)
    for package, limit in LIMITS.items():
        size = house.size(package)
        counts = (f"{n:,} of {most:,} {what}" for what, n, most in zip(Limits._fields, size, limit, strict=True))
        print(f"{package}/: {', '.join(counts)}")
    violations = house.violations(LIMITS, FLOORS, SAME_CLASS)
    for line in violations:
        print(line, file=sys.stderr)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
