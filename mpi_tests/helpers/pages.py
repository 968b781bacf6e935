"""Parse the pages of `collectives.bench.page` as a browser does: their tables, charts and links."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any


class Page(HTMLParser):
    """A page's `tables`, each a list of rows by column, and its `charts`, `links` and `tags`."""

    def __init__(self, text: str):
        super().__init__()
        self.tables: dict[str, list[dict[str, Any]]] = {}
        self.charts: list[dict[str, Any]] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self._names: list[str] = []
        self._row: list[Any] = []
        self._cell: Any = None  # attributes of the open cell
        self._text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.tags.append(tag)
        self.links += [values[name] for name in ("href", "src", "srcset", "data", "action") if name in values]
        self._end_cell()
        if tag == "figure":
            self.charts.append(json.loads(values["data-chart"]))
        elif tag == "table":
            self._rows = self.tables.setdefault(values["id"], [])
            self._names = []
        elif tag == "tr":
            self._end_row()
        elif tag == "td":
            self._cell = values
        self._text = ""

    def handle_endtag(self, tag):
        self._end_cell()
        if tag == "button":
            self._names.append(self._text)
        elif tag in ("tbody", "table"):
            self._end_row()

    def handle_data(self, data):
        self._text += data

    def _end_cell(self):
        if self._cell is not None:
            text = self._cell.get("data-v", self._text.strip("\n"))
            is_text = self._cell.get("class") == "text"
            self._row.append(text if is_text else float(text) if text else None)
            self._cell = None

    def _end_row(self):
        if self._row:
            self._rows.append(dict(zip(self._names, self._row, strict=True)))
        self._row = []


def check_charts(page: Page) -> None:
    """Check that each chart refers to a table of the page and its columns."""
    for chart in page.charts:
        columns = page.tables[chart["table"]][0].keys()
        names = {chart["x"]["column"]} if "column" in chart["x"] else set()
        for line in chart.get("lines", ()):
            names |= {*line["where"], *(name for pair in line.get("bands", ()) for name in pair)}
        names |= {part["column"] for part in chart.get("parts", ())}
        assert names <= columns, (chart["title"], names - columns)


def check_fetches_nothing(text: str) -> None:
    page = Page(text)
    assert all(link.startswith("#") or link == "data:," for link in page.links), page.links
    assert not {"iframe", "img", "object", "embed", "base"} & {*page.tags}
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert "default-src 'none'" in text
