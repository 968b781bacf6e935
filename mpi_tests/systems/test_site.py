"""The site builds without warnings, loads no external files, and fits its window; test_documents.py runs commands."""

import re
import subprocess
import sys

import pytest

from collectives import algorithms
from collectives.schedule.spec import COLLECTIVES
from mpi_tests.helpers.browser import browser, console, needs_chromium, open_file, overflow
from mpi_tests.helpers.launch import ROOT, environment
from mpi_tests.helpers.site import Fetched

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


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site with MkDocs' warnings as errors, and return its folder."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    result = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr
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
        link = driver.find_element("css selector", ".md-search-result__link")
        assert "algorithms/" in link.get_attribute("href")
