"""Horovod's interface over these collectives: `import collectives.horovod.torch as hvd` in place of horovod.torch."""
