"""One HTML file of sections: text, charts, and the tables that the charts are drawn from.

The file contains its style and its script, and fetches nothing.  A chart is described by a dict, which page.js draws at
the available width; its data stand in a table, for readers without pictures, too.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
UNITS = ("GiB", 30), ("MiB", 20), ("KiB", 10)
Chart = Mapping[str, Any]


class Column(NamedTuple):
    """A column of a table: `unit` is "bytes" where cells show sizes, as 64 KiB; `digits` are those of other numbers."""

    name: str
    unit: str = ""
    digits: int = 6


class Table(NamedTuple):
    """Rows of cells: numbers, texts, or None for nothing.  Charts name the table by `key`, and columns by theirs."""

    key: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    wraps: bool = False  # whether long texts go over several lines

    def without(self, names: Collection[str]) -> "Table":
        """Leave columns out."""
        indices = [i for i, column in enumerate(self.columns) if column.name not in names]
        rows = [[row[i] for i in indices] for row in self.rows]
        return self._replace(columns=[self.columns[i] for i in indices], rows=rows)

    @property
    def empty(self) -> set[str]:
        """The names of columns in which no row has anything."""
        return {column.name for i, column in enumerate(self.columns) if all(row[i] is None for row in self.rows)}


class Section(NamedTuple):
    """A heading, some sentences, charts with their captions, and tables beneath."""

    heading: str
    texts: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()


def page(title: str, sections: Sequence[Section]) -> str:
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    links = "".join(f'<li><a href="#s{i}">{escape(each.heading)}</a>' for i, each in enumerate(sections))
    return "\n".join(
        [
            '<!doctype html><html lang="en"><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title><style>\n{style}</style>",
            f"<main><h1>{escape(title)}</h1><nav><ul>{links}</ul></nav>",
            *(section_html(f"s{i}", each) for i, each in enumerate(sections)),
            f"</main><script>\n{script}</script></html>\n",
        ]
    )


def section_html(key: str, section: Section) -> str:
    texts = "".join(f"<p>{escape(text)}</p>" for text in section.texts)
    figures = "".join(map(figure_html, section.charts))
    charts = f'<div class="charts">{figures}</div>' if figures else ""
    tables = "".join(map(table_html, section.tables))
    return f'<section id="{key}"><h2>{escape(section.heading)}</h2>{texts}{charts}{tables}</section>'


def figure_html(chart: Chart) -> str:
    """Describe a chart to page.js, which draws it above its caption."""
    text = escape(json.dumps(chart, separators=(",", ":")), quote=False).replace("'", "&#39;")  # as it has many "
    return f"<figure data-chart='{text}'><figcaption>{escape(chart['title'])}</figcaption></figure>"


def table_html(table: Table) -> str:
    """Write a table that scrolls within itself, and is sorted by its headings."""
    heads = "".join(f'<th scope="col"><button>{escape(column.name)}</button>' for column in table.columns)
    body = "\n".join(f"<tr>{''.join(map(cell, row, table.columns))}" for row in table.rows)
    caption, look = escape(table.caption), " class=pairs" if table.wraps else ""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{caption}"><table id="{escape(table.key)}"{look}>'
        f"<caption>{caption}</caption><thead><tr>{heads}</thead><tbody>\n{body}</tbody></table></div>"
    )


def cell(value: Any, column: Column) -> str:
    """Write a cell; a size in words, and a number that is rounded to fewer digits, has its number in an attribute.

    >>> cell(65536, Column("size", "bytes")), cell(0.1 + 0.2, Column("time")), cell("<a>", Column("name"))
    ('<td data-v=65536>64 KiB', '<td>0.3', '<td class=text>&lt;a&gt;')
    >>> cell(12345.678, Column("time", digits=3)), cell(2, Column("wrong", digits=3))
    ('<td data-v=12345.7>12300', '<td>2')
    """
    if value is None:
        return "<td>"
    if isinstance(value, str):
        return f"<td class=text>{escape(value)}"
    if column.unit == "bytes":
        return f"<td data-v={value}>{shown(value)}"
    number = f"{value:.6g}"
    text = number if isinstance(value, int) else rounded(value, column.digits)
    return f"<td>{number}" if float(text) == float(number) else f"<td data-v={number}>{text}"


def rounded(value: float, digits: int) -> str:
    """Format a number with so many significant digits, without an exponent if it is large.

    >>> rounded(12345.6, 3), rounded(0.012345, 3), rounded(7, 3)
    ('12300', '0.0123', '7')
    """
    return f"{float(f'{value:.{digits}g}'):.15g}"


def shown(nbytes: float) -> str:
    """Format bytes by the largest binary unit that leaves at least 1.

    >>> [shown(nbytes) for nbytes in (8, 65536, 3 << 19, 1 << 40, 62.444)]
    ['8 B', '64 KiB', '1.5 MiB', '1024 GiB', '62.4 B']
    """
    unit, shift = next((each for each in UNITS if nbytes >= 1 << each[1]), ("B", 0))
    number = nbytes / (1 << shift)
    return f"{rounded(number, 4 if number.is_integer() else 3)} {unit}"


def pairs(key: str, caption: str, values: Mapping[str, Any]) -> Table:
    """Make a table of names and values, without empty ones."""
    full = {name: value for name, value in values.items() if value not in (None, "", [], {})}
    rows = [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in full.items()]
    return Table(key, caption, (Column("what"), Column("value")), rows, wraps=True)
