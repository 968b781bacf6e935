"""Evaluation by a stand-in for lm_eval, which notes how it is called; and folders and environments without it."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from mpi_tests.helpers.launch import ROOT, environment

STAND_IN = {
    "lm_eval/__init__.py": """
import os

def simple_evaluate(model, model_args=None, tasks=None, num_fewshot=None, batch_size=None, device=None, limit=None,
                    log_samples=True):
    assert not log_samples
    if "unknown" in tasks:
        raise KeyError("unknown is not a\\nregistered task")
    called = [model, model_args, tasks, num_fewshot, batch_size, device, limit]
    groups = {"groups": {"all": {}}} if len(tasks) > 1 else {}
    return {"results": {task: {"acc": 0.25} for task in tasks}, "called": called, "type": int, **groups}
""",
    "lm_eval/utils.py": """
def make_table(results, column="results"):
    return f"table of {column}: {', '.join(results[column])}"

def handle_non_serializable(value):
    return str(value)
""",
    "transformers.py": "",
}


@pytest.fixture
def program(tmp_path):
    """Return a function that runs the program beside some packages of the stand-in."""

    def run(*words, packages=tuple(STAND_IN)):
        for name in packages:
            (tmp_path / "packages" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "packages" / name).write_text(STAND_IN[name])
        env = environment() | {"PYTHONPATH": f"{tmp_path / 'packages'}:{ROOT}"}
        command = [sys.executable, "-m", "training.evaluate", *map(str, words)]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)

    return run


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "out").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "out" / name).write_text("{}")
    return tmp_path / "out"


def test_a_folder_is_evaluated(program, folder):
    result = program(folder, "--tasks", "piqa")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == ["table of results: piqa", f"in {folder}/lm_eval.json"]
    document = json.loads((folder / "lm_eval.json").read_text())
    assert document["results"] == {"piqa": {"acc": 0.25}}
    assert document["called"] == ["hf", {"pretrained": str(folder)}, ["piqa"], None, 1, "cpu", None]
    assert document["type"] == "<class 'int'>"


def test_options_are_passed_on(program, folder, tmp_path):
    options = ["--num_fewshot", 2, "--limit", 10, "--batch_size", 4, "--device", "cuda:1", "--out", "results.json"]
    result = program("out", "--tasks", "piqa", "arc_easy", *options)
    assert result.stdout.splitlines() == ["table of results: piqa, arc_easy", "table of groups: all", "in results.json"]
    called = json.loads((tmp_path / "results.json").read_text())["called"]
    assert called == ["hf", {"pretrained": "out"}, ["piqa", "arc_easy"], 2, 4, "cuda:1", 10]


@pytest.mark.parametrize(
    ("missing", "packages", "words", "message"),
    [
        ("config.json", [*STAND_IN], [], "out/config.json: no such file; pass the out_dir of a run that has ended"),
        ("tokenizer.json", [*STAND_IN], [], "out/tokenizer.json: no such file; lm_eval needs one: train with"),
        ("", [], [], " is not installed: pip install 'lm_eval[hf]'"),
        (
            "",
            [*STAND_IN],
            ["--out", "none/x"],
            "--out none/x can't be written (No such file or directory): pass a path",
        ),
        ("", [*STAND_IN], ["unknown"], "lm_eval ends with KeyError: 'unknown is not a\\nregistered task'"),
        ("", [*STAND_IN], ["--limit", "0"], "argument --limit: '0' must be a whole number from 1 to"),
    ],
)
def test_bad_input_is_one_line(program, folder, missing, packages, words, message):
    if not packages and find_spec("lm_eval"):
        pytest.skip("lm_eval is installed")
    if missing:
        (folder / missing).unlink()
    result = program("out", "--tasks", "piqa", *words, packages=packages)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (folder / "lm_eval.json").exists()
