"""The site is built, fetches nothing, and fits its window; the commands of its pages run, in small."""

import re
import shlex
import subprocess
import sys

import pytest

from collectives import algorithms
from collectives.schedule.spec import COLLECTIVES
from mpi_tests.helpers.browser import browser, console, needs_chromium, open_file, overflow
from mpi_tests.helpers.launch import ROOT, environment
from mpi_tests.helpers.site import PAGES, Fetched, blocks, commands

pytestmark = pytest.mark.shares_cores

SHOWN = (
    "index.html",
    "architecture/index.html",
    "architecture/all_reduce.html",
    "algorithms/all_reduce.html",
    "reference/collectives.html",
    "reference/commands.html",
    "benchmarking.html",
    "environment.html",
)
HANGING = "COLLECTIVES_TIMEOUT_S=5 mpirun -n 3 python examples/hang.py"
# What each command of the pages is run as: in small, writing to a folder of its own.
IN_SMALL = {
    "mpirun -n 4 python -m collectives.bench all_reduce all_gather --peers mpi,gloo --json results.json": (
        "mpirun -n 2 python -m collectives.bench all_reduce all_gather --peers mpi,gloo --json {folder}/results.json"
        " -b 1K -e 1K -n 2"
    ),
    "mpirun -n 4 python -m collectives.bench --tune tuning.json": (
        "mpirun -n 2 python -m collectives.bench --tune {folder}/tuning.json all_reduce -b 1K -e 1K -n 2"
    ),
    "mpirun -n 2 python benchmarks/peers.py --repeats 7 --out FILE": (
        "mpirun -n 2 python benchmarks/peers.py --repeats 1 --end 64 --out {folder}/peers.json"
    ),
    "python benchmarks/table.py benchmarks/results/peers-*.json": (
        "python benchmarks/table.py benchmarks/results/peers-*.json"
    ),
    "python -m collectives.doctor": "python -m collectives.doctor",
    "mpirun -n 4 python -m collectives.doctor": "mpirun -n 4 python -m collectives.doctor",
    "mpirun -n 3 python -m mpi_tests.fuzz --seconds 60": "mpirun -n 3 python -m mpi_tests.fuzz --seconds 2",
}


def run(command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of a page in a shell, with this Python and its mpirun first."""
    env = environment() | {"PATH": f"{sys.exec_prefix}/bin:{environment()['PATH']}"}
    return subprocess.run(command, shell=True, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site; warnings of MkDocs are errors."""
    folder = tmp_path_factory.mktemp("site")
    ended = run(f"python -m mkdocs build --strict --site-dir {shlex.quote(str(folder))}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


def test_nothing_is_fetched_from_elsewhere(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 30
    assert [(page.name, url) for page in pages for url in Fetched(page.read_text()).urls if "//" in url] == []
    assert [path.name for path in site.rglob("*.css") if re.search(r"url\(['\"]?(https?:)?//", path.read_text())] == []


def test_every_algorithm_has_its_section(site):
    for collective in COLLECTIVES:
        text = (site / "algorithms" / f"{collective}.html").read_text()
        headings = re.findall(r'<h2 id="(\w+)"', text)
        assert headings[-len(algorithms.names(collective)) :] == algorithms.names(collective)
        assert text.count("round 0:") == len(algorithms.names(collective))


def test_every_program_has_its_help(site):
    text = (site / "reference" / "commands.html").read_text()
    assert len(re.findall('<h2 id="python', text)) == text.count("usage: ")


@needs_chromium
@pytest.mark.parametrize("width", [400, 1400])
def test_pages_fit_their_window_and_log_nothing(site, width):
    with browser(width) as driver:
        for page in SHOWN:
            open_file(driver, site / page)
            assert (page, console(driver), max(0, overflow(driver))) == (page, [], 0)


@needs_chromium
def test_the_search_finds_a_page_from_disk(site):
    with browser(1400) as driver:
        driver.implicitly_wait(20)
        open_file(driver, site / "index.html")
        driver.find_element("css selector", ".md-search__input").send_keys("rabenseifner")
        found = driver.find_element("css selector", ".md-search-result__link")
        assert "algorithms/" in found.get_attribute("href")


def test_every_command_of_the_pages_is_run():
    shown = {command for page in PAGES for command in commands(page)}
    assert shown == {*IN_SMALL, HANGING}


@pytest.mark.parametrize("command", IN_SMALL)
def test_commands_of_the_pages(command, tmp_path):
    ended = run(IN_SMALL[command].format(folder=shlex.quote(str(tmp_path))))
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_hanging_job_ends_as_is_shown():
    shown = next(text for kind, text in blocks(ROOT / "docs" / "troubleshooting.md") if kind == "text").splitlines()
    ended = run(HANGING)
    assert ended.returncode != 0
    lines = [re.sub(r"waited for \d+ s", "waited for 5 s", line) for line in ended.stderr.splitlines()]
    assert [line for line in shown if line != "..." and line not in lines] == []
