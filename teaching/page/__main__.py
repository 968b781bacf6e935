"""Write a page that steps through every schedule, of collectives and of installed packages.  No MPI is needed.

python -m teaching.page --out page.html
"""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

from collectives.job.settings import Parser
from teaching.page.assemble import Scene, page
from teaching.page.scenes import collectives

GROUP = "teaching.page"  # of entry points
Source = Callable[[], Scene]


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        flags = parser().parse_args(arguments)
        refuse(flags.out)
        sources = installed() if flags.scenes is None else [named(text) for text in flags.scenes]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = page([collectives.scene(), *(source() for source in sources)])
    with open(f"{flags.out}.part", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(f"{flags.out}.part", flags.out)
    print(f"{flags.out}: {len(text.encode()) / 1000:.0f} kB, opens in any browser without a network")
    return 0


def parser() -> Parser:
    parser = Parser("python -m teaching.page", __doc__)
    parser.add_argument("--out", required=True, metavar="FILE", help="the page, one file")
    words = f"instead of those that are installed, as entry points {GROUP}, beside the collectives"
    parser.add_argument("--scenes", nargs="*", metavar="MODULE:FUNCTION", help=words)
    return parser


def refuse(path: str) -> None:
    """Refuse a path where no page can be put, by a ValueError."""
    if not os.access(os.path.dirname(path) or ".", os.W_OK) or os.path.isdir(path):
        raise ValueError(f"--out {path} can't be written: pass a file in an existing, writable folder")


def installed() -> list[Source]:
    return [point.load() for point in sorted(entry_points(group=GROUP), key=lambda point: point.name)]


def named(text: str) -> Source:
    """Return the function that `text` names, as MODULE:FUNCTION.

    Raises: ValueError where there is none.
    """
    module, _, name = text.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"--scenes {text!r} cannot be imported: write MODULE:FUNCTION, as in the help ({error})"
        ) from None


if __name__ == "__main__":
    sys.exit(main())
