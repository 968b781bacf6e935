"""One HTML file of scenes: their scripts and data, packed, in one template."""

import base64
import json
import zlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, NamedTuple

CORE = ("pack.js", "elements.js", "steps.js")


class Scene(NamedTuple):
    """A scene to step through: JavaScript that calls `addScene`, and its data by name, of JSON's types."""

    name: str
    title: str
    scripts: tuple[str, Sequence[str]]  # a package, and names of files in it
    data: dict[str, Any]


def page(scenes: Sequence[Scene]) -> str:
    """Return the page of some scenes, in their order."""
    core = [read(__package__, name) for name in CORE]
    own = [f"{{\n{read(scene.scripts[0], name)}}}" for scene in scenes for name in scene.scripts[1]]
    parts = {
        "style": read(__package__, "style.css"),
        "script": "\n".join([*core, *own, "openPage();\n"]),
        "data": "\n".join(
            f'<script type="text/plain" id="data-{scene.name}.{name}">{packed(value)}</script>'
            for scene in scenes
            for name, value in scene.data.items()
        ),
    }
    text = read(__package__, "page.html")
    for name, part in parts.items():
        text = text.replace(f"<!-- {name} -->", part)
    return text


def read(package: str, name: str) -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")


def packed(value: Any) -> str:
    """Return data as JSON, deflated, in base64: `unpack` in pack.js undoes it."""
    text = json.dumps(value, separators=(",", ":"))
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15, 9)
    return base64.b64encode(deflate.compress(text.encode()) + deflate.flush()).decode()


def unpacked(text: str) -> Any:
    """Return the data that `packed` packs."""
    return json.loads(zlib.decompress(base64.b64decode(text), -15))
