#!/usr/bin/env bash
# Train on several machines under LSF.  From the repository's root: bsub < hostfiles/lsf.sh
# Edit three lines: the ranks, how many of them on a machine, and what every rank runs.  Another command for one job:
# COMMAND="python -m collectives.bench" bsub < hostfiles/lsf.sh
#BSUB -n 64
#BSUB -R "span[ptile=8]"
COMMAND=${COMMAND:-python train.py}

set -euo pipefail
cd "$LS_SUBCWD"
source .venv/bin/activate
mpirun --hostfile "$LSB_DJOB_HOSTFILE" -np "$(wc -l < "$LSB_DJOB_HOSTFILE")" $COMMAND  # the file: a line a rank
