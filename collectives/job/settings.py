"""Valid values of settings: one table that checks flags, files and Python alike; and sizes on command lines, as 64K.

A setting is a field of a dataclass: its type gives the kind of value, its metadata the `choices` or the `range`.
"""

import argparse
import dataclasses
import difflib
import io
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from numbers import Integral, Real
from typing import Any, NamedTuple, get_args, get_type_hints

__version__ = "0.1.0"  # of the whole project

KINDS: dict[type, type] = {int: Integral, float: Real}  # NumPy's numbers, too
MOST_BYTES = 1 << 50  # of a size on a command line
EVALUATED = cache(get_type_hints)  # takes long
SUFFIXES = {"": 0, "K": 10, "M": 20, "G": 30}
CONTROL = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")


class Range(NamedTuple):
    """The numbers from `least` to `most`, without the ends that are `open`.

    >>> print(Range(1, 8), Range(0, 1, open="below"), Range(0, 64, open="above", unit="MiB"), sep="; ")
    from 1 to 8; at least 0 and below 1; above 0 and at most 64 MiB
    """

    least: float
    most: float
    open: str = ""  # "above": without `least`; "below": without `most`; or both
    unit: str = ""

    def __contains__(self, number: Any) -> bool:
        above = self.least < number if "above" in self.open else self.least <= number
        return bool(above and (number < self.most if "below" in self.open else number <= self.most))

    def __str__(self) -> str:
        begin = f"above {self.least}" if "above" in self.open else f"at least {self.least}"
        end = f"below {self.most}" if "below" in self.open else f"at most {self.most}"
        return f"{f'{begin} and {end}' if self.open else f'from {self.least} to {self.most}'} {self.unit}".rstrip()

    def whole(self, text: str) -> int:
        """Parse a whole number on a command line."""
        number = int(text) if re.fullmatch(r"-?\d{1,30}", text, re.ASCII) else None
        return self._refused_unless_in(text, number, "a whole number")

    def number(self, text: str) -> float:
        """Parse a number on a command line."""
        try:
            number = float(text)
        except ValueError:
            number = None
        return self._refused_unless_in(text, number, "a number")

    def _refused_unless_in(self, text: str, number: Any, kind: str) -> Any:
        if number is None or number not in self:
            raise argparse.ArgumentTypeError(f"{text!r} must be {kind} {self}")
        return number


positive = Range(1, 1_000_000).whole


def program() -> str | None:
    """Name the module that runs, as argparse does from Python 3.14 on; None for a script, which argparse names."""
    spec = sys.modules["__main__"].__spec__
    return f"python -m {spec.name.removesuffix('.__main__')}" if spec else None


class Parser(argparse.ArgumentParser):
    """A parser that raises where argparse would end the process, so that ranks can agree on the error first."""

    def __init__(self, prog: str | None = None, description: str | None = None, **more: Any):  # as subparsers pass
        form = argparse.RawDescriptionHelpFormatter
        if sys.version_info >= (3, 14):
            more.setdefault("color", False)  # mpirun gives ranks a terminal, also where its own output goes to a file
        super().__init__(prog or program(), description=description, formatter_class=form, **more)
        version = f"handwritten-collectives {__version__}"
        self.add_argument("--version", action="version", version=version, help="print the version and exit")
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a path must not end a program that prints it

    def parse_args(self, args=None, namespace=None):
        """Parse flags, and say which known ones are nearest to unknown ones."""
        namespace, unknown = self.parse_known_args(args, namespace)
        if unknown:
            acts = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
            parsers = [self, *(parser for action in acts for parser in action.choices.values())]
            options = [flag for parser in parsers for flag in parser._option_string_actions]
            flags = [word.partition("=")[0] for word in unknown if word.startswith("--")]
            hints = "".join(nearest(flag, options) for flag in flags)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hints}")
        return namespace

    def parse_known_args(self, args=None, namespace=None):
        """Parse flags with dashes and with underscores within them alike, and `--version`."""
        words = sys.argv[1:] if args is None else list(args)
        end = words.index("--") if "--" in words else len(words)
        words = [self._as_defined(word) for word in words[:end]] + words[end:]
        return super().parse_known_args(words, namespace)

    def _as_defined(self, word: str) -> str:
        name, equals, value = word.partition("=")
        if not name.startswith("--") or name in self._option_string_actions:
            return word
        for other in (name[2:].replace("-", "_"), name[2:].replace("_", "-")):
            if f"--{other}" in self._option_string_actions:
                return f"--{other}{equals}{value}"
        return word

    def error(self, message: str):
        raise ValueError(f"{' '.join(message.split())}; see --help")


def nearest(name: str, names: Iterable[str]) -> str:
    """Return words for the name that a mistyped one resembles, if there is one.

    >>> nearest("--micro_batchsize", ["--micro_batch_size", "--lr"]), nearest("--learning_rate", ["--lr"])
    (' (nearest: --micro_batch_size)', '')
    >>> nearest("--json", ["--version"])  # dashes resemble nothing
    ''
    """
    bare = {each.lstrip("-"): each for each in names}
    close = difflib.get_close_matches(name.lstrip("-"), list(bare), n=1)
    return f" (nearest: {bare[close[0]]})" if close else ""


def value_type(hint: Any) -> Any:
    """Return int for `int | None`, for example."""
    return next((kind for kind in get_args(hint) if kind is not type(None)), hint) if hint != list[str] else list


def refusal(name: str, value: Any, hint: Any, metadata: Mapping[str, Any]) -> str:
    """Return the fault of a setting of the type `hint`; empty for none.

    >>> refusal("lr", -1.0, float, {"range": Range(0, 100, open="above")})
    'lr=-1.0 must be above 0 and at most 100'
    """
    kind, choices, numbers = value_type(hint), metadata.get("choices"), metadata.get("range")
    if value is None and type(None) in get_args(hint):
        return ""
    texts = value if isinstance(value, list) else [value]
    if not is_a(value, kind) or (kind is list and not all(isinstance(text, str) for text in texts)):
        return f"{name}={value!r} must be of type {'list of str' if kind is list else kind.__name__}"
    if choices and value not in choices:
        return f"{name}={value!r} is unknown: use {', '.join(map(str, choices))}"
    if numbers and value not in numbers:
        return f"{name}={value!r} must be {numbers}"
    if any(isinstance(text, str) and CONTROL.search(text) for text in texts):
        return f"{name}={value!r} has characters that are not text: remove them"
    return ""


def is_a(value: Any, kind: type) -> bool:
    return isinstance(value, KINDS.get(kind, kind)) and (kind is bool or not isinstance(value, bool))


def hints_of(kind: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields, which are text in its source."""
    return EVALUATED(kind)


def check(settings: Any, *names: str) -> None:
    """Raise ValueError for the first invalid field of a dataclass, or of `names`, with its value and the valid ones."""
    hints = hints_of(type(settings))
    for field in (field for field in dataclasses.fields(settings) if not names or field.name in names):
        if why := refusal(field.name, getattr(settings, field.name), hints[field.name], field.metadata):
            raise ValueError(why)


def num_bytes(text: str) -> int:
    """Parse a size, with K, M or G for 2^10, 2^20 or 2^30.

    >>> num_bytes("8"), num_bytes("64K")
    (8, 65536)
    """
    match = re.fullmatch(r"(\d{1,20})([KMG]?)", text, re.ASCII)
    nbytes = int(match[1]) << SUFFIXES[match[2]] if match else MOST_BYTES + 1
    if nbytes > MOST_BYTES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size: write one like 8, 64K, 1M or 1G, at most {MOST_BYTES >> 30}G"
        )
    return nbytes


def size_in_words(nbytes: int) -> str:
    """Format a size as `num_bytes` parses it.

    >>> [size_in_words(nbytes) for nbytes in (8, 65536, 3 << 20)]
    ['8', '64K', '3M']
    """
    for suffix, shift in reversed(SUFFIXES.items()):
        if nbytes and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift}{suffix}"
    return str(nbytes)


def ladder(begin: int, end: int, factor: int) -> tuple[int, ...]:
    """List sizes from `begin` to `end`, each `factor` times the one before.

    >>> ladder(8, 1000, 4)
    (8, 32, 128, 512)
    """
    sizes = [begin]
    while 0 < sizes[-1] * factor <= end:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)
