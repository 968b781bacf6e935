"""Public names of packages, imported when they are first used."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazily(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package that imports its public names for type checking only.

    A name is imported from the module that the package's `__init__.py` names, on its first use.
    """
    module = sys.modules[package]
    assert module.__file__
    tree = ast.parse(Path(module.__file__).read_bytes())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 0]
    homes = {alias.name: node.module for node in imports for alias in node.names if node.module}

    def load(name: str) -> Any:
        if name not in module.__all__:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        setattr(module, name, value)
        return value

    return load, lambda: sorted({*vars(module), *module.__all__})
