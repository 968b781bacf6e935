"""Run the commands and the code of the documentation, in smaller versions if they would take minutes."""

import platform
import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from mpi_tests.helpers.documents import (
    COMMANDS,
    PAGES,
    Command,
    blocks,
    checkout,
    command_with,
    commands,
    run,
    small,
    unwritten,
    with_forks,
)
from mpi_tests.helpers.launch import ROOT, launch

pytestmark = pytest.mark.shares_cores

SAYS = {  # patterns of a command's output, besides the output that its page shows
    r"train\.py|-m training( |$)": r"iter (\d)/\1 ",
    r"collectives\.bench (?!.*--(?:space-time|links))": "# Wrong elements    : 0 OK",
    r"parallelism\.planner": "layouts fit, ",
    r"pipeline\.schedule search": "known:",
    r"pipeline\.schedule check": "holds: 4 ranks, 8 stages",
    r"teaching\.exercise .*/ring\.py": "right on 1 to 16 ranks",
    r"mpi4py\.bench helloworld": "Hello, World!",
    r"schedule\.simulate": r"all_reduce on \d+ ranks of \d+ nodes: ",
    r"--space-time": ": planned, ",
}
PYTHON_ELSEWHERE = {"docs/torch.md": "systems/test_torch_backend.py"}
NUM_RANKS = 2  # for the Python code of a page


def own(page: str) -> list[Command]:
    """Return the commands of a page that run here; an example started by several pages runs with the first only."""
    first = {command.text: command.page for command in reversed(COMMANDS)}
    here = [command for command in commands(page) if command.elsewhere is None]
    return [command for command in here if "examples/" not in command.text or first[command.text] == page]


@pytest.mark.parametrize("page", [page for page in PAGES if own(page)])
def test_commands(page, tmp_path):
    """Run the commands of a page from top to bottom in one folder: later ones read the files of earlier ones."""
    folder = checkout(tmp_path)
    for command in own(page):
        text = small(command.text)
        output = run(text if page == "README.md" else with_forks(text), folder).stdout
        for words, line in SAYS.items():
            assert not re.search(words, command.text) or re.search(line, output), f"{command.text}\n{output}"
        assert not unwritten(command.text, folder), command.text
        if command.output is not None:  # lines of ranks may come in any order
            assert sorted(output.splitlines()) == sorted(command.output.splitlines()), command.text


def python_of(page: str) -> str:
    """Return the Python code of a page as one program, without examples, which commands run."""
    code = [block.text for block in blocks(page) if block.language == "python"]
    return "\n".join(text for text in code if not text.startswith("# examples/"))


@pytest.mark.parametrize("page", [page for page in PAGES if python_of(page) and page not in PYTHON_ELSEWHERE])
def test_python(page):
    result = launch(NUM_RANKS, sys.executable, "-c", python_of(page))
    assert result.returncode == 0, result.stderr


def test_text_from_what_was_trained(tmp_path):
    folder = checkout(tmp_path)
    trained = run(with_forks(small("mpirun -n 2 python train.py")), folder).stdout
    assert trained.splitlines()[-1] == "for more: python -m training.sample --from out"
    sampling = {each.text for each in COMMANDS if str(each.elsewhere).endswith("test_text_from_what_was_trained")}
    texts = {command: run(f"{command} --num_tokens 9", folder).stdout for command in sampling}
    for command, text in texts.items():
        num_samples = int((re.findall(r"--num_samples (\d+)", command) or ["1"])[0])
        assert (text.count("def "), text.count("\n---\n")) == (num_samples, num_samples - 1), command
    whole = run("python sample.py --from out --num_tokens 9 --prompt 'def '", folder).stdout
    assert texts['mpirun -n 2 python sample.py --from out --prompt "def "'] == whole


def test_a_model_is_tuned_as_shown(tmp_path):
    folder = checkout(tmp_path)
    tuning = [each for each in COMMANDS if str(each.elsewhere).endswith("test_a_model_is_tuned_as_shown")]
    assert len(tuning) == 6
    for command in tuning:
        output = run(with_forks(command.text), folder).stdout
        assert command.output in (None, output), command.text


def test_commands_for_gpus_say_what_is_missing():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU: the commands would take long")
    checking, *others = [command.text for command in COMMANDS if re.search("gpu_check|--device cuda", command.text)]
    assert run(checking).stdout.startswith("skipped: ")
    assert others
    for command in others:
        assert re.search("needs CuPy|no CUDA device|sees no CUDA device", run(command, fails=True).stderr), command


def test_what_pip_is_told_to_install_is_there():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {extra for text in PAGES.values() for extra in re.findall(r"pip install '\.\[(\w+)\]'", text)}
    assert names
    assert names <= extras.keys()


def test_a_hanging_job_ends_as_shown():
    command = command_with("examples/hang.py")
    example = output_of(command).splitlines()
    result = run(command, fails=True)
    begin = result.stderr.index(example[0])
    lines = result.stderr[begin:].splitlines()[: len(example)]
    *lines, where = [re.sub(r"\b\d+ s\b", "5 s", line) for line in lines]
    *report, shown_where = example
    assert lines == report
    words, folder = where.rsplit(" ", 1)
    assert words == shown_where.rsplit(" ", 1)[0]
    assert {path.name for path in Path(folder).iterdir()} == {"rank_0", "rank_1", "rank_2"}


def test_the_doctor_says_what_is_shown():
    """The first line is as shown, and the others have the shown topics and ranks, with this machine's facts."""
    command = "mpirun -n 4 python -m collectives.doctor"
    example = output_of(command).replace("node1", platform.node()).splitlines()
    lines = run(command).stdout.splitlines()
    assert lines[0] == example[0]
    assert {topic(line) for line in example} <= {topic(line) for line in lines}


def topic(line: str) -> str:
    return re.sub(r"^\w+ +|: .*", "", line)


def output_of(text: str) -> str:
    """Return the output that the pages show for a command."""
    (output,) = {command.output for command in COMMANDS if command.text == text and command.output}
    return output
