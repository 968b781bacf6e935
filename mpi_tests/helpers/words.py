"""Enforce the glossary: one word for one thing, in names, messages, help texts and Markdown.

python -m mpi_tests.helpers.words

Prints a line `file:line: word: say ...` for each violation, and exits with 1 if there are any:

- names, those of local variables included, that contain a word of `NAMES` as a part, in snake or in camel case, or
  that only say how a value was obtained (`PARTICIPLES`), and functions that are named `of_...`;
- phrases of `PHRASES`, in strings other than docstrings and in Markdown outside of code;
- docstrings of functions that begin with a noun or a pronoun (`NO_VERBS`), which ruff's D401 does not see.

`ALLOWED`, `ALLOWED_NAMES` and `DOCUMENTED` list the exceptions.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mpi_tests.helpers.house import PACKAGES, ROOT

FOLDERS = (*PACKAGES, "mpi_tests", "benchmarks", "hostfiles", "examples")
PAGES = ("*.md", "docs/**/*.md", "hostfiles/*.md")

PLACES = frozenset({"place", "placed", "places", "placing"})
NAMES = dict.fromkeys(PLACES, "address, index, position, call site, ...") | {
    "claims": "description",
    "fold": "reduce, reduction",
    "folded": "reduced",
    "folding": "reduce, reduction",
    "folds": "reduce, reduction",
    "crowded": "oversubscribed",
    "delivery": "message",
    "footing": "facts, description",
    "later": "deferred, following, ...",
    "letter": "message, point to point",
    "letters": "message, point to point",
    "meet": "barrier",
    "meets": "barrier",
    "meeting": "barrier",
    "meetings": "barrier",
    "pull": "get",
    "push": "put",
    "put_off": "defer",
    "said": "description, text",
    "share": "shard, fraction",
    "shares": "shards, fractions",
}
PARTICIPLES = ("asked", "found", "given", "kept", "known", "made", "told")
WHAT_IT_IS = "what the value is, not how it was obtained"
WHAT_IT_RETURNS = "what the function returns"

PHRASES = {
    r"can't share": "is not divisible by",
    r"can't be shared": "is not divisible by",
    r"crowded": "oversubscribed",
    r"do(es)?n't go together": "are incompatible",
    r"do not go together": "are incompatible",
    r"\bgoes on\b": "continues, resumes",
    r"\bgo(es)? astray\b": "diverges",
    r"\b(has|have|was|were|is|are|been) left out\b": "is missing, skipped",
    r"(?<!here )\bis no (?!longer\b|worse\b|better\b|more\b)\w": "is not a",
    r"\bis not to be had\b": "is not available",
    r"\bnot over after\b": "not finished after",
    r"\bput off\b": "defer",
    r"\bunder way\b": "running, in progress",
}

NO_VERBS = """
    A All An And Another Any As At Before Both But By Each Every Everyone Four From How In It Its Many MiB Nobody No Of
    On Once One Or Other Our Raises: Seconds Several So Some That The Their There They This Those Three To Twice Two
    What Whatever When Where Wherever Whether Which Whichever Who Whoever Whose Why With Within
""".split()  # noqa: SIM905, a list of words is to be read

ALLOWED = {
    "mpi_tests/helpers/words.py": "the words themselves",
    "mpi_tests/without_ranks/test_words.py": "planted sentences",
}
IN_PLACE = re.compile(r"(?<![a-z])(in|out_of)_place(?![a-z])", re.IGNORECASE)  # a call whose `x` is its `out`
DOCUMENTED = {"parallelism/placement.py": PLACES, "parallelism/tensor/sharding_plan.py": PLACES}
ALLOWED_NAMES = dict.fromkeys(("meet_s", "pull_s_per_byte"), "keys of tuning files that users have") | dict.fromkeys(
    ("share_stream", "shares_events", "shares_memory"), "have in common"
)


class Finding(NamedTuple):
    path: str
    line: int
    word: str
    say: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.word}: say {self.say}"


def in_python(path: str, source: str) -> Iterator[Finding]:
    """Yield the findings of a module."""
    tree = ast.parse(source, path)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docstrings.add(first.value)
                yield from in_docstring(path, node, first)
        for name in names(node):
            yield from in_name(path, node, name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield from in_text(path, node.lineno, node.value)


def in_docstring(path: str, node: ast.AST, text: ast.stmt) -> Iterator[Finding]:
    """Yield the first word if it is not a verb; properties and tests, which state a fact, may begin with a noun."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("test"):
        return
    is_property = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
    word = (ast.get_docstring(node) or "").partition(" ")[0].rstrip(",.")
    if word in NO_VERBS and not is_property:
        yield Finding(path, text.lineno, word, f"what {node.name} does, beginning with a verb")


def names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node binds, by whatever statement; those of tests are sentences."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            if not name.startswith("test"):
                yield name
        case ast.ClassDef(name=name) | ast.arg(arg=name):
            yield name
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            yield name
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            yield name
        case ast.MatchMapping(rest=str(name)) | ast.alias(asname=str(name)):
            yield name


def parts(name: str) -> list[str]:
    """Split a name in snake or camel case into its words, in lower case, without `in_place` and `out_of_place`."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", IN_PLACE.sub("", name))
    return [word.lower() for word in words]


def in_name(path: str, node: ast.AST, name: str) -> Iterator[Finding]:
    """Yield the words of a name that the glossary replaces, and the name itself if it is vague."""
    line: int = node.lineno  # type: ignore[attr-defined]
    allowed = {word for start, words in DOCUMENTED.items() if path.startswith(start) for word in words}
    joined = f"_{'_'.join(parts(name))}_"
    for word, say in NAMES.items():
        if f"_{word}_" in joined and word not in allowed and name not in ALLOWED_NAMES:
            yield Finding(path, line, name, say)
    if name.strip("_").lower() in PARTICIPLES:
        yield Finding(path, line, name, WHAT_IT_IS)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and joined.startswith("_of_") and joined != "_of_":
        yield Finding(path, line, name, WHAT_IT_RETURNS)


def in_text(path: str, line: int, text: str) -> Iterator[Finding]:
    """Yield the phrases of a text that the glossary replaces."""
    for number, words in enumerate(text.splitlines()):
        for phrase, say in PHRASES.items():
            for match in re.finditer(phrase, words):
                yield Finding(path, line + number, match[0], say)


def in_markdown(path: str, text: str) -> Iterator[Finding]:
    """Yield the phrases of a page, outside of its code."""
    without_code = re.sub(r"^```.*?^```", lambda code: "\n" * code[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    yield from in_text(path, 1, re.sub(r"`[^`\n]*`", "", without_code))


def findings(tree: Path) -> Iterator[Finding]:
    """Yield the violations in the modules and pages of a tree."""
    modules = [path for folder in FOLDERS for path in sorted((tree / folder).rglob("*.py"))]
    pages = [path for pattern in PAGES for path in sorted(tree.glob(pattern))]
    for path in [*sorted(tree.glob("*.py")), *modules, *pages]:
        name = path.relative_to(tree).as_posix()
        if name not in ALLOWED:
            check = in_python if path.suffix == ".py" else in_markdown
            yield from check(name, path.read_text())


def main(tree: Path = ROOT) -> int:
    lines = [str(finding) for finding in findings(tree)]
    for line in lines:
        print(line, file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
