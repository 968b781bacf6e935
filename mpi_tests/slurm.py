"""Slurm on the rig: a slurmd on each host, and slurmctld on rig1."""

import secrets
import shutil
import subprocess
import time

from mpi_tests.launch import watched
from mpi_tests.rig import NETWORK, STATE, job_environment, on

FOLDER = STATE / "slurm"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "sinfo")
CONF = """
ClusterName=rig
SlurmctldHost=rig1({network}.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=YES
"""
NODE = "NodeName={name} NodeAddr={address} CPUs={slots} RealMemory=4000\n"


def missing():
    """The programs that there aren't."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


class Slurm:
    """Slurm on a rig that is up; it goes down with the rig."""

    def __init__(self, rig, patience_s=30):
        self.rig, self.patience_s = rig, patience_s
        self.environment = job_environment() | {"SLURM_CONF": f"{FOLDER}/slurm.conf"}
        self.configure()
        self.start_munge()
        self.start("rig1", "slurmctld", "-D")
        for name in rig.names:
            self.start(name, "slurmd", "-D", "-N", name)
        self.wait_for(lambda: self.run("sinfo", "-h", "-o", "%t %D").stdout == f"idle {rig.hosts}\n", "idle nodes")

    def configure(self):
        for folder in ("state", *(f"spool-{name}" for name in self.rig.names)):
            (FOLDER / folder).mkdir(parents=True)
        nodes = [
            NODE.format(name=name, address=f"{NETWORK}.{number}", slots=self.rig.slots)
            for number, name in enumerate(self.rig.names, 1)
        ]
        (FOLDER / "slurm.conf").write_text(CONF.format(network=NETWORK, folder=FOLDER) + "".join(nodes))
        # The hosts share a file system, and the default is a folder that each of them would make.
        (FOLDER / "mpi.conf").write_text("PMIxCliTmpDirBase=/dev/shm\n")

    def start_munge(self):
        """A munged of its own, that knows nothing of the machine's."""
        key = FOLDER / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = {
            name: f"{FOLDER}/munge.{name.removesuffix('-file')}"
            for name in ("key-file", "pid-file", "seed-file", "log-file", "socket")
        }
        self.start("rig1", "munged", "--foreground", *(f"--{name}={path}" for name, path in files.items()))
        self.wait_for(lambda: (FOLDER / "munge.socket").exists(), "munged")

    def start(self, host, *command):
        with (FOLDER / f"{command[0]}-{host}.log").open("w") as log:
            subprocess.Popen(on(host, *command), env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def run(self, *command, timeout=60):
        """Run a command on rig1, as at a login node."""
        return watched(on("rig1", *command), self.environment, timeout)

    def wait_for(self, happened, what):
        deadline = time.monotonic() + self.patience_s
        while not happened():
            assert time.monotonic() < deadline, f"Slurm has no {what} after {self.patience_s} s\n{self.logs()}"
            time.sleep(0.2)

    def logs(self):
        return "\n".join(f"{file.name}:\n{file.read_text()}" for file in sorted(FOLDER.glob("*.log")))
