"""Predict memory and time of a step for every layout, and list the best.  Neither MPI nor torch is needed.

python -m parallelism.planner --config configs/small.toml --hosts 8 --gpus 8
python -m parallelism.planner --n_layer 32 --n_embd 4096 --n_head 32 --block_size 4096 --dtype bfloat16 --hosts 2
python -m parallelism.planner --config configs/small.toml --fabric 100gbe --gpus 2 --measure --tp 1
"""

import sys
from collections.abc import Sequence

from parallelism.planner.flags import parse_request
from parallelism.planner.report import command, report
from parallelism.planner.search import nothing, search


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        what = parse_request(arguments, __doc__)
        print("\n".join(what.words), flush=True)
        result = search(what.job, what.machine, what.fixed, what.number)
        if not result.best:
            raise ValueError(nothing(result, what.machine))
        print("\n".join(report(what.job, what.machine, result)))
        print(what.command, command(result.best[0].layout, what.written))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
