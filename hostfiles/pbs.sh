#!/usr/bin/env bash
# Train on several machines under PBS, in as many jobs as it takes.  From the repository's root:
#
#     qsub hostfiles/pbs.sh
#     qsub -v COMMAND="python -m collectives.bench" hostfiles/pbs.sh
#
# Two minutes before the time limit the training writes a checkpoint and ends; the job submits itself again and resumes.
# In COMMAND, %a is the number of an array's task (qsub -J 1-4), and nothing in other jobs.
#PBS -N train
#PBS -l select=8:ncpus=8:mpiprocs=8
#PBS -l walltime=01:00:00
#PBS -j oe
# With GPUs, a rank each: -l select=8:ncpus=8:mpiprocs=8:ngpus=8, and add --device cuda to COMMAND.
COMMAND=${COMMAND:-python -m training --checkpoint_dir saved%a --out_dir out%a --resume auto}
SIGNAL_AFTER_S=${SIGNAL_AFTER_S:-3480} # the walltime less two minutes, since PBS sends no signal ahead of it

set -euo pipefail
COMMAND=${COMMAND//%a/${PBS_ARRAY_INDEX:-}} # filled in before it is submitted again, by a task for itself alone
export COMMAND SIGNAL_AFTER_S
cd "$PBS_O_WORKDIR"
# Modules: the MPI that mpi4py was installed with, and CUDA, if the site has them so.
# module load openmpi cuda
source .venv/bin/activate
source hostfiles/run_and_requeue.sh

# Network: Open MPI and MPICH find InfiniBand and RoCE by themselves, through UCX.  To have a job fail where it would
# otherwise run over a slower network, remove a # and name the device that `ucx_info -d` or `ip link` shows:
# export OMPI_MCA_pml=ucx UCX_NET_DEVICES=mlx5_0:1 # InfiniBand and RoCE
# export OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,sm,tcp OMPI_MCA_btl_tcp_if_include=eth0 # Ethernet, Open MPI
# export UCX_TLS=self,sm,tcp UCX_NET_DEVICES=eth0 # Ethernet, MPICH

# Binding: Open MPI's mpirun keeps each rank on a core of its own, on whole nodes.
export PRTE_MCA_hwloc_default_binding_policy=${PRTE_MCA_hwloc_default_binding_policy:-core} # Open MPI 5
export OMPI_MCA_hwloc_base_binding_policy=${OMPI_MCA_hwloc_base_binding_policy:-core}       # Open MPI 4

(sleep "$SIGNAL_AFTER_S" && kill -USR1 $$) >/dev/null 2>&1 &
timer=$!
trap 'pkill -P "$timer" || true; kill "$timer" 2>/dev/null || true' EXIT
ranks=$(wc -l <"$PBS_NODEFILE") # the file has a line a rank
read -ra command <<<"$COMMAND"
run_and_requeue "qsub -v COMMAND,SIGNAL_AFTER_S hostfiles/pbs.sh" mpirun --hostfile "$PBS_NODEFILE" -np "$ranks" "${command[@]}"
