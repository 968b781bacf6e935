"""Continue a text with a model trained by `python -m training`, or a GPT-2 or Llama in Hugging Face's format.

python -m training.sample --from out --prompt "def "
mpirun -n 2 python -m training.sample --from out --prompt "def " --num_samples 3 --top_p 0.9
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

import collectives
from collectives.job import environment
from collectives.job.settings import Parser, Range
from models.generate import check, generate
from models.hf import load_hugging_face
from models.model import Model
from models.tokenizer import BYTE_VOCABULARY, BYTES, Tokenizer, load_tokenizer, saved_tokenizer, token_ids
from training.ranges import SEED, TEXT

SAMPLES = Range(1, 1000)


def main() -> None:
    comm = collectives.world()
    if comm.rank:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # other ranks are silent  # noqa: SIM115
    torch.set_num_threads(environment.threads_per_rank())
    with comm.agreed():
        args = parse()
        gpt = load_hugging_face(args.directory).eval()
        tokenizer = tokenizer_of(Path(args.directory), gpt, args.tokenizer)
        prompt = torch.tensor([encode(tokenizer, args.prompt, gpt)])  # (1, seq)
    if comm.size > 1:
        split(gpt, comm)
    for number in range(args.num_samples):
        generator = torch.Generator().manual_seed(args.seed + number)
        tokens = generate(
            gpt, prompt, args.num_tokens, args.temperature, args.top_k, args.top_p, generator, comm.broadcast
        )
        print(f"{'---' + os.linesep if number else ''}{tokenizer.decode(tokens[0].tolist())}", flush=True)


def parse() -> Namespace:
    """Read the command line.

    Raises: ValueError for invalid flags.
    """
    parser = Parser(description=__doc__, allow_abbrev=False)
    add: Any = parser.add_argument
    add("--from", dest="directory", default="out", help="a run's out_dir, or a folder of Hugging Face's (out)")
    add("--prompt", default="\n", help="text to go on from (a new line)")
    add("--tokenizer", help="a tokenizer.json, .tiktoken file or meta.pkl, where the folder has none of its own")
    add("--num_tokens", type=TEXT.whole, default=200, help="tokens to add (200)")
    add("--num_samples", type=SAMPLES.whole, default=1, help="texts to draw (1)")
    add("--temperature", type=float, default=0.8, help="below 1 likelier tokens are drawn more often (0.8)")
    add("--top_k", type=int, help="draw of so many of the likeliest tokens (all)")
    add("--top_p", type=float, help="draw of the fewest tokens that have this probability together (1)")
    add("--seed", type=SEED.whole, default=1337, help="of the first text; the next has the next (1337)")
    args = parser.parse_args()
    check(args.temperature, args.top_k, args.top_p)
    return args


def tokenizer_of(folder: Path, gpt: Model, name: str | None) -> Tokenizer:
    """Return the requested tokenizer, or the folder's, or bytes or token ids, depending on the vocabulary's size.

    Raises: ValueError for a tokenizer with more tokens than the model.
    """
    vocab_size = gpt.config.vocab_size
    tokenizer = load_tokenizer(name) if name else saved_tokenizer(folder)
    if tokenizer is None:
        tokenizer = load_tokenizer(BYTES) if vocab_size == BYTE_VOCABULARY else token_ids(vocab_size)
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(f"{tokenizer.name} has {tokenizer.vocab_size} tokens, the model in {folder} only {vocab_size}")
    return tokenizer


def encode(tokenizer: Tokenizer, prompt: str, gpt: Model) -> list[int]:
    """Return the prompt's tokens.

    Raises: ValueError for an empty prompt, or tokens that the model lacks.
    """
    ids = [int(token) for token in tokenizer.encode(prompt)]
    if not ids:
        raise ValueError(f"prompt={prompt!r} has no tokens: pass some text to go on from")
    if not 0 <= min(ids) <= max(ids) < gpt.config.vocab_size:
        raise ValueError(f"prompt={prompt!r}: tokens must be from 0 to {gpt.config.vocab_size - 1}")
    return ids


def split(gpt: Model, comm: collectives.Communicator) -> None:
    """Split attention and MLPs over the ranks; embeddings and experts are replicated.  Collective."""
    from parallelism.tensor.sharding_plan import parallelize
    from training.family import plan_of

    whole = ("transformer.wte", "lm_head", "loss", "transformer.h.*.mlp")
    with redirect_stdout(None):
        parallelize(gpt, {name: each for name, each in plan_of(gpt.config).items() if name not in whole}, comm)


if __name__ == "__main__":
    main()
