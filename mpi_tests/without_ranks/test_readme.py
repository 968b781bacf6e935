"""What the README says of commands, files and figures is so; ../systems/test_readme.py runs the commands."""

import json
import re
import runpy
import shlex
import subprocess
from importlib.util import find_spec

import pytest

from mpi_tests.helpers.launch import ROOT
from mpi_tests.helpers.readme import COMMANDS, README, TRAINING, TRIED
from mpi_tests.release import CHECKS

RESULTS = ROOT / "benchmarks" / "results"


def test_every_command_is_run_by_a_test():
    others = ["make train", "make test", "source .venv/bin/activate"]
    assert sorted(COMMANDS) == sorted([*others, *TRIED])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--assume-old=.venv/installed train ARGS='--max_iters 2'", "mpirun -n 2 python train.py --max_iters 2"),
        ("test", "--with-mpi"),
    ],
)
def test_make_runs_what_the_readme_says(words, line):
    ended = subprocess.run(["make", "--dry-run", *shlex.split(words)], cwd=ROOT, capture_output=True, text=True)
    assert line in ended.stdout, ended.stderr
    assert "`mpirun -n 2 python train.py`" in README


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
    assert command in TRAINING or "--device cuda" in command  # those are for GPUs: test_presets.py trains smaller ones


def test_its_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target).exists(), target


def test_its_figures_are_those_of_the_results():
    runs = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("peers-*.json"))]
    assert len(runs) == 4
    table = runpy.run_path(str(ROOT / "benchmarks" / "table.py"))["table"]
    assert "\n".join(table(runs)) in (RESULTS / "README.md").read_text()


def test_its_times_of_calls_are_those_of_the_results():
    files = sorted(RESULTS.glob("calls-*.md"))
    assert len(files) == 3
    for file in files:
        rows = [line.strip("| ").split(" | ") for line in file.read_text().splitlines()]
        times = {int(row[1]): row[2:] for row in rows if row[0] == "all_reduce" and len(row) == 8}
        mpi = "MPICH 5.0.2" if "mpich" in file.name else "Open MPI 5.0.11"
        ranks = re.search(r"(\d)\.md", file.name).group(1)
        sizes = {min(times): f"{min(times)} B", 1 << 14: "16 KiB", 1 << 20: "1 MiB", 1 << 26: "64 MiB"}
        for nbytes, size in sizes.items():
            plan, call, _, symmetric, native, _ = times[nbytes]
            assert f"| {mpi} | {ranks} | {size} | {call} | {plan} | {native} | {symmetric} |" in README


def test_tables_of_the_rig_are_those_of_the_results():
    table = runpy.run_path(str(ROOT / "benchmarks" / "rig.py"))["table"]
    for name in ("rig-openmpi.json", "rig-openmpi-tuned.json"):
        assert "\n".join(table(json.loads((RESULTS / name).read_text()))) in (RESULTS / "README.md").read_text()


def test_tables_of_split_models_are_those_of_the_results():
    for ranks in (2, 4):
        for name, row in json.loads((RESULTS / f"splitting-openmpi-{ranks}.json").read_text())["results"].items():
            cells = f"{row['tokens_per_s']:.0f} | {row['step_ms']:.1f} | {row['exposed_ms']:.1f}"
            assert f"| {ranks} | {name} | {cells} |" in (RESULTS / "README.md").read_text()


@pytest.mark.parametrize("path", sorted(RESULTS.glob("sharing-*.json")))
def test_tables_of_data_parallelism_are_those_of_the_results(path):
    run = json.loads(path.read_text())
    for name, row in run["results"].items():
        cells = " | ".join(f"{value:.1f}" for value in row.values())
        assert f"| {run['ranks']} | {name} | {cells} |" in (path.parent / "README.md").read_text()


@pytest.mark.parametrize("path", sorted(RESULTS.glob("pipelining-*.json")))
def test_tables_of_pipelines_are_those_of_the_results(path):
    run = json.loads(path.read_text())
    table = runpy.run_path(str(ROOT / "benchmarks" / "pipelining_table.py"))["table"]
    assert "\n".join(table(run["ranks"], run["results"])) in (path.parent / "README.md").read_text()
