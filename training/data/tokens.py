"""Training data: tokens from text or .bin files, and windows of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from training.data.conversations import Conversations, holds_conversations, load_conversations
from training.data.text_files import find_files, has_rows, holds_tokens, read_documents
from training.data.token_files import GPT2_VOCABULARY, TokenFile, TokenSequence
from training.data.tokenizer import (
    BYTES,
    Tokenizer,
    check_tokenizers,
    load_tokenizer,
    saved_dtype,
    saved_tokenizer,
    token_ids,
)
from training.settings.ranges import TOKEN

TEXT_FIELD = "text"
PROMPT_TOKENS = 16
BLOCK_TOKENS, MOST_BLOCKS = 1 << 22, 64  # sample in which the least and the largest token are searched


class Tokens(NamedTuple):
    """Training data: tokens, the vocabulary size, and the tokenizer."""

    ids: TokenSequence
    vocab_size: int
    name: str
    tokenizer: Tokenizer
    val_ids: TokenSequence | None = None  # validation data; None: the end of `ids`
    conversations: Conversations | None = None  # of `ids`, if these are of conversations
    val_conversations: Conversations | None = None
    val_parts: Mapping[str, Tokens] = MappingProxyType({})  # of several paths, by path


def language_reference() -> bytes:
    """Return the parts of Python's language reference that CPython includes for `help()`.

    Raises: ValueError if this Python was installed without them.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ValueError(
            "this Python lacks its language reference (pydoc_data), the default data: pass --data with a text file"
        ) from None
    return "\n".join(topics[key] for key in sorted(topics)).encode()


def load_tokens(
    paths: list[str],
    val_paths: Sequence[str] = (),
    tokenizer: str | None = BYTES,
    vocab_size: int | None = None,
    text_field: str = TEXT_FIELD,
    token_dtype: str | None = None,
) -> Tokens:
    """Read files, and the files in folders, in order; without any, the language reference.

    .bin files hold tokens, with llm.c's header or without, as nanoGPT's; they are read lazily, by window.  A meta.json
    of `python -m training.prepare`, or a meta.pkl of nanoGPT, beside them has their dtype and tokenizer; otherwise
    `token_dtype` is the dtype of files without a header, and `vocab_size` the number of tokens.  Other files hold text:
    plain, JSON or Parquet; it needs a `tokenizer`.  In a folder, .bin files whose names begin with "val" are validation
    data.  `vocab_size` may exceed the tokenizer's.  Files of JSON whose rows have messages hold conversations.

    Raises: ValueError with the path and the remedy.
    """
    options = tokenizer, vocab_size, text_field, token_dtype
    files, val_files = find_files(paths), find_files(list(val_paths))
    if token_dtype and not any(map(holds_tokens, files + val_files)):
        raise ValueError(f"token_dtype={token_dtype} is that of .bin files, and there are none: omit it")
    if text_field != TEXT_FIELD and not any(has_rows(path) for path in files + val_files if not holds_tokens(path)):
        raise ValueError(f"text_field={text_field} is that of JSON or Parquet files, and there are none: omit it")
    if not paths:
        of_text = text_tokenizer(tokenizer)
        ids = TokenSequence([of_text.tokens(language_reference().decode(), document_end=False)])
        tokens = Tokens(ids, of_text.vocab_size, "Python language reference", of_text)
    else:
        tokens = load_files(files, " + ".join(Path(path).name for path in paths), *options)
    if val_paths:
        parts = {path: load_files(find_files([path]), Path(path).name, *options) for path in val_paths}
        check_tokenizers([tokens.tokenizer, *(part.tokenizer for part in parts.values())])
        validation = next(iter(parts.values()))
        if len(parts) > 1:
            validation = load_files(val_files, " + ".join(Path(path).name for path in val_paths), *options)
        if (tokens.conversations is None) != (validation.conversations is None):
            raise ValueError(f"one of {tokens.name} and {validation.name} holds conversations: pass data of one kind")
        tokens = tokens._replace(
            val_ids=validation.ids,
            val_conversations=validation.conversations,
            val_parts=parts if len(parts) > 1 else {},
            vocab_size=max(tokens.vocab_size, validation.vocab_size),
        )
    if vocab_size is None:
        return tokens
    if vocab_size < tokens.vocab_size:
        raise ValueError(
            f"vocab_size={vocab_size} is less than the {tokens.vocab_size} of {tokens.name}: use that, or omit it"
        )
    return tokens._replace(vocab_size=vocab_size)


def load_files(
    files: list[str], name: str, tokenizer: str | None, vocab_size: int | None, text_field: str, token_dtype: str | None
) -> Tokens:
    binary = [path for path in files if holds_tokens(path)]
    text = [path for path in files if not holds_tokens(path)]
    if binary and text:
        raise ValueError(f"{binary[0]} holds tokens and {text[0]} text; pass files of one kind")
    if binary:
        return load_bin(binary, name, tokenizer, vocab_size, token_dtype)
    chats = [path for path in text if holds_conversations(path, text_field)]
    if chats and len(chats) < len(text):
        other = next(path for path in text if path not in chats)
        raise ValueError(f"{chats[0]} holds conversations and {other} text; pass files of one kind")
    if chats:
        return load_chats(chats, name, text_tokenizer(tokenizer))
    return load_text(text, name, text_tokenizer(tokenizer), text_field)


def text_tokenizer(name: str | None) -> Tokenizer:
    if name is None:
        raise ValueError("text needs the model's tokenizer, which its folder lacks: set tokenizer")
    return load_tokenizer(name)


def load_bin(
    paths: list[str], name: str, tokenizer: str | None, vocab_size: int | None, token_dtype: str | None
) -> Tokens:
    validating = [path for path in paths if Path(path).name.startswith("val")]
    if len(validating) == len(paths):
        validating = []
    of_bin = tokenizer_of(paths, tokenizer)
    vocabulary = of_bin.vocab_size if of_bin else vocab_size
    files = {path: TokenFile(path, token_dtype or saved_dtype(Path(path).parent), vocabulary) for path in paths}
    ids = TokenSequence([files[path] for path in paths if path not in validating])
    val_ids = TokenSequence([files[path] for path in validating]) if validating else None
    ends = [token_range(each) for each in (ids, val_ids) if each is not None]
    least, largest = min(least for least, _ in ends), max(largest for _, largest in ends)
    if least < 0 or largest > TOKEN.most:
        token = least if least < 0 else largest
        raise ValueError(f"{name} has token {token}, not {TOKEN}: set token_dtype, or write it again")
    of_bin = of_bin or token_ids(max(vocab_size or bin_vocab_size(largest), largest + 1))
    if largest >= of_bin.vocab_size:
        raise ValueError(f"{name} has token {largest}, but {of_bin.name} only {of_bin.vocab_size}: pass its tokenizer")
    return Tokens(ids, of_bin.vocab_size, name, of_bin, val_ids)


def tokenizer_of(paths: list[str], name: str | None) -> Tokenizer | None:
    """Return the tokenizer of .bin files: the one stored beside them, or else the requested one.

    Raises: ValueError if these differ.
    """
    tokenizers = [saved_tokenizer(folder) for folder in sorted({Path(path).parent for path in paths})]
    check_tokenizers([each or token_ids(0) for each in tokenizers])
    requested = None if name in (None, BYTES) else load_tokenizer(name)
    check_tokenizers([each for each in (tokenizers[0], requested) if each])
    return tokenizers[0] or requested


def load_text(paths: list[str], name: str, tokenizer: Tokenizer, field: str) -> Tokens:
    parts = [part for path in paths for part in tokenize(path, tokenizer, field) if len(part)]
    if not parts:
        raise ValueError(f"{paths[0]}: empty; pass a file with text in it")
    ids = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return Tokens(TokenSequence([ids]), tokenizer.vocab_size, name, tokenizer)


def load_chats(paths: list[str], name: str, tokenizer: Tokenizer) -> Tokens:
    conversations = load_conversations(paths, tokenizer)
    ids = TokenSequence([conversations.ids])
    return Tokens(ids, tokenizer.vocab_size, name, tokenizer, conversations=conversations)


def tokenize(path: str, tokenizer: Tokenizer, field: str) -> Iterator[np.ndarray]:
    """Yield the tokens of a file's documents.  Plain files, as bytes, are joined without end tokens."""
    ends = tokenizer.name != BYTES or has_rows(path)
    for text in read_documents(path, field):
        yield tokenizer.tokens(text, ends)


def token_range(ids: TokenSequence) -> tuple[int, int]:
    """Return the least and the largest token, sampling blocks if there are many."""
    step = max(1, len(ids) // (BLOCK_TOKENS * MOST_BLOCKS)) * BLOCK_TOKENS
    blocks = (np.asarray(ids[start : start + BLOCK_TOKENS]) for start in range(0, len(ids), step))
    ends = [(int(block.min()), int(block.max())) for block in blocks]
    return min(least for least, _ in ends), max(largest for _, largest in ends)


def bin_vocab_size(largest: int) -> int:
    # At least GPT-2's vocabulary; above it, a multiple of 64, which splits evenly over ranks and fills the tiles
    # of a matrix unit.
    return GPT2_VOCABULARY if largest < GPT2_VOCABULARY else (largest // 64 + 1) * 64


def split(tokens: Tokens, val_fraction: float, block_size: int) -> tuple[TokenSequence, TokenSequence]:
    """Return the training ids and the validation ids, which are separate or the end of the data.

    Raises: ValueError if either is too short for `TokenWindows`.
    """
    num_val = int(len(tokens.ids) * val_fraction) if tokens.val_ids is None else len(tokens.val_ids)
    num_train = len(tokens.ids) - (num_val if tokens.val_ids is None else 0)
    largest = min(num_train // 2, num_val - 1)
    if block_size > largest:
        remedy = f"use block_size={largest} or less" if largest > 0 else "pass a longer text"
        raise ValueError(
            f"{tokens.name}: {num_train} tokens to train and {num_val} to validate on are too few for "
            f"block_size={block_size}; {remedy}"
        )
    for path, part in tokens.val_parts.items():
        if block_size >= len(part.ids):
            raise ValueError(
                f"{path}: {len(part.ids)} tokens are too few to validate on with block_size={block_size}: use less, or "
                "omit the file"
            )
    return tokens.ids[:num_train], tokens.ids[num_train:] if tokens.val_ids is None else tokens.val_ids


class TokenWindows:
    """Windows that tile `ids`, with a different phase in [0, block_size) in each epoch.

    Their number is the same in every epoch: that at the largest phase. With seed=None the phase
    is always 0, to validate on the same windows each time.
    """

    notice = ""  # there is nothing to say of them

    def __init__(self, ids: TokenSequence | np.ndarray, block_size: int, seed: int | None):
        largest = len(ids) - 1 if seed is None else len(ids) // 2
        if not 1 <= block_size <= largest:
            raise ValueError(f"block_size={block_size} for {len(ids)} tokens: use 1 to {largest}")
        if seed is not None and not 0 <= seed < 2**63:
            raise ValueError(f"seed={seed} must be from 0 to 2**63 - 1")
        self.ids = ids
        self.block_size = block_size
        self.seed = seed
        self.set_epoch(0)

    def __len__(self) -> int:
        max_phase = 0 if self.seed is None else self.block_size - 1
        return (len(self.ids) - 1 - max_phase) // self.block_size

    def set_epoch(self, epoch: int):
        if epoch < 0:
            raise ValueError(f"epoch={epoch} must be at least 0")
        self.phase = 0 if self.seed is None else draw(self.seed, epoch) % self.block_size

    def batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return windows(self.ids, self.phase + np.asarray(indices) * self.block_size, self.block_size)

    @property
    def prompt(self) -> np.ndarray:
        """The first tokens, to go on from."""
        return np.asarray(self.ids[:PROMPT_TOKENS])

    def documents(self, indices: np.ndarray, inputs: np.ndarray, end: int | None) -> np.ndarray | None:
        """Return the document number of each token, if a token ends documents.  Shapes: (batch, seq)."""
        return None if end is None else documents(inputs, end)

    def num_targets(self, indices: np.ndarray) -> int:
        """Return the number of targets in some windows."""
        return len(indices) * self.block_size


def draw(seed: int, epoch: int) -> int:
    # Raw bits are the same in every version of NumPy. The last word of the counter selects a stream: 0 is
    # reserved for a shuffle with the same seed and epoch.
    philox = np.random.Philox(key=[seed, epoch], counter=[0, 0, 0, 1])
    return int(philox.random_raw())


def windows(ids: TokenSequence | np.ndarray, starts: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `block_size` ids from each start, and the ids shifted by one, as int64.

    Shapes: starts (batch,), results (batch, seq).
    """
    last = len(ids) - block_size - 1
    outside = [int(start) for start in starts if not 0 <= start <= last]
    if outside:
        raise ValueError(f"a window of {block_size} can't start at {outside[0]} in {len(ids)} ids: use 0 to {last}")
    together = np.empty((len(starts), block_size + 1), np.int64)  # (batch, seq + 1)
    for window, start in zip(together, starts, strict=True):
        window[:] = ids[start : start + block_size + 1]
    return together[:, :-1], together[:, 1:]


def documents(ids: np.ndarray, end: int) -> np.ndarray:
    """Return each token's document number, where each document ends with token `end`.

    Shapes: ids and result (batch, seq).

    >>> documents(np.array([[7, 0, 7, 7, 0, 0, 7]]), end=0).tolist()
    [[0, 0, 1, 1, 1, 2, 3]]
    """
    ends = ids == end
    return np.cumsum(ends, axis=1) - ends
