#!/usr/bin/env bash
# Train on several machines under LSF, in as many jobs as it takes.  From the repository's root:
#
#     bsub < hostfiles/lsf.sh
#     COMMAND="python -m collectives.bench" bsub < hostfiles/lsf.sh
#
# Two minutes before the time limit train.py writes a checkpoint and ends; the job goes back into the queue and resumes.
#BSUB -J train
#BSUB -n 64
#BSUB -R "span[ptile=8]"
#BSUB -W 60
#BSUB -o train-%J.out
#BSUB -e train-%J.err
#BSUB -r
#BSUB -wt 2 -wa USR1
# With GPUs, a rank each (remove a #, and add --device cuda to COMMAND):
##BSUB -gpu "num=8"
COMMAND=${COMMAND:-python train.py --checkpoint_dir saved --resume auto}

set -euo pipefail
cd "$LS_SUBCWD"
# Modules: the MPI that mpi4py was installed with, and CUDA, if the site has them so.
# module load openmpi cuda
source .venv/bin/activate
source hostfiles/run_and_requeue.sh

# Network: Open MPI and MPICH take InfiniBand and RoCE by UCX, where they find it.  To insist on that, or to name the
# interface where there is only Ethernet (Open MPI):
# export OMPI_MCA_pml=ucx UCX_NET_DEVICES=mlx5_0:1
# export OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,sm,tcp OMPI_MCA_btl_tcp_if_include=eth0

ranks=$(wc -l <"$LSB_DJOB_HOSTFILE") # the file has a line a rank
run_and_requeue "brequeue $LSB_JOBID" mpirun --hostfile "$LSB_DJOB_HOSTFILE" -np "$ranks" $COMMAND
