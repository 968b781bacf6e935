#!/usr/bin/env bash
# Train on several machines under Slurm, in as many jobs as it takes.  From the repository's root:
#
#     sbatch hostfiles/slurm.sh
#     COMMAND="python -m collectives.bench" sbatch --nodes=2 --time=10 hostfiles/slurm.sh
#     COMMAND="python -m training --seed %a --checkpoint_dir saved%a --out_dir out%a --resume auto" sbatch --array=0-3 hostfiles/slurm.sh
#
# Two minutes before the time limit the training writes a checkpoint and ends; the job goes back into the queue and resumes.
# In COMMAND, %a is the number of an array's task, and nothing in other jobs.
#SBATCH --job-name=train
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=1
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out
#SBATCH --error=%x-%j.err
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
# With GPUs, a rank each (remove a #, and add --device cuda to COMMAND):
##SBATCH --gpus-per-node=8
COMMAND=${COMMAND:-python -m training --checkpoint_dir saved%a --out_dir out%a --resume auto}

set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
# Modules: the MPI that mpi4py was installed with, and CUDA, if the site has them so.
# module load openmpi cuda
source .venv/bin/activate
source hostfiles/run_and_requeue.sh

# Network: Open MPI and MPICH find InfiniBand and RoCE by themselves, through UCX.  To have a job fail where it would
# otherwise run over a slower network, remove a # and name the device that `ucx_info -d` or `ip link` shows:
# export OMPI_MCA_pml=ucx UCX_NET_DEVICES=mlx5_0:1 # InfiniBand and RoCE
# export OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,sm,tcp OMPI_MCA_btl_tcp_if_include=eth0 # Ethernet, Open MPI
# export UCX_TLS=self,sm,tcp UCX_NET_DEVICES=eth0 # Ethernet, MPICH

# Launcher: srun, which binds each rank to its cores, where Slurm speaks the MPI's interface; else mpirun.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
interface=pmix
export SLURM_PMIX_FENCE=ring # Slurm's other fence releases ranks early: Open MPI's would now and then crash in MPI_Init
if [[ $(mpirun --version 2>&1) == *HYDRA* ]]; then interface=pmi2; fi # MPICH's
if grep -qw "$interface" <<<"$(srun --mpi=list 2>&1)"; then
    launcher="srun --mpi=$interface"
    # Bind where the cluster does so (TaskPlugin=task/affinity or task/cgroup).
    if grep -q "^TaskPlugin .*\(affinity\|cgroup\)" <<<"$(scontrol show config)"; then launcher+=" --cpu-bind=cores"; fi
else
    launcher=mpirun
fi
read -ra command <<<"${COMMAND//%a/${SLURM_ARRAY_TASK_ID:-}}"
read -ra launcher <<<"${LAUNCHER:-$launcher}"
# The job id of one of the tasks is that of the whole array, too.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
run_and_requeue "scontrol requeue ${job:-$SLURM_JOB_ID}" "${launcher[@]}" "${command[@]}"
