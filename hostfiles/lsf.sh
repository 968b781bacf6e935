#!/usr/bin/env bash
# Train on several machines under LSF, in as many jobs as it takes.  From the repository's root:
#
#     bsub < hostfiles/lsf.sh
#     COMMAND="python -m collectives.bench" bsub < hostfiles/lsf.sh
#
# Two minutes before the time limit the training writes a checkpoint and ends; the job goes back into the queue and resumes.
# In COMMAND, %a is the number of an array's task (bsub -J "train[1-4]"), and nothing in other jobs.
#BSUB -J train
#BSUB -n 64
#BSUB -R "span[ptile=8]"
#BSUB -W 60
#BSUB -o train-%J-%I.out
#BSUB -e train-%J-%I.err
#BSUB -r
#BSUB -wt 2 -wa USR1
# With GPUs, a rank each (remove a #, and add --device cuda to COMMAND):
##BSUB -gpu "num=8"
COMMAND=${COMMAND:-python -m training --checkpoint_dir saved%a --out_dir out%a --resume auto}

set -euo pipefail
cd "$LS_SUBCWD"
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

ranks=$(wc -l <"$LSB_DJOB_HOSTFILE") # the file has a line a rank
task=${LSB_JOBINDEX:-0}
task=${task#0} # LSF's number for a job that is not of an array
read -ra command <<<"${COMMAND//%a/$task}"
run_and_requeue "brequeue $LSB_JOBID${task:+[$task]}" mpirun --hostfile "$LSB_DJOB_HOSTFILE" -np "$ranks" "${command[@]}"
