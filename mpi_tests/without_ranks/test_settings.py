"""Command lines: spelling of flags, the version; the names listed by dir()."""

import pydoc
import re
import tomllib
from pathlib import Path

import pytest

import collectives
from collectives.algorithms.groups import Topology
from collectives.job.settings import Parser
from parallelism.planner.settings import parse
from training.settings.config import Config
from training.settings.layout import AXES, on_fewer_ranks


def parser():
    result = Parser("program", allow_abbrev=False)
    result.add_argument("--num_ranks", type=int)
    result.add_argument("--space-time")
    result.add_argument("words", nargs="*")
    return result


@pytest.mark.parametrize(
    "flags", [["--num_ranks", "3", "--space-time=a_b-c"], ["--num-ranks=3", "--space_time", "a_b-c"]]
)
def test_flags_have_dashes_or_underscores(flags):
    args = parser().parse_args(flags)
    assert (args.num_ranks, args.space_time) == (3, "a_b-c")


def test_argparse_may_pass_what_this_parser_does_not_know():
    """As it does to parsers of subcommands, whose colors are new in Python 3.14."""
    command = Parser("program").add_subparsers().add_parser("draw", epilog="All times are in seconds.")
    assert type(command) is Parser
    assert command.format_help().endswith("All times are in seconds.\n")


def test_what_follows_two_dashes_stays():
    assert parser().parse_args(["--", "--num-ranks"]).words == ["--num-ranks"]


def test_an_unknown_flag_is_named_as_it_was_written():
    with pytest.raises(ValueError, match=r"unrecognized arguments: --num-rank \(nearest: --num_ranks\);"):
        parser().parse_args(["--num-rank", "3"])


def test_training_takes_dashes():
    config = parse(Config, "", ["--max-iters", "7", "--no-bias", "--num_micro-batches=2"])
    assert (config.max_iters, config.bias, config.num_micro_batches) == (7, False, 2)


def test_every_command_prints_the_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        parser().parse_args(["--version"])
    assert capsys.readouterr().out == f"handwritten-collectives {collectives.__version__}\n"
    assert re.fullmatch(r"\d+\.\d+\.\d+", collectives.__version__)


def test_the_public_names_are_listed():
    assert {*collectives.__all__, "__version__"} <= set(dir(collectives))
    for name in dir(collectives):
        assert getattr(collectives, name) is not None


def test_help_lists_what_a_communicator_has():
    text = pydoc.plain(pydoc.render_doc(collectives.Communicator))
    for name in ("rank", "size", "topology", "mpi", "network"):
        assert re.search(rf"^ \|  {name}\n \|      \w", text, re.MULTILINE)


def test_scripts_and_packages_are_there():
    """A wheel installs each script's function, and type hints for each package."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    for target in project["scripts"].values():
        module, _, function = target.partition(":")
        assert callable(getattr(__import__(module, fromlist=[function]), function)), target
    assert all(Path(package, "py.typed").is_file() for package in ("collectives", "parallelism"))


def fewer(flags: str, left: int) -> tuple[dict[str, int], int]:
    """Return the axes longer than 1, and the number of training ranks, of a run that goes on with so many ranks."""
    config = parse(
        Config, "", ["--n_layer", "4", "--n_embd", "64", "--n_head", "4", "--block_size", "64", *flags.split()]
    )
    smaller, trains = on_fewer_ranks(config, Topology.from_ids([0] * left))
    assert (smaller.global_batch_size, smaller.micro_batch_size) == (config.global_batch_size, config.micro_batch_size)
    return {axis: length for axis in AXES if (length := getattr(smaller, axis)) > 1}, trains


@pytest.mark.parametrize(
    ("flags", "left", "expected"),
    [
        ("--micro_batch_size 2 --global_batch_size 24", 3, ({}, 3)),
        ("--micro_batch_size 2 --global_batch_size 24", 5, ({}, 4)),  # 12 micro-batches
        ("--micro_batch_size 2 --global_batch_size 24 --reproducible", 5, ({}, 5)),  # which may have unequal numbers
        ("--micro_batch_size 2 --global_batch_size 24 --tp 2", 6, ({"tp": 2}, 6)),
        ("--micro_batch_size 2 --global_batch_size 24 --tp 2 --sequence_parallel", 3, ({}, 3)),
        ("--micro_batch_size 2 --global_batch_size 24 --pp 4 --schedule zb_h1", 6, ({"pp": 2}, 6)),
        ("--micro_batch_size 2 --global_batch_size 24 --pp 2 --tp 2 --zero_stage 3", 7, ({"tp": 2}, 6)),
        ("--micro_batch_size 2 --global_batch_size 8 --sp 2 --sp_order striped", 1, ({}, 1)),
        ("--micro_batch_size 2 --global_batch_size 8 --num_experts 4 --ep 4", 2, ({"ep": 2}, 2)),
    ],
)
def test_the_layout_of_fewer_ranks(flags, left, expected):
    assert fewer(flags, left) == expected


def test_micro_batches_move_between_fewer_ranks_where_they_can():
    words = ["--micro_batch_size", "2", "--global_batch_size", "24", "--reproducible", "--balance_load"]
    config = parse(Config, "", words)
    for left, moves in ((2, True), (1, False)):
        smaller, trains = on_fewer_ranks(config, Topology.from_ids([0] * left))
        assert (smaller.balance_load, trains) == (moves, left)
        smaller.checked(Topology.from_ids([0] * left))


def test_no_layout_of_fewer_ranks():
    config = parse(Config, "", ["--micro_batch_size", "4", "--global_batch_size", "12"])
    config.global_batch_size = 3
    with pytest.raises(ValueError, match="no layout of 2 ranks or fewer can go on: global_batch_size=3 is not divis"):
        on_fewer_ranks(config, Topology.from_ids([0, 0]))
