"""What the README tells its reader to run, run: in small where it would take minutes."""

import json
import platform
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from mpi_tests.helpers.launch import launch
from mpi_tests.helpers.readme import (
    BLOCKS,
    DRAWING,
    EXAMINING,
    HANGING,
    MEASURING,
    ON_GPUS,
    PAGE,
    PLANNING,
    PREDICTING,
    PREPARING,
    REPORTING,
    SAMPLING,
    SEARCHING,
    TRAINING,
    example,
    run,
)

IN_SMALL = "--max_iters 2 --n_layer 2 --n_head 4 --n_embd 8 --block_size 8 --micro_batch_size 2 --sample_tokens 2"
IN_SMALL += " --val_fraction 0.002"


def test_commands_for_gpus_say_what_there_lacks():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: they would take long")
    checking, training = ON_GPUS
    assert run(checking).stdout.startswith("skipped: ")
    assert re.search("needs CuPy|no CUDA device|sees no CUDA device", run(training, fails=True).stderr)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """Return the folder that preparing writes."""
    folder = tmp_path_factory.mktemp("prepared") / "tokens"
    run(PREPARING.replace("--out tokens", f"--out {shlex.quote(str(folder))}"))
    return folder


@pytest.mark.parametrize("command", TRAINING)
def test_training_commands(command, tmp_path, tokens):
    here = command.replace("trace.json", shlex.quote(f"{tmp_path}/trace.json"))
    here = here.replace(" saved", f" {shlex.quote(str(tmp_path / 'saved'))}")
    here = here.replace("out/report.html", shlex.quote(f"{tmp_path}/report.html"))
    here = here.replace("--data tokens", f"--data {shlex.quote(str(tokens))}")
    output = run(f"{here} {IN_SMALL} --out_dir {shlex.quote(str(tmp_path))}").stdout
    assert "iter 2/2" in output
    assert (tmp_path / "loss.png").exists()
    assert (tmp_path / "report.html").exists() == ("--report" in command)
    assert (tmp_path / "trace.json").exists() == (tmp_path / "trace.png").exists() == ("--trace" in command)


def test_text_from_what_was_trained(tmp_path):
    out = shlex.quote(str(tmp_path / "out"))
    printed = run(f"mpirun -n 2 python train.py {IN_SMALL} --out_dir {out}").stdout
    command = f"python sample.py --from {tmp_path / 'out'}"
    assert printed.splitlines()[-1] == f"for more: {command}"
    several, split = [run(command.replace("--from out", f"--from {out} --num_tokens 9")).stdout for command in SAMPLING]
    assert several.count("def ") == 3
    assert several.count("\n---\n") == 2
    assert split.startswith("def ")
    whole = run(f"{command} --num_tokens 9 --prompt 'def '").stdout
    assert whole == split


def test_the_planner_lists_layouts():
    output = run(PLANNING).stdout
    assert "8 x 8 ranks: InfiniBand NDR" in output
    assert re.search(r"layouts fit, .*\n\n +step +tokens/s.*layout\n.*tokens|us .* dp \d+", output)


def test_pipelines_are_drawn_as_shown_and_searched(tmp_path):
    shown = next(text for _, text in BLOCKS if text.startswith("zb_h1: "))
    assert run(DRAWING).stdout == shown
    file = tmp_path / "my.csv"
    assert "known:" in run(SEARCHING.replace("my.csv", shlex.quote(str(file)))).stdout
    assert (
        "my.csv holds: 4 ranks, 8 stages"
        in run(f"python -m parallelism.pipeline.schedule check {shlex.quote(str(file))}").stdout
    )


@pytest.mark.shares_cores
def test_the_page_is_written(tmp_path):
    file = tmp_path / "page.html"
    assert "without a network" in run(PAGE.replace("page.html", shlex.quote(str(file)))).stdout
    assert 'id="data-collectives.all_reduce.ring"' in file.read_text()


def test_measuring_commands(tmp_path):
    (measure,) = MEASURING
    file = tmp_path / "results.json"
    output = run(f"{measure.replace('results.json', shlex.quote(str(file)))} -b 1K -e 1K -n 2").stdout
    assert "# Wrong elements    : 0 OK" in output
    assert {row["name"] for row in json.loads(file.read_text())["results"]} == {"auto", "mpi", "gloo"}


def test_reporting_commands(tmp_path):
    measure, both, of_runs = (
        re.sub(r"\b(before|after|report|both)\.(json|html)", rf"{shlex.quote(str(tmp_path))}/\g<0>", command)
        for command in REPORTING
    )
    run(f"{measure} -b 1K -e 1K -n 2 --json {shlex.quote(str(tmp_path / 'before.json'))}")
    shutil.copy(tmp_path / "before.json", tmp_path / "after.json")
    run(both)
    assert "Medians side by side; ratio: after over before" in (tmp_path / "both.html").read_text()
    for name in ("out", "out-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"iter": 1, "loss": 2.0}\n')
        of_runs = of_runs.replace(f" {name} ", f" {shlex.quote(str(tmp_path / name))} ")
    run(of_runs)
    assert "Losses side by side" in (tmp_path / "both.html").read_text()


def test_predicting_commands(tmp_path):
    predict, draw = PREDICTING
    assert "65536 ranks of 8192 nodes" in run(f"{predict} --algorithms binomial hierarchical -b 1M -e 1M").stdout
    picture = tmp_path / "ring.png"
    output = run(draw.replace("-b 1M", "-b 1K -n 2").replace("ring.png", shlex.quote(str(picture)))).stdout
    assert "all_reduce ring, 1K: planned, " in output
    assert list(tmp_path.iterdir()) == [picture]


@pytest.mark.parametrize(("name", "ranks"), [("examples/sum.py", 3), ("examples/split.py", 2), ("examples/draw.py", 1)])
def test_examples_do_what_the_readme_shows(name, ranks):
    shown = example(name)
    ended = launch(ranks, "python", name)
    assert sorted(ended.stdout.splitlines()) == sorted(shown.splitlines()), ended.stderr


def test_a_hanging_job_ends_as_the_readme_shows():
    shown = example("examples/hang.py").splitlines()
    ended = run(HANGING, fails=True)
    begin = ended.stderr.index(shown[0])
    lines = ended.stderr[begin:].splitlines()[: len(shown)]
    *lines, where = [re.sub(r"\b\d+ s\b", "5 s", line) for line in lines]
    *report, shown_where = shown
    assert lines == report
    words, folder = where.rsplit(" ", 1)
    assert words == shown_where.rsplit(" ", 1)[0]
    assert {path.name for path in Path(folder).iterdir()} == {"rank_0", "rank_1", "rank_2"}


def test_the_doctor_says_what_the_readme_shows():
    """Its first line, and others on the same topics, of the same ranks; their facts are this machine's."""
    shown = next(text for _, text in BLOCKS if text.startswith("ok       ranks: 4")).replace("node1", platform.node())
    said = run(EXAMINING).stdout.splitlines()
    assert said[0] == shown.splitlines()[0]
    subjects = {re.sub(r"^\w+ +|: .*", "", line) for line in said}
    assert {re.sub(r"^\w+ +|: .*", "", line) for line in shown.splitlines()} <= subjects
