"""The pages of the site are right about the code; ../systems/test_site.py builds the site and runs its commands."""

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import griffe
import pytest

import parallelism
from collectives.bench.report import bus_factor
from collectives.job import environment
from collectives.schedule.spec import COLLECTIVES
from mpi_tests.helpers.documented import rows
from mpi_tests.helpers.documents import PAGES, blocks
from mpi_tests.helpers.launch import ROOT
from mpi_tests.helpers.launch import environment as without_launcher
from mpi_tests.helpers.site import DOCS, REFERENCE, code, is_defined, table, texts_in

PACKAGES = ("collectives", "parallelism", "models", "training", "teaching")


def in_order(names):
    return sorted(names, key=str.casefold)


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if REFERENCE.search(text)])
def test_every_file_and_function_that_is_named_is_there(page):
    references = REFERENCE.findall(PAGES[page])
    assert [f"{path}:{name}" for path, name in references if not is_defined(path, name)] == []


def test_each_step_of_a_life_names_a_file_and_a_function():
    for page in ("all_reduce", "gradient", "micro_batch"):
        text = (DOCS / "architecture" / f"{page}.md").read_text()
        steps = re.findall(r"^\d+\. .*?(?=^\d+\. |^\S|\Z)", text, re.MULTILINE | re.DOTALL)
        assert len(steps) > 10
        last = "The method returns", "What is bound is of one"  # the caller's view, and a list of such places
        assert [step for step in steps if "→ `" not in step and not any(words in step for words in last)] == []


def printing(page):
    """Return a page's Python code and its output, shown in the text block right after it."""
    return [text.text for code, text in pairwise(blocks(page)) if (code.language, text.language) == ("python", "text")]


@pytest.mark.parametrize("page", [page for page in PAGES if printing(page)])
def test_the_python_of_a_page_prints_what_is_shown(page):
    program = "\n".join(block.text for block in blocks(page) if block.language == "python")
    env = without_launcher() | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    result = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert [text for text in printing(page) if text not in result.stdout] == []


def test_the_report_of_a_hang_that_is_quoted_is_the_one_that_is_shown():
    (report,) = [block.text for block in blocks("docs/guide/collectives.md") if "not arrived at" in block.text]
    quoted = re.findall(r"`(rank 0 has waited .*|not arrived .*)`", PAGES["docs/troubleshooting.md"])
    assert len(quoted) == 2
    assert set(quoted) <= set(report.splitlines())


def test_the_table_of_our_variables_is_that_of_the_code(monkeypatch):
    rows = table(DOCS / "environment.md", "Ours")
    monkeypatch.setenv(environment.SURVIVES, "1")
    names = [code(name)[0] for name, *_ in rows]
    assert names == in_order(environment.SETTINGS)
    for name, (_, _, values, default) in zip(names, rows, strict=True):
        read = environment.SETTINGS[name]
        monkeypatch.delenv(name, raising=False)
        unset = read()
        for value in code(values):
            monkeypatch.setenv(name, value)
            read()  # raises if the value is invalid
        for value in code(default):
            monkeypatch.setenv(name, value)
            assert read() == unset, name


def test_the_tables_of_others_variables_are_those_that_are_read():
    page = DOCS / "environment.md"
    rows = [*table(page, "Of others, that we read"), *table(page, "Of others, that we set")]
    names = {name for cell, *_ in rows for name in code(cell)}
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    read = {name for path in files for name in read_in(path)} - set(environment.SETTINGS)
    assert names == read


def read_in(path: Path) -> set[str]:
    """Return the environment variables that a file reads or sets: by name, or from a tuple of names."""
    text = path.read_text()
    if "os.environ" not in text:
        return set()
    direct = re.findall(r'environ(?:\.get|\.setdefault)?[(\[]"(\w+)"', text) + re.findall(
        r'"(\w+)" in os\.environ', text
    )
    direct += re.findall(r'\b(?:whole|choice)(?:\(|, )"(\w+)"', text)
    tuples = re.findall(r"^(?:LAUNCHED_\w+|LOCAL_RANKS|SET_BY_HAND) = \((.*)\)$", text, re.MULTILINE)
    return {*direct, *re.findall(r'"(\w+)"', " ".join(tuples))}


def test_factors_of_bus_bandwidth_are_those_of_the_code():
    rows = {code(name)[0]: code(factor)[0] for name, _, factor in table(DOCS / "benchmarking.md", "What busbw is")}
    assert rows.keys() == COLLECTIVES.keys() - {"barrier", "scan", "exscan"}
    for name, factor in rows.items():
        for p in range(2, 9):
            assert eval(factor, {"p": p}) == pytest.approx(bus_factor(name, p)), name


def test_every_collective_has_its_row_in_the_choice():
    cells = [cell for _, _, cell in table(DOCS / "which-call.md", "Which collective")]
    assert {name for cell in cells for name in code(cell)} >= COLLECTIVES.keys()


def test_the_public_names_are_in_the_reference():
    page = (DOCS / "reference" / "parallelism.md").read_text()
    assert set(re.findall(r"^::: parallelism\.(\w+)$", page, re.MULTILINE)) == set(parallelism.__all__)


@pytest.mark.parametrize("package", ["collectives", "parallelism"])
def test_the_parameters_of_public_calls_have_a_meaning(package, monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "generate")
    import docstrings

    loader = griffe.GriffeLoader(search_paths=[ROOT], extensions=griffe.load_extensions(docstrings.Docstrings))
    tree = loader.load(package)
    loader.resolve_aliases()
    names = {"collectives": ["communicator.Communicator", "communicator.Collectives", "arrays.ops.Op"]}
    public = {tree[name].canonical_path for name in names.get(package, parallelism.__all__)}
    calls = [call for call in docstrings.documented(tree) if public & {call.path, call.parent.path}]
    assert len(calls) > 20
    assert [call.path for call in calls if docstrings.parameters(call) and not docstrings.table(call)] == []


@pytest.mark.parametrize("heading", ["torch.distributed", "DeepSpeed", "Megatron-LM"])
def test_a_model_of_ones_own_is_divided_by_our_classes(heading):
    words = {word for head, (_, here) in rows("coming-from.md") if head == heading for word in re.findall(r"\w+", here)}
    assert words >= {"Sharded", "PipelineParallel", "Checkpoints", "make_schedule"}


def test_the_glossary_is_in_order():
    terms = re.findall(r"^(\w.*)\n:   ", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    assert len(terms) > 30
    assert terms == in_order(terms)


def test_errors_that_are_explained_are_in_the_code():
    texts = list(texts_in("collectives"))
    for message, *_ in table(DOCS / "troubleshooting.md", "Errors"):
        for words in re.findall(r"`([^`]+)`", message):
            assert any(words.strip() in text for text in texts), words
