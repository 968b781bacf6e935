"""Tokenizers: bytes of UTF-8, or a file of the tokenizers or tiktoken libraries, or of nanoGPT's characters."""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from collectives.job.system import replacing
from training.data import nanogpt
from training.data.token_files import TOKEN_DTYPES

BYTES, TOKEN_IDS = "bytes", "token ids"
BYTE_VOCABULARY = 256
META = "meta.json"  # beside tokens or weights, with the name of their tokenizer
DOCUMENT_END = "<|endoftext|>"
SURROGATE = re.compile("[\ud800-\udfff]")  # in a str, one without its other half
CHAT_FILES = TEMPLATE, TOKENIZER_SETTINGS = "chat_template.jinja", "tokenizer_config.json"
COMPARED = 256  # tokens that tell tokenizers apart


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
    """Return the tokenizer "bytes", or that of a tokenizer.json, a .tiktoken file named by its encoding, or a meta.pkl.

    Raises: ValueError with the file and the remedy.
    """
    if name == BYTES:
        return Tokenizer(BYTES, BYTE_VOCABULARY, 0, encode_bytes, decode_bytes)  # UTF-8 text has no byte 0 of its own
    if not Path(name).is_file():
        raise ValueError(f"tokenizer={name}: no such file; pass {BYTES}, a tokenizer.json, or a .tiktoken file")
    if name.endswith(".pkl"):
        return characters(name)
    try:
        return tiktoken(name) if name.endswith(".tiktoken") else tokenizer_json(name)
    except ImportError as error:
        raise ValueError(
            f"tokenizer={name}: needs {error.name}, which is not installed; pip install {error.name}"
        ) from None


def token_ids(vocab_size: int) -> Tokenizer:
    """Return a tokenizer whose text is the tokens' numbers, for tokens of an unknown tokenizer."""
    return Tokenizer(TOKEN_IDS, vocab_size, None, encode_numbers, lambda ids: " ".join(map(str, ids)))


def check_tokenizers(tokenizers: Sequence[Tokenizer]) -> None:
    """Refuse data of different tokenizers.

    Raises: ValueError with both tokenizers.
    """
    for other in tokenizers[1:]:
        if differ(tokenizers[0], other):
            names = f"{tokenizers[0].path or tokenizers[0].name} and of {other.path or other.name}"
            raise ValueError(f"tokens of {names}: pass data that has one tokenizer")


def differ(first: Tokenizer, second: Tokenizer) -> bool:
    """Return whether the tokens that both have mean different text, comparing some."""
    if TOKEN_IDS in (first.name, second.name):
        return first.name != second.name
    number = min(first.vocab_size, second.vocab_size)
    tokens = range(0, number, max(1, number // COMPARED))
    return any(first.decode([token]) != second.decode([token]) for token in tokens)


def save_tokenizer(tokenizer: Tokenizer, folder: Path, vocab_size: int, dtype: str | None = None) -> None:
    """Save the tokenizer of tokens or weights beside them: its name, and a copy; for tokens, their dtype, too.

    Its chat template is copied, too.
    """
    if tokenizer.path and Path(tokenizer.path).resolve() != (folder / tokenizer.name).resolve():
        shutil.copy(tokenizer.path, folder / tokenizer.name)
        for name in CHAT_FILES:
            if (file := Path(tokenizer.path).parent / name).is_file():
                shutil.copy(file, folder / name)
    meta = {"tokenizer": tokenizer.name, "vocab_size": vocab_size, **({"dtype": dtype} if dtype else {})}
    with replacing(folder / META) as temporary:
        temporary.write_text(json.dumps(meta) + "\n")


def saved_tokenizer(folder: Path) -> Tokenizer | None:
    """Return a folder's tokenizer: what `save_tokenizer` wrote, a tokenizer.json, or nanoGPT's characters.

    Raises: ValueError with the file's name.
    """
    name, meta = saved_name(folder), read_meta(folder)
    if meta and name == TOKEN_IDS:
        return token_ids(meta[1])
    return load_tokenizer(name) if name else None


def saved_name(folder: Path) -> str | None:
    """Return the name of a folder's tokenizer for `load_tokenizer`, or `TOKEN_IDS`."""
    if meta := read_meta(folder):
        return meta[0] if meta[0] in (BYTES, TOKEN_IDS) else str(folder / meta[0])
    files = [folder / name for name in ("tokenizer.json", nanogpt.FILE)]
    return next((str(file) for file in files if file.is_file()), None)


def saved_dtype(folder: Path) -> str | None:
    """Return the dtype of a folder's token files without headers: what `save_tokenizer` wrote, or nanoGPT's uint16."""
    if meta := read_meta(folder):
        return meta[2]
    file = folder / nanogpt.FILE
    return "uint16" if file.is_file() and nanogpt.read_characters(file).vocab_size <= 1 << 16 else None


def read_meta(folder: Path) -> tuple[str, int, str | None] | None:
    """Return the tokenizer's name, the vocabulary's size and the tokens' dtype, if any, of a folder's meta.json."""
    path = folder / META
    if not path.is_file():
        return None
    try:
        meta = json.loads(path.read_text())
        name, vocab_size, dtype = str(meta["tokenizer"]), int(meta["vocab_size"]), meta.get("dtype")
        if dtype not in (None, *TOKEN_DTYPES):
            raise ValueError(f"dtype {dtype!r} is none of {', '.join(TOKEN_DTYPES)}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: not what training.prepare writes ({error}); write it again") from None
    return name, vocab_size, dtype


def encode_numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split()]
    except ValueError:
        raise ValueError(f"{text!r}: there is no tokenizer, so that tokens are numbers, such as '1 2 3'") from None


def unicode(text: str) -> str:
    """Replace halves of surrogate pairs, which JSON may have but UTF-8 not, as tiktoken does.

    >>> unicode("a\\ud83d b")
    'a\ufffd b'
    """
    return SURROGATE.sub("\ufffd", text)


def encode_bytes(text: str) -> np.ndarray:
    return np.frombuffer(unicode(text).encode(), np.uint8)


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
        return tokenizer.encode(unicode(text), add_special_tokens=False).ids

    end = next((token for token in ends if token is not None), None)
    vocab_size = 1 + max(tokenizer.get_vocab().values(), default=0)  # there may be numbers without a token
    return Tokenizer(Path(path).name, vocab_size, end, encode, tokenizer.decode, path)


def characters(path: str) -> Tokenizer:
    """Return the tokenizer of a meta.pkl, whose tokens are characters, or only numbers."""
    vocab_size, stoi, itos = nanogpt.read_characters(Path(path))
    if not stoi:
        return token_ids(vocab_size)

    def encode(text: str) -> list[int]:
        if missing := sorted(set(text) - stoi.keys()):
            raise ValueError(f"{missing[0]!r} is not a character of {path}: omit it")
        return [stoi[character] for character in text]

    def decode(ids: Sequence[int]) -> str:
        return "".join(itos.get(token, "") for token in ids)

    return Tokenizer(Path(path).name, vocab_size, None, encode, decode, path)


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
