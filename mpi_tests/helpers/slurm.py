"""Slurm on the rig: slurmctld on rig1, a slurmd on each host, as many cores per host as the rig has slots there."""

import re
import secrets
import shutil
import subprocess
import time

from mpi_tests.helpers.launch import watched
from mpi_tests.rig import NETWORK, STATE, job_environment, on

FOLDER = STATE / "slurm"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
CONF = f"""
ClusterName=rig
SlurmctldHost=rig1({NETWORK}.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={FOLDER}/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmctldPidFile={FOLDER}/slurmctld.pid
SlurmdPidFile={FOLDER}/slurmd-%n.pid
SlurmdSpoolDir={FOLDER}/spool-%n
StateSaveLocation={FOLDER}/state
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=YES
"""


def missing():
    """Return the programs that are not installed."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


ACTIVE = ("PENDING", "CONFIGURING", "RUNNING", "SIGNALING", "REQUEUED", "COMPLETING")


class Slurm:
    """Context manager of a Slurm cluster on a running rig."""

    def __init__(self, rig):
        self.rig = rig
        self.environment = job_environment() | {"SLURM_CONF": f"{FOLDER}/slurm.conf"}
        self.daemons = []

    def __enter__(self):
        self.configure()
        self.start_munge()
        self.start("rig1", "slurmctld", "-D")
        for name in self.rig.names:
            self.start(name, "slurmd", "-D", "-N", name)
        idle = f"idle {self.rig.hosts}\n"
        self.wait_for(lambda: self.run("sinfo", "-h", "-o", "%t %D").stdout == idle, "idle nodes")
        return self

    def __exit__(self, *_):
        for daemon in reversed(self.daemons):
            daemon.terminate()
            daemon.wait()

    def configure(self):
        for folder in ("state", *(f"spool-{name}" for name in self.rig.names)):
            (FOLDER / folder).mkdir(parents=True)
        nodes = [
            f"NodeName={name} NodeAddr={NETWORK}.{number} CPUs={self.rig.slots} RealMemory=4000\n"
            for number, name in enumerate(self.rig.names, 1)
        ]
        (FOLDER / "slurm.conf").write_text(CONF + "".join(nodes))
        # The default is one folder, which hosts with a shared file system would all create.
        (FOLDER / "mpi.conf").write_text("PMIxCliTmpDirBase=/dev/shm\n")

    def start_munge(self):
        """Start a munged besides the machine's own."""
        key = FOLDER / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = {"key-file": key.name, "pid-file": "munge.pid", "seed-file": "munge.seed", "socket": "munge.socket"}
        options = [f"--{option}={FOLDER / name}" for option, name in files.items()]
        self.start("rig1", "munged", "--foreground", *options)
        self.wait_for((FOLDER / "munge.socket").exists, "munged")

    def start(self, host, *command):
        with (FOLDER / f"{command[0]}-{host}.log").open("w") as log:
            files = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self.daemons.append(subprocess.Popen(on(host, *command), env=self.environment, **files))

    def run(self, *command, env=None, timeout=60):
        """Run a command on rig1 as on a login node; hydra then starts ranks through Slurm, not through the rig."""
        plain = ("env", "-u", "HYDRA_LAUNCHER", "-u", "HYDRA_LAUNCHER_EXEC")
        return watched(on("rig1", *plain, *command), self.environment | (env or {}), timeout)

    def batch(self, *arguments, env=None, timeout=60):
        """Submit a job, wait until it ends, and return its state and its output."""
        output = FOLDER / "output"
        output.unlink(missing_ok=True)
        submitted = self.run("sbatch", "--parsable", "-o", output, "-e", output, *arguments, env=env)
        job = submitted.stdout.strip()
        assert job, submitted.stderr
        self.wait_for(lambda: self.state(job) not in ACTIVE, f"end of job {job}", timeout)
        return self.state(job), output.read_text()

    def state(self, job):
        """Return a job's state: of an array, that of a task that has not ended, else of one that has failed."""
        states = re.findall(r"JobState=(\w+)", self.run("scontrol", "show", "job", job).stdout)
        return max(states, key=lambda state: (state in ACTIVE, state != "COMPLETED"))

    def wait_for(self, happened, what, patience_s=30):
        deadline = time.monotonic() + patience_s
        while not happened():
            assert time.monotonic() < deadline, f"Slurm: no {what} after {patience_s} s\n{self.logs()}"
            time.sleep(0.2)

    def logs(self):
        return "\n".join(f"{file.name}:\n{file.read_text()}" for file in sorted(FOLDER.glob("*.log")))
