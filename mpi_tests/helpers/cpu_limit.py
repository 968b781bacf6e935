"""Limits of the CPU time of processes, by Linux's control groups of version 1 or 2.  Need root.

Source: Linux kernel documentation, "CFS Bandwidth Control", and "Control Group v2", section CPU.
"""

import os
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 20_000  # in which a group has its time: shorter than a step


class CPULimit:
    """A control group whose processes get `cores` together, such as 0.5; `tasks` is the file that takes their ids."""

    def __init__(self, name, cores=1.0):
        self.is_v2 = (ROOT / "cgroup.controllers").exists()
        self.folder = (ROOT if self.is_v2 else ROOT / "cpu") / name
        self.tasks = self.folder / "cgroup.procs"
        if self.is_v2:
            (ROOT / "cgroup.subtree_control").write_text("+cpu")
        self.folder.mkdir(exist_ok=True)
        self.set(cores)

    def set(self, cores):
        quota_us = max(1000, round(cores * PERIOD_US))  # the least that Linux takes
        if self.is_v2:
            (self.folder / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        else:
            (self.folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self.folder / "cpu.cfs_quota_us").write_text(str(quota_us))

    def add(self, process):
        self.tasks.write_text(str(process))

    def remove(self):
        """Remove the group, once its processes have ended or are in another one."""
        self.folder.rmdir()


def is_available():
    """Return whether this process may make control groups."""
    groups = ROOT if (ROOT / "cgroup.controllers").exists() else ROOT / "cpu"
    return os.geteuid() == 0 and os.access(groups, os.W_OK)
