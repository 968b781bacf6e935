import os
import sys

import pytest

from mpi_tests.helpers.launch import remove_sessions_of_killed_mpiruns
from mpi_tests.rig import Rig, UnavailableError

# Tests that a single worker runs one after the other: they share the machine's only rig, or what a fixture takes
# long to build: pages, the site, a wheel, compiled kernels.
ALONE = ("page", "pages", "portability", "site", "wheel")
TOGETHER = {"rig": ("rig", "slurm", "hostfiles", "survival_hosts")} | {name: (name,) for name in ALONE}
GROUPS = {f"mpi_tests/systems/test_{name}.py": group for group, names in TOGETHER.items() for name in names}
pytest_plugins = ["mpi_tests.helpers.ranks", "mpi_tests.helpers.progress", "mpi_tests.helpers.cuda_arrays"]
collect_ignore = ["helpers/cuda_on_host/site"]  # importing it redirects CuPy to the stand-in
os.environ["COLLECTIVES_LINKS"] = "0"  # this machine's cached link speeds would steer `auto`


def pytest_sessionstart():
    remove_sessions_of_killed_mpiruns()


def pytest_sessionfinish():
    if browser := sys.modules.get("mpi_tests.helpers.browser"):
        browser.end()


def pytest_runtest_setup(item):
    if item.nodeid.startswith("mpi_tests/systems/"):  # whose tests kill mpiruns, and start many
        remove_sessions_of_killed_mpiruns()


@pytest.fixture(scope="module")
def rig():
    """Yield a rig of 4 hosts of 2 slots, at 1 Gbit/s."""
    try:
        emulator = Rig().__enter__()
    except UnavailableError as error:
        pytest.skip(str(error))
    yield emulator
    emulator.__exit__()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give all tests of a group to one worker; xdist's own groups have no effect from pytest 9.1 on."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return GROUPS.get(nodeid.partition("::")[0], nodeid)

    return Groups(config, log)
