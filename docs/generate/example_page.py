"""The gallery of examples: of each, what its docstring says, and what the pages show that it prints."""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PICTURES = {"draw_ring": "ring.png"}
HEAD = """# Examples

Complete programs of a screen or less, in `examples/`. Most compare what they compute with what one process computes,
and fail if it differs. Tests run each by the command that is shown.
"""


class Example(NamedTuple):
    """A program: what it does, and its commands."""

    name: str
    sentence: str
    commands: tuple[str, ...]


def pages() -> dict[str, str]:
    """Return the page by its path below docs/."""
    shown = {path: FENCE.findall(path.read_text()) for path in SOURCES}
    return {"examples.md": "\n".join([HEAD, *(line for each in examples() for line in section(each, shown))])}


def examples() -> Iterator[Example]:
    """Yield the programs in the order of their names.

    Raises: RuntimeError for one whose docstring has no command.
    """
    for path in sorted((ROOT / "examples").glob("*.py")):
        sentence, _, rest = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")
        commands = tuple(line for line in rest.splitlines() if f"python examples/{path.name}" in line)
        if not commands:
            raise RuntimeError(f"{path}: the docstring has no command with python examples/{path.name}")
        yield Example(path.stem, sentence.replace("\n", " "), commands)


def section(example: Example, shown: dict[Path, list[tuple[str, str]]]) -> Iterator[str]:
    """Write what an example does and prints, with its code folded, and the pages that explain it."""
    code = f"# examples/{example.name}.py\n"
    yield f"## {example.name}\n\n{example.sentence}\n"
    for command in example.commands:
        yield f"```bash\n{command}\n```\n"
        if text := output(command, shown):
            yield f"```text\n{text}```\n"
    if picture := PICTURES.get(example.name):
        yield f"![{example.sentence}]({picture})\n"
    source = (ROOT / "examples" / f"{example.name}.py").read_text()
    yield f'??? example "examples/{example.name}.py"\n\n    ```python'
    yield "\n".join(f"    {line}".rstrip() for line in source.splitlines()) + "\n    ```\n"
    pages = [path for path, blocks in shown.items() if any(text.startswith(code) for _, text in blocks)]
    below = [path.relative_to(ROOT / "docs") for path in pages if path.name != "README.md"]
    links = [f"[{title(ROOT / 'docs' / path)}]({path.as_posix()})" for path in below]
    if links:
        yield f"Explained in {' and '.join(links)}.\n"


def output(command: str, shown: dict[Path, list[tuple[str, str]]]) -> str:
    """Return the output that a page shows right after a command; empty if none does."""
    for blocks in shown.values():
        for (language, text), (of_next, following) in pairwise(blocks):
            lines = [line.split(" #")[0].strip() for line in text.splitlines()]
            if language == "bash" and lines[-1:] == [command] and of_next in ("", "text"):
                return following
    return ""


def title(path: Path) -> str:
    heading = next(line for line in path.read_text().splitlines() if line.startswith("# "))
    return heading.removeprefix("# ")
