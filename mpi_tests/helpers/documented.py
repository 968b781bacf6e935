"""The tables of docs/, and the training commands in them, run on smaller models by the ranks of a test."""

import re
import shlex

from mpi_tests.helpers.launch import ROOT
from parallelism.planner.settings import parse
from training.config import Config
from training.main import train

COMMAND = re.compile(r"mpirun -n (\d+) python (?:train\.py|-m training) ?(.*)")
# Appended to a command, these flags override its own sizes.
SMALLER = (
    "--n_layer 4 --n_head 4 --n_embd 32 --block_size 16 --micro_batch_size 4 --max_iters 2 --warmup_iters 0 "
    "--val_fraction 0.002 --sample_tokens 2 --bucket_mb 0.02 --out_dir="
)


def rows(name: str) -> list[tuple[str, list[str]]]:
    """Return the rows of a page's tables, each with the heading above it and its cells."""
    table, heading = [], ""
    for line in (ROOT / "docs" / name).read_text().splitlines():
        if line.startswith("#"):
            heading = line.strip("# ")
        elif line.startswith("|") and not line.startswith("|---"):
            table.append((heading, [cell.strip() for cell in line.strip("|").split(" | ")]))
    return table


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def losses(flags: str, comm, folder: str) -> list[float]:
    """Train with the flags of a command, with files in a folder shared by all ranks; return the losses on rank 0."""
    here = re.sub(r"(--checkpoint_dir|--tensorboard) (\w+)", rf"\1 {folder}/\2", flags)
    is_large = "--depth" in flags and "--global_batch_size" not in flags  # a depth sets thousands of samples
    fewer = "--num_micro_batches 2 " if is_large else ""
    _, records = train(parse(Config, "", shlex.split(f"{here} {fewer}{SMALLER}")), comm)
    return [record["loss"] for record in records if "loss" in record]
