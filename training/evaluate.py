"""Evaluate a run's weights on tasks of EleutherAI's lm-evaluation-harness, which must be installed.

python -m training.evaluate out --tasks hellaswag arc_easy
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from collectives.job.settings import Parser, Range
from collectives.job.system import write
from collectives.schedule.draw import refuse

CONFIG, TOKENIZERS = "config.json", ("tokenizer.json", "tokenizer.model", "vocab.json")
SAMPLES, SHOTS, EXAMPLES = Range(1, 10**4), Range(0, 10**3), Range(1, 10**9)


def main() -> int:
    parser = Parser(description=__doc__, allow_abbrev=False)
    add: Any = parser.add_argument
    add("folder", type=Path, help="a run's out_dir, or another folder of Hugging Face's")
    add("--tasks", nargs="+", required=True, help="names of tasks, or YAML files of one's own")
    add("--num_fewshot", type=SHOTS.whole, help="examples ahead of each question (the task's own number)")
    add("--limit", type=EXAMPLES.whole, help="questions of each task (all)")
    add("--batch_size", type=SAMPLES.whole, default=1, help="questions at once (1)")
    add("--device", default="cpu", help="device of torch (cpu)")
    add("--out", type=Path, help="output file in JSON (lm_eval.json in the folder)")
    try:
        print(*evaluate(parser.parse_args()), sep="\n")
    except ValueError as error:
        print(f"training.evaluate: {error}", file=sys.stderr)
        return 2
    return 0


def evaluate(args: Namespace) -> list[str]:
    """Evaluate, write the results, and return their tables.

    Raises: ValueError with the remedy.
    """
    out = args.out or args.folder / "lm_eval.json"
    check(args.folder)
    refuse(str(out), "--out ")
    import lm_eval
    from lm_eval.utils import handle_non_serializable, make_table

    try:
        results = lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(args.folder)},
            tasks=args.tasks,
            num_fewshot=args.num_fewshot,
            limit=args.limit,
            batch_size=args.batch_size,
            device=args.device,
            log_samples=False,
        )
    except (KeyError, ValueError, OSError) as error:  # as for an unknown task, or data that cannot be downloaded
        raise ValueError(f"lm_eval ends with {type(error).__name__}: {' '.join(str(error).split())}") from None
    write(out, json.dumps(results, indent=2, default=handle_non_serializable))
    return [make_table(results), *([make_table(results, "groups")] if results.get("groups") else []), f"in {out}"]


def check(folder: Path) -> None:
    """Check that lm_eval can read a folder.

    Raises: ValueError with the remedy.
    """
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder / CONFIG}: no such file; pass the out_dir of a run that has ended")
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise ValueError(f"{folder / TOKENIZERS[0]}: no such file; lm_eval needs one: train with --tokenizer FILE.json")
    for package in ("lm_eval", "transformers"):
        if find_spec(package) is None:
            raise ValueError(f"{package} is not installed: pip install 'lm_eval[hf]'")


if __name__ == "__main__":
    sys.exit(main())
