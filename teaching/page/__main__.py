"""Write a page that steps through every schedule, of collectives and of parallel training.  No MPI is needed.

python -m teaching.page --out page.html
python -m teaching.page --out page.html --schedule all_reduce=examples.own_schedule:swing

Without torch, ring attention and ZeRO are left out.
"""

import sys
from collections.abc import Sequence

from collectives.job.settings import Parser
from collectives.job.system import write
from collectives.schedule.draw import refuse
from teaching.page.assemble import page
from teaching.page.scenes import has_torch, scenes
from teaching.page.scenes.collectives import own_row


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        flags = parser().parse_args(arguments)
        refuse(flags.out, "--out ")
        if sys.flags.optimize > 1:
            raise ValueError("the page shows docstrings, which python -OO removes: run it without -OO")
        own = tuple(map(own_row, flags.schedule))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not has_torch():
        print("torch is not installed: the page is without ring attention and ZeRO", file=sys.stderr)
    text = page(scenes(own))
    write(flags.out, text)
    print(f"{flags.out}: {len(text.encode()) / 1000:.0f} kB, opens in any browser without a network")
    return 0


def parser() -> Parser:
    parser = Parser("python -m teaching.page", __doc__)
    parser.add_argument("--out", required=True, metavar="FILE", help="the page, one file")
    words = "show a schedule of your own, too; several times for several"
    parser.add_argument("--schedule", action="append", default=[], metavar="COLLECTIVE=MODULE:FUNCTION", help=words)
    return parser


if __name__ == "__main__":
    sys.exit(main())
