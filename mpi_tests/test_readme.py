"""What the README tells its reader to run, run: in small where it would take minutes."""

import json
import platform
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train
from mpi_tests.launch import ROOT, environment, launch

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS = [line.split("#")[0].strip() for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]
# Run by test_benchmarks.py, and by test_rig.py and test_slurm.py.
TEACHING = "mpirun -n 4 python benchmarks/data_parallelism.py --output ways.json --picture ways.png"
SEVERAL_MACHINES = [command for command in COMMANDS if re.search("8x8|sbatch|mpi_tests.rig", command)]
TRAINING = [command for command in COMMANDS if "train.py" in command and command not in SEVERAL_MACHINES]
TUNING = [command for command in COMMANDS if "tuning.json" in command]
PREDICTING = [command for command in COMMANDS if "simulate" in command or "space_time" in command]
MEASURING = [command for command in COMMANDS if "results.json" in command]
PLANNING = "python -m parallelism.planner --config configs/small.toml --hosts 8 --gpus 8"
DRAWING, SEARCHING = (command for command in COMMANDS if "pipeline_schedule" in command)
EXAMINING = "mpirun -n 4 python -m collectives.doctor"
HANGING = "COLLECTIVES_TIMEOUT_S=5 mpirun -n 3 python examples/hang.py"
ON_GPUS = [command for command in COMMANDS if "gpu_check" in command or "--device cuda" in command]
ALONE = [PLANNING, DRAWING, SEARCHING, EXAMINING, HANGING]
IN_SMALL = "--max_iters 2 --n_layer 2 --n_head 4 --n_embd 8 --block_size 8 --micro_batch_size 2 --sample_tokens 2"


def run(command: str, fails: bool = False) -> subprocess.CompletedProcess:
    """Run a command of the README in a shell, in the environment that it says to activate."""
    bin_folder = Path(sys.executable).parent
    path = {"PATH": f"{bin_folder}:{environment()['PATH']}"}
    ended = subprocess.run(
        command, shell=True, cwd=ROOT, env=environment() | path, capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode != 0) == fails, ended.stdout + ended.stderr
    return ended


def test_every_command_is_run_by_a_test():
    known = ["make train", "make test", "source .venv/bin/activate", "mpirun -n 3 python examples/sum.py"]
    known += ["mpirun -n 2 python examples/split.py"]
    assert sorted(COMMANDS) == sorted(
        [
            *known,
            *SEVERAL_MACHINES,
            *TRAINING,
            *TUNING,
            *PREDICTING,
            *MEASURING,
            *ON_GPUS,
            TEACHING,
            PLANNING,
            DRAWING,
            SEARCHING,
            EXAMINING,
            HANGING,
        ]
    )


def test_commands_for_gpus_say_what_there_lacks():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: they would take long")
    checking, training = ON_GPUS
    assert run(checking).stdout.startswith("skipped: ")
    assert re.search("needs CuPy|no CUDA device|sees no CUDA device", run(training, fails=True).stderr)


def test_make_train_runs_what_the_readme_says(tmp_path):
    assert "`mpirun -n 2 python train.py`" in README
    planned = run("make --dry-run --assume-old=.venv/installed train ARGS='--max_iters 2'").stdout
    assert "mpirun -n 2 python train.py --max_iters 2" in planned
    assert "--with-mpi" in run("make --dry-run test").stdout


def test_the_help_of_train_py_shows_commands_that_are_run():
    shown = [line.strip() for line in train.__doc__.splitlines() if "mpirun" in line]
    assert len(shown) == 5
    assert set(shown) <= {"mpirun -n 2 python train.py", *TRAINING}


@pytest.mark.parametrize("command", TRAINING)
def test_training_commands(command, tmp_path):
    here = command.replace("trace.json", shlex.quote(f"{tmp_path}/trace.json"))
    here = here.replace(" saved", f" {shlex.quote(str(tmp_path / 'saved'))}")
    output = run(f"{here} {IN_SMALL} --out_dir {shlex.quote(str(tmp_path))}").stdout
    assert "iter 2/2" in output
    assert (tmp_path / "loss.png").exists()
    assert (tmp_path / "trace.json").exists() == (tmp_path / "trace.png").exists() == ("--trace" in command)


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
        in run(f"python -m parallelism.pipeline_schedule check {shlex.quote(str(file))}").stdout
    )


def test_tuning_commands(tmp_path):
    measure, follow = (command.replace("tuning.json", shlex.quote(f"{tmp_path}/tuning.json")) for command in TUNING)
    assert "all_reduce" in run(f"{measure} --end 64 --repeats 1 --warmups 1").stdout
    assert "rank 3 of 4" in run(follow).stdout


def test_measuring_commands(tmp_path):
    (measure,) = MEASURING
    file = tmp_path / "results.json"
    output = run(f"{measure.replace('results.json', shlex.quote(str(file)))} -b 1K -e 1K -n 2").stdout
    assert "# Wrong elements    : 0 OK" in output
    assert {row["name"] for row in json.loads(file.read_text())["results"]} == {"auto", "mpi", "gloo"}


def test_predicting_commands(tmp_path):
    predict, draw = PREDICTING
    assert "65536 ranks of 8192 nodes" in run(f"{predict} --algorithms binomial hierarchical -b 1M -e 1M").stdout
    picture = tmp_path / "ring.png"
    assert "planned" in run(draw.replace("-b 1M", "-b 1K -n 2").replace("ring.png", shlex.quote(str(picture)))).stdout
    assert picture.exists()


def test_a_hostfile_starts_more_ranks_than_cores(tmp_path):
    """64 ranks, as on a cluster; training on them is the same command with more patience."""
    body = (
        "import collectives, numpy as np\nc = collectives.world()\nx = c.all_reduce(np.ones(1000), algorithm='ring')\n"
    )
    (tmp_path / "script.py").write_text(f"{body}assert x.sum() == 64000, x\nprint('done')\n")
    output = run(f"mpirun --hostfile hostfiles/local.txt -np 64 python {tmp_path}/script.py").stdout
    assert output.count("done") == 64


def example(name: str) -> str:
    """What the README shows as the output of an example; its code must be the file's."""
    index = next(i for i, (_, text) in enumerate(BLOCKS) if text.startswith(f"# {name}"))
    code = BLOCKS[index][1]
    assert (ROOT / name).read_text() == code.partition("\n")[2]
    return next(text for kind, text in BLOCKS[index + 1 :] if kind == "")


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
    assert [re.sub(r"\b\d+ s\b", "5 s", line) for line in lines] == shown


def test_the_doctor_says_what_the_readme_shows():
    """Its first line, and others on the same topics, of the same ranks; their facts are this machine's."""
    shown = next(text for _, text in BLOCKS if text.startswith("ok       ranks: 4")).replace("node1", platform.node())
    said = run(EXAMINING).stdout.splitlines()
    assert said[0] == shown.splitlines()[0]
    subjects = {re.sub(r"^\w+ +|: .*", "", line) for line in said}
    assert {re.sub(r"^\w+ +|: .*", "", line) for line in shown.splitlines()} <= subjects


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_a_config_begins_with_the_command_that_runs_it(config, tmp_path):
    first = config.read_text().splitlines()[0]
    assert re.fullmatch(rf"# mpirun -n \d+ python train.py --config configs/{config.name}", first)
    assert "iter 2/2" in run(f"{first[2:]} {IN_SMALL} --out_dir {shlex.quote(str(tmp_path))}").stdout


def test_its_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target).exists(), target


def test_its_figures_are_those_of_the_results():
    results = ROOT / "benchmarks" / "results"
    runs = [json.loads(file.read_text()) for file in sorted(results.glob("peers-*.json"))]
    assert len(runs) == 4
    for run in runs:
        seconds = {r["bytes"]: r["seconds"] for r in run["results"] if r["collective"] == "all_reduce"}
        names = "auto symmetric", "mpi", "gloo"
        small, large = ([seconds[nbytes][name] for name in names] for nbytes in (1 << 16, 1 << 26))
        cells = *(f"{s * 1e6:.0f}" for s in small), *(f"{s * 1e3:.1f}" for s in large)
        assert f"| {run['mpi']} | {run['ranks']} | {' | '.join(cells)} |" in README
    table = runpy.run_path(str(ROOT / "benchmarks" / "table.py"))["table"]
    assert "\n".join(table(runs)) in (results / "README.md").read_text()


def test_tables_of_the_rig_are_those_of_the_results():
    results = ROOT / "benchmarks" / "results"
    table = runpy.run_path(str(ROOT / "benchmarks" / "rig.py"))["table"]
    for name in ("rig-openmpi.json", "rig-openmpi-tuned.json"):
        assert "\n".join(table(json.loads((results / name).read_text()))) in (results / "README.md").read_text()


def test_tables_of_split_models_are_those_of_the_results():
    results = ROOT / "benchmarks" / "results"
    for ranks in (2, 4):
        for name, row in json.loads((results / f"splitting-openmpi-{ranks}.json").read_text())["results"].items():
            cells = f"{row['tokens_per_s']:.0f} | {row['step_ms']:.1f} | {row['exposed_ms']:.1f}"
            assert f"| {ranks} | {name} | {cells} |" in (results / "README.md").read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("sharing-*.json")))
def test_tables_of_data_parallelism_are_those_of_the_results(path):
    run = json.loads(path.read_text())
    for name, row in run["results"].items():
        cells = " | ".join(f"{value:.1f}" for value in row.values())
        assert f"| {run['ranks']} | {name} | {cells} |" in (path.parent / "README.md").read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("pipelining-*.json")))
def test_tables_of_pipelines_are_those_of_the_results(path):
    run = json.loads(path.read_text())
    table = runpy.run_path(str(ROOT / "benchmarks" / "pipelining_table.py"))["table"]
    assert "\n".join(table(run["ranks"], run["results"])) in (path.parent / "README.md").read_text()
