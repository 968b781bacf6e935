"""Conversations: rows of JSON with messages, as tokens of which a model learns the answers only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from training.data.chat_template import ANSWERS, Message, TextSpan, load_template
from training.data.text_files import kind_of, read_json
from training.data.tokenizer import Tokenizer, unicode

LISTS = ("messages", "conversations")  # names of a row's messages
ROLES = {"human": "user", "gpt": ANSWERS}  # other names of roles, in rows with "from" and "value"


@dataclass(frozen=True)
class Conversations:
    """Tokens of conversations, one after the other, whether each is an answer's, and the end of each conversation."""

    ids: np.ndarray
    is_answer: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> Conversations:
        """Join the tokens of each conversation, and whether each is an answer's."""
        ids, answers = zip(*pairs, strict=True)
        return cls(np.concatenate(ids), np.concatenate(answers), np.cumsum([len(each) for each in ids]))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a conversation, and whether each is an answer's."""
        if number >= len(self):
            raise IndexError(number)
        span = slice(self.ends[number - 1] if number else 0, self.ends[number])
        return self.ids[span], self.is_answer[span]

    def part(self, numbers: Iterable[int]) -> Conversations:
        """Return some of the conversations."""
        return Conversations.of([self[number] for number in numbers])


def holds_conversations(path: str, field: str) -> bool:
    """Return whether the first row of a file has messages, and no text in `field`."""
    if kind_of(path) != "json":
        return False
    _, row = next(read_json(path), ("", None))
    return isinstance(row, dict) and field not in row and any(isinstance(row.get(name), list) for name in LISTS)


def load_conversations(paths: Sequence[str], tokenizer: Tokenizer) -> Conversations:
    """Read files of conversations; the chat template is that of the tokenizer's folder.

    Raises: ValueError with the file, the line and the remedy.
    """
    if tokenizer.path is None or not tokenizer.path.endswith(".json"):
        raise ValueError(
            f"{paths[0]} holds conversations, which need a tokenizer.json and a chat template in its folder, but "
            f"tokenizer={tokenizer.name}: set init_from or tokenizer"
        )
    template = load_template(Path(tokenizer.path).parent)
    encode = encoder(tokenizer)
    pairs = []
    for path in paths:
        for where, row in read_json(path):
            try:
                text, spans = template.answers(messages_of(row), row.get("tools"))
            except ValueError as error:
                raise ValueError(f"{path}: {where}: {error}") from None
            pairs.append(encode(text, spans))
    return Conversations.of(pairs)


def messages_of(row: Any) -> list[Message]:
    """Return a row's messages, each with a role and its text.

    Raises: ValueError for a row without messages, or without one of the assistant.
    """
    messages = next((row[name] for name in LISTS if row.get(name)), None) if isinstance(row, dict) else None
    if not isinstance(messages, list):
        raise ValueError(f"no list of messages in {' or '.join(LISTS)}: add it, or omit the row")
    every = [message_of(number, message) for number, message in enumerate(messages, 1)]
    if all(message["role"] != ANSWERS for message in every):
        raise ValueError("no message of the assistant, which is what a model learns: add one, or omit the row")
    return every


def message_of(number: int, message: Any) -> Message:
    fields = message if isinstance(message, dict) else {}
    role, content = fields.get("role", fields.get("from")), fields.get("content", fields.get("value"))
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError(f"message {number} has no text in role and content, or from and value: add it")
    return {**fields, "role": ROLES.get(role, role), "content": unicode(content)}


def encoder(tokenizer: Tokenizer) -> Any:
    """Return a function of a text and its answers' spans to its tokens, and whether each is an answer's."""
    library = import_module("tokenizers").Tokenizer.from_file(tokenizer.path)
    library.no_truncation()
    library.no_padding()

    def encode(text: str, spans: Sequence[TextSpan]) -> tuple[np.ndarray, np.ndarray]:
        encoding = library.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, tokenizer.dtype), tokens_in(encoding.offsets, spans)

    return encode


def tokens_in(offsets: Sequence[tuple[int, int]], spans: Sequence[TextSpan]) -> np.ndarray:
    """Return whether each token, from its first character to before its last, is one of a span's.

    Tokens without characters, between others of a span, are the span's, too.

    >>> tokens_in([(0, 2), (2, 3), (3, 3), (3, 6)], [TextSpan(2, 5)]).tolist()
    [False, True, True, True]
    """
    inside = np.zeros(len(offsets), bool)
    starts, stops = np.array(offsets, int).reshape(-1, 2).T
    for span in spans:
        common = np.flatnonzero((starts < span.stop) & (stops > span.start) & (stops > starts))
        if len(common):
            inside[common[0] : common[-1] + 1] = True
    return inside
