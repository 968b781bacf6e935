"""Parse the pages of the site for tests: tables, references to the sources, fetched URLs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

from mpi_tests.helpers.launch import ROOT

DOCS = ROOT / "docs"
REFERENCE = re.compile(r"`([\w/]+\.py):([\w.]+)`")


def table(page: Path, heading: str) -> list[list[str]]:
    """Return the rows, as cells, of the table beneath a heading."""
    _, _, below = page.read_text().partition(f"## {heading}\n")
    rows = [line for line in below.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[2:]]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def is_defined(path: str, name: str) -> bool:
    """Return whether a file defines a function, class, method, attribute or constant of this dotted name."""
    body = ast.parse((ROOT / path).read_text()).body
    for part in name.split("."):
        matches = [node for node in body if part in names_of(node)]
        if not matches:
            return False
        body = getattr(matches[-1], "body", [])
    return True


def names_of(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def texts_in(folder: str) -> Iterator[str]:
    """Yield every string in the sources of a package; of f-strings, the literal parts."""
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


class Fetched(HTMLParser):
    """The URLs that a browser fetches with a page: style sheets and icons, but not links to other pages."""

    def __init__(self, text: str):
        super().__init__()
        self.urls: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        if tag != "a":
            self.urls += [value for name, value in attributes if name in ("src", "href", "srcset") and value]
