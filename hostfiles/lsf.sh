#!/usr/bin/env bash
# Train on several machines under LSF: bsub < hostfiles/lsf.sh, from the repository's root.
# Edit three lines: the ranks, how many of them share a machine, and what every rank runs.  To measure the machines:
# COMMAND="python -m collectives.bench" bsub < hostfiles/lsf.sh
#BSUB -n 64
#BSUB -R "span[ptile=8]"
COMMAND=${COMMAND:-python train.py}

set -euo pipefail
cd "$LS_SUBCWD"
source .venv/bin/activate
mpirun --hostfile "$LSB_DJOB_HOSTFILE" -np "$LSB_DJOB_NUMPROC" $COMMAND  # the file has a line for each rank
