"""Horovod's interface over these collectives: `import collectives.horovod.torch as hvd` in place of horovod.torch.

`hvd.init` starts MPI.  Until then nothing here imports mpi4py.MPI: if the program does, it has MPI started as usual.
"""

from collectives.job.environment import before_mpi

before_mpi()
