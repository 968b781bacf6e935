"""Continue a text with a model trained by `python -m training`, or one in Hugging Face's format.

python -m training.sample --from out --prompt "def "
mpirun -n 2 python -m training.sample --from out --prompt "def " --num_samples 3 --top_p 0.9
python -m training.sample --from out --chat "How are you?"
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch

import collectives
from collectives.job.settings import Parser, Range
from models.decoder import Decoder
from models.generate import check, generate
from parallelism.tensor.sharding_plan import parallelize
from training.data.chat_template import ChatTemplate, load_template
from training.data.token_files import TokenSequence
from training.data.tokenizer import BYTE_VOCABULARY, BYTES, Tokenizer, load_tokenizer, saved_tokenizer, token_ids
from training.parallel.decoder import plan_of
from training.parallel.device import prepare_process
from training.settings.fields import RunSettings
from training.settings.ranges import SEED, TEXT
from training.weights.hf import load_hugging_face

SAMPLES = Range(1, 1000)


def sample(model: Decoder, prompt: np.ndarray | TokenSequence, config: RunSettings, tokenizer: Tokenizer) -> str:
    """Return a continuation of some tokens, as text or token ids, or a line with the reason why there is none."""
    start = torch.from_numpy(np.asarray(prompt, np.int64))[None].to(config.device)  # (1, seq)
    generator = torch.Generator(config.device).manual_seed(config.seed)
    model.eval()
    try:
        tokens = generate(model, start, config.sample_tokens, 0.8, top_k=50, generator=generator)
    except ValueError as error:
        return f"no sample: {error}"
    return tokenizer.decode(tokens[0].tolist())


def main() -> None:
    comm = collectives.world()
    prepare_process(comm)
    with comm.agreed():
        args = parse()
        model = load_hugging_face(args.directory).eval()
        tokenizer = tokenizer_of(Path(args.directory), model, args.tokenizer)
        template = None if args.chat is None else load_template(Path(args.directory))
        text = template.text([{"role": "user", "content": args.chat}], prompts=True) if template else args.prompt
        prompt = torch.tensor([encode(tokenizer, text, model)])  # (1, seq)
    if comm.size > 1:
        split(model, comm)
    for number in range(args.num_samples):
        generator = torch.Generator().manual_seed(args.seed + number)
        tokens = generate(
            model, prompt, args.num_tokens, args.temperature, args.top_k, args.top_p, generator, comm.broadcast
        )
        ids: Sequence[int] = tokens[0].tolist()
        if template:
            ids = answer(ids[prompt.shape[1] :], template, tokenizer)
        print(f"{'---' + os.linesep if number else ''}{tokenizer.decode(ids)}", flush=True)


def parse() -> Namespace:
    """Read the command line.

    Raises: ValueError for invalid flags.
    """
    parser = Parser(description=__doc__, allow_abbrev=False)
    add: Any = parser.add_argument
    add("--from", dest="directory", default="out", help="a run's out_dir, or a folder of Hugging Face's (out)")
    add("--prompt", default="\n", help="text to go on from (a new line)")
    add("--chat", help="question to answer, asked by the folder's chat template, instead of a text to go on from")
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


def tokenizer_of(folder: Path, model: Decoder, name: str | None) -> Tokenizer:
    """Return the requested tokenizer, or the folder's, or bytes or token ids, depending on the vocabulary's size.

    Raises: ValueError for a tokenizer with more tokens than the model.
    """
    vocab_size = model.config.vocab_size
    tokenizer = load_tokenizer(name) if name else saved_tokenizer(folder)
    if tokenizer is None:
        tokenizer = load_tokenizer(BYTES) if vocab_size == BYTE_VOCABULARY else token_ids(vocab_size)
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(f"{tokenizer.name} has {tokenizer.vocab_size} tokens, the model in {folder} only {vocab_size}")
    return tokenizer


def encode(tokenizer: Tokenizer, prompt: str, model: Decoder) -> list[int]:
    """Return the prompt's tokens.

    Raises: ValueError for an empty prompt, or tokens that the model lacks.
    """
    ids = [int(token) for token in tokenizer.encode(prompt)]
    if not ids:
        raise ValueError(f"prompt={prompt!r} has no tokens: pass some text to go on from")
    if not 0 <= min(ids) <= max(ids) < model.config.vocab_size:
        raise ValueError(f"prompt={prompt!r}: tokens must be from 0 to {model.config.vocab_size - 1}")
    return ids


def answer(ids: Sequence[int], template: ChatTemplate, tokenizer: Tokenizer) -> Sequence[int]:
    """Return the tokens before the one that ends an answer."""
    end = template.special_tokens.get("eos_token")
    last = [int(token) for token in tokenizer.encode(end)][-1] if end else None
    return ids[: ids.index(last)] if last in ids else ids


def split(model: Decoder, comm: collectives.Communicator) -> None:
    """Split attention and MLPs over the ranks; embeddings and experts are replicated.  Collective."""
    whole = ("transformer.wte", "lm_head", "loss", "transformer.h.*.mlp")
    with redirect_stdout(None):
        parallelize(model, {name: each for name, each in plan_of(model.config).items() if name not in whole}, comm)


if __name__ == "__main__":
    main()
