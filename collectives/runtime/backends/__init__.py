"""The ways in which a schedule runs: programs of shared memory, of messages and of devices, and MPI's requests."""
