"""torch.distributed over the collectives: initialization, and the guide's programs."""

import re
import sys

import pytest

from mpi_tests.helpers.launch import ROOT, launch
from mpi_tests.helpers.torch_programs import INIT, fsdp2, lacking

pytestmark = pytest.mark.shares_cores


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


def test_several_hosts(rig):
    """Only the first host has MASTER_ADDR in its environment."""
    result = rig.launch(sys.executable, "-c", ON_HOSTS + INIT, env={"MASTER_ADDR": "nowhere.invalid"})
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"{rank} 8 [8.0, 8.0]" for rank in range(8)]
