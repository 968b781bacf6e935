#!/usr/bin/env bash
# Train on several machines under PBS.  From the repository's root: qsub hostfiles/pbs.sh
# Edit three lines: the machines and ranks on each, the time, and what every rank runs.  Another command for one job:
# qsub -v COMMAND="python -m collectives.bench" hostfiles/pbs.sh
#PBS -l select=8:ncpus=8:mpiprocs=8
#PBS -l walltime=01:00:00
COMMAND=${COMMAND:-python train.py}

set -euo pipefail
cd "$PBS_O_WORKDIR"
source .venv/bin/activate
mpirun --hostfile "$PBS_NODEFILE" -np "$(wc -l < "$PBS_NODEFILE")" $COMMAND  # the file: a line a rank
