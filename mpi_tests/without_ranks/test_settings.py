"""Command lines: spelling of flags, the version; the names listed by dir()."""

import pydoc
import re
import tomllib
from pathlib import Path

import pytest

import collectives
from collectives.job.settings import Parser
from parallelism.planner.settings import parse
from training.config import Config


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
    packages = ("collectives", "models", "parallelism", "teaching", "training")
    assert all(Path(package, "py.typed").is_file() for package in packages)
