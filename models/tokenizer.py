"""Tokenizers: bytes of UTF-8, or a file of the tokenizers or tiktoken libraries."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from collectives.job.system import replacing

BYTES, TOKEN_IDS = "bytes", "token ids"
META = "meta.json"  # beside tokens or weights, with the name of their tokenizer
DOCUMENT_END = "<|endoftext|>"


class Tokenizer(NamedTuple):
    """A tokenizer: text to tokens and back.  `end` is the token that follows each document, or None.

    `decode` skips invalid tokens, which a model with a larger vocabulary may draw.
    """

    name: str
    vocab_size: int
    end: int | None
    encode: Callable[[str], Sequence[int] | np.ndarray]
    decode: Callable[[Sequence[int]], str]
    path: str | None = None  # its file

    @property
    def dtype(self) -> np.dtype:
        """Smallest dtype for token files."""
        return np.dtype(np.uint8 if self.vocab_size <= 256 else "<u2" if self.vocab_size <= 1 << 16 else "<u4")

    def tokens(self, text: str, document_end: bool) -> np.ndarray:
        """Return a document's tokens, followed by the end token if requested and available."""
        ids = np.asarray(self.encode(text), self.dtype)
        return np.append(ids, self.dtype.type(self.end)) if document_end and self.end is not None else ids


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer "bytes", or that of a tokenizer.json or of a .tiktoken file, named by its encoding.

    Raises: ValueError with the file and the remedy.
    """
    if name == BYTES:
        return Tokenizer(BYTES, 256, 0, encode_bytes, decode_bytes)  # UTF-8 text has no byte 0 of its own
    if not Path(name).is_file():
        raise ValueError(f"tokenizer={name}: no such file; pass {BYTES}, a tokenizer.json, or a .tiktoken file")
    try:
        return tiktoken(name) if name.endswith(".tiktoken") else tokenizer_json(name)
    except ImportError as error:
        raise ValueError(
            f"tokenizer={name}: needs {error.name}, which is not installed; pip install {error.name}"
        ) from None


def token_ids(vocab_size: int) -> Tokenizer:
    """Return a tokenizer whose text is the tokens' numbers, for tokens of an unknown tokenizer."""
    return Tokenizer(TOKEN_IDS, vocab_size, None, encode_numbers, lambda ids: " ".join(map(str, ids)))


def save_tokenizer(tokenizer: Tokenizer, folder: Path, vocab_size: int) -> None:
    """Save the tokenizer of tokens or weights beside them: its name, and a copy."""
    if tokenizer.path and Path(tokenizer.path).resolve() != (folder / tokenizer.name).resolve():
        shutil.copy(tokenizer.path, folder / tokenizer.name)
    meta = {"tokenizer": tokenizer.name, "vocab_size": vocab_size}
    with replacing(folder / META) as temporary:
        temporary.write_text(json.dumps(meta) + "\n")


def saved_tokenizer(folder: Path) -> Tokenizer | None:
    """Return a folder's tokenizer: what `save_tokenizer` wrote, or a tokenizer.json.

    Raises: ValueError with the file's name.
    """
    path = folder / META
    if not path.is_file():
        if not (folder / "tokenizer.json").is_file():
            return None
        return load_tokenizer(str(folder / "tokenizer.json"))
    try:
        meta = json.loads(path.read_text())
        name, vocab_size = str(meta["tokenizer"]), int(meta["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not what training.prepare writes ({error}); write it again") from None
    if name == TOKEN_IDS:
        return token_ids(vocab_size)
    return load_tokenizer(BYTES if name == BYTES else str(folder / name))


def encode_numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split()]
    except ValueError:
        raise ValueError(f"{text!r}: there is no tokenizer, so that tokens are numbers, such as '1 2 3'") from None


def encode_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


def decode_bytes(ids: Sequence[int]) -> str:
    return bytes(token for token in ids if token < 256).decode(errors="replace")


def tokenizer_json(path: str) -> Tokenizer:
    tokenizers = import_module("tokenizers")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises no other class
        raise ValueError(f"tokenizer={path}: not a tokenizer.json ({error}); check the path") from None
    ends = [tokenizer.token_to_id(token) for token in (DOCUMENT_END, "<|end_of_text|>", "</s>", "<eos>")]

    def encode(text: str) -> Any:
        return tokenizer.encode(text, add_special_tokens=False).ids

    end = next((token for token in ends if token is not None), None)
    return Tokenizer(Path(path).name, tokenizer.get_vocab_size(), end, encode, tokenizer.decode, path)


def tiktoken(path: str) -> Tokenizer:
    """Read a tokenizer in tiktoken's format; the file's name selects the encoding's splitting pattern."""
    library, public = import_module("tiktoken"), import_module("tiktoken_ext.openai_public")
    name = Path(path).stem
    encodings = [each for each, make in public.ENCODING_CONSTRUCTORS.items() if each != "gpt2"]
    if name not in encodings:
        raise ValueError(f"tokenizer={path}: no encoding of tiktoken is called {name}; name it {', '.join(encodings)}")
    try:
        rows = map(str.split, Path(path).read_text(encoding="utf-8").splitlines())
        ranks = {base64.b64decode(token): int(rank) for token, rank in rows}
        with mock.patch.object(public, "load_tiktoken_bpe", return_value=ranks):  # would access the network
            encoding = library.Encoding(**public.ENCODING_CONSTRUCTORS[name]())
    except (ValueError, AssertionError) as error:
        raise ValueError(f"tokenizer={path}: not tiktoken's ranks of {name} ({error}); check the file") from None
    tokens = {*ranks.values(), encoding.eot_token}

    def decode(ids: Sequence[int]) -> str:
        return encoding.decode([token for token in ids if token in tokens])

    return Tokenizer(Path(path).name, encoding.n_vocab, encoding.eot_token, encoding.encode_ordinary, decode, path)
