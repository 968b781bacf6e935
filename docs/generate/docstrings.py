"""Docstrings of the house as markdown: doctests in fences, labels as `Raises:` in bold, and a table of parameters."""

import re
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import griffe

LABEL = re.compile(r"^(Cost|Raises|Shapes|Source|Sources):", re.MULTILINE)
MEANINGS = Path(__file__).with_name("parameters.toml")
Meanings = dict[str, dict[str, str]]


class Docstrings(griffe.Extension):
    """Rewrites each docstring as it is read."""

    def on_instance(self, *, obj: griffe.Object, **more: Any) -> None:
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)

    def on_function_instance(self, *, func: griffe.Function, **more: Any) -> None:
        """Type arrays, which have no type that all array libraries know."""
        for parameter in func.parameters:
            if str(parameter.annotation) == "Any":
                parameter.annotation = meanings()["types"].get(parameter.name, parameter.annotation)

    def on_package(self, *, pkg: griffe.Module, **more: Any) -> None:
        for each in documented(pkg):
            assert each.docstring
            if lines := table(each):
                each.docstring.value += "\n\n" + "\n".join(lines)
            elif isinstance(each, griffe.Class) and is_named_tuple(each) and (fields := parameters(each)):
                names = ", ".join(f"`{field.name}: {field.annotation}`" for field in fields)
                each.docstring.value += f"\n\n**Fields:** {names}"


@cache
def meanings() -> Meanings:
    return tomllib.loads(MEANINGS.read_text())


def documented(module: griffe.Module | griffe.Class) -> Iterator[griffe.Function | griffe.Class]:
    """Yield the public functions, classes and methods that have a docstring."""
    for member in module.members.values():
        if member.is_alias or (member.name.startswith("_") and member.name != "__call__"):
            continue
        if isinstance(member, griffe.Function | griffe.Class) and member.docstring:
            yield member
        if isinstance(member, griffe.Module | griffe.Class):
            yield from documented(member)


def table(described: griffe.Function | griffe.Class) -> list[str]:
    """Return a table of parameters with their types, defaults and meanings; empty unless all have a meaning."""
    rows = [(each, meaning(described, each.name)) for each in parameters(described)]
    if not rows or not all(text for _, text in rows):
        return []
    lines = (f"| `{each.name}` | {code(each.annotation)} | {code(default(each))} | {text} |" for each, text in rows)
    head = ['<div class="parameters" markdown>\n', "| parameter | type | default | meaning |", "|---|---|---|---|"]
    return [*head, *lines, "\n</div>"]


def parameters(described: griffe.Function | griffe.Class) -> Sequence[griffe.Parameter]:
    """Return the parameters of a call, without `self`; of a NamedTuple or a dataclass, its fields."""
    if isinstance(described, griffe.Class) and "__init__" not in described.members:
        if not is_named_tuple(described) and not any("dataclass" in str(each.value) for each in described.decorators):
            return []
        fields = [each for each in described.attributes.values() if each.annotation and "property" not in each.labels]
        return [griffe.Parameter(each.name, annotation=each.annotation, default=each.value) for each in fields]
    function = described.members["__init__"] if isinstance(described, griffe.Class) else described
    assert isinstance(function, griffe.Function)
    return [each for each in function.parameters if each.name not in ("self", "cls")]


def meaning(described: griffe.Function | griffe.Class, name: str) -> str:
    """Return what a parameter means: of this method, or else of its class, or else wherever it has this name."""
    owner = described.parent
    is_method = isinstance(owner, griffe.Class)
    headings = [f"{owner.name}.{described.name}" if owner and is_method else described.name, "of-any"]
    return next((text for heading in headings if (text := meanings().get(heading, {}).get(name))), "")


def default(parameter: griffe.Parameter) -> Any:
    is_variadic = parameter.kind in (griffe.ParameterKind.var_positional, griffe.ParameterKind.var_keyword)
    return None if is_variadic else parameter.default


def is_named_tuple(described: griffe.Class) -> bool:
    return "NamedTuple" in map(str, described.bases)


def code(words: Any) -> str:
    return "" if words is None else f"`{words}`"


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
