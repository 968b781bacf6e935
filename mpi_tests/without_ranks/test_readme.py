"""The pages are right about commands, files and figures; ../systems/test_documents.py runs the commands."""

import json
import re
import runpy
import shlex
import subprocess
from importlib.util import find_spec

import pytest

from mpi_tests import stranger
from mpi_tests.helpers.documents import (
    COMMANDS,
    ELSEWHERE,
    FENCED,
    LANGUAGES,
    PAGES,
    PROGRAMS,
    TRAINING,
    blocks,
    commands,
)
from mpi_tests.helpers.launch import ROOT
from mpi_tests.release import CHECKS

RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_run_by_a_test(page):
    """The test is that of ELSEWHERE, or test_documents.py, which only starts PROGRAMS."""
    assert {block.language for block in blocks(page)} <= LANGUAGES
    for command in commands(page):
        assert command.elsewhere or PROGRAMS.match(command.text), f"{page} has `{command.text}`, which no test runs"


@pytest.mark.parametrize("test", sorted({*ELSEWHERE.values()}))
def test_the_tests_that_run_commands_exist(test):
    path, _, name = test.partition("::")
    assert f"def {name}(" in (ROOT / "mpi_tests" / path).read_text()


def test_no_line_of_the_table_is_left_over():
    for pattern in ELSEWHERE:
        assert any(re.match(pattern, command.text) for command in COMMANDS), pattern


@pytest.mark.parametrize("page", PAGES)
def test_examples_are_shown_as_they_are(page):
    for block in blocks(page):
        if block.language == "python" and block.text.startswith("# examples/"):
            title, _, code = block.text.partition("\n")
            assert (ROOT / title.removeprefix("# ")).read_text() == code, title


def test_pages_that_have_a_command_in_common_show_the_same_output():
    outputs = {(command.text, command.output) for command in COMMANDS if command.output is not None}
    assert len(outputs) == len({text for text, _ in outputs})


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--assume-old=.venv/installed train ARGS='--max_iters 2'", "mpirun -n 2 python train.py --max_iters 2"),
        ("test", "--with-mpi"),
        *((command.text.removeprefix("make "), "") for command in COMMANDS if command.text.startswith("make ")),
    ],
)
def test_make_runs_what_the_pages_say(words, line):
    result = subprocess.run(["make", "--dry-run", *shlex.split(words)], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert line in result.stdout


def test_the_pages_install_as_a_stranger_does():
    """mpi_tests.stranger runs the home page's line in an environment of its own, and a job there."""
    pages = "\n".join(PAGES[page] for page in stranger.PAGES)
    (line,) = [command for command in stranger.commands(pages) if command.startswith("pip ")]
    assert line in [command.text for command in commands("docs/index.md")]
    assert f" && {line} && mpirun " in stranger.step_of(line, whole=True).run
    assert all(f"`{line}`" in PAGES[page] for page in ("README.md", "docs/guide/install.md"))


def test_the_readme_is_short():
    assert len(PAGES["README.md"].split()) <= 900


def test_make_ci_and_the_checks_of_a_release_run_files_that_exist():
    text = (ROOT / "Makefile").read_text() + (ROOT / ".ci" / "run").read_text()
    text += "\n".join(check.command for check in CHECKS)
    files = set(re.findall(r"\b[\w/]+\.py\b", text))
    modules = set(re.findall(r"-m (mpi_tests\.[\w.]+)", text))
    assert len(files) > 10
    assert len(modules) > 5
    assert [file for file in files if not (ROOT / file).is_file()] == []
    assert [name for name in modules if find_spec(name) is None] == []


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_a_config_begins_with_the_command_that_runs_it(config):
    command = config.read_text().splitlines()[0].removeprefix("# ")
    assert f" --config configs/{config.name} " in f"{command} "
    assert command in TRAINING or "--device cuda" in command  # for GPUs: test_presets.py trains smaller models


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_to_files_lead_somewhere(page):
    """systems/test_site.py checks the links of docs/, some to generated pages, when it builds the site."""
    text = FENCED.sub("", (ROOT / page).read_text())
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (ROOT / target).exists(), target


def test_the_files_of_results_are_those_of_their_table():
    """A row's first cell names files; N stands for a number of ranks, * for anything."""
    cells = re.findall(r"^\| (`[^|]*) \|", (RESULTS / "README.md").read_text().partition("\n## ")[0], re.MULTILINE)
    patterns = [name.replace("-N.", "-[0-9].") for cell in cells for name in re.findall(r"`(\S+)`", cell)]
    named = {path.name for pattern in patterns for path in RESULTS.glob(pattern)}
    assert all(any(RESULTS.glob(pattern)) for pattern in patterns)
    assert {path.name for path in RESULTS.iterdir()} - {"README.md"} == named


def test_the_commands_of_results_run_files_that_exist():
    """Those of the pages, and those recorded in files of results."""
    pages = "\n".join(page.read_text() for page in RESULTS.glob("*.md"))
    commands = re.findall(r"python (?:-m )?[\w./]+", pages)
    for file in RESULTS.glob("*.json"):
        words = json.loads(file.read_text()).get("command", "")
        commands.append(words if isinstance(words, str) else shlex.join(words))
    programs = {words.split()[2 if " -m " in words else 1] for words in commands if words.startswith("python ")}
    assert len(programs) > 15
    for program in programs:
        assert (ROOT / program).is_file() if program.endswith(".py") else find_spec(program), program


def test_the_ratios_of_the_readme_are_those_of_the_results():
    """A cell is the mean and the least of calls on ordinary arrays, or on symmetric ones."""
    head = next(line for line in PAGES["README.md"].splitlines() if line.startswith("| | Open MPI, 2 ranks"))
    assert head.count(": mean | least |") == 4
    rows = re.findall(r"^\| (\w+)(, symmetric memory)? \| (\d.*) \|$", PAGES["README.md"], re.MULTILINE)
    assert len(rows) == 6
    for collective, is_symmetric, ratios in rows:
        cells = []
        for name in ("openmpi-2", "openmpi-4", "mpich-2", "mpich-4"):
            text = (RESULTS / f"calls-{name}.md").read_text()
            assert "(medians of 3 runs)" in text
            call, symmetric = mean_and_least(text, collective)
            cells += (symmetric if is_symmetric else call).split(", ")
        assert ratios.split(" | ") == cells, collective


def mean_and_least(text, collective):
    """Return the ratios of calls on ordinary arrays and on symmetric ones in a document of calls."""
    _, call, _, symmetric = re.findall(rf"^\| {collective} \| (.*) \|$", text, re.MULTILINE)[-1].split(" | ")
    return call, symmetric


def test_the_numbers_of_the_home_page_are_those_of_the_results():
    calls = (RESULTS / "calls-openmpi-2.md").read_text()
    zero = (RESULTS / "zero-openmpi-2.json").read_text()
    rows = json.loads(zero)["results"]
    by_stage_3 = rows["ZeRO 3: ours"]["tokens_per_s"] / rows["FSDP2: torch"]["tokens_per_s"]
    expected = [mean_and_least(calls, name)[0] for name in ("all_reduce", "all_gather")]
    shown = re.findall(r"^\| .* \| (\d\.\d\d(?:, \d\.\d\d)?) \| \[", PAGES["docs/index.md"], re.MULTILINE)
    assert shown == [expected[0], f"{by_stage_3:.2f}", expected[1]]
    ordinary, symmetric = (ratio.partition(",")[0] for ratio in mean_and_least(calls, "all_reduce"))
    assert (
        f"{symmetric} times as fast as Open MPI's own, where ordinary arrays have {ordinary}"
        in PAGES["docs/which-call.md"]
    )


def test_the_times_of_a_short_call_are_the_same_wherever_they_stand():
    text = (RESULTS / "calls-openmpi-2.md").read_text()
    plan, call, _, _, native, _ = re.search(r"^\| all_reduce \| 8 \| (.*) \|$", text, re.MULTILINE)[1].split(" | ")
    for page in ("README.md", "docs/limits.md"):
        words = f"{call} us as a call and {plan} as a plan(, .* binds)?, where Open MPI's own takes {native}"
        assert re.search(words, " ".join(PAGES[page].split())), page
    (saved,) = re.findall(r"A call takes ([\d.]+ to [\d.]+) us more than its plan", (RESULTS / "README.md").read_text())
    for page in ("docs/guide/collectives.md", "docs/troubleshooting.md", "docs/which-call.md"):
        assert f"saves {saved.replace('.0', '')} us" in " ".join(PAGES[page].split()), page


def test_its_times_of_calls_are_those_of_the_results():
    files = sorted(RESULTS.glob("calls-*.md"))
    assert len(files) == 4
    for file in files:
        rows = [line.strip("| ").split(" | ") for line in file.read_text().splitlines()]
        times = {int(row[1]): row[2:] for row in rows if row[0] == "all_reduce" and len(row) == 8}
        mpi = "MPICH 5.0.2" if "mpich" in file.name else "Open MPI 5.0.11"
        ranks = re.search(r"(\d)\.md", file.name).group(1)
        sizes = {min(times): f"{min(times)} B", 1 << 14: "16 KiB", 1 << 20: "1 MiB", 1 << 26: "64 MiB"}
        for nbytes, size in sizes.items():
            plan, call, _, symmetric, native, _ = times[nbytes]
            row = f"| {mpi} | {ranks} | {size} | {call} | {plan} | {native} | {symmetric} |"
            assert row in PAGES["docs/guide/tools.md"]


def test_tables_of_the_rig_are_those_of_the_results():
    table = runpy.run_path(str(ROOT / "benchmarks" / "rig_table.py"))["table"]
    for name in ("rig-openmpi.json", "rig-openmpi-tuned.json"):
        assert "\n".join(table(json.loads((RESULTS / name).read_text()))) in (RESULTS / "README.md").read_text()


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_table_of_the_same_bits_is_that_of_the_results(ranks):
    text = (RESULTS / "README.md").read_text()
    for name, row in json.loads((RESULTS / f"reproducible-openmpi-{ranks}.json").read_text())["results"].items():
        times = f"{row['ordinary_ms']:.0f} | {row['reproducible_ms']:.0f} | {row['ratio']:.2f}"
        assert f"| {ranks} | {name} | {times} | {row['ordinary_bytes']:.1f} | {row['reproducible_bytes']:.1f} |" in text


def test_tables_of_split_models_are_those_of_the_results():
    for ranks in (2, 4):
        for name, row in json.loads((RESULTS / f"tensor-parallel-openmpi-{ranks}.json").read_text())["results"].items():
            cells = f"{row['tokens_per_s']:.0f} | {row['step_ms']:.1f} | {row['exposed_ms']:.1f}"
            assert f"| {ranks} | {name} | {cells} |" in (RESULTS / "README.md").read_text()


@pytest.mark.parametrize("path", sorted(RESULTS.glob("zero-*.json")))
def test_tables_of_data_parallelism_are_those_of_the_results(path):
    run = json.loads(path.read_text())
    for name, row in run["results"].items():
        cells = " | ".join(f"{value:.1f}" for value in row.values())
        assert f"| {run['ranks']} | {name} | {cells} |" in (path.parent / "README.md").read_text()


@pytest.mark.parametrize("path", sorted(RESULTS.glob("pipeline-parallel-*.json")))
def test_tables_of_pipelines_are_those_of_the_results(path):
    run = json.loads(path.read_text())
    table = runpy.run_path(str(ROOT / "benchmarks" / "pipeline_table.py"))["table"]
    assert "\n".join(table(run["ranks"], run["results"])) in (path.parent / "README.md").read_text()
