"""Jobs on several hosts that go on without ranks that die, under Open MPI's `mpirun --with-ft ulfm`."""

import re
import sys

import pytest

from mpi_tests.helpers import survival
from mpi_tests.helpers.launch import find_mpirun, watched
from mpi_tests.rig import HOSTFILE, Rig, UnavailableError, job_environment, on
from mpi_tests.systems.test_survival import BATCH, CALLS, DYING, SCRIPT, undisturbed

pytestmark = [
    pytest.mark.shares_cores,
    pytest.mark.skipif(
        not survival.is_open_mpi(), reason="needs Open MPI, which continues without a rank that has died"
    ),
]


@pytest.fixture(scope="module")
def hosts():
    """Yield a function that runs a script on two hosts of two ranks each, which go on without those that die."""
    try:
        rig = Rig(hosts=2, rate="none").__enter__()
    except UnavailableError as error:
        pytest.skip(str(error))

    def run(*words):
        flags = ["--with-ft", "ulfm", "--hostfile", HOSTFILE, "-n", 4]
        return watched(on("rig1", find_mpirun(), *flags, sys.executable, *words), job_environment(), 120)

    yield run
    rig.__exit__()


@pytest.mark.parametrize("way", ["a plan in symmetric memory", "messages"])
def test_ranks_die_on_several_hosts(tmp_path, hosts, way):
    script, (array, call) = tmp_path / "script.py", CALLS[way]
    script.write_text(SCRIPT.format(array=array, call=call))
    result = hosts(script)
    assert {"rank 1 is rank 0 of 2", "rank 3 is rank 1 of 2"} <= {*result.stdout.splitlines()}, result.stderr


def test_several_hosts_need_settings_that_mpi_reads_when_it_starts(tmp_path, hosts):
    script = tmp_path / "script.py"
    script.write_text("from mpi4py import MPI; import collectives; collectives.world()")
    result = hosts(script)
    line = (
        "error: where ranks of several hosts may die, MPI must have started with OMPI_MCA_btl_tcp_flags=send,inplace "
        "OMPI_MCA_coll=^han: pass it to mpirun by -x, or call collectives.world() before mpi4py.MPI is imported"
    )
    assert line in result.stderr.splitlines()


def test_training_on_several_hosts_goes_on(tmp_path, hosts):
    """A rank of the second host dies; the others have snapshots of all shards of the optimizer's states."""
    script = tmp_path / "script.py"
    script.write_text(DYING)
    words = f"{survival.TINY} --micro_batch_size 2 {BATCH} --zero_stage 1 --max_iters 10 --checkpoint_interval 0"
    words += f" --snapshot_interval 3 --checkpoint_dir {tmp_path}"
    result = hosts(script, "3", "before an update", *words.split())
    assert "rank 3 has died: 3 of 4 ranks continue\n" in result.stdout, result.stdout + result.stderr
    assert re.search(r"weights of /dev/shm/snapshots-\w+/\d+-step-3, ", result.stdout), result.stdout
    val_loss = float(re.findall(r"val loss (\S+)", result.stdout)[-1])
    assert val_loss == pytest.approx(undisturbed("--max_iters 10"), abs=1e-3)
