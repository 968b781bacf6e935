"""Merge an adapter of PEFT into its model's weights, and write these in Hugging Face's format.

python -m training.merge --from model --adapter tuned/adapter --out merged
"""

from __future__ import annotations

import sys
from pathlib import Path

from collectives.job.settings import Parser
from training.data.tokenizer import save_tokenizer, saved_tokenizer
from training.lora.adapters import attach_adapters, merge
from training.lora.peft import adapter_factors
from training.settings.config import Config
from training.weights.export import save_hugging_face
from training.weights.hf import load_hugging_face


def main() -> int:
    parser = Parser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--from", dest="directory", required=True, help="folder of a model of Hugging Face's")
    parser.add_argument("--adapter", required=True, help="folder of an adapter for it, as PEFT or train.py writes")
    parser.add_argument("--out", type=Path, required=True, help="output folder of the merged weights")
    try:
        args = parser.parse_args()
        print(merged(args.directory, args.adapter, args.out))
    except (ValueError, OSError) as error:
        print(f"training.merge: {error}", file=sys.stderr)
        return 2
    return 0


def merged(directory: str, adapter: str, out: Path) -> str:
    """Write the merged weights, with the tokenizer if there is one; return a line on them.

    Raises: ValueError for folders that cannot be read, or do not fit together.
    """
    model = load_hugging_face(directory)
    settings = Config(init_from=directory, lora_from=adapter, vocab_size=model.config.vocab_size)
    targets = attach_adapters(model, settings, adapter_factors(model, settings))
    merge(model, targets)
    save_hugging_face(model, out, directory)
    if tokenizer := saved_tokenizer(Path(directory)):
        save_tokenizer(tokenizer, out, model.config.vocab_size)
    return f"{len(targets)} adapters merged: python -m training.sample --from {out}"


if __name__ == "__main__":
    sys.exit(main())
