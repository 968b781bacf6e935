"""Plans for other numbers of ranks, the page of a plan, and what would make a model fit."""

import re

import pytest

from collectives.schedule.fabrics import FABRICS, in_nodes
from models.config import ModelConfig
from mpi_tests.helpers.pages import Page
from parallelism.planner.__main__ import main
from parallelism.planner.division import divisions
from parallelism.planner.layout import ParallelLayout, TrainingJob
from parallelism.planner.memory import memory, model_shards
from parallelism.planner.place import Machine, NodeGroups, RankPlacement
from parallelism.planner.scaling import scale_point
from parallelism.planner.search import search, variants

MODEL = ModelConfig(vocab_size=32000, block_size=4096, n_layer=32, n_embd=4096, n_head=32)
JOB = TrainingJob(MODEL, 64, "bfloat16", master_weights=True)
FLAGS = "--n_layer 32 --n_embd 4096 --n_head 32 --block_size 4096 --vocab_size 32000 --dtype bfloat16 --master_weights"
FLAGS += " --global_batch_size 64 --pp 1 --sp 1 --schedule 1f1b"
FIXED = {"pp": 1, "sp": 1}


def machine(ranks):
    return Machine(in_nodes(ranks, 8), FABRICS["ndr"].network, 5e14, 72e9)


@pytest.mark.parametrize("ranks", [2, 8, 32])
def test_another_number_of_ranks_is_planned_as_if_it_were_the_only_one(ranks):
    own = scale_point(JOB, machine(16), FIXED, ranks)
    assert own.planned == search(JOB, machine(ranks), FIXED).best[0]


def test_why_a_number_of_ranks_has_no_layout():
    result = search(JOB, machine(1), {"tp": 1})
    total = min(memory.total for _, memory in result.nearest)
    point = scale_point(JOB, machine(16), {"tp": 1}, 1)
    assert point.planned is None
    assert point.why == f"none of {result.too_large} layouts fits: the nearest takes {total / 1e9:.1f} GB"


def test_groups_in_common_are_those_of_each_mesh():
    """The ranks of each group, found by hand from coordinates, lie on the nodes that a placement prices."""
    shared = NodeGroups(machine(64))
    for layout in (ParallelLayout(dp=4, pp=2, sp=4, tp=2), ParallelLayout(dp=8, tp=8), ParallelLayout(dp=2, sp=32)):
        placement = RankPlacement(layout, machine(64), groups=shared)
        for axis, stride in (("tp", 1), ("dp", layout.pp * layout.sp * layout.tp)):
            length = getattr(layout, axis)
            starts = [rank for rank in range(64) if rank // stride % length == 0]
            groups = [[(start + i * stride) // 8 for i in range(length)] for start in starts]
            widest = max(groups, key=lambda nodes: len({*nodes}))
            own = placement.along(axis)
            assert [len(node) for node in own.nodes] == [widest.count(node) for node in dict.fromkeys(widest)]
            assert own.groups == max(sum(node in group for group in groups) for node in range(8))


def test_the_group_on_most_nodes_is_priced():
    """Of three pairs on two nodes of three ranks, the second one is on both nodes."""
    six = Machine(in_nodes(6, 3), FABRICS["ndr"].network, 5e14, 72e9)
    assert RankPlacement(ParallelLayout(dp=3, tp=2), six).tp.nodes == ((0,), (1,))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb_v"])
def test_no_pipeline_rank_holds_more_than_a_search_counts(schedule):
    job, virtual_stages = JOB._replace(global_batch_size=8), 1 if schedule == "1f1b" else 2
    layout = ParallelLayout(pp=4, dp=2, schedule=schedule, virtual_stages=virtual_stages, num_micro_batches=4)
    placement = RankPlacement(layout, machine(8))
    (division,) = divisions(job, layout, placement, False)
    for full, usage in variants(division, layout, {}):
        owners = full.dp if full.zero_stage else 1
        each = [memory(job, full, [shard], owners) for shard in model_shards(job, full)]
        assert usage.total == max(own.total for own in each)


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """Return what the command prints, and its page."""
    import contextlib
    import io

    path, out = tmp_path_factory.mktemp("plan") / "plan.html", io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(f"{FLAGS} --hosts 2 --gpus 8 --number 3 --up_to 24 --html {path}".split()) == 0
    return out.getvalue(), Page(path.read_text(encoding="utf-8"))


def test_the_page_has_the_layouts_that_are_printed(planned):
    text, page = planned
    rows = page.tables["layouts"]
    printed = re.findall(r"^ *([\d.]+) (m?s) .*%  \w+ +(.*)$", text[: text.index("  ranks")], re.MULTILINE)
    assert len(rows) == len(printed) == 3
    for row, (number, unit, layout) in zip(rows, printed, strict=True):
        assert row["flags of train.py"] == layout
        assert row["step, ms"] == pytest.approx(float(number) * {"s": 1e3, "ms": 1}[unit], rel=0.05)
        times = [value for name, value in row.items() if name.endswith(", ms") and name != "step, ms"]
        assert sum(times) == pytest.approx(row["step, ms"], rel=1e-4)
        kinds = [value for name, value in row.items() if name.endswith(", GB") and name != "memory, GB"]
        assert sum(kinds) == pytest.approx(row["memory, GB"], rel=1e-4)


def test_the_page_and_the_terminal_list_numbers_of_ranks(planned):
    text, page = planned
    rows = page.tables["ranks"]
    assert [row["ranks"] for row in rows] == [1, 2, 4, 8, 16, 24]
    for row in rows:
        line = re.search(rf"^ +{row['ranks']:.0f} +(.*)$", text[text.index("  ranks") :], re.MULTILINE)
        assert line
        assert line[1].endswith(row["layout"])
    one, last = rows[0], rows[-2]
    assert one["step, ms"] is None  # as the model does not fit
    assert last["ideal, ms"] == pytest.approx(rows[1]["step, ms"] / 8, rel=1e-4)
    assert last["step, ms"] > last["ideal, ms"] * 0.9
    charts = [chart for chart in page.charts if chart["table"] == "ranks"]
    assert [chart["lines"][0]["column"] for chart in charts] == ["step, ms", "memory, GB"]


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        (
            "--hosts 1 --tp 1 --zero_stage 0 --recompute none",
            "omit zero_stage=0, as dp 8 zero_stage 1 num_micro_batches 8 takes ",
        ),
        (
            "--hosts 1 --tp 1 --recompute none --micro_batch_size 8",
            "omit recompute=none, as dp 8 zero_stage ",
        ),
        ("--hosts 1 --gpus 1 --recompute full", "use 2 ranks, as tp 2 recompute full num_micro_batches 64 takes "),
        ("--hosts 1 --gpus 1 --dp 1 --tp 1", "use a smaller model or batch"),
    ],
)
def test_a_model_that_fits_no_layout(capsys, flags, remedy):
    """The remedy that the message names is tried: with it, the command has a plan."""
    assert main(f"{FLAGS} {flags}".split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert remedy in line
    if ranks := re.search(r"use (\d+) ranks", line):
        flags = flags.replace("--gpus 1", f"--gpus {ranks[1]}")
    for name in re.findall(r"(\w+)=", line[line.index("omit ") :] if "omit " in line else ""):
        flags = re.sub(rf"--{name} \w+", "", flags)
    assert main(f"{FLAGS} {flags}".split()) == (2 if "smaller" in remedy else 0)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--up_to 0", "argument --up_to: '0' must be a whole number from 1 to 131072 ranks"),
        ("--up_to 131073", "argument --up_to: '131073' must be a whole number from 1 to 131072 ranks"),
        ("--html nowhere/plan.html", "--html nowhere/plan.html can't be written (No such file or directory): pass a"),
        ("--accelerator v100", "invalid choice: 'v100' (choose from"),
        ("--hosts 8 --tp 1 --pp 1 --sp 1 --global_batch_size 8", "is not divisible by dp=64: use 64"),
    ],
)
def test_bad_input(capsys, flags, why):
    assert main(flags.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line


def test_hosts_that_differ_are_not_repeated(capsys, tmp_path):
    host = '[[hosts]]\nname = "{}"\nranks = 2\ntflops = {}\nmemory = 4.0\n'
    (tmp_path / "cluster.toml").write_text(host.format("a", 1.0) + host.format("b", 2.0))
    assert main(["--cluster", str(tmp_path / "cluster.toml"), "--up_to", "8"]) == 2
    assert "--up_to 8 needs nodes that are alike, and the hosts of" in capsys.readouterr().err
