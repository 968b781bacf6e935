#!/usr/bin/env bash
# Train on several machines under PBS: qsub hostfiles/pbs.sh, from the repository's root.
# Edit three lines: the machines with the ranks on each, the hours, and what every rank runs.  To measure the machines:
# qsub -v COMMAND="python -m collectives.bench" hostfiles/pbs.sh
#PBS -l select=8:ncpus=8:mpiprocs=8
#PBS -l walltime=01:00:00
COMMAND=${COMMAND:-python train.py}

set -euo pipefail
cd "$PBS_O_WORKDIR"
source .venv/bin/activate
mpirun --hostfile "$PBS_NODEFILE" -np "$(wc -l < "$PBS_NODEFILE")" $COMMAND  # the file has a line for each rank
