"""List the slowest items of the last test runs, and warn of those that take too long.

python -m mpi_tests.helpers.slowest --make_test 300 --whole 900

As machines are noisy, only a total of more than 40 minutes is an error.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from mpi_tests.helpers.progress import CACHE

TIMES_FOLDER = Path(__file__).parents[2] / ".pytest_cache" / "v" / CACHE
ITEM_LIMIT_S = 20
MAKE_TEST_LIMIT_S = 12 * 60
WHOLE_LIMIT_S = 40 * 60


def slowest(seconds: dict[str, float], count: int = 10) -> Iterator[str]:
    """Yield a line for each of the slowest items, then warnings.

    >>> print(*slowest({"quick": 1.0, "slow": 25.0}, count=1), sep="\\n")
       25.0 s  slow
    warning: slow takes 25 s, more than 20 s: make it smaller, or move it to `make test-all`
    """
    items = sorted(seconds, key=seconds.__getitem__, reverse=True)
    yield from (f"{seconds[item]:7.1f} s  {item}" for item in items[:count])
    for item in items:
        if seconds[item] > ITEM_LIMIT_S:
            remedy = "make it smaller, or move it to `make test-all`"
            yield f"warning: {item} takes {seconds[item]:.0f} s, more than {ITEM_LIMIT_S} s: {remedy}"


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m mpi_tests.helpers.slowest", description=__doc__.splitlines()[0])
    parser.add_argument("--make_test", type=float, default=0, help="duration of `make test` in seconds")
    parser.add_argument("--whole", type=float, default=0, help="duration of all tests in seconds")
    args = parser.parse_args(words)
    runs = [json.loads(path.read_text()) for path in sorted(TIMES_FOLDER.iterdir())] if TIMES_FOLDER.is_dir() else []
    seconds = {item: duration for run in runs for item, duration in run.items()}
    print("\n".join(["slowest items:", *slowest(seconds)]))
    if args.make_test > MAKE_TEST_LIMIT_S:
        print(f"warning: make test takes {args.make_test:.0f} s, more than {MAKE_TEST_LIMIT_S} s: see the items above")
    if args.whole > WHOLE_LIMIT_S:
        print(f"error: all takes {args.whole:.0f} s, more than {WHOLE_LIMIT_S} s: see the items above")
    return int(args.whole > WHOLE_LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
