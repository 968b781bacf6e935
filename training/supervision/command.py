"""The words of a job's command: mpirun's number of ranks and hostfile, and train.py's settings."""

from __future__ import annotations

from collections.abc import Container, Sequence

RANKS = ("-n", "-np", "--n", "--np")
HOSTFILES = ("--hostfile", "-hostfile", "--machinefile", "-machinefile", "-f")
# Parts of a layout, and settings that have an effect in some layouts only: of these, `--layout auto` has its own.
LAYOUT = (
    *("layout", "dp", "pp", "sp", "tp", "ep", "sequence_parallel", "schedule", "virtual_stages", "max_alive"),
    *("zero_stage", "zero_group", "recompute", "micro_batch_size", "num_micro_batches"),
    *("sp_mode", "sp_order", "sp_heads", "balance"),
)


def setting(word: str) -> str:
    """Return the name of train.py's setting that a flag sets; "" for another word.

    >>> setting("--checkpoint-dir=saved"), setting("--no-sequence_parallel"), setting("-n")
    ('checkpoint_dir', 'sequence_parallel', '')
    """
    name = word.partition("=")[0]
    return name[2:].replace("-", "_").removeprefix("no_") if name.startswith("--") else ""


def value_of(words: Sequence[str], name: str) -> str | None:
    """Return the last value of a setting, or None if no flag sets it.

    >>> value_of(["--seed", "1", "--seed=2", "--resume"], "seed"), value_of(["--resume"], "resume")
    ('2', '')
    """
    for position in reversed(range(len(words))):
        if setting(words[position]) == name:
            _, equals, value = words[position].partition("=")
            return value if equals else "".join(words[position + 1 : position + 2])
    return None


def without(words: Sequence[str], names: Container[str]) -> list[str]:
    """Return the words without the flags of some settings, and without their values.

    >>> without(["--tp", "2", "--pp=2", "--sequence_parallel", "--seed", "7"], ("tp", "pp", "sequence_parallel"))
    ['--seed', '7']
    """
    rest, is_dropped = [], False
    for word in words:
        if word.startswith("-"):
            is_dropped = setting(word) in names
        if not is_dropped:
            rest.append(word)
        elif not word.startswith("-") or "=" in word:
            is_dropped = False  # a flag has one value
    return rest


def position_of(words: Sequence[str], flags: Container[str]) -> int | None:
    """Return the position of the value of one of mpirun's flags, or None.

    >>> position_of(["mpirun", "-n", "2", "python"], RANKS), position_of(["mpirun", "python"], RANKS)
    (2, None)
    """
    return next((number + 1 for number, word in enumerate(words[:-1]) if word in flags), None)


def replaced(words: Sequence[str], flags: Container[str], value: object) -> list[str]:
    """Return the words with another value of one of mpirun's flags, if they have it."""
    position = position_of(words, flags)
    return [*words] if position is None else [*words[:position], str(value), *words[position + 1 :]]
