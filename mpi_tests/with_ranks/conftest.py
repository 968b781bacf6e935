"""Choose the cases that `make test` runs; pytest on single files runs all."""

from pathlib import Path

import pytest

from mpi_tests.helpers.cases import CASES, name_of, some_of
from mpi_tests.helpers.ranks import IS_PROOF


def pytest_collection_modifyitems(config, items):
    if IS_PROOF or not all(Path(word).is_dir() for word in config.args):
        return
    tests = {}
    for item in items:
        tests.setdefault(name_of(item.nodeid), []).append(item.nodeid)
    if unknown := CASES.keys() - tests.keys():
        raise pytest.UsageError(
            f"mpi_tests/helpers/cases.py names tests that do not exist: {', '.join(sorted(unknown))}"
        )
    chosen = {item for cases in tests.values() for item in some_of(cases)}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]
