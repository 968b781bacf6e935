"""The meta.pkl beside nanoGPT's .bin files, a vocabulary of characters, read without running any of its code."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, NamedTuple

FILE = "meta.pkl"


class Characters(NamedTuple):
    """A vocabulary: tokens by character, and characters by token, both empty if the file has only their number."""

    vocab_size: int
    stoi: dict[str, int]
    itos: dict[int, str]


class PlainUnpickler(pickle._Unpickler):  # the one in C takes as much memory as a file of some bytes tells it to
    """Unpickles numbers, strings and their containers, but refuses every class and function."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def read_characters(path: Path) -> Characters:
    """Read a meta.pkl.

    Raises: ValueError with the path and the remedy.
    """
    try:
        with path.open("rb") as file:
            meta = PlainUnpickler(file).load()
        characters = Characters(meta["vocab_size"], meta.get("stoi", {}), meta.get("itos", {}))
        refuse_other_types(characters)
    except Exception as error:  # a damaged pickle raises errors of many classes
        why = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{path}: not what nanoGPT writes ({why}); move it, and set vocab_size and token_dtype"
        ) from None
    return characters


def refuse_other_types(characters: Characters) -> None:
    vocab_size, stoi, itos = characters
    if type(vocab_size) is not int or vocab_size < 1:
        raise ValueError(f"vocab_size={vocab_size!r}")
    for names, tokens in ((stoi.keys(), stoi.values()), (itos.values(), itos.keys())):
        if not all(type(name) is str for name in names) or not all(token in range(vocab_size) for token in tokens):
            raise ValueError(f"stoi and itos are not of strings and of tokens below vocab_size={vocab_size}")
