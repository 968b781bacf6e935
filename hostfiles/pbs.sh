#!/usr/bin/env bash
# Train on several machines under PBS, in as many jobs as it takes.  From the repository's root:
#
#     qsub hostfiles/pbs.sh
#     qsub -v COMMAND="python -m collectives.bench" hostfiles/pbs.sh
#
# Two minutes before the time limit train.py writes a checkpoint and ends; the job submits itself again and resumes.
#PBS -N train
#PBS -l select=8:ncpus=8:mpiprocs=8
#PBS -l walltime=01:00:00
#PBS -j oe
# With GPUs, a rank each: -l select=8:ncpus=8:mpiprocs=8:ngpus=8, and add --device cuda to COMMAND.
COMMAND=${COMMAND:-python train.py --checkpoint_dir saved --resume auto}
SIGNAL_AFTER_S=${SIGNAL_AFTER_S:-3480} # the walltime less two minutes, since PBS sends no signal ahead of it

set -euo pipefail
export COMMAND SIGNAL_AFTER_S
cd "$PBS_O_WORKDIR"
# Modules: the MPI that mpi4py was installed with, and CUDA, if the site has them so.
# module load openmpi cuda
source .venv/bin/activate
source hostfiles/run_and_requeue.sh

# Network: Open MPI and MPICH take InfiniBand and RoCE by UCX, where they find it.  To insist on that, or to name the
# interface where there is only Ethernet (Open MPI):
# export OMPI_MCA_pml=ucx UCX_NET_DEVICES=mlx5_0:1
# export OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,sm,tcp OMPI_MCA_btl_tcp_if_include=eth0

(sleep "$SIGNAL_AFTER_S" && kill -USR1 $$) >/dev/null 2>&1 &
timer=$!
trap 'pkill -P "$timer" || true; kill "$timer" 2>/dev/null || true' EXIT
ranks=$(wc -l <"$PBS_NODEFILE") # the file has a line a rank
run_and_requeue "qsub -v COMMAND,SIGNAL_AFTER_S hostfiles/pbs.sh" mpirun --hostfile "$PBS_NODEFILE" -np "$ranks" $COMMAND
