"""One HTML file of scenes: their scripts and data, packed, in one template."""

import base64
import json
import zlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, NamedTuple

CORE = ("pack.js", "elements.js", "steps.js")


class Scene(NamedTuple):
    """A scene to step through: data by name, of JSON's types, which the script scenes/`name`.js shows."""

    name: str
    data: dict[str, Any]


def page(scenes: Sequence[Scene]) -> str:
    """Return the page of some scenes, in their order."""
    own = [f"{{\n{read(f'scenes/{scene.name}.js')}}}" for scene in scenes]
    parts = {
        "style": read("style.css"),
        "script": "\n".join([*map(read, CORE), *own, "openPage();\n"]),
        "data": "\n".join(
            f'<script type="text/plain" id="data-{scene.name}.{name}">{packed(value)}</script>'
            for scene in scenes
            for name, value in scene.data.items()
        ),
    }
    text = read("page.html")
    for name, part in parts.items():
        text = text.replace(f"<!-- {name} -->", part)
    return text


def read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def packed(value: Any) -> str:
    """Return data as JSON, deflated, in base64: `unpack` in pack.js undoes it."""
    text = json.dumps(value, separators=(",", ":"))
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15, 9)
    return base64.b64encode(deflate.compress(text.encode()) + deflate.flush()).decode()


def unpacked(text: str) -> Any:
    """Return the data that `packed` packs."""
    return json.loads(zlib.decompress(base64.b64decode(text), -15))
