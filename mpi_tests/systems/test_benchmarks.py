"""Small runs of the benchmarks of split models, pipelines, data parallelism and plans, and the counts they report."""

import importlib.util
import json
import re
import subprocess
import sys

import pytest

from models.config import ModelConfig
from models.decoder import Decoder
from mpi_tests.helpers.launch import ROOT, environment, launch, refusal, watched

pytestmark = pytest.mark.shares_cores

IN_SMALL = {
    "tensor_parallel.py": "--n_layer 1 --n_head 4 --n_embd 32 --vocab_size 64 --seq 16 --repeats 1",
    "pipeline_parallel.py": (
        "--n_layer 4 --n_head 2 --n_embd 16 --vocab_size 16 --seq 8 --num_micro_batches 4 --repeats 1"
    ),
    "data_parallel.py": "--n_layer 4 --n_head 2 --n_embd 64 --vocab_size 32 --seq 8 --bucket_mb 0.5 --repeats 1",
    "zero.py": "--n_layer 2 --n_head 2 --n_embd 32 --vocab_size 64 --seq 16 --repeats 1",
    "reproducible.py": "--block_size 16 --micro_batch_size 1 --num_micro_batches 4 --turns 1",
    "health_cost.py": "--block_size 16 --micro_batch_size 1 --steps 10",
    "snapshots.py": "--block_size 16 --micro_batch_size 1 --turns 1",
    "planner.py": "--n_layer 4 --n_head 2 --n_embd 128 --block_size 8 --samples 4 --steps 3",
    "gpt2.py": "--n_layer 1 --n_head 2 --n_embd 16 --block_size 8 --micro_batch_size 2 --steps 2 --turns 2 --matrix 64",
    "experts.py": "--tokens 32 --n_embd 16 --num_experts 8 --experts_per_token 2 --repeats 1",
    "dropout.py": "--n_layer 1 --n_head 2 --n_embd 16 --block_size 8 --micro_batch_size 2 --repeats 1",
    "training_step.py": "--n_layer 1 --n_head 2 --n_embd 16 --block_size 8 --micro_batch_size 2 --turns 1",
    "training_input.py": "--shards 3 --shard_mb 1 --steps 2",
    "memory.py": "--modes ring ulysses hybrid --seq 512 --n_embd 16 --tokens 256 --vocab_size 4096 --model_n_embd 128",
}


def run(ranks, benchmark, path, *more):
    words = [*IN_SMALL[benchmark].split(), *more]
    result = launch(ranks, sys.executable, f"benchmarks/{benchmark}", *words, "--output", path, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    document = json.loads(path.read_text())
    assert document["ranks"] == ranks
    assert f"benchmarks/{benchmark} {words[0]}" in document["command"]
    assert document["versions"].keys() >= {"python", "numpy", "torch"}
    return document["results"], result.stdout


@pytest.mark.proof
def test_tensor_parallel(tmp_path):
    results, output = run(2, "tensor_parallel.py", tmp_path / "tensor.json")
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    tensor = [f"{way}: {whose}" for way in ("tp", "tp, sequence-parallel") for whose in ("ours", "torch")]
    sequence = [f"sp, {mode}: ours" for mode in ("ring", "ulysses", "hybrid")]
    assert list(results) == tensor + sequence + ["sp, ulysses: DeepSpeed"] * has_deepspeed
    assert ("DeepSpeed is not here" in output) != has_deepspeed
    for name, figures in results.items():
        assert name in output
        assert figures["tokens_per_s"] * figures["step_ms"] == pytest.approx(1e3 * 2 * 16)
        assert figures["exposed_ms"] == pytest.approx(figures["step_ms"] - figures["computing_ms"])


def test_experts(tmp_path):
    results, output = run(2, "experts.py", tmp_path / "experts.json")
    ways = "ours", "MPI_Alltoallv", "gloo"
    assert list(results) == [f"{way}, {kind}" for kind in ("balanced", "skewed") for way in ways]
    for name, figures in results.items():
        assert name in output
        assert figures["us_per_row"] * figures["rows"] == pytest.approx(1e3 * figures["ms"])
    assert len({figures["rows"] for name, figures in results.items() if "skewed" in name}) == 1


def test_dropout(tmp_path):
    results, output = run(1, "dropout.py", tmp_path / "dropout.json")
    assert list(results) == ["none", "torch's", "ours"]
    assert results["none"]["beside none"] == 1
    assert all(name in output and figures["step_ms"] > 0 for name, figures in results.items())


def test_training_step(tmp_path):
    results, output = run(1, "training_step.py", tmp_path / "step.json")
    assert list(results) == ["gpt2", "llama"]
    for figures in results.values():
        assert list(figures) == ["train.py", "same kernels", "torch's"]
        assert all(name in output and row["step_ms"] > 0 for name, row in figures.items())


@pytest.mark.proof
def test_training_input(tmp_path):
    results, output = run(2, "training_input.py", tmp_path / "input.json")
    assert list(results) == ["small", "large"]
    for name, figures in results.items():
        assert name in output
        assert 0 <= figures["wait_ms"] <= figures["step_ms"]


def test_calls_vs_mpi(tmp_path):
    path = tmp_path / "calls.md"
    small = ["--collectives", "all_reduce", "all_gather", "--bytes", "8", "65536", "--rounds", "2", "--out", path]
    result = launch(2, sys.executable, "benchmarks/calls_vs_mpi.py", *small, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [line.strip("| ").split(" | ") for line in path.read_text().splitlines() if re.match(r"\| all_", line)]
    assert [row[:2] for row in rows[:4]] == [[name, n] for name in ("all_reduce", "all_gather") for n in ("8", "65536")]
    assert all(float(time) > 0 for row in rows[:4] for time in row[2:])
    assert [row[0] for row in rows[4:]] == ["all_reduce", "all_gather"]  # speed-ups, from 64 KiB on
    slow, median = tmp_path / "slow.md", tmp_path / "median.md"
    slow.write_text(path.read_text().replace(f"| all_reduce | 8 | {rows[0][2]} |", "| all_reduce | 8 | 9999.0 |"))
    files = ["--median", path, slow, path, "--out", median]
    result = launch(1, sys.executable, "benchmarks/calls_vs_mpi.py", *files, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "9999.0" in slow.read_text()
    times, summary = median.read_text().split("\n\nOf ")
    assert times == path.read_text().split("\n\nOf ")[0]
    assert "(medians of 3 runs)" in summary


@pytest.mark.proof
def test_zero(tmp_path):
    results, output = run(2, "zero.py", tmp_path / "zero.json")
    ours = [f"ZeRO {stage}: ours" for stage in (1, 2, 3)]
    assert list(results) == ["DataParallel: ours", "DDP: torch", *ours, "FSDP2: torch"]
    for name, figures in results.items():
        assert name in output
        assert figures["tokens_per_s"] * figures["step_ms"] == pytest.approx(1e3 * 2 * 16)
        assert figures["exposed_ms"] == pytest.approx(figures["step_ms"] - figures["computing_ms"])


@pytest.mark.proof
def test_snapshots(tmp_path):
    results, output = run(2, "snapshots.py", tmp_path / "snapshots.json")
    assert list(results) == ["dp 2", "dp 2, ZeRO 1", "dp 2, ZeRO 3", "pp 2", "tp 2"]
    for name, figures in results.items():
        assert name in output
        assert figures["ratio"] == pytest.approx(figures["with_ms"] / figures["without_ms"])


@pytest.mark.proof
def test_kills(tmp_path):
    words = ["--jobs", "supervised", "--minutes", "0.3", "--every_s", "6", "--output", str(tmp_path / "kills.json")]
    finished = watched([sys.executable, "benchmarks/kills.py", *words], environment(), 100)
    assert finished.returncode == 0, finished.stderr
    results = json.loads((tmp_path / "kills.json").read_text())["results"]
    assert [figures["kills"] for figures in results.values()] == [0, 2]
    assert all(figures["samples_a_minute"] == 16 * figures["steps_a_minute"] for figures in results.values())
    assert all(figures["steps_after"] > 0 for figures in results.values())


@pytest.mark.proof
def test_health_cost(tmp_path):
    results, _ = run(2, "health_cost.py", tmp_path / "health.json")
    for figures in results:
        assert 0 < figures["fraction"] < 1
        assert figures["health_median_ms"] <= figures["health_95_ms"] < figures["step_ms"]


@pytest.mark.proof
def test_reproducible(tmp_path):
    results, output = run(2, "reproducible.py", tmp_path / "reproducible.json")
    assert list(results) == ["dp 2", "dp 2, ZeRO 1", "dp 2, ZeRO 2", "dp 2, ZeRO 3", "pp 2", "tp 2", "sp 2"]
    for name, figures in results.items():
        assert name in output
        assert figures["reproducible_bytes"] == 2 * figures["ordinary_bytes"]
        assert (figures["ordinary_bytes"] > 3) == (name in ("dp 2", "dp 2, ZeRO 1", "sp 2"))


def test_gpt2(tmp_path):
    results, output = run(1, "gpt2.py", tmp_path / "gpt2.json", "--no_compile", "--dtype", "float32")
    assert list(results) == ["ours", "plain loop"]
    for figures in results.values():
        assert figures["tokens_per_s"] * figures["step_ms"] == pytest.approx(1e3 * 2 * 8)
        a_token = 6 * (50304 * 16 + 12 * 16 * 16 + 3 * 16) + 12 * 16 * 8
        assert figures["model_flops_per_s"] == pytest.approx(figures["tokens_per_s"] * a_token)
        assert figures["fraction"] == pytest.approx(figures["model_flops_per_s"] / figures["matrix_flops_per_s"])
    assert "goal: at least 45%" in output


def test_torch_backend():
    result = launch(
        2, sys.executable, "benchmarks/torch_backend.py", "--rounds", "1", "--seconds", "0.001", timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    sizes = [int(nbytes) for nbytes in re.findall(r"^ *(\d+) +[\d.]+ +[\d.]+ +[\d.]+$", result.stdout, re.MULTILINE)]
    assert sizes == [1 << power for power in range(10, 27, 2)]


@pytest.mark.proof
def test_torch_training(tmp_path):
    """One command starts jobs of 1 and 2 ranks, and writes one table of them."""
    path, words = tmp_path / "torch-training.md", "--rounds 1 --n_layer 1 --n_head 2 --n_embd 16 --seq 8"
    command = [sys.executable, "benchmarks/torch_training.py", "--ranks", "1", "2", "--out", str(path), *words.split()]
    result = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [line.strip("| ").split(" | ") for line in path.read_text().splitlines() if re.match(r"\| \d", line)]
    assert [row[:2] for row in rows] == [[ranks, way] for ranks in "12" for way in ("DDP", "FSDP2")]
    for row in rows:
        alone, ours, gloo, *exposed, _ = map(float, row[2:])
        assert min(alone, ours, gloo) > 0
        assert exposed == pytest.approx([ours - alone, gloo - alone], abs=0.2)  # of one round; each value is rounded
    examples = [sys.executable, "-m", "doctest", "benchmarks/torch_training.py"]
    subprocess.run(examples, cwd=ROOT, env=environment(), check=True, timeout=60)


@pytest.mark.proof
def test_pipeline_parallel(tmp_path):
    path = tmp_path / "pipeline.json"
    results, output = run(2, "pipeline_parallel.py", path)
    schedules = ("gpipe", "1f1b", "interleaved", "breadth_first", "zb_h1", "zb_v")
    assert list(results) == [f"{model}, {schedule}" for model in ("sleep", "gpt") for schedule in schedules]
    for name, figures in results.items():
        assert f"| 2 | {name} | " in output
        for whose in ("ours", "torch"):
            assert figures[f"{whose}_overhead_ms"] == pytest.approx(figures[f"{whose}_ms"] - figures["price_ms"])
    # 4 micro-batches on 2 ranks: sleeps of 5 ms, of which a whole backward pass has two
    assert results["sleep, 1f1b"]["price_ms"] > 5 * 15
    assert results["sleep, zb_h1"]["price_ms"] > 5 * 13
    table = subprocess.run([sys.executable, "benchmarks/pipeline_table.py", path], cwd=ROOT, capture_output=True)
    assert table.stdout.decode() in output


WITHOUT_TIED = """
import sys
sys.path.insert(0, "benchmarks")
import pipeline_parallel
from helpers import torch_pipelines
torch_pipelines.TorchPipeline.sum_up_tied = lambda self: None
pipeline_parallel.main()
"""


@pytest.mark.proof
def test_gradients_of_pipelines_are_compared():
    words = [*IN_SMALL["pipeline_parallel.py"].split(), "--models", "gpt", "--schedules", "1f1b"]
    result = launch(2, sys.executable, "-c", WITHOUT_TIED, *words)
    assert result.returncode != 0
    assert re.search(r"torch, 1f1b: the gradient of (transformer.wte|lm_head).weight is off by ", result.stderr)


@pytest.mark.proof
def test_memory(tmp_path):
    results, output = run(2, "memory.py", tmp_path / "memory.json")
    of = {title.partition(",")[0]: title for title in results}
    ring, *others = (rows for title, rows in results.items() if title.startswith("attention"))
    model, loss = results[of["a GPT's parameters"]], results[of["loss of 256 tokens"]]
    assert all(title in output for title in results)
    positions = 8 * 512 / 2**20  # MiB of those of all tokens, which every rank keeps
    for size in (1, 2):
        divided = (ring["sp 1"]["kept"] - positions) / size
        assert ring[f"sp {size}"]["kept"] == pytest.approx(divided + positions)
        for rows in others:  # q, k and v of other heads are kept besides the exchanged arrays
            assert rows[f"sp {size}"]["kept"] < 1.3 * rows["sp 1"]["kept"] / size
        for kind in ("parameters", "gradients"):  # norms and positions are on every rank
            assert model[f"tp {size}"][kind] < 1.05 * model["tp 1"][kind] / size
        assert loss[f"tp {size}"]["kept"] < 1.1 * loss["plain"]["kept"] / size
        assert loss[f"tp {size}"]["peak"] < 1.5 * loss["plain"]["peak"] / size


@pytest.mark.proof
def test_data_parallel(tmp_path):
    picture = tmp_path / "ways.png"
    results, output = run(4, "data_parallel.py", tmp_path / "ways.json", "--picture", picture)
    num_params = Decoder(ModelConfig(vocab_size=32, block_size=8, n_layer=4, n_head=2, n_embd=64)).num_params() + 8 * 64
    mib = 4 * num_params / 2**20  # size of the parameters
    expected = {  # in units of `mib`: sent and received, sent out of a group, allocated between steps
        "parameter server": (5, 2, 4),
        "all-reduce at the end": (3, 1.5, 4),
        "in buckets, overlapped": (3, 1.5, 4),
        "hierarchical": (3, 1, 4),
        "ZeRO stage 1": (3, 1.5, 2.5),
        "ZeRO stage 2": (3, 1.5, 1.75),
        "ZeRO stage 3": (4.5, 2.25, 1),
    }
    assert list(results) == list(expected)
    for name, figures in results.items():
        assert name in output
        sizes = [figures[f"{what}_mib"] / mib for what in ("busiest", "out_of_group", "held")]
        if name == "ZeRO stage 3":  # two of four blocks stay gathered between the forward and the backward pass
            assert 3.7 < sizes[0] < 3.9
            assert sizes[1] == pytest.approx(sizes[0] / 2, rel=1e-3)  # chunks end between blocks of 128
            sizes[:2] = expected[name][:2]
        assert sizes == pytest.approx(expected[name], rel=0.02)
        formulas = [figures[f"{what}_formula_mib"] / mib for what in ("busiest", "held")]
        assert formulas == pytest.approx(expected[name][::2])
        assert figures["peak_mib"] > figures["held_mib"]
        assert figures["exposed_ms"] == pytest.approx(figures["step_ms"] - figures["computing_ms"])
    assert results["parameter server"]["peak_mib"] > (4 + 4) * mib  # and gradients of all ranks
    assert picture.read_bytes().startswith(b"\x89PNG")


SUMMED_UP = """
import sys
sys.path.insert(0, "benchmarks")
import data_parallel, torch
from helpers import data_parallel_variants
data_parallel_variants.torch.mean = torch.sum
data_parallel.main()
"""


def test_parameters_of_data_parallelism_are_compared():
    result = launch(2, sys.executable, "-c", SUMMED_UP, *IN_SMALL["data_parallel.py"].split())
    assert result.returncode != 0
    assert re.search(r"parameter server: .*weight is off by .* of what plain training has changed", result.stderr)


@pytest.mark.proof
def test_planner(tmp_path):
    names = ["dp 4", "dp 4, zero 3", "tp 2, pp 2"]
    results, output = run(4, "planner.py", tmp_path / "planner.json", "--layouts", *names)
    layouts = results["layouts"]
    assert list(layouts) == names
    num_params = (
        Decoder(ModelConfig(vocab_size=256, block_size=8, n_layer=4, n_head=2, n_embd=128)).num_params() + 8 * 128
    )
    state_mib = 16 * num_params / 2**20  # parameters, gradients and two moments, in MiB
    for whose in ("predicted", "measured"):
        assert state_mib < layouts["dp 4"][f"{whose}_mib"]
        assert state_mib / 4 < layouts["dp 4, zero 3"][f"{whose}_mib"] < state_mib
        assert state_mib / 4 < layouts["tp 2, pp 2"][f"{whose}_mib"] < state_mib
    for name, figures in layouts.items():
        assert name in output
        for unit in ("mib", "ms"):
            ratio = figures[f"predicted_{unit}"] / figures[f"measured_{unit}"]
            assert figures[f"predicted_to_measured_{unit}"] == pytest.approx(ratio)
    for unit in ("mib", "ms"):
        ranking = []
        for whose in ("predicted", "measured"):
            values = [figures[f"{whose}_{unit}"] for figures in layouts.values()]
            ranking.append([sorted(values).index(value) for value in values])
        squares = sum((a - b) ** 2 for a, b in zip(*ranking, strict=True))
        assert results["correlation"][unit] == pytest.approx(1 - 6 * squares / (3 * (3**2 - 1)))


REFUSED = {
    ("tensor_parallel", "--seq 30"): "can't be split over sp=2 ranks in zigzag order: use a multiple of 4",
    ("tensor_parallel", "--vocab_size 65"): "65 can't be split over 2 ranks by torch: use a multiple",
    ("pipeline_parallel", "--n_layer 3"): "--n_layer 3 is too few for 4 stages: use 4 or more",
    ("pipeline_parallel", "--num_micro_batches 5"): "5 can't be interleaved by torch on 2 ranks: use a multiple",
    ("memory", "--modes ulysses --n_head 1"): "2 ranks can't exchange these heads, use a multiple",
    ("data_parallel", "--bucket_mb 0"): "bucket_mb=0.0 must be above 0",
    ("gpt2", ""): "this is of one rank, not of 2: start it without mpirun",
    ("planner", "--layouts 'dp 4' 'pp 4'"): "the layouts are of 4 ranks, not 2: start as many, as with mpirun -n 4",
}
PARSE = """
import importlib, json, shlex, sys
sys.path.insert(0, "benchmarks")
reasons = []
for benchmark, words in json.load(sys.stdin):
    sys.argv = [benchmark, *shlex.split(words)]
    try:
        importlib.import_module(benchmark).parse(2)
    except ValueError as error:
        reasons.append(str(error))
print(json.dumps(reasons))
"""


def test_graphs(tmp_path):
    path, links = tmp_path / "graphs.json", "examples/links/ring.toml"
    command = [
        sys.executable,
        "benchmarks/graphs.py",
        "--links",
        links,
        "--collectives",
        "all_gather",
        "--output",
        path,
    ]
    result = subprocess.run(command, cwd=ROOT, env=environment(), text=True, capture_output=True)
    assert result.returncode == 0, result.stderr
    (row,) = json.loads(path.read_text())["results"]
    assert (row["graph, ranks, collective"], row["bound"], row["best named"]) == (
        "ring, 8, all_gather",
        "28.57",
        "neighbor",
    )
    assert "ring, 8, all_gather" in result.stdout


def test_flags_that_make_no_sense():
    """The checks for 2 ranks, all in one process."""
    command = [sys.executable, "-c", PARSE]
    cases = json.dumps(list(REFUSED))
    result = subprocess.run(command, cwd=ROOT, env=environment(), input=cases, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for reason, message in zip(json.loads(result.stdout), REFUSED.values(), strict=True):
        assert message in reason


def test_a_refusal_ends_all_ranks_with_a_line():
    result = launch(2, sys.executable, "benchmarks/memory.py", "--output", "there/is/none.json")
    assert "there is no folder there/is, so make it first" in refusal(result)
