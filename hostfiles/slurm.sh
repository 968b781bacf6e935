#!/usr/bin/env bash
# Train on several machines under Slurm: sbatch hostfiles/slurm.sh, from the repository's root.
# Edit three lines: the machines, the ranks on each, and what every rank runs.  To measure the machines:
# COMMAND="python -m collectives.bench" sbatch hostfiles/slurm.sh
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
COMMAND=${COMMAND:-python train.py}

set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
source .venv/bin/activate
mpirun $COMMAND  # knows from Slurm where its ranks belong
