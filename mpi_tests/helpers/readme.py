"""The README's blocks and the commands in them."""

import re
import subprocess
import sys
from pathlib import Path

from mpi_tests.helpers.launch import ROOT, environment

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS = [line.split("#")[0].strip() for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]
# Run by test_benchmarks.py, and by test_rig.py and test_slurm.py.
TEACHING = "mpirun -n 4 python benchmarks/data_parallelism.py --output ways.json --picture ways.png"
SEVERAL_MACHINES = [command for command in COMMANDS if re.search("8x8|sbatch|mpi_tests.rig", command)]
TRAINING = [command for command in COMMANDS if "train.py" in command and command not in SEVERAL_MACHINES]
SAMPLING = [command for command in COMMANDS if "sample.py" in command]
PREPARING = next(command for command in COMMANDS if "training.prepare" in command)
TUNING = [command for command in COMMANDS if "tuning.json" in command]
PREDICTING = [command for command in COMMANDS if "simulate" in command or "space-time" in command]
MEASURING = [command for command in COMMANDS if "results.json" in command]
REPORTING = [command for command in COMMANDS if "--html" in command]
PLANNING = "python -m parallelism.planner --config configs/small.toml --hosts 8 --gpus 8"
DRAWING, SEARCHING = (command for command in COMMANDS if "pipeline.schedule" in command)
PAGE = "python -m collectives.page --out page.html"
EXAMINING = "mpirun -n 4 python -m collectives.doctor"
HANGING = "COLLECTIVES_TIMEOUT_S=5 mpirun -n 3 python examples/hang.py"
ON_GPUS = [command for command in COMMANDS if "gpu_check" in command or "--device cuda" in command]
ADDING = "mpirun -n 3 python examples/sum.py"
JUDGING = "python -m collectives.exercise ring collectives/algorithms/ring.py"
FACING = "COLLECTIVES_MPI4PY=report mpirun -n 4 python -m collectives.mpi4py -m mpi4py.bench helloworld"
SPLITTING = "mpirun -n 2 python examples/split.py"
# Each is run by a test.
TRIED = [*SEVERAL_MACHINES, *TRAINING, *SAMPLING, *TUNING, *PREDICTING, *MEASURING, *REPORTING, *ON_GPUS]
TRIED += [
    TEACHING,
    PREPARING,
    PLANNING,
    DRAWING,
    SEARCHING,
    EXAMINING,
    HANGING,
    ADDING,
    FACING,
    SPLITTING,
    JUDGING,
    PAGE,
]


def example(name: str) -> str:
    """Return the README's output of an example, after checking that its code is the file's."""
    index = next(i for i, (_, text) in enumerate(BLOCKS) if text.startswith(f"# {name}"))
    code = BLOCKS[index][1]
    assert (ROOT / name).read_text() == code.partition("\n")[2]
    return next(text for kind, text in BLOCKS[index + 1 :] if kind == "")


def run(command: str, fails: bool = False) -> subprocess.CompletedProcess:
    """Run a command of the README in a shell, in the environment that it says to activate."""
    env = environment() | {"PATH": f"{Path(sys.executable).parent}:{environment()['PATH']}"}
    ended = subprocess.run(command, shell=True, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert (ended.returncode != 0) == fails, ended.stdout + ended.stderr
    return ended
