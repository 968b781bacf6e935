"""Horovod's interface over these collectives: `import collectives.horovod.torch as hvd` in place of horovod.torch."""

from collectives.job.launch import import_mpi

import_mpi()  # before the modules here import mpi4py, which would start MPI
