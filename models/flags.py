"""A dataclass as command line flags, and a TOML file that sets them."""

import argparse
import dataclasses
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

C = TypeVar("C")


class Parser(argparse.ArgumentParser):
    """A parser that raises where argparse would end the process, so that ranks can agree on the error first."""

    def error(self, message: str):
        raise ValueError(f"{message}; see --help")


def parse(kind: type[C], description: str, arguments: Sequence[str] | None = None) -> C:
    """Make a `kind` from flags; what they leave out is taken from the `--config` file, then from the defaults.

    A field's help is its metadata["help"].

    Raises: ValueError for an unknown flag or key, or a value of the wrong type.
    """
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--config", type=Path, help="a TOML file of these settings; flags come before it")
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        add_flag(parser, field, hints[field.name])
    given = vars(parser.parse_args(sys.argv[1:] if arguments is None else arguments))
    path = given.pop("config", None)
    return kind(**{**(from_toml(path, hints) if path else {}), **given})


def add_flag(parser: argparse.ArgumentParser, field: dataclasses.Field, hint: Any) -> None:
    default = field.default_factory() if callable(field.default_factory) else field.default
    settings: dict[str, Any] = {"default": argparse.SUPPRESS, "help": f"{field.metadata['help']} ({default})"}
    if hint is bool:
        settings["action"] = argparse.BooleanOptionalAction
    elif hint == list[str]:
        settings["nargs"] = "+"
    else:
        settings["type"] = value_type(hint)
    if "choices" in field.metadata:
        settings["choices"] = field.metadata["choices"]
    parser.add_argument(f"--{field.name}", **settings)


def value_type(hint: Any) -> Any:
    """int of `int | None`, for example."""
    return next((kind for kind in get_args(hint) if kind is not type(None)), hint)


def from_toml(path: Path, hints: dict[str, Any], strict: bool = True) -> dict[str, Any]:
    """A file's settings.  Unless `strict`, there may be others than `hints` has the types of."""
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: can't be read ({error.strerror}); check the path") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not TOML: {error}") from None
    for key, value in values.items():
        if key not in hints:
            if not strict:
                continue
            raise ValueError(f"{path}: {key} is no setting; there are {', '.join(hints)}")
        expected = list if hints[key] == list[str] else value_type(hints[key])
        allowed = (int, float) if expected is float else expected
        if not isinstance(value, allowed) or (isinstance(value, bool) and expected is not bool):
            raise ValueError(f"{path}: {key} = {value!r} must be of type {expected.__name__}")
    return values
