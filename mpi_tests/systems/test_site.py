"""The site builds without warnings, loads no external files, and fits its window; test_documents.py runs commands."""

import inspect
import re
import subprocess
import sys
import tomllib
from collections import Counter
from html import unescape

import pytest

from collectives import Communicator, __version__, algorithms
from collectives.schedule.spec import COLLECTIVES
from mpi_tests.helpers.browser import browser, console, needs_chromium, open_file, overflow
from mpi_tests.helpers.documents import COMMANDS
from mpi_tests.helpers.launch import ROOT, environment
from mpi_tests.helpers.site import Fetched

pytestmark = pytest.mark.shares_cores

SHOWN = (
    "index.html",
    "architecture/index.html",
    "architecture/all_reduce.html",
    "algorithms/all_reduce.html",
    "reference/collectives.html",
    "reference/parallelism.html",
    "reference/commands.html",
    "reference/commands/train.html",
    "reference/commands/measure.html",
    "examples.html",
    "which-call.html",
    "coming-from.html",
    "limits.html",
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


def options_of(site, page):
    """Return the flags and the text of each option that a page of commands explains."""
    text = (site / "reference" / "commands" / page).read_text()
    options = re.findall(r"<dt>(.*?)</dt>\s*<dd>(.*?)</dd>", text, re.DOTALL)
    return [(without_tags(flags), without_tags(words)) for flags, words in options]


def without_tags(text):
    return unescape(re.sub(r"<[^>]*>", "", text)).strip()


def test_every_option_is_explained_once(site):
    pages = sorted((site / "reference" / "commands").glob("*.html"))
    assert len(pages) == 6
    options = [option for page in pages for option in options_of(site, page.name)]
    assert len(options) > 180
    assert [option for option in options if not option[1]] == []
    assert [option for option, count in Counter(options).items() if count > 1] == []


@pytest.mark.parametrize(
    ("page", "program"),
    [
        ("train", "train.py"),
        ("plan", "-m parallelism.planner"),
        ("plan", "-m parallelism.pipeline.schedule search"),
        ("repair", "-m mpi_tests.gpu_check"),
    ],
)
def test_a_program_s_options_are_those_of_its_help(site, page, program):
    """An option is explained on the page, or a link to its explanation."""
    command = [sys.executable, *program.split(), "--help"]
    text = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300).stdout
    flags = set(re.findall(r"^  (?:-\w(?: \w+)?, )?(--\w+)", text, re.MULTILINE)) - {"--help", "--version"}
    shown = {flag for option in options_of(site, f"{page}.html") for flag in re.findall(r"--\w+", option[0])}
    linked = re.findall(r'<a href="[^"]*#[\w-]+"><code>(--\w+)', (site / f"reference/commands/{page}.html").read_text())
    assert len(flags) >= 5
    assert flags <= shown | set(linked)


def test_programs_of_the_pages_have_a_section(site):
    """A program that the pages start is explained, but for benchmarks, examples and tests."""
    text = (site / "reference" / "commands.html").read_text()
    started = {re.search(r"python ((?:-m )?[\w./]+)", command.text) for command in COMMANDS}
    programs = {match[1] for match in started if match} - {"-m training", "-m training.sample"}  # by their files
    ours = {name for name in programs if re.match(r"-m (collectives|parallelism|training|teaching)|\w+\.py", name)}
    assert len(ours) > 10
    assert {name for name in ours if f"python {name}" not in text} == set()


def test_every_example_is_in_the_gallery_with_its_output(site):
    text = unescape((site / "examples.html").read_text())
    examples = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
    assert re.findall(r'<h2 id="(\w+)"', text) == examples
    shown = without_tags(text)
    for command in COMMANDS:
        if "examples/" in command.text and command.text in shown and command.output:
            assert command.output.splitlines()[0] in shown, command.text
    assert {name for name in examples if f"python examples/{name}.py" not in shown} == set()


def test_public_calls_have_a_table_of_their_parameters(site):
    """Each parameter of the signature has its row, and each row its meaning."""
    num_tables = 0
    for page in ("collectives", "parallelism"):
        text = (site / "reference" / f"{page}.html").read_text()
        for table in re.findall(r"<th>parameter</th>.*?</table>", text, re.DOTALL):
            rows = [re.findall(r"<td>(.*?)</td>", row, re.DOTALL) for row in table.split("<tr>")[1:]]
            num_tables += 1
            assert all(name and meaning for name, _, _, meaning in rows), table
    assert num_tables > 60
    reference = (site / "reference" / "collectives.html").read_text()
    section = re.search(r'id="collectives.communicator.Communicator.all_reduce".*?</table>', reference, re.DOTALL)[0]
    names = re.findall(r"<td><code>(\w+)</code></td>", section)
    assert set(names) >= {*inspect.signature(Communicator.all_reduce).parameters} - {"self"}


def test_every_meaning_of_a_parameter_is_shown(site):
    meanings = tomllib.loads((ROOT / "docs" / "generate" / "parameters.toml").read_text())
    pages = [(site / "reference" / f"{name}.html").read_text() for name in ("collectives", "parallelism")]
    shown = " ".join(without_tags(" ".join(pages)).split())
    texts = {
        text.replace("`", "") for heading, each in meanings.items() if heading != "types" for text in each.values()
    }
    assert {text for text in texts if text not in shown} == set()


def test_the_header_has_the_version_and_the_foot_the_next_page(site):
    text = (site / "guide" / "install.html").read_text()
    assert f"Version {__version__}" in without_tags(text)
    assert 'class="md-footer__link md-footer__link--next"' in text


@needs_chromium
@pytest.mark.parametrize("width", [390, 1400])
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
