#!/usr/bin/env bash
# Train on several machines under Slurm.  From the repository's root: sbatch hostfiles/slurm.sh
# Edit three lines: the machines, the ranks on each, and what every rank runs.  Another command for one job:
# COMMAND="python -m collectives.bench" sbatch hostfiles/slurm.sh
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
COMMAND=${COMMAND:-python train.py}

set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
source .venv/bin/activate
mpirun $COMMAND  # Slurm tells it where to start how many ranks
