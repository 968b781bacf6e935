"""torch.distributed over the collectives: initialization, and the guide's programs."""

import json
import re
import sys

import pytest

from mpi_tests.helpers.launch import ROOT, environment, launch, watched
from mpi_tests.helpers.torch_programs import INIT, fsdp2, lacking
from mpi_tests.helpers.torchrun_programs import PROGRAMS

pytestmark = pytest.mark.shares_cores
OURS = ("-m", "collectives.torch")


def guide():
    """Return the guide's programs by heading."""
    text = (ROOT / "docs" / "torch.md").read_text()
    return dict(re.findall(r"^## ([^\n]*)\n+```python\n(.*?)```", text, re.DOTALL | re.MULTILINE))


def output_lines(program):
    """Return the sorted output lines of 2 ranks."""
    result = launch(2, sys.executable, "-c", program)
    assert result.returncode == 0, result.stderr
    return sorted(result.stdout.splitlines())


ONE_AFTER_THE_OTHER = """
for program in {programs}:
    exec(program, {{}})
"""


def test_the_guide_s_programs():
    """One job runs them in turn, between two programs that pass nothing to init and do not destroy the group."""
    programs = [f"{INIT}\ndist.destroy_process_group()", guide()["DistributedDataParallel"]]
    if not lacking(fsdp2):
        programs.append(guide()["FSDP2"])
    lines = ["0 2 [2.0, 2.0]"] * 2 + ["1 2 [2.0, 2.0]"] * 2
    assert output_lines(ONE_AFTER_THE_OTHER.format(programs=[*programs, INIT])) == lines


ACCELERATED = """
import time
mine = torch.full((2,), accelerator.process_index + 1.0)
padded = accelerator.pad_across_processes(torch.ones(accelerator.process_index + 1))
for result in losses, accelerator.gather(mine), accelerator.reduce(mine, "mean"), accelerator.gather(padded):
    print(accelerator.process_index, [round(x, 5) for x in result.tolist()])
print(accelerator.process_index, len(batches), accelerator.gather_for_metrics([accelerator.process_index]))
time.sleep(0.5)  # in which gloo's threads let go of tensors, for which they need the GIL: who ends them keeps it
"""


FORGOTTEN = """
from accelerate.state import AcceleratorState, GradientState
AcceleratorState._reset_state(reset_partial_state=True)
GradientState._reset_state()
"""


def test_accelerate_in_the_guide_as_over_gloo():
    pytest.importorskip("accelerate")
    end = "accelerator.end_training()"
    ours = guide()["Hugging Face accelerate"].replace(end, ACCELERATED + end)
    gloo = ours.replace('init_process_group("collectives")', 'init_process_group("gloo")')
    lines = output_lines(ONE_AFTER_THE_OTHER.format(programs=[ours, FORGOTTEN, gloo]))
    assert len(lines) == 20
    assert lines[::2] == lines[1::2]


def test_the_trainer_in_the_guide():
    pytest.importorskip("transformers")
    assert output_lines(f"{guide()['Hugging Face Trainer']}\nprint(arguments.world_size)").count("2") == 2


INHERITED = {"MASTER_ADDR": "nowhere.invalid", "WORLD_SIZE": "64", "SLURM_NTASKS": "64", "SLURM_PROCID": "5"}
BY_ENVIRONMENT = f"""
import os, socket
{INIT}
other = 1 - dist.get_rank()
port = [None]
if other:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = [free.getsockname()[1]]
dist.broadcast_object_list(port)
dist.destroy_process_group()
os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port[0]), RANK=str(other), WORLD_SIZE="2")
{INIT}
assert dist.get_rank() == other
dist.destroy_process_group()
os.environ["RANK"] = "0"
{INIT}
"""


def test_init_by_the_environment():
    """A part of the variables is ignored; if all are set, they may number the ranks differently from MPI."""
    result = launch(2, sys.executable, "-c", BY_ENVIRONMENT, env=INHERITED)
    error = "error: MPI has started 2 ranks, and in the environment of its rank 1 RANK is 0 and WORLD_SIZE 2: unset"
    assert result.returncode != 0
    assert error in result.stderr
    assert sorted(result.stdout.splitlines()) == ["0 2 [2.0, 2.0]"] * 2 + ["1 2 [2.0, 2.0]"] * 2


ON_HOSTS = """
import pytest, torch.distributed as dist
import collectives.torch_backend
from mpi_tests.helpers.torch_programs import ddp
losses = []
for backend in ("collectives", "gloo"):
    dist.init_process_group(backend)
    losses.append(ddp())
    dist.destroy_process_group()
assert losses[0] == pytest.approx(losses[1], rel=1e-5)
"""


@pytest.mark.proof
def test_several_hosts(rig):
    """Only the first host has MASTER_ADDR in its environment."""
    result = rig.launch(sys.executable, "-c", ON_HOSTS + INIT, env={"MASTER_ADDR": "nowhere.invalid"})
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"{rank} 8 [8.0, 8.0]" for rank in range(8)]


@pytest.mark.proof
def test_several_hosts_as_torchrun(rig):
    """Ranks of other hosts find rank 0's store by the variables."""
    result = rig.launch(sys.executable, "-m", "collectives.torch", "-c", AS_TORCHRUN)
    assert result.returncode == 0, result.stderr
    own = "rank {0} of 8, {1} of 2 on node {2} of 4, by collectives: [8.0, 8.0]"
    assert sorted(result.stdout.splitlines()) == [own.format(rank, rank % 2, rank // 2) for rank in range(8)]


AS_TORCHRUN = """
import os, torch, torch.distributed as dist
e = os.environ
dist.init_process_group("gloo")
x = torch.ones(2)
dist.all_reduce(x)
print(
    f"rank {e['RANK']} of {e['WORLD_SIZE']}, {e['LOCAL_RANK']} of {e['LOCAL_WORLD_SIZE']} on node {e['GROUP_RANK']} "
    f"of {e['GROUP_WORLD_SIZE']}, by {dist.get_backend()}: {x.tolist()}"
)
dist.destroy_process_group()
"""
VARIABLES = """
import json, os, sys
names = set(os.environ) - set(json.loads(sys.argv[1]))
variables = {name: os.environ[name] for name in names}
sys.stdout.write(json.dumps([int(os.environ["RANK"]), sys.argv[2:], variables]) + "\\n")
"""
OF_THE_LAUNCHER = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}  # every job has others
OF_ITS_AGENT = {f"TORCHELASTIC_{name}" for name in ("USE_AGENT_STORE", "ERROR_FILE", "SIGNALS_TO_HANDLE")}
OF_ITS_AGENT.add("TORCH_NCCL_ASYNC_ERROR_HANDLING")


def test_the_variables_of_torchrun(tmp_path):
    """They are compared with those that torchrun adds to its own environment."""
    program = tmp_path / "program.py"
    program.write_text(VARIABLES)
    before = environment() | {"OMP_NUM_THREADS": "1"}
    arguments = [program, json.dumps(sorted(before)), "--flag", "word"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *arguments]
    theirs, ours = (
        {rank: (words, variables) for rank, words, variables in map(json.loads, result.stdout.splitlines())}
        for result in (watched(torchrun, before, 120), launch(2, sys.executable, *OURS, *arguments, env=before))
    )
    for rank in range(2):
        (words, variables), (own_words, own) = theirs[rank], ours[rank]
        assert own_words == words == ["--flag", "word"]
        assert own.keys() >= OF_THE_LAUNCHER
        same = variables.keys() - OF_ITS_AGENT - OF_THE_LAUNCHER
        assert len(same) > 8
        assert {name: own.get(name) for name in same} == {name: variables[name] for name in same}
    assert ours[0][1]["MASTER_PORT"] == ours[1][1]["MASTER_PORT"]


FOR_TORCHRUN = """
import os, sys
import torch
import torch.distributed as dist
from torch.distributed import init_process_group  # before any group

rank, world_size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))


def like_torch_s_examples():
    dist.init_process_group(init_method="env://", world_size=world_size, rank=rank)


def like_nanogpt():
    if os.environ.get("RANK", "-1") != "-1":
        init_process_group(backend="nccl")
        assert int(os.environ["LOCAL_RANK"]) < int(os.environ["LOCAL_WORLD_SIZE"])


def like_picotron():
    dist.init_process_group(rank=rank, world_size=world_size, backend="gloo", init_method="env://")
    pairs, _ = dist.new_subgroups_by_enumeration([[0, 1]])
    assert dist.get_world_size(pairs) == 2


def by_device():
    dist.init_process_group("cpu:gloo,cuda:nccl")


def by_mesh():
    dist.device_mesh.init_device_mesh("cpu", (world_size,))


for begin in like_torch_s_examples, like_nanogpt, like_picotron, by_device, by_mesh:
    begin()
    names = {dist.get_backend(dist.new_group(backend=name)) for name in (None, "gloo", "nccl", dist.Backend.MPI)}
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    model(torch.full((1, 1), rank + 1.0)).sum().backward()
    assert names == {dist.get_backend()} == {"collectives"}, names
    print(begin.__name__, rank, model.module.weight.grad.item(), flush=True)
    dist.destroy_process_group()
"""


def test_programs_for_torchrun():
    result = launch(2, sys.executable, *OURS, "-c", FOR_TORCHRUN)
    assert result.returncode == 0, result.stderr
    begins = ["by_device", "by_mesh", "like_nanogpt", "like_picotron", "like_torch_s_examples"]
    assert sorted(result.stdout.splitlines()) == [f"{begin} {rank} 1.5" for begin in begins for rank in range(2)]


ENDS = """
import sys
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1 or {everywhere}:
    {end}
MPI.COMM_WORLD.Barrier()
"""


@pytest.mark.parametrize("launcher", ["collectives.torch", "collectives.mpi4py"])
@pytest.mark.parametrize(
    ("end", "status", "words"),
    [
        ("raise ValueError('seven')", 1, "rank 1 of 2 failed and ends the job:"),
        ("sys.exit(3)", 3, "rank 1 exits with status 3 and ends the job"),
        ("sys.exit('seven')", 1, "seven"),
    ],
)
def test_a_rank_that_ends_alone_ends_the_job(launcher, end, status, words):
    program = ENDS.format(end=end, everywhere=False)
    result = launch(2, sys.executable, "-m", launcher, "-c", program, timeout=60)
    assert result.returncode == status
    assert words in result.stderr


def test_ranks_that_end_together_end_as_they_say():
    result = launch(2, sys.executable, *OURS, "-c", ENDS.format(end="sys.exit(3)", everywhere=True), timeout=60)
    assert result.returncode == 3
    assert "ends the job" not in result.stderr


@pytest.mark.parametrize("launcher", ["collectives.torch", "collectives.mpi4py"])
def test_no_program(launcher, tmp_path):
    for word, why in ((tmp_path / "a.py", "no such program"), (tmp_path, "a folder without a __main__.py")):
        result = watched([sys.executable, "-m", launcher, word], environment(), 60)
        assert result.returncode == 2
        assert result.stderr.startswith(f"error: {word}: {why}; usage: python -m {launcher}")


@pytest.mark.proof
@pytest.mark.parametrize("name", PROGRAMS)
def test_libraries_as_under_torchrun(name, tmp_path):
    library, text, arguments = PROGRAMS[name]
    pytest.importorskip(library)
    program = tmp_path / "program.py"
    program.write_text(text)
    ours = launch(2, sys.executable, *OURS, program, *arguments)
    assert ours.returncode == 0, ours.stderr
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", program, *arguments]
    assert losses(ours) == losses(watched(torchrun, environment(), 180))


def losses(result):
    lines = sorted(line for line in result.stdout.splitlines() if line.startswith("loss"))
    assert len(lines) == 2, result.stderr
    return lines
