#!/usr/bin/env bash
# Run a command on a host of the rig: rig_agent.sh rig1 command...
# mpirun starts this script in place of ssh: it accepts and ignores ssh's options, and like ssh, it does not pass on the
# environment.
set -euo pipefail
while [[ $1 == -* ]]; do shift; done
host=$1
shift

# Its processes share the CPU time of the host, where that is limited.
tasks=/run/collectives-rig/$host/tasks
if [[ -e $tasks ]]; then echo $$ > "$(< "$tasks")"; fi

kept=(env)
if [[ $(hostname) =~ ^rig[0-9]+$ ]]; then
    kept=(env --ignore-environment HOME="$HOME" PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin)
fi
exec nsenter --net="/run/netns/$host" unshare --uts --ipc --mount "${kept[@]}" AGENT="$(realpath "$0")" bash -c '
set -e
rig=/run/collectives-rig
hostname "$1"
mount --bind "$rig/$1/shm" /dev/shm
mount --bind $rig/hosts /etc/hosts
export TMPDIR=$rig/$1
export PRTE_MCA_plm_ssh_agent=$AGENT HYDRA_LAUNCHER=ssh HYDRA_LAUNCHER_EXEC=$AGENT
# All hosts share the cores of this machine, which they cannot detect.
export COLLECTIVES_CORES=${COLLECTIVES_CORES:-$(< $rig/cores)}
export OMPI_MCA_mpi_yield_when_idle=${OMPI_MCA_mpi_yield_when_idle:-1}
# Measured links are only valid for this rig: the next one has other links between hosts of the same names.
export COLLECTIVES_LINKS=${COLLECTIVES_LINKS:-$rig/links}
exec bash -c "$2"' "$host" "$host" "$*"
