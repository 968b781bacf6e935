"""Conversations packed into sequences of one length, each a document of its own."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from models.decoder import CrossEntropy
from training.data.conversations import Conversations
from training.data.tokens import Tokens, TokenWindows, split


class PackedConversations:
    """Sequences of `block_size` tokens, each of whole conversations and of padding; targets are the answers.

    A longer conversation is cut after its last answer that fits, or skipped if none does; `notice` counts these.

    Raises: ValueError if no conversation is left.
    """

    def __init__(self, conversations: Conversations, block_size: int):
        self.block_size = block_size
        pairs = [conversations[number] for number in range(len(conversations))]
        lengths = [fitting_length(is_answer, block_size + 1) for _, is_answer in pairs]
        self.pairs = [
            (ids[:length].astype(np.int64), is_answer[:length])
            for (ids, is_answer), length in zip(pairs, lengths, strict=True)
            if length
        ]
        if not self.pairs:
            raise ValueError(f"no conversation has an answer within block_size={block_size} tokens: use a larger one")
        self.sequences = packed([len(ids) - 1 for ids, _ in self.pairs], block_size)
        counts = [sum(int(self.pairs[each][1][1:].sum()) for each in sequence) for sequence in self.sequences]
        self.counts = np.array(counts)
        short = sum(length > 0 and bool(each[length:].any()) for (_, each), length in zip(pairs, lengths, strict=True))
        self.notice = f"{len(self.pairs)} conversations in {len(self)} sequences of block_size={block_size}"
        if short or 0 in lengths:
            self.notice += f"; too long for it: {short} cut after an answer, {lengths.count(0)} skipped"

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def prompt(self) -> np.ndarray:
        """The beginning of the first conversation, up to its first answer."""
        ids, is_answer = self.pairs[0]
        return ids[: max(1, int(is_answer.argmax()))]

    def set_epoch(self, epoch: int) -> None:
        """Do nothing, as the sequences are the same in every epoch."""

    def batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of some sequences, and their targets, as int64.  Shapes: (batch, seq)."""
        inputs = np.zeros((len(indices), self.block_size), np.int64)
        targets = np.full_like(inputs, CrossEntropy.ignored)
        for row, index in enumerate(indices):
            start = 0
            for number in self.sequences[index]:
                ids, is_answer = self.pairs[number]
                span = slice(start, start := start + len(ids) - 1)
                inputs[row, span] = ids[:-1]
                targets[row, span] = np.where(is_answer[1:], ids[1:], CrossEntropy.ignored)
        return inputs, targets

    def documents(self, indices: np.ndarray, inputs: np.ndarray, end: int | None) -> np.ndarray:
        """Return each token's conversation in its sequence; padding has a number of its own.  Shapes: (batch, seq)."""
        numbers = np.empty(inputs.shape, np.int64)
        for row, index in enumerate(indices):
            lengths = [len(self.pairs[number][0]) - 1 for number in self.sequences[index]]
            numbers[row] = np.repeat(np.arange(len(lengths) + 1), [*lengths, self.block_size - sum(lengths)])
        return numbers

    def num_targets(self, indices: np.ndarray) -> int:
        """Return the number of the answers' tokens in some sequences."""
        return int(self.counts[indices].sum())


def fitting_length(is_answer: np.ndarray, limit: int) -> int:
    """Return the number of a conversation's tokens up to its last answer that ends within a limit, 0 if none does.

    The first token cannot be learned.

    >>> [fitting_length(np.array([0, 0, 1, 1, 0, 1, 0], bool), limit) for limit in (7, 6, 5, 3)]
    [6, 6, 4, 0]
    """
    ends = np.flatnonzero(is_answer & ~np.append(is_answer[1:], False)) + 1
    return int(ends[(ends > 1) & (ends <= limit)].max(initial=0))


def packed(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Return the numbers of the documents in each sequence of a size, with little space left over.

    The longest come first, each where it leaves the least space.

    >>> packed([3, 5, 2, 4], size=7)
    [[1, 2], [3, 0]]

    Source: Johnson, "Fast algorithms for bin packing", 1974, section 2 (best fit decreasing).
    """
    sequences: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # in sequences, and the sequences' numbers, in order
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        at = bisect_left(spaces, (lengths[number], 0))
        if at == len(spaces):
            sequences.append([])
            spaces.append((size, len(sequences) - 1))
        space, index = spaces.pop(at)
        sequences[index].append(number)
        insort(spaces, (space - lengths[number], index))
    return sequences


Windows = TokenWindows | PackedConversations


def training_windows(tokens: Tokens, val_fraction: float, block_size: int, seed: int) -> tuple[Windows, Windows]:
    """Return the windows to train on and to validate on.

    Raises: ValueError if the data is too short for either.
    """
    every, val = tokens.conversations, tokens.val_conversations
    if every is None:
        train_ids, val_ids = split(tokens, val_fraction, block_size)
        return TokenWindows(train_ids, block_size, seed), TokenWindows(val_ids, block_size, None)
    if val is None:
        number = max(1, int(len(every) * val_fraction))
        if number == len(every):
            raise ValueError(f"{tokens.name}: one conversation is too few to train and to validate on: add others")
        every, val = every.part(range(len(every) - number)), every.part(range(len(every) - number, len(every)))
    return PackedConversations(every, block_size), PackedConversations(val, block_size)


def validation_windows(tokens: Tokens, block_size: int) -> dict[str, Windows]:
    """Return the windows of each path of validation data, if there are several."""
    return {
        path: TokenWindows(part.ids, block_size, None)
        if part.conversations is None
        else PackedConversations(part.conversations, block_size)
        for path, part in tokens.val_parts.items()
    }
