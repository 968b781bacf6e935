#!/usr/bin/env bash
# In place of ssh, run a command on a host of the rig: rig_agent.sh [options of ssh, which do nothing] rig1 command...
set -euo pipefail
while [[ $1 == -* ]]; do shift; done
host=$1
shift

agent=$(realpath "$0")
export PRTE_MCA_plm_ssh_agent=$agent HYDRA_LAUNCHER=ssh HYDRA_LAUNCHER_EXEC=$agent
# All hosts share this machine's cores, which none of them can know.
export COLLECTIVES_CORES=${COLLECTIVES_CORES:-1}
export OMPI_MCA_mpi_yield_when_idle=${OMPI_MCA_mpi_yield_when_idle:-1}
export OMPI_MCA_pml=${OMPI_MCA_pml:-ob1}

exec nsenter --net="/run/netns/$host" unshare --uts --ipc --mount bash -c '
set -e
hostname "$1"
mount -t tmpfs tmpfs /dev/shm
mount --bind /run/collectives-rig/hosts /etc/hosts
export TMPDIR=/run/collectives-rig/$1
eval "$2"' rig "$host" "$*"
