"""Docstrings of the house as markdown: doctests in fences, and `Raises:` and the like in bold."""

import re
from typing import Any

import griffe

LABEL = re.compile(r"^(Cost|Raises|Shapes|Source|Sources):", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites each docstring as it is read."""

    def on_instance(self, *, obj: griffe.Object, **more: Any) -> None:
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(docstring: str) -> str:
    """Fence each doctest, up to the next empty line, and set labels in bold."""
    lines: list[str] = []
    is_open = False
    for line in docstring.splitlines():
        if line.startswith(">>> ") and not is_open:
            lines += ["", "```pycon"]
            is_open = True
        if is_open and not line.strip():
            lines.append("```")
            is_open = False
        lines.append(line if is_open else LABEL.sub(r"**\1:**", line))
    return "\n".join([*lines, *(["```"] if is_open else [])])
