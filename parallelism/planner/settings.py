"""Settings: read a dataclass from command line flags and TOML files."""

import argparse
import dataclasses
import json
import os
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from collectives.job.settings import Parser, nearest, refusal, value_type

C = TypeVar("C")
CONFIGS = Path(__file__).parent / "configs"  # of the repository and the wheel


def parse(kind: type[C], description: str, arguments: Sequence[str] | None = None) -> C:
    """Make a `kind` from flags; other fields are from the `--config` file, or the defaults.

    A field's help is its metadata["help"]; collectives/job/settings.py documents the other keys.  A flag overrides the
    file's value of its field, and of the fields in its metadata["sets"].

    Raises: ValueError for an unknown flag or key, or an invalid value.
    """
    parser = Parser(description=description, allow_abbrev=False)
    parser.add_argument("--config", type=config_file, help=f"{config_help()}; flags override it")
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        add_flag(parser, field, hints[field.name])
    flags = vars(parser.parse_args(sys.argv[1:] if arguments is None else arguments))
    path = flags.pop("config", None)
    return kind(**overridden(from_toml(path, kind) if path else {}, flags, kind), **flags)


def overridden(in_file: dict[str, Any], flags: dict[str, Any], kind: type) -> dict[str, Any]:
    """Return the settings of a file that remain beside flags: not those of the same name, nor what a flag sets."""
    dropped = {*flags}
    for field in dataclasses.fields(kind):
        if field.name in flags:
            dropped.update(field.metadata.get("sets", ()))
    return {name: value for name, value in in_file.items() if name not in dropped}


def config_file(text: str) -> Path:
    """Return the file of settings that a command line names, by path, or by name if it is in `CONFIGS`.

    >>> config_file("small").name, config_file("my/small.toml").as_posix()
    ('small.toml', 'my/small.toml')
    """
    return Path(text) if os.path.isfile(text) else named_configs().get(text, Path(text))


def named_configs() -> dict[str, Path]:
    return {path.stem: path for path in sorted(CONFIGS.glob("*.toml"))}


def config_help() -> str:
    return f"TOML file of settings, or one of {', '.join(named_configs())}"


def add_flag(parser: argparse.ArgumentParser, field: dataclasses.Field, hint: Any) -> None:
    default = field.default_factory() if callable(field.default_factory) else field.default
    settings: dict[str, Any] = {
        "default": argparse.SUPPRESS,
        "help": field.metadata["help"] + (f" (default: {default})" if default not in (None, "", []) else ""),
    }
    kind = value_type(hint)
    if kind is bool:
        settings["action"] = argparse.BooleanOptionalAction
    elif kind is list:
        settings["nargs"] = "+"
    else:
        settings["type"] = kind
    if "choices" in field.metadata:
        settings["choices"] = field.metadata["choices"]
    parser.add_argument(f"--{field.name}", **settings)


def from_toml(path: Path, kind: type, strict: bool = True) -> dict[str, Any]:
    """Read settings from a TOML file.  Unless `strict`, settings that are not fields of `kind` are allowed.

    Raises: ValueError with the file's name.
    """
    fields, hints = {field.name: field for field in dataclasses.fields(kind)}, get_type_hints(kind)
    values = read_toml(path)
    for key, value in values.items():
        if isinstance(value, dict):
            raise ValueError(f"{path}: [{key}] is a table, but settings are not grouped in tables: remove its heading")
        if key not in fields:
            if not strict:
                continue
            raise ValueError(f"{path}: {key} is not a setting{nearest(key, fields)}; there are {', '.join(fields)}")
        if why := refusal(key, value, hints[key], fields[key].metadata):
            raise ValueError(f"{path}: {why}")
    return values


def to_toml(settings: Any) -> str:
    """Format a dataclass as a file that `from_toml` reads; fields that are None are omitted.

    >>> import types
    >>> print(to_toml(types.SimpleNamespace(lr=3e-05, data=["a b"], bias=True, seed=None)), end="")
    lr = 3e-05
    data = ["a b"]
    bias = true
    """
    values = {name: value for name, value in vars(settings).items() if value is not None}
    return "".join(
        f"{name} = {json.dumps(value, ensure_ascii=False, default=float)}\n" for name, value in values.items()
    )


def read_toml(path: Path) -> dict[str, Any]:
    try:
        if path.exists() and not path.is_file():
            raise ValueError(f"{path}: no such settings file; check the path")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: can't be read ({error.strerror}); check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not TOML: {error}") from None
